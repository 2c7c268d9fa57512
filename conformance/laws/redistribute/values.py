"""Laws of the values that travel: what contributions reduce to, dtypes that not all backends carry, replicas."""

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
from shardlaw.conformance.laws.redistribute.placements import DOC, moving_law, to_elements, under_target
from shardlaw.conformance.laws.redistribute.views import OnViews
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

# of nine one each: contributions that cancel to nothing, which a lost or doubled one shows at once; values that fill
# their dtype, and those at its edges
FILLS_DRAWN = st.sampled_from(("distinct",) * 6 + ("zeros", "wide", "edges"))
# of these whatever is drawn, on two ranks: a reduction in another dtype, and one that loses what is no number
VALUES = ("float64:wide", "int64:wide", "float32:edges")


def fill_for(draw: st.DrawFn, dtype: str, op: str) -> str:
    """Few bits have room for small numbers alone, and what is large on every rank has no average within its dtype."""
    fill = draw(FILLS_DRAWN)
    if dtype in ("bfloat16", "uint8"):
        return "small"
    return "wide" if (fill, op) == ("edges", "avg") else fill


def of_values(to: str, out_of_order: Callable[[Limits], list[Case]]) -> Callable[[Limits], list[Case]]:
    """Sums of :data:`VALUES` that go to ``to``, after other cases."""
    sums = texts(*(f"mesh=2 x=5x3:P(sum):{values} to={to}" for values in VALUES))
    return lambda limits: [*out_of_order(limits), *sums(limits)]


def with_pending(draw: st.DrawFn, mesh: Mesh, ndim: int, op: str) -> ref.Placements:
    """Placements with the contribution ``P(op)`` on at least one mesh dim."""
    free = draw(placements(mesh, ndim, kinds=("P", "S", "R"), reduce_ops=(op,)))
    at = draw(st.integers(0, mesh.ndim - 1))
    return (*free[:at], ref.Partial(op), *free[at + 1 :])


@st.composite
def draw_reduce(draw: st.DrawFn, limits: Limits) -> Case:
    by_op = {op: [d for d in REDUCED if d in limits.dtypes and can_reduce(DTYPES[d], op)] for op in ref.REDUCE_OPS}
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes())
    op = draw(st.sampled_from([op for op in ref.REDUCE_OPS if by_op[op]]))
    at, dtype = with_pending(draw, mesh, len(shape), op), draw(st.sampled_from(by_op[op]))
    to = tuple(ref.Replicate() if isinstance(p, ref.Partial) else p for p in at)
    return fields(mesh=mesh, x=TensorSpec(shape, at, dtype, fill_for(draw, dtype, op)), to=to, seed=draw(draws.seeds()))


@st.composite
def draw_scatter(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes(min_dims=1))
    op = draw(st.sampled_from(("sum", "max", "avg", "min", "product")))
    at = with_pending(draw, mesh, len(shape), op)
    to = tuple(ref.Shard(draw(st.integers(0, len(shape) - 1))) if isinstance(p, ref.Partial) else p for p in at)
    dtype = draw(st.sampled_from(draws.FLOATS if op == "avg" else draws.EXACT))
    return fields(mesh=mesh, x=TensorSpec(shape, at, dtype, fill_for(draw, dtype, op)), to=to, seed=draw(draws.seeds()))


def draw_keep(limits: Limits) -> st.SearchStrategy[Case]:
    drawn = to_elements(dims=(2, 3), kinds=("P", "S", "R"), targets=("P", "S", "R"))(limits)
    return drawn.filter(lambda case: "P(" in case.get("to") and case.get("to") not in case.get("x"))


MERGED = ("2x2", "1x2", "2x1", "2x2", "1x3", "1x2x2", "2x2x1")


@st.composite
def draw_merged(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from([mesh for mesh in map(Mesh.parse, MERGED) if max(mesh.ranks) < limits.world_size]))
    shape = draw(shapes(min_dims=1, max_dims=2))
    op = draw(st.sampled_from(["sum", "avg", "mixed", "max", "product"]))
    ops = [draw(st.sampled_from(["avg", "sum"])) for _ in mesh.shape] if op == "mixed" else [op] * mesh.ndim
    goals: list[ref.Placement] = [ref.Replicate(), ref.Shard(0), ref.Shard(len(shape) - 1)]
    to = [draw(st.sampled_from(goals))] * mesh.ndim
    if draw(st.integers(0, 3)) == 3:
        to[draw(st.integers(0, mesh.ndim - 1))] = draw(st.sampled_from(goals))
    flat = draw(st.sampled_from(["a,b"] if mesh.ndim == 2 else ["a,b,c", "a,b", "b,c"]))
    x = TensorSpec(shape, tuple(map(ref.Partial, ops)))
    return fields(mesh=mesh, x=x, to=tuple(to), flatten=flat, seed=draw(draws.seeds()))


# on a mesh whose rows and columns ascend, but not when they are read one after the other; to shards of two dims, which
# are not to be merged; and where the dims that are flattened are others, of as many ranks
FLATTENED = (
    "mesh=2x2@0,2,1,3 x=4x4:P(sum),P(sum) to=S(0),S(0) flatten=a,b",
    "mesh=2x2@0,2,1,3 x=4x4:P(sum),P(sum) to=R,R flatten=a,b",
    "mesh=2x2 x=4x4:P(sum),P(sum) to=S(0),S(1) flatten=a,b",
    "mesh=1x2x2 x=4x4:P(sum),R,P(sum) to=R,R,R flatten=a,b",
)


@law(
    "redistribute.merged",
    source="torch.distributed.tensor._redistribute, docstring of _optimize_transform_infos",
    control="mesh=2x2 x=4x6:P(avg),P(avg) to=S(0),S(0) flatten=a,b",
    features=lambda case: {"flattened-dims"},
    draw=draw_merged,
    sweep=texts(*FLATTENED),
    sweeps=4,
    draws=60,
    needs=("all_reduce", "reduce_scatter", "subgroups"),
)
def merged(x: Annotated[DTensor, OnViews()], to: Placements):
    """Reductions over several mesh dims give the same where a flattened mesh lets them be merged into one."""
    return x.redistribute(placements=to)


merged.due(under_target)


# dtypes that targets are not asked to declare: carried right, or refused by every rank
WIDE = ("float16", "int8", "complex64", "complex128", "int16")
PARTIAL_OPS = ("sum", "max", "min", "avg", "product", "bxor")


@st.composite
def draw_dtypes(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes())
    dtype = draw(st.sampled_from((*WIDE[:4], *WIDE)))
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
    """Half, short and complex elements are redistributed as they are, or refused by every rank."""
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
    at = with_pending(draw, mesh, len(shape), draw(st.sampled_from(("sum", "avg", "product"))))
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
    """After a reduction to replicas every rank holds the same bits."""
    seat = x.device_mesh.get_coordinate() or ()
    share = 1 + sum(at for at, placement in zip(seat, x.placements, strict=False) if isinstance(placement, Partial))
    # contributions that no sum of the dtype holds exactly: every order of adding them rounds differently
    local = x.to_local() / 3 + x.to_local() * share / 7
    y = DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    return y.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()


@replicas.due
def _(x: Global):
    return Alike(x.mesh)


def draw_apart(limits: Limits) -> st.SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False, min_size=2)
    options: dict[str, Any] = {"on": on, "dtypes": draws.EXACT, "memories": ("plain", "transposed")}
    drawn = to_elements(targets=("R", "S", "P"), **options)(limits)

    def moves(case: Case) -> bool:
        """Whether any mesh dim of several ranks changes its placement; without one the memory may be the same."""
        ends = case.tensor("x").placements or (), case.placements("to")
        return any(size > 1 and old != new for size, old, new in zip(case.mesh().shape, *ends, strict=True))

    return drawn.filter(moves)


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
    """A tensor that was redistributed is of its own memory: what is written into it does not reach its source."""
    moved = x.redistribute(placements=to)
    moved.to_local().add_(1)
    return x.to_local()


@apart.due
def _(x: Global, rank: Rank):
    return x.due_local(rank)


# reductions that elements of a dtype do not have
NOT_THERE = (("int64", "avg"), ("int32", "avg"), ("uint8", "avg"), ("bool", "avg"), ("float32", "band"),
             ("float64", "bor"), ("float32", "bxor"), ("bfloat16", "band"), ("complex64", "max"),
             ("complex64", "min"))  # fmt: skip


def sweep_closed(limits: Limits) -> list[Case]:
    cases = []
    meshes = map(Mesh.parse, ("2", "3", "1x2", "2x1", "2@0,2", "2x2"))
    for mesh, (dtype, op), goal in itertools.product(meshes, NOT_THERE, ("R", "S(0)")):
        pending = mesh.shape.index(max(mesh.shape))  # along a mesh dim of one rank nothing is left to do
        at, to = (",".join(one if dim == pending else "R" for dim in range(mesh.ndim)) for one in (f"P({op})", goal))
        cases.append(fields(mesh=mesh, x=f"5x3:{at}:{dtype}:small", to=to))
    return [case for case in cases if case.world <= limits.world_size]


@law(
    "redistribute.dtype-closure",
    source="torch.distributed.tensor docs, Partial: the reductions and which tensors have them",
    control="mesh=2 x=5x3:P(avg):int64:small to=R",
    sweep=sweep_closed,
    narrow=draws.with_smaller_tensor,
    sweeps=120,
    weight=0.3,
    tier="extended",
    members=True,
)
def dtype_closure(x: torch.Tensor, mesh: DeviceMesh, at: PlacementsOf, to: Placements):
    """Averages of integers, bitwise reductions of floats and extremes of complex numbers are refused on every rank."""
    pending = DTensor.from_local(x, mesh, at, run_check=False)
    return {"refused": caught(lambda: pending.redistribute(placements=to)), "input": pending.to_local()}


@dtype_closure.due
def _(x: torch.Tensor):
    return {"refused": Refused(), "input": x}


LAWS = (
    moving_law(
        "redistribute.reduce",
        "Contributions become, on every rank, their reduction by the operation that the placement names.",
        REDUCTIONS,
        control="mesh=2x2 x=5x6:P(max),S(0) to=R,S(0)",
        draw=draw_reduce,
        sweep=of_values("R", draws.permuted_mesh_cases("P(max)", to="R")),
        sweeps=6,
        draws=110,
        needs=("all_reduce",),
        weight=1.2,
    ),
    moving_law(
        "redistribute.reduce-scatter",
        "Contributions become shards of their reduction, uneven and empty ones included.",
        REDUCTIONS,
        control="mesh=2x2 x=5x6:P(max),S(0) to=S(1),S(0)",
        draw=draw_scatter,
        sweep=of_values("S(0)", draws.permuted_mesh_cases("P(sum)", to="S(0)")),
        sweeps=6,
        draws=100,
        needs=("reduce_scatter",),
        weight=1.2,
    ),
    moving_law(
        "redistribute.keep-partial",
        "Other mesh dims can be redistributed while a reduction stays pending on one.",
        REDUCTIONS,
        control="mesh=2x2 x=5x6:P(sum),S(0) to=P(sum),R",
        draw=draw_keep,
        draws=60,
        weight=0.6,
    ),
)
