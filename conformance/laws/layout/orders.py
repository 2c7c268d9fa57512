"""Laws of strided shards and of shard orders."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Of
from shardlaw.conformance.law.fields import Field, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import FullTensor, PlacementsOf
from shardlaw.reference import placement as reference
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.orders import Order, order_placements, owned_in_order
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements as draw_placements


def draw_strided(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(st.sampled_from(draws.meshes(limits))), draw(shapes(min_dims=1))
        kinds = draw(st.sampled_from([("_S",), ("_S", "S", "R")]))
        at = draw(draw_placements(mesh, len(shape), kinds=kinds, split_factors=(2, 3, 4, 5, 7, 9, 1)))
        how = draw(st.sampled_from(["distribute", "redistribute"]))
        return fields(mesh=mesh, x=TensorSpec(shape, at), how=how, seed=draw(draws.seeds()))

    return case().filter(lambda case: "_S" in case.text)


@law(
    "layout.strided",
    source="torch.distributed.tensor.placement_types, docstring of _StridedShard",
    control="mesh=2 x=7:_S(0,3) how=distribute",
    draw=draw_strided,
    draws=90,
    # more elements in each part than the mesh dim has ranks, beside a mesh dim that replicates
    cases=("mesh=2x2 x=16:R,_S(0,2) how=redistribute", "mesh=2x2 x=3x12:_S(1,3),R how=redistribute"),
    weight=0.5,
    tier="extended",
)
def strided(x: FullTensor, mesh: DeviceMesh, placements: PlacementsOf, how: Literal["distribute", "redistribute"]):
    """Strided shards of any split factor have the elements and the local shape that the split factor defines, also
    where they encode no shard order."""
    replicated = [Replicate()] * mesh.ndim
    d = distribute_tensor(x, mesh, placements if how == "distribute" else replicated, src_data_rank=None)
    if how == "redistribute":
        d = d.redistribute(placements=placements)
    shape, _ = compat.local_shape_and_offset(x.shape, mesh, placements)
    return {"local": d, "shape": tuple(shape)}


@strided.due
def _(x: Global, rank: Rank):
    coord = x.mesh.coord(rank)
    return {"local": x, "shape": ... if coord is None else Of(x.layout.local_shape(coord), "wrong-layout")}


@st.composite
def draw_order(draw: st.DrawFn, limits: Limits) -> Case:
    names = ("2x2", "1x2", "2x1", "2x2x1", "1x2x2", "2x1x2", "2x2@0,2,1,3")
    on = [mesh for mesh in map(Mesh.parse, names) if max(mesh.ranks) < limits.world_size]
    mesh, dims = draw(st.sampled_from(on)), draw(st.sampled_from([1, 1, 2]))
    mesh_dims = draw(st.permutations(range(mesh.ndim)))
    count = draw(st.integers(1 if dims == 1 else 0, mesh.ndim))
    orders = {0: tuple(mesh_dims[:count])} | ({1: tuple(mesh_dims[count:])} if dims == 2 else {})
    shape = tuple(mesh.size * draw(st.sampled_from([1, 2, 3])) for _ in range(dims))
    if draw(st.sampled_from([False] * 4 + [True])):
        at = draw(draw_placements(mesh, dims, kinds=("S", "_S", "R"), split_factors=(2, 3, 4, 5)))
        return fields(mesh=mesh, x=TensorSpec(shape, at), seed=draw(draws.seeds()))
    orders = {dim: order for dim, order in orders.items() if order}
    cuts = ";".join(f"{dim}:{','.join(map(str, order))}" for dim, order in orders.items())
    x = TensorSpec(shape, order_placements(mesh, orders))
    return fields(mesh=mesh, x=x, cuts=cuts, seed=draw(draws.seeds()))


class OrdersField(Field):
    """A shard order: for each tensor dim the mesh dims that shard it, one after the other."""

    takes = "mesh dims by tensor dims, such as 0:1,0;1:2"

    def parse(self, text: str) -> dict[int, Order]:
        try:
            parts = [part.split(":") for part in text.split(";")]
            return {int(dim): tuple(map(int, order.split(","))) for dim, order in parts}
        except ValueError:
            raise NotationError(f"{text!r} is none") from None


def is_decodable(mesh: Mesh, placements: reference.Placements) -> bool:
    """Whether the placements encode a shard order."""
    strided = reference.StridedShard
    plain = tuple(reference.Shard(p.dim) if isinstance(p, strided) and p.split_factor == 1 else p for p in placements)
    by_dim: dict[int, list[int]] = {}
    for at, placement in enumerate(placements):
        dim = reference.shard_dim(placement)
        if dim is not None:
            by_dim.setdefault(dim, []).append(at)
    choices = [[(dim, order) for order in itertools.permutations(mesh_dims)] for dim, mesh_dims in by_dim.items()]
    return any(order_placements(mesh, dict(orders)) == plain for orders in itertools.product(*choices))


def shard_in_order(x: torch.Tensor, mesh: DeviceMesh, orders: Any) -> torch.Tensor:
    """The local tensor of this rank, for even shards in the given order."""
    for entry in orders:
        for mesh_dim in entry.mesh_dims:
            x = x.chunk(mesh.size(mesh_dim), entry.tensor_dim)[mesh.get_local_rank(mesh_dim)]
    return x


@law(
    "layout.order",
    source="torch.distributed.tensor._dtensor_spec, docstrings of DTensorSpec on shard_order",
    control="mesh=2x2 x=8:_S(0,2),S(0) cuts=0:1,0",
    draw=draw_order,
    draws=70,
    weight=0.3,
    tier="extended",
)
def order(
    x: FullTensor,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    cuts: Annotated[dict[int, Order] | None, OrdersField()] = None,
):
    """Strided shards that encode a shard order decode to it, and it encodes to them; for even shards both give the same
    local tensors; other placements decode to no order."""
    read = compat.placements_to_orders(tuple(placements), mesh)
    if cuts is None:
        return {"decodable": read is not None}
    entries = tuple(compat.ShardOrderEntry(tensor_dim=dim, mesh_dims=order) for dim, order in sorted(cuts.items()))
    plain = tuple(Shard(p.dim) if hasattr(p, "dim") else Replicate() for p in placements)
    written = compat.orders_to_placements(entries, plain, mesh)
    d = distribute_tensor(x, mesh, placements, src_data_rank=None)
    decoded = None if read is None else shard_in_order(x, mesh, read)
    return {
        "decodable": read is not None,
        "encoded": [*written] == placements,
        "decoded": decoded,
        "local": d.to_local(),
    }


@order.due
def _(x: Global, rank: Rank, cuts=None):
    if cuts is None:
        return {"decodable": is_decodable(x.mesh, x.placements)}
    local, coord = x.full, x.mesh.coord(rank)
    assert coord is not None
    for dim, order in cuts.items():
        owned = owned_in_order(local.shape[dim], x.mesh, order, coord)
        local = local.index_select(dim, torch.tensor(owned, dtype=torch.int64))
    return {"decodable": True, "encoded": True, "decoded": local, "local": local}
