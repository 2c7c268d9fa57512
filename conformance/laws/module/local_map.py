"""Laws of functions on local tensors (local_map)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from shardlaw.conformance.law.act import fields, law, texts
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
# functions of local tensors, which give parts of what they give of whole ones
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
class Mapped:
    """How the inputs and outputs of a function are placed, alike along all mesh dims.

    ``grads``: how gradients of the inputs are placed where they are not placed as the inputs. ``outs``: one for each
    output, ``None`` for what
    is no tensor. ``b``: the shape of ``b`` for that of ``a`` and a number of ranks.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement | None, ...]
    b: Callable[[Shape, int], Shape] = field(default=lambda shape, ranks: shape)
    grads: tuple[Placement, ...] = ()
    dims: int = 2


MAPPED: dict[str, Mapped] = {
    "scale": Mapped((S(0),), (S(0),), dims=1),
    "scale-pending": Mapped((P,), (P,), grads=(R(),), dims=1),
    "rows-sum": Mapped((S(0),), (P,)),
    "columns-sum": Mapped((S(1),), (S(0),)),
    "turned": Mapped((S(0),), (S(1),)),
    "add": Mapped((S(1), S(1)), (S(1),)),
    "inner": Mapped((S(1), S(0)), (P,), lambda shape, ranks: (shape[1], 3)),
    "by-columns": Mapped((R(), S(1)), (S(1),), lambda shape, ranks: (shape[1], ranks), (P, S(1))),
    "by-rows": Mapped((S(0), R()), (S(0),), lambda shape, ranks: (shape[1], 3), (S(0), P)),
    "pair": Mapped((S(0),), (S(0), P)),
    "with-number": Mapped((S(1),), (S(1), None)),
}


def options_of(case: Case) -> dict[str, Any]:
    """What local_map is told of the function ``fn``: with ``checked`` also how its inputs lie, with ``grads`` how
    their gradients do."""
    one, ndim, checked = (
        MAPPED[case.get("fn")],
        case.mesh().ndim,
        WordField(("no", "yes", "moved")).parse(case.get("checked", "no")),
    )
    outs = tuple(at and [at] * ndim for at in one.outs)
    options: dict[str, Any] = {"out_placements": outs if len(outs) > 1 else outs[0]}
    if checked != "no":
        options |= {"in_placements": tuple([at] * ndim for at in one.ins), "redistribute_inputs": checked == "moved"}
    if "grads" in case:
        options["in_grad_placements"] = tuple([at] * ndim for at in one.grads or one.ins)
    return options


def leaves_of(case: Case) -> list[DTensorValue]:
    """The inputs ``a`` and ``b``, as far as there are any."""
    specs = [case.tensor(name) for name in "ab" if name in case]
    return [
        dtensor(case.mesh(), spec.build(case.seed), *(spec.placements or ()), form="leaf", seed=case.seed)
        for spec in specs
    ]


def features_map(case: Case) -> set[str]:
    one, ndim = MAPPED[case.get("fn")], case.mesh().ndim
    inputs = [operand(case, name).layout for name in "ab"[: len(one.ins)]]
    found = {"local-map", f"way:{case.get('fn')}"} | ({"backward"} if "grads" in case else set())
    if len(one.outs) > 1:
        found.add("several-outputs")
    taken = [layout.replace((at,) * ndim) for layout, at in zip(inputs, one.ins, strict=True)]
    if case.get("checked", "") == "moved" and any(
        before.placements != layout.placements for before, layout in zip(inputs, taken, strict=True)
    ):
        found.add("redistributed")
    return found | ({"uneven"} if any(not layout.is_even() for layout in taken) else set())


@st.composite
def draw_map(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = palette_meshes(("2", "2", "2", "3", "3", "4", "2x2"), limits.world_size)
    mesh, name = draw(st.sampled_from(meshes)), draw(st.sampled_from(sorted(MAPPED)))
    one = MAPPED[name]
    shape: Shape = tuple(draw(st.sampled_from([mesh.size, 2 * mesh.size, mesh.size + 1])) for _ in range(one.dims))
    sizes = [shape, one.b(shape, mesh.size)][: len(one.ins)]
    checked = draw(st.sampled_from([None, "yes", "moved", "moved"]))
    said: dict[str, Any] = {}
    for key, size, due in zip("ab", sizes, one.ins, strict=False):
        at: Placements = (due,) * mesh.ndim
        if checked == "moved" and not isinstance(due, Partial):
            at = draw(placements(mesh, len(size), kinds=("R", "S", "P")))
        said[key] = TensorSpec(size, at, "float64", "small")
    grads = draw(st.sampled_from([None, 1])) if name != "with-number" else None
    said |= {"fn": name, "checked": checked, "grads": grads}
    said |= {key: draw(st.sampled_from([None, 1])) for key in ("decorator", "on", "plain")}
    if said["plain"] and any(isinstance(at, Partial) for at in one.ins):
        said["plain"] = None
    return fields(mesh=mesh, **said, seed=draw(draws.seeds()))


@law(
    "module.local-map",
    source=f"{DOC}, local_map",
    control="mesh=2 a=4x6:S(0):float64:small b=6x3:R:float64:small fn=inner checked=moved grads=1",
    draw=draw_map,
    draws=17,
    sweep=texts(
        # functions of which an input is used whole on every rank: its gradients add up only if they are declared to
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
    ),
    sweeps=12,
    features=features_map,
    needs=NEEDS,
    weight=0.3,
)
def mapped(
    mesh: DeviceMesh,
    fn: Annotated[str, WordField(FUNCTIONS)],
    options: Annotated[dict[str, Any], FromCase(options_of, "checked")],
    inputs: Annotated[list[DTensor], FromCase(leaves_of, "a", "b")],
    grads: bool = False,
    decorator: bool = False,
    on: bool = False,
    plain: bool = False,
):
    """A function mapped over local tensors gets them placed as required and gives tensors placed as declared,
    gradients too."""
    if on:
        options["device_mesh"] = mesh
    function = local_map(**options)(FUNCTIONS[fn]) if decorator else local_map(FUNCTIONS[fn], **options)
    out = function(*inputs)
    outs = [*out] if isinstance(out, tuple) else [out]
    again = function(*(one.full_tensor().detach() for one in inputs)) if plain else None
    if grads:
        at = [Replicate() if one.is_partial() else one for one in outs[0].placements]
        ones = torch.ones(outs[0].shape, dtype=outs[0].dtype, device=mesh.device_type)
        outs[0].backward(distribute_tensor(ones, mesh, at, src_data_rank=None))
    return {
        "outputs": outs,
        "plain": again[0] if isinstance(again, tuple) else again,
        "gradients": [one.grad for one in inputs],
    }


@mapped.due
def _(mesh: Mesh, fn: str, inputs: list[Global], grads: bool, plain: bool):
    leaves: list[Any] = [one.full.clone().requires_grad_() for one in inputs]
    out = FUNCTIONS[fn](*leaves)
    outs = [*out] if isinstance(out, tuple) else [out]
    if grads:
        outs[0].backward(torch.ones_like(outs[0]))
    declared = zip(outs, MAPPED[fn].outs, strict=True)
    return {
        "outputs": [one if at is None else dtensor(mesh, one, *(at,) * mesh.ndim) for one, at in declared],
        "plain": outs[0].detach() if plain else None,
        "gradients": [Claimed(one.grad, mesh) if grads else None for one in leaves],
    }


# what is refused, of x, sharded on dim 0 of a mesh of one dim
SHARDED, WHOLE = [Shard(0)], [Replicate()]
REFUSED: dict[str, tuple[type[Exception], Callable[[DTensor], Any]]] = {
    "placed-otherwise": (ValueError, lambda x: local_map(lambda a: a, SHARDED, (WHOLE,))(x)),
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
    """local_map refuses inputs that are placed otherwise, and placements that do not fit what goes in or comes out; so
    is a plain operand
    refused where nobody asked for replicas."""
    return caught(lambda: REFUSED[attempt][1](x))


@refusals.due
def _(x: Global, attempt: str):
    return Refused((REFUSED[attempt][0],))
