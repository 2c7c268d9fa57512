"""Laws of local_map: functions of local tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Refused, caught
from shardlaw.conformance.law.fields import WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import DTensorValue, FromCase, dtensor
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import operand
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Partial, Placement, Placements
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.placements import placements

DOC = "torch.distributed.tensor.experimental docs"
NEEDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
P = Partial("sum")
# functions that, applied to local tensors, return local parts of the dense result
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scale": lambda a: a * 2,
    "scale-pending": lambda a: a * 2,
    "rows-sum": lambda a: a.sum(0),
    "columns-sum": lambda a: a.sum(0),
    "turned": lambda a: a.t(),
    "add": lambda a, b: a + b,
    "inner": lambda a, b: a @ b,
    "by-columns": lambda a, b: a @ b,
    "by-rows": lambda a, b: a @ b,
    "pair": lambda a: (a + 1, a.sum(0)),
    "with-number": lambda a: (a - 1, a.dim()),
}


@dataclass(frozen=True)
class FunctionPlacements:
    """The placements of a function's inputs and outputs, the same along all mesh dims, or those along one of them.

    ``outs``: one for each output, ``None`` where it is no tensor. ``b``: the shape of ``b`` for the shape of ``a`` and
    the number of ranks. ``grads``: the placements of the inputs' gradients, where they differ from those of the inputs.
    ``dims``: the dims of ``a``.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement | None, ...]
    b: Callable[[Shape, int], Shape] = field(default=lambda shape, ranks: shape)
    grads: tuple[Placement, ...] = ()
    dims: int = 2


PLACEMENTS: dict[str, FunctionPlacements] = {
    "scale": FunctionPlacements((S(0),), (S(0),), dims=1),
    "scale-pending": FunctionPlacements((P,), (P,), grads=(R(),), dims=1),
    "rows-sum": FunctionPlacements((S(0),), (P,)),
    "columns-sum": FunctionPlacements((S(1),), (S(0),)),
    "turned": FunctionPlacements((S(0),), (S(1),)),
    "add": FunctionPlacements((S(1), S(1)), (S(1),)),
    "inner": FunctionPlacements((S(1), S(0)), (P,), lambda shape, ranks: (shape[1], 3)),
    "by-columns": FunctionPlacements((R(), S(1)), (S(1),), lambda shape, ranks: (shape[1], ranks), (P, S(1))),
    "by-rows": FunctionPlacements((S(0), R()), (S(0),), lambda shape, ranks: (shape[1], 3), (S(0), P)),
    "pair": FunctionPlacements((S(0),), (S(0), P)),
    "with-number": FunctionPlacements((S(1),), (S(1), None)),
}


def from_end(placement: Placement, tensor: TensorSpec) -> Placement:
    """The same placement of a tensor, its dim counted from the end."""
    return S(placement.dim - len(tensor.shape)) if isinstance(placement, S) else placement


def along_dims(at: Placement, ndim: int, along: int | None) -> list[Placement]:
    """A placement along all mesh dims, or along one of them, with replicas along the others."""
    return [at if along in (None, dim) else R() for dim in range(ndim)]


def read_options(case: Case) -> dict[str, Any]:
    """The options of local_map: the placements of outputs, of inputs with ``checked``, and of gradients with
    ``grads``. Where ``checked`` is ``from-end``, the dims of the inputs count from the end."""
    function, ndim = PLACEMENTS[case.get("fn")], case.mesh().ndim
    along = case.integer("along") if "along" in case else None
    checked = WordField(("no", "yes", "moved", "from-end")).parse(case.get("checked", "no"))
    outs = tuple(at and along_dims(at, ndim, along) for at in function.outs)
    options: dict[str, Any] = {"out_placements": outs if len(outs) > 1 else outs[0]}
    if checked != "no":
        ins = function.ins
        if checked == "from-end":
            ins = tuple(from_end(at, case.tensor(name)) for name, at in zip("ab", ins, strict=False))
        options["in_placements"] = tuple(along_dims(at, ndim, along) for at in ins)
        options["redistribute_inputs"] = checked == "moved"
    if "grads" in case:
        options["in_grad_placements"] = tuple(along_dims(at, ndim, along) for at in function.grads or function.ins)
    return options


def read_leaves(case: Case) -> list[DTensorValue]:
    """The inputs ``a`` and ``b``, if the case has it, as leaves that require gradients."""
    mesh, specs = case.mesh(), [case.tensor(name) for name in "ab" if name in case]
    return [dtensor(mesh, s.build(case.seed), *(s.placements or ()), form="leaf", seed=case.seed) for s in specs]


def features_local_map(case: Case) -> set[str]:
    function, ndim = PLACEMENTS[case.get("fn")], case.mesh().ndim
    layouts = [operand(case, name).layout for name in "ab"[: len(function.ins)]]
    along = case.integer("along") if "along" in case else None
    required = [
        layout.replace(tuple(along_dims(at, ndim, along))) for layout, at in zip(layouts, function.ins, strict=True)
    ]
    found = {"local-map", f"way:{case.get('fn')}"} | ({"backward"} if "grads" in case else set())
    if len(function.outs) > 1:
        found.add("several-outputs")
    if case.get("checked", "") == "moved" and any(
        before.placements != after.placements for before, after in zip(layouts, required, strict=True)
    ):
        found.add("redistributed")
    return found | ({"uneven"} if any(not layout.is_even() for layout in required) else set())


@st.composite
def draw_local_map(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = palette_meshes(("2", "2", "2", "3", "3", "4", "2x2"), limits.world_size)
    mesh, name = draw(st.sampled_from(meshes)), draw(st.sampled_from(sorted(PLACEMENTS)))
    function = PLACEMENTS[name]
    shape: Shape = tuple(draw(st.sampled_from([mesh.size, 2 * mesh.size, mesh.size + 1])) for _ in range(function.dims))
    sizes = [shape, function.b(shape, mesh.size)][: len(function.ins)]
    checked = draw(st.sampled_from([None, "yes", "moved", "moved", "from-end"]))
    along = draw(st.sampled_from([None, *range(mesh.ndim)])) if mesh.ndim > 1 else None
    values: dict[str, Any] = {"along": along}
    for key, size, required in zip("ab", sizes, function.ins, strict=False):
        at: Placements = tuple(along_dims(required, mesh.ndim, along))
        if checked == "moved" and not isinstance(required, Partial):
            at = draw(placements(mesh, len(size), kinds=("R", "S", "P")))
        values[key] = TensorSpec(size, at, "float64", "small")
    grads = draw(st.sampled_from([None, 1])) if name != "with-number" else None
    values |= {"fn": name, "checked": checked, "grads": grads}
    values |= {key: draw(st.sampled_from([None, 1])) for key in ("decorator", "on", "plain")}
    if values["plain"] and any(isinstance(at, Partial) for at in function.ins):
        values["plain"] = None
    return fields(mesh=mesh, **values, seed=draw(draws.seeds()))


@law(
    "module.local-map",
    source=f"{DOC}, local_map",
    control="mesh=2 a=4x6:S(0):float64:small b=6x3:R:float64:small fn=inner checked=moved grads=1",
    draw=draw_local_map,
    draws=17,
    cases=(
        # an input is replicated: its gradients are summed only if they are declared partial
        "mesh=2 a=4x6:R:float64:small b=6x2:S(1):float64:small fn=by-columns grads=1",
        "mesh=2 a=4x6:S(0):float64:small b=6x3:R:float64:small fn=by-rows grads=1",
        "mesh=2x2x2 a=8x6:S(0),S(0),S(0):float64:small b=6x3:R,R,R:float64:small fn=by-rows grads=1",
        "mesh=2x2x2 a=8x16:R,R,R:float64:small b=16x8:S(1),S(1),S(1):float64:small fn=by-columns grads=1",
        "mesh=2x2x2 a=8x16:S(1),S(0),R:float64:small b=16x3:R,S(0),S(1):float64:small fn=inner checked=moved grads=1",
        "mesh=2x2x2 a=8x16:P(sum),S(1),R:float64:small b=16x3:S(0),R,S(0):float64:small fn=inner checked=moved grads=1",
        "mesh=2x2x2 a=16:S(0),S(0),S(0):float64:small fn=scale grads=1",
        "mesh=2x2x2 a=8:S(0),R,P(sum):float64:small fn=scale checked=moved grads=1",
        "mesh=2x2x2 a=16x3:S(0),S(0),S(0):float64:small b=3x2:R,R,R:float64:small fn=by-rows grads=1",
        "mesh=2x2x2 a=3x2:R,R,R:float64:small b=2x16:S(1),S(1),S(1):float64:small fn=by-columns grads=1",
        "mesh=2x2x2 a=9:R,S(0),R:float64:small fn=scale checked=moved",
        "mesh=2x2x2 a=8x8:S(1),S(1),S(1):float64:small b=8x3:S(0),S(0),S(0):float64:small fn=inner grads=1",
        "mesh=2 a=4x6:S(1):float64:small fn=columns-sum checked=from-end",
        "mesh=2 a=4:P(sum):float64:small fn=scale-pending checked=from-end grads=1",
        # placements that two mesh dims exchange
        "mesh=2x2 a=4x6:R,S(0):float64:small fn=rows-sum checked=moved along=0",
        # gradients that are declared partial, of an input that is redistributed
        "mesh=2 a=4x6:S(0):float64:small b=6x2:S(1):float64:small fn=by-columns checked=moved grads=1",
    ),
    features=features_local_map,
    needs=NEEDS,
    weight=0.3,
)
def mapped(
    mesh: DeviceMesh,
    fn: Annotated[str, WordField(FUNCTIONS)],
    options: Annotated[dict[str, Any], FromCase(read_options, "checked", "along")],
    inputs: Annotated[list[DTensor], FromCase(read_leaves, "a", "b")],
    grads: bool = False,
    decorator: bool = False,
    on: bool = False,
    plain: bool = False,
):
    """local_map calls a function with local tensors in the required placements and returns DTensors in the declared
    placements; the same holds for gradients."""
    if on:
        options["device_mesh"] = mesh
    function = local_map(**options)(FUNCTIONS[fn]) if decorator else local_map(FUNCTIONS[fn], **options)
    out = function(*inputs)
    outs = [*out] if isinstance(out, tuple) else [out]
    plain_out = function(*(x.full_tensor().detach() for x in inputs)) if plain else None
    if grads:
        placements = [Replicate() if at.is_partial() else at for at in outs[0].placements]
        ones = torch.ones(outs[0].shape, dtype=outs[0].dtype, device=mesh.device_type)
        outs[0].backward(distribute_tensor(ones, mesh, placements, src_data_rank=None))
    return {
        "outputs": outs,
        "plain": plain_out[0] if isinstance(plain_out, tuple) else plain_out,
        "gradients": [x.grad for x in inputs],
    }


@mapped.due
def _(mesh: Mesh, fn: str, inputs: list[Global], grads: bool, plain: bool, along: int | None = None):
    leaves: list[Any] = [x.full.clone().requires_grad_() for x in inputs]
    out = FUNCTIONS[fn](*leaves)
    outs = [*out] if isinstance(out, tuple) else [out]
    if grads:
        outs[0].backward(torch.ones_like(outs[0]))
    return {
        "outputs": [
            out if at is None else dtensor(mesh, out, *along_dims(at, mesh.ndim, along))
            for out, at in zip(outs, PLACEMENTS[fn].outs, strict=True)
        ],
        "plain": outs[0].detach() if plain else None,
        "gradients": [Claimed(leaf.grad, mesh) if grads else None for leaf in leaves],
    }


@law(
    "module.local-map-calls",
    source=f"{DOC}, local_map (a PlacementType is a Tuple[Placement] value; no DTensor argument is the only exception)",
    control="mesh=2 x=4:S(0):float64:small call=by-place",
    cases=[f"mesh=2 x=4:S(0):float64:small call={call}" for call in ("by-place", "by-name", "beside", "tuple")],
    weight=0.1,
)
def called(x: DTensor, call: Literal["by-place", "by-name", "beside", "tuple"]):
    """local_map calls a function with the local tensors of all DTensors, those given by name too, and makes DTensors of
    what it returns, whether their placements are a list or a tuple."""
    summed = local_map(
        lambda a, b=0.0: (a + b).sum().reshape(1), out_placements=(Shard(0),) if call == "tuple" else [Shard(0)]
    )
    if call == "by-name":
        return summed(a=x)
    return summed(x, b=x) if call == "beside" else summed(x)


@called.due
def _(x: Global, call: str):
    times = 2 if call == "beside" else 1
    return x.holding(torch.stack([x.local(rank).sum() * times for rank in x.mesh.ranks]))


# refused calls, with x sharded on dim 0 of a 1-D mesh
SHARDED, REPLICATED = [Shard(0)], [Replicate()]
REFUSED: dict[str, tuple[type[Exception], Callable[[DTensor], Any]]] = {
    "placed-otherwise": (ValueError, lambda x: local_map(lambda a: a, SHARDED, (REPLICATED,))(x)),
    "other-placements-of-two": (
        ValueError,
        lambda x: local_map(lambda a: a, [Replicate(), Shard(0)], ([Shard(0), Shard(0)],))(x),
    ),
    "none-for-tensor": (AssertionError, lambda x: local_map(lambda a: a, SHARDED, (None,))(x)),
    "placements-for-number": (AssertionError, lambda x: local_map(lambda a, k: a, SHARDED, (SHARDED, SHARDED))(x, 3)),
    "fewer-in-placements": (AssertionError, lambda x: local_map(lambda a, b: a, SHARDED, (SHARDED,))(x, x)),
    "fewer-out-placements": (AssertionError, lambda x: local_map(lambda a: (a, a), (SHARDED,), (SHARDED,))(x)),
    "placements-for-text": (AssertionError, lambda x: local_map(lambda a: "text", SHARDED, (SHARDED,))(x)),
    "gives-dtensor": (AssertionError, lambda x: local_map(lambda a: x, SHARDED, (SHARDED,))(x)),
    "none-for-gradient": (AssertionError, lambda x: local_map(lambda a: a, SHARDED, (SHARDED,), (None,))(x)),
    "plain-beside": (RuntimeError, lambda x: torch.add(x, torch.ones(4, 3, device=x.device))),
}


def sweep_refused(limits: Limits) -> list[Case]:
    two = {"mesh": "2x2" if limits.world_size > 3 else "1x2", "x": "4x3:R,S(0)"}
    return [
        fields(attempt=attempt, **(two if attempt.endswith("of-two") else {"mesh": "2", "x": "4x3:S(0)"}))
        for attempt in REFUSED
    ]


@law(
    "module.local-map-refusals",
    source=f"{DOC}, local_map (Raises)",
    control="mesh=2 x=4x3:S(0) attempt=placed-otherwise",
    sweep=sweep_refused,
    sweeps=10,
    weight=0.1,
)
def refusals(x: DTensor, attempt: Annotated[str, WordField(REFUSED)]):
    """local_map refuses inputs with other placements, and placements that do not match its inputs and outputs; outside
    of implicit_replication a plain operand is refused."""
    return caught(lambda: REFUSED[attempt][1](x))


@refusals.due
def _(attempt: str):
    return Refused((REFUSED[attempt][0],))
