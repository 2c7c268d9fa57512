"""Laws of ``DTensor.from_local``, of the equality of placements, and of tensors distributed as contributions."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, cast

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Of, Refused, caught
from shardlaw.conformance.law.fields import Placements, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.layout.distribute import REQUIRES_GRAD
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import (
    ByRankField,
    FullTensor,
    LocalShard,
    OwnFullTensor,
    OwnValues,
    PlacementsOf,
    ShapeOf,
    StrideOf,
    layout_of,
    own_values,
)
from shardlaw.reference import simulate
from shardlaw.reference.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard, StridedShard, shard_dim
from shardlaw.reference.tensors import TensorSpec, dense
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements as draw_placements

DOC = "torch.distributed.tensor docs"


@law(
    "layout.from-local",
    source=f"{DOC}, DTensor.from_local and DTensor.to_local",
    control="mesh=2x2 x=5x6:S(0),P(sum)",
    draw=lambda limits: draws.tensor_cases(
        limits, kinds=("R", "S", "_S", "P"), memories=("plain", "transposed"), extra=REQUIRES_GRAD
    ),
    draws=110,
    weight=0.6,
)
def from_local(
    local: LocalShard,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    shape: ShapeOf,
    stride: StrideOf,
    requires_grad: bool = False,
):
    """from_local with a global shape keeps the local tensor and its storage, and to_local returns it."""
    local.requires_grad_(requires_grad)
    d = DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)
    back, sees_writes = d.to_local(), True
    with torch.no_grad():
        pointer = d.to_local().data_ptr()
        if not any(placement.is_partial() for placement in placements):
            local.add_(1)
            sees_writes = torch.equal(back, local)
            local.sub_(1)
    storage = back.data_ptr() == local.data_ptr(), pointer == local.data_ptr(), sees_writes
    metadata = {"requires_grad": d.requires_grad, "stride": tuple(d.stride())}
    return {"local": d, **metadata, "to_local": back, "same storage": storage}


@from_local.due
def _(local: Global, stride, rank: Rank, requires_grad=False):
    inside = local.mesh.coord(rank) is not None
    back = {"to_local": local.local(rank), "same storage": (True, True, True)}
    metadata = {"requires_grad": Of(requires_grad), "stride": Of(stride)}
    return {"local": local, **metadata, **(back if inside else dict.fromkeys(back, ...))}


@st.composite
def draw_infer(draw: st.DrawFn, limits: Limits) -> Case:
    any_shape, no_unit_dims = shapes(min_dims=1), shapes(min_dims=1, min_size=2)
    mesh = draw(st.sampled_from(draws.meshes(limits, submeshes=False, min_size=2)))
    local = draw(st.sampled_from([no_unit_dims] * 7 + [any_shape]).flatmap(lambda shape: shape))
    at = draw(draw_placements(mesh, len(local), kinds=("R", "S", "P")))
    shape = [*local]
    for extent, dim in zip(mesh.shape, map(shard_dim, at), strict=True):
        if dim is not None:
            shape[dim] *= extent
    memory = "plain" if min(local) < 2 else draw(st.sampled_from(["plain", "plain", "transposed"]))
    return fields(mesh=mesh, x=TensorSpec(tuple(shape), at, memory=memory), seed=draw(draws.seeds()))


def features_infer(case: Case) -> set[str]:
    """``size-1`` by the local shape: with a local size of 1 the order of strides is undefined."""
    layout = layout_of(case)
    return {"size-1"} if 1 in layout.local_shape((0,) * layout.mesh.ndim) else set()


@law(
    "layout.infer",
    source=f"{DOC}, DTensor.from_local (shape, stride)",
    control="mesh=2x2 x=4x6:S(0),S(1)",
    features=features_infer,
    draw=draw_infer,
    draws=70,
    cases=("mesh=2 x=4x6:_S(0,2)", "mesh=3 x=2x9:_S(1,3)", "mesh=2x2 x=8x3:_S(0,2),R"),
    members=True,
    weight=0.4,
)
def infer(local: LocalShard, mesh: DeviceMesh, placements: PlacementsOf):
    """Without a global shape, from_local computes shape and stride from the local ones as if all shards were even."""
    d = DTensor.from_local(local, mesh, placements)
    return {"local": d, "stride": [step for step, size in zip(d.stride(), d.shape, strict=True) if size > 1]}


@infer.due
def _(local: Global):
    shape = local.full.shape
    stride = [step for step, size in zip(local.stride, shape, strict=True) if size > 1]
    return {"local": local, "stride": ... if 0 in shape else Of(stride)}


@st.composite
def draw_checked(draw: st.DrawFn, limits: Limits) -> Case:
    on = draws.meshes(limits, submeshes=False, permuted=False, min_size=2)
    how = draw(st.sampled_from(("data", "data", "data", "data", "shape", "dtype")))
    base = draw(draws.tensor_cases(limits, on=on, kinds=("R", "S"), min_dims=1))
    spec = base.tensor("x")
    if how == "data":
        return base.with_fields(how=how)
    return base.with_fields(how=how, x=TensorSpec(tuple(max(size, 1) for size in spec.shape), spec.placements))


def sweep_checked(limits: Limits) -> list[Case]:
    """Shards of 1 and 3 rows where the layout has 2 and 2; replicas on a sub-mesh and on meshes whose table does not
    ascend; local tensors with another stride on one rank."""
    uneven = (("2", "4x3"), ("2", "4"), ("3", "6x2"), ("4", "8x3"))
    cases = [fields(mesh=mesh, x=f"{shape}:S(0)", how="sizes") for mesh, shape in uneven]
    cases += [fields(mesh="2@0,2", x="4x3:R", how="data")]
    cases += [fields(mesh=mesh, x=x, how="stride") for mesh, x in (("2", "4x6:S(0)"), ("3", "3x4:R"))]
    cases = [case for case in cases if case.world <= limits.world_size]
    return [*cases, *draws.permuted_mesh_cases("R", how="data")(limits), fields(mesh="2", x="4x6:R", how="trained")]


def faulty_local(value: tuple[OwnValues, str], rank: int) -> torch.Tensor:
    """A local tensor with the fault ``how``: other values or numbers of rows on each rank, or another shape, dtype or
    stride on the last rank. With ``trained`` it has none: that of the last rank will require a gradient."""
    x, how = value
    right, coord = Global.of(x.spec, x.mesh, x.seed), x.mesh.coord(rank)
    if coord is None:
        return torch.empty(0)
    if how == "data":
        return x.of(rank).local(rank)
    if how == "sizes":
        sizes = [1, 3, 1, 3] if x.mesh.size == 4 else [1, *[2] * (x.mesh.size - 2), 3]
        return right.full.split(sizes)[coord[0]].clone()  # type: ignore[no-any-return]
    local = right.local(rank)
    if rank != max(x.mesh.ranks) or how == "trained":
        return local
    if how == "shape":
        largest = simulate.take(right.full, right.layout, (0,) * x.mesh.ndim)
        return torch.cat([largest, dense((1, *largest.shape[1:]), local.dtype)])
    return local.to(torch.float64) if how == "dtype" else local.t().contiguous().t()


FaultyLocal = Annotated[
    torch.Tensor,
    ByRankField(lambda case, name: (own_values(case, "x"), case.get("how")), faulty_local, "x", "how"),
]
How = Literal["data", "shape", "dtype", "stride", "sizes", "trained"]


@law(
    "layout.run-check",
    source=f"{DOC}, DTensor.from_local (run_check)",
    control="mesh=2x2 x=4x6:S(0),R how=data",
    draw=draw_checked,
    draws=60,
    sweep=sweep_checked,
    sweeps=11,
    needs=("broadcast", "object_collectives"),
    weight=0.6,
)
def run_check(
    local: FaultyLocal, mesh: DeviceMesh, placements: PlacementsOf, shape: ShapeOf, stride: StrideOf, how: How
):
    """from_local with run_check gives replicas the data of the first rank, and refuses local tensors whose metadata
    differ from each other or from the layout."""
    if how == "data":
        checked = DTensor.from_local(local, mesh, placements, run_check=True, shape=shape, stride=stride)
        return {"data": checked.to_local()}
    if how == "trained" and mesh.get_rank() == mesh.mesh.max():
        local.requires_grad_()
    metadata = {"shape": shape, "stride": stride} if how == "sizes" else {}
    return {"refused": caught(lambda: DTensor.from_local(local, mesh, placements, run_check=True, **metadata))}  # type: ignore[arg-type]


@run_check.due
def _(x: OwnFullTensor, how, rank: Rank):
    if how != "data":
        return {"refused": Refused((ValueError, RuntimeError, AssertionError))}
    own = cast("OwnValues", x)
    coord = own.mesh.coord(rank)
    if coord is None:
        return {"data": ...}
    pairs = zip(own.spec.placements or (), coord, strict=True)
    source = own.mesh.rank_at(tuple(0 if isinstance(placement, Replicate) else at for placement, at in pairs))
    return {"data": own.of(source).local(rank)}


PLACEMENTS: tuple[Placement, ...] = (
    *(Replicate(), Shard(0), Shard(1), Shard(-1)),
    *(StridedShard(0, 2), StridedShard(0, 3), StridedShard(1, 2), StridedShard(0, 1)),
    *(Partial(op) for op in REDUCE_OPS),
)


def sweep_placements(limits: Limits) -> list[Case]:
    return [fields(a=a, b=b, world=2) for a, b in itertools.combinations_with_replacement(PLACEMENTS, 2)]


@law(
    "layout.placement-equality",
    source=f"{DOC}, Placement, Shard, Replicate, Partial",
    control="a=_S(0,2) b=_S(0,3) world=2",
    sweep=sweep_placements,
    sweeps=136,
    weight=0.2,
)
def placement_equality(a: Placements, b: Placements):
    """Placements are equal exactly when kind, dim, split factor and reduction are; equal ones have equal hashes;
    is_shard, is_replicate and is_partial tell the kind and dim."""
    (first,), (second,) = a, b
    dim = getattr(first, "dim", 0)
    return {
        "equality": (first == second, second == first, first != second),
        "hash": hash(first) == hash(second),
        "set": len({first, second}),
        "kind": (first.is_replicate(), first.is_partial()),
        "shard": (first.is_shard(), first.is_shard(dim), first.is_shard(dim + 1)),
    }


@placement_equality.due
def _(a, b):
    (first,), same = a, a == b
    shard = (True, True, False) if isinstance(first, Shard) else (False, ..., ...)
    return {
        "equality": (same, same, not same),
        "hash": True if same else ...,
        "set": 2 - same,
        "kind": (isinstance(first, Replicate), isinstance(first, Partial)),
        "shard": ... if isinstance(first, StridedShard) else shard,
    }


def draw_partition(limits: Limits) -> SearchStrategy[Case]:
    ops = ("sum", "avg", "min", "max")
    placed = draws.tensor_cases(limits, kinds=("P", "R", "S"), reduce_ops=ops, dtypes=draws.FLOATS)
    return placed.filter(lambda case: "P(" in case.text)


@law(
    "layout.partition",
    source="torch.distributed.tensor.placement_types, docstring of Partial._partition_value",
    control="mesh=2 x=5x6:P(sum)",
    draw=draw_partition,
    draws=40,
    weight=0.3,
    tier="extended",
)
def partition(x: FullTensor, mesh: DeviceMesh, placements: PlacementsOf):
    """The contributions to a sum, average, minimum or maximum as which a tensor is distributed reduce to that
    tensor."""
    return {"contributions": distribute_tensor(x, mesh, placements, src_data_rank=None)}


@partition.due
def _(x: Global):
    return {"contributions": x.near()}
