"""Laws of the values that redistributions give: reductions, dtypes that few backends support, replicas, copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Alike, Either, Global, Refused, caught
from shardlaw.conformance.law.fields import Placements, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.redistribute.placements import DOC, draw_moves_to_values, moving_law, under_target
from shardlaw.conformance.laws.redistribute.views import OnViewsField
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import PlacementsOf
from shardlaw.reference import placement as ref
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.simulate import can_reduce
from shardlaw.reference.tensors import DTYPES, TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements

REDUCTIONS = "torch.distributed.tensor docs, Partial and DTensor.redistribute"
REDUCED = ("float32", "int64", "float64", "int32", "bfloat16", "uint8")

# with zeros, all contributions cancel: a lost or repeated one shows at once
FILLS = st.sampled_from(("distinct",) * 6 + ("zeros", "wide", "edges"))
# enumerated values, which show a reduction in a narrower dtype and one that loses NaNs
VALUES = ("float64:wide", "int64:wide", "float32:edges")


def draw_fill(draw: st.DrawFn, dtype: str, op: str) -> str:
    """A fill whose reduction by ``op`` the dtype can represent."""
    fill = draw(FILLS)
    if dtype in ("bfloat16", "uint8"):
        return "small"
    return "wide" if (fill, op) == ("edges", "avg") else fill


def sweep_with_values(to: str, sweep: Callable[[Limits], list[Case]]) -> Callable[[Limits], list[Case]]:
    """The cases of ``sweep``, then sums of :data:`VALUES` that are redistributed to ``to``."""
    sums = texts(*(f"mesh=2 x=5x3:P(sum):{values} to={to}" for values in VALUES))
    return lambda limits: [*sweep(limits), *sums(limits)]


def draw_pending(draw: st.DrawFn, mesh: Mesh, ndim: int, op: str) -> ref.Placements:
    """Placements with ``P(op)`` on at least one mesh dim."""
    free = draw(placements(mesh, ndim, kinds=("P", "S", "R"), reduce_ops=(op,)))
    at = draw(st.integers(0, mesh.ndim - 1))
    return (*free[:at], ref.Partial(op), *free[at + 1 :])


@st.composite
def draw_reduce(draw: st.DrawFn, limits: Limits) -> Case:
    by_op = {op: [d for d in REDUCED if d in limits.dtypes and can_reduce(DTYPES[d], op)] for op in ref.REDUCE_OPS}
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes())
    op = draw(st.sampled_from([op for op in ref.REDUCE_OPS if by_op[op]]))
    at, dtype = draw_pending(draw, mesh, len(shape), op), draw(st.sampled_from(by_op[op]))
    to = tuple(ref.Replicate() if isinstance(p, ref.Partial) else p for p in at)
    return fields(
        mesh=mesh, x=TensorSpec(shape, at, dtype, draw_fill(draw, dtype, op)), to=to, seed=draw(draws.seeds())
    )


@st.composite
def draw_scatter(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes(min_dims=1))
    op = draw(st.sampled_from(("sum", "max", "avg", "min", "product")))
    at = draw_pending(draw, mesh, len(shape), op)
    to = tuple(ref.Shard(draw(st.integers(0, len(shape) - 1))) if isinstance(p, ref.Partial) else p for p in at)
    dtype = draw(st.sampled_from(draws.FLOATS if op == "avg" else draws.EXACT))
    return fields(
        mesh=mesh, x=TensorSpec(shape, at, dtype, draw_fill(draw, dtype, op)), to=to, seed=draw(draws.seeds())
    )


def draw_keep_partial(limits: Limits) -> st.SearchStrategy[Case]:
    moves = draw_moves_to_values(dims=(2, 3), kinds=("P", "S", "R"), targets=("P", "S", "R"))(limits)
    return moves.filter(lambda case: "P(" in case.get("to") and case.get("to") not in case.get("x"))


MERGED = ("2x2", "1x2", "2x1", "2x2", "1x3", "1x2x2", "2x2x1")


@st.composite
def draw_merged(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from([mesh for mesh in map(Mesh.parse, MERGED) if max(mesh.ranks) < limits.world_size]))
    shape = draw(shapes(min_dims=1, max_dims=2))
    op = draw(st.sampled_from(["sum", "avg", "mixed", "max", "product"]))
    ops = [draw(st.sampled_from(["avg", "sum"])) for _ in mesh.shape] if op == "mixed" else [op] * mesh.ndim
    targets: list[ref.Placement] = [ref.Replicate(), ref.Shard(0), ref.Shard(len(shape) - 1)]
    to = [draw(st.sampled_from(targets))] * mesh.ndim
    if draw(st.integers(0, 3)) == 3:
        to[draw(st.integers(0, mesh.ndim - 1))] = draw(st.sampled_from(targets))
    flat = draw(st.sampled_from(["a,b"] if mesh.ndim == 2 else ["a,b,c", "a,b", "b,c"]))
    x = TensorSpec(shape, tuple(map(ref.Partial, ops)))
    return fields(mesh=mesh, x=x, to=tuple(to), flatten=flat, seed=draw(draws.seeds()))


# a mesh whose flattened ranks do not ascend; shards of two tensor dims, which must not be merged; a flattened mesh of
# other dims of the same size; an average behind a sum
FLATTENED = (
    "mesh=2x2@0,2,1,3 x=4x4:P(sum),P(sum) to=S(0),S(0) flatten=a,b",
    "mesh=2x2@0,2,1,3 x=4x4:P(sum),P(sum) to=R,R flatten=a,b",
    "mesh=2x2 x=4x4:P(sum),P(sum) to=S(0),S(1) flatten=a,b",
    "mesh=1x2x2 x=4x4:P(sum),R,P(sum) to=R,R,R flatten=a,b",
    "mesh=2x2 x=4x4:P(sum),P(avg) to=R,R flatten=a,b",
)


@law(
    "redistribute.merged",
    source="torch.distributed.tensor._redistribute, docstring of _optimize_transform_infos",
    control="mesh=2x2 x=4x6:P(avg),P(avg) to=S(0),S(0) flatten=a,b",
    features=lambda case: {"flattened-dims"},
    draw=draw_merged,
    cases=FLATTENED,
    draws=60,
    needs=("all_reduce", "reduce_scatter", "subgroups"),
)
def merged(x: Annotated[DTensor, OnViewsField()], to: Placements):
    """Reductions over several mesh dims give the same values where a flattened mesh allows to merge them into one."""
    return x.redistribute(placements=to)


merged.due(under_target)


# dtypes that targets need not support
OPTIONAL_DTYPES = ("float16", "int8", "complex64", "complex128", "int16")
PARTIAL_OPS = ("sum", "max", "min", "avg", "product", "bxor")


@st.composite
def draw_dtypes(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes())
    dtype = draw(st.sampled_from((*OPTIONAL_DTYPES[:4], *OPTIONAL_DTYPES)))
    op = draw(st.sampled_from([op for op in PARTIAL_OPS if can_reduce(DTYPES[dtype], op)]))
    at = draw(placements(mesh, len(shape), kinds=("R", "S", "P"), reduce_ops=(op,)))
    to = draw(placements(mesh, len(shape), kinds=("R", "S")))
    return fields(mesh=mesh, x=TensorSpec(shape, at, dtype, "small"), to=to, seed=draw(draws.seeds()))


@law(
    "redistribute.dtypes",
    source=DOC,
    control="mesh=2x2 x=5x6:S(0),P(sum):float16:small to=S(1),R",
    draw=draw_dtypes,
    draws=70,
    weight=0.8,
    tier="extended",
)
def dtypes(x: DTensor, to: Placements):
    """Tensors of float16, int8, int16 and complex dtypes are redistributed correctly, or refused by every rank."""
    try:
        return x.redistribute(placements=to)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return error


@dtypes.due
def _(x: Global, to):
    return Either((x.under(to), Refused()))


@st.composite
def draw_replicas(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, min_size=2))), draw(shapes(min_dims=1, min_size=1))
    at = draw_pending(draw, mesh, len(shape), draw(st.sampled_from(("sum", "avg", "product"))))
    floats = [dtype for dtype in ("float32", "bfloat16", "float64") if dtype in limits.dtypes]
    return fields(mesh=mesh, x=TensorSpec(shape, at, draw(st.sampled_from(floats)), "unit"), seed=draw(draws.seeds()))


@law(
    "redistribute.replicas",
    source=f"{DOC}: Replicate means that each rank holds the same tensor",
    control="mesh=2x2 x=5x3:P(sum),S(0):float32:unit",
    draw=draw_replicas,
    draws=30,
    needs=("all_reduce",),
    weight=0.4,
)
def replicas(x: DTensor):
    """After a reduction to Replicate every rank has the same bits."""
    coordinate = x.device_mesh.get_coordinate() or ()
    pairs = zip(coordinate, x.placements, strict=False)
    factor = 1 + sum(at for at, placement in pairs if isinstance(placement, Partial))
    # sums of these contributions round differently in every order
    local = x.to_local() / 3 + x.to_local() * factor / 7
    y = DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    return y.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()


@replicas.due
def _(x: Global):
    return Alike(x.mesh)


def draw_apart(limits: Limits) -> st.SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False, min_size=2)
    options: dict[str, Any] = {"on": on, "dtypes": draws.EXACT, "memories": ("plain", "transposed")}
    moves = draw_moves_to_values(targets=("R", "S", "P"), **options)(limits)

    def changes_placement(case: Case) -> bool:
        """Whether a mesh dim of several ranks changes its placement; otherwise the result may share memory."""
        ends = case.tensor("x").placements or (), case.placements("to")
        return any(size > 1 and old != new for size, old, new in zip(case.mesh().shape, *ends, strict=True))

    return moves.filter(changes_placement)


@law(
    "redistribute.apart",
    source=f"{DOC}: out of place, it leaves the original one unchanged",
    control="mesh=2 x=4x6:R to=S(0)",
    draw=draw_apart,
    draws=30,
    weight=0.2,
    tier="extended",
)
def apart(x: DTensor, to: Placements):
    """A redistributed tensor has its own memory: writes into it do not change its source."""
    moved = x.redistribute(placements=to)
    moved.to_local().add_(1)
    return x.to_local()


@apart.due
def _(x: Global, rank: Rank):
    return x.due_local(rank)


# dtypes and reductions that are not defined for them
UNDEFINED = (("int64", "avg"), ("int32", "avg"), ("uint8", "avg"), ("bool", "avg"), ("float32", "band"),
             ("float64", "bor"), ("float32", "bxor"), ("bfloat16", "band"), ("complex64", "max"),
             ("complex64", "min"))  # fmt: skip


def sweep_undefined(limits: Limits) -> list[Case]:
    cases = []
    meshes = map(Mesh.parse, ("2", "3", "1x2", "2x1", "2@0,2", "2x2"))
    for mesh, (dtype, op), target in itertools.product(meshes, UNDEFINED, ("R", "S(0)")):
        pending = mesh.shape.index(max(mesh.shape))  # nothing is reduced along a mesh dim of one rank
        at, to = (
            ",".join(placement if dim == pending else "R" for dim in range(mesh.ndim))
            for placement in (f"P({op})", target)
        )
        cases.append(fields(mesh=mesh, x=f"5x3:{at}:{dtype}:small", to=to))
    return [case for case in cases if case.world <= limits.world_size]


@law(
    "redistribute.dtype-closure",
    source="torch.distributed.tensor docs, Partial: the reductions and which tensors have them",
    control="mesh=2 x=5x3:P(avg):int64:small to=R",
    sweep=sweep_undefined,
    narrow=draws.with_smaller_tensor,
    sweeps=120,
    weight=0.3,
    tier="extended",
    members=True,
)
def dtype_closure(x: torch.Tensor, mesh: DeviceMesh, at: PlacementsOf, to: Placements):
    """Every rank refuses averages of integers, bitwise reductions of floats, and maxima and minima of complex
    numbers."""
    pending = DTensor.from_local(x, mesh, at, run_check=False)
    return {"refused": caught(lambda: pending.redistribute(placements=to)), "input": pending.to_local()}


@dtype_closure.due
def _(x: torch.Tensor):
    return {"refused": Refused(), "input": x}


LAWS = (
    moving_law(
        "redistribute.reduce",
        "Redistributed to Replicate, contributions become on every rank their reduction by the op of the placement.",
        REDUCTIONS,
        control="mesh=2x2 x=5x6:P(max),S(0) to=R,S(0)",
        draw=draw_reduce,
        sweep=sweep_with_values("R", draws.permuted_mesh_cases("P(max)", to="R")),
        sweeps=6,
        draws=110,
        needs=("all_reduce",),
        weight=1.2,
    ),
    moving_law(
        "redistribute.reduce-scatter",
        "Redistributed to Shard, contributions become shards of their reduction, also uneven and empty ones.",
        REDUCTIONS,
        control="mesh=2x2 x=5x6:P(max),S(0) to=S(1),S(0)",
        draw=draw_scatter,
        sweep=sweep_with_values("S(0)", draws.permuted_mesh_cases("P(sum)", to="S(0)")),
        sweeps=6,
        draws=100,
        needs=("reduce_scatter",),
        weight=1.2,
    ),
    moving_law(
        "redistribute.keep-partial",
        "A redistribution of some mesh dims keeps the reduction that is pending on another.",
        REDUCTIONS,
        control="mesh=2x2 x=5x6:P(sum),S(0) to=P(sum),R",
        draw=draw_keep_partial,
        draws=60,
        weight=0.6,
    ),
)
