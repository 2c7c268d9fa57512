"""Laws of layouts that are cut out of the ordinary: strided shards of any split factor, and dims of a mesh in any order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import distribute_tensor

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.orders import Order, owned_in_order, placed_in_order
from reference.placement import Placement, Placements, Replicate, Shard, StridedShard, shard_dim
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


DOC = "torch.distributed.tensor docs"
ORDERS = "torch.distributed.tensor._dtensor_spec, docstrings of DTensorSpec on shard_order"


FACTORS = (2, 3, 4, 5, 7, 9, 1)


def draw_strided(limits: Limits) -> SearchStrategy[Case]:
    mesh_drawn, shape_drawn = st.sampled_from(draws.meshes(limits)), shapes(min_dims=1)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(mesh_drawn), draw(shape_drawn)
        kinds = draw(st.sampled_from([("_S",), ("_S", "S", "R")]))
        at = draw(placements(mesh, len(shape), kinds=kinds, split_factors=FACTORS))
        how = draw(st.sampled_from(["distribute", "redistribute"]))
        return Case.of("layout.strided", mesh=mesh, x=TensorSpec(shape, at), how=how, seed=draw(draws.seeds()))

    return case().filter(lambda case: "_S" in case.text)


def check_strided(case: Case, here: Here) -> None:
    """Whatever its split factor, a strided shard of a whole tensor is cut as it says, and torch knows its local shape."""
    x = given(case)
    live, at = here.mesh(x.layout.mesh), here.placements(x.layout.placements)
    first = here.placements(draws.replicated(x.layout)) if case.get("how") == "redistribute" else at
    got = distribute_tensor(here.tensor(x.full), live, first, src_data_rank=None)
    if case.get("how") == "redistribute":
        got = got.redistribute(placements=at)
    here.same_dtensor(got, x.full, "local", mesh=x.layout.mesh, placements=x.layout.placements)
    coord = here.coord(x.layout.mesh)
    if coord is not None:
        told = tuple(compat.name("local_shape_and_offset")(torch.Size(x.layout.shape), live, at)[0])
        due = x.layout.local_shape(coord)
        here.require(told == due, "wrong-layout", "shape", "the local shape that torch computes differs", due, told)


def script_strided(case: Case) -> Script:
    x = given(case)
    at, whole = (scripts.placements(of) for of in (x.layout.placements, draws.replicated(x.layout)))
    moved = case.get("how") == "redistribute"
    made = f"distribute_tensor({scripts.tensor(x.full)}, mesh, {whole if moved else at}, src_data_rank=None)"
    body = [f"mesh = {scripts.mesh(x.layout.mesh)}", f"d = {made}{f'.redistribute(placements={at})' if moved else ''}"]
    return scripts.holds(case, body, "d", x.full, x.layout)


def draw_order(limits: Limits) -> SearchStrategy[Case]:
    names = ("2x2", "1x2", "2x1", "2x2x1", "1x2x2", "2x1x2", "2x2@0,2,1,3")
    on = [mesh for mesh in map(Mesh.parse, names) if max(mesh.ranks) < limits.world_size]
    mesh_drawn, times = st.sampled_from(on), st.sampled_from([1, 2, 3])
    strange = st.sampled_from([False] * 4 + [True])

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, dims = draw(mesh_drawn), draw(st.sampled_from([1, 1, 2]))
        free = draw(st.permutations(range(mesh.ndim)))
        first = draw(st.integers(1, mesh.ndim)) if dims == 1 else draw(st.integers(0, mesh.ndim))
        orders = {dim: tuple(part) for dim, part in ((0, free[:first]), (dims - 1, free[first:] if dims == 2 else free[:first])) if part}
        shape = tuple(mesh.size * draw(times) for _ in range(dims))
        if draw(strange):
            at = draw(placements(mesh, dims, kinds=("S", "_S", "R"), split_factors=(2, 3, 4, 5)))
            return Case.of("layout.order", mesh=mesh, x=TensorSpec(shape, at), seed=draw(draws.seeds()))
        cuts = ";".join(f"{dim}:{','.join(map(str, order))}" for dim, order in orders.items())
        return Case.of("layout.order", mesh=mesh, x=TensorSpec(shape, placed_in_order(mesh, orders)), cuts=cuts, seed=draw(draws.seeds()))

    return case()


def _orders(case: Case) -> dict[int, Order]:
    """Which mesh dims cut each tensor dim, the first one first."""
    parts = [part.split(":") for part in case.get("cuts").split(";")]
    return {int(dim): tuple(map(int, order.split(","))) for dim, order in parts}


def decodable(mesh: Mesh, placed: Placements) -> bool:
    """Whether any shard order is written down as these placements."""

    def plain(placement: Placement) -> Placement:
        return Shard(placement.dim) if isinstance(placement, StridedShard) and placement.split_factor == 1 else placement

    by_dim: dict[int, list[int]] = {}
    for at, placement in enumerate(placed):
        dim = shard_dim(placement)
        if dim is not None:
            by_dim.setdefault(dim, []).append(at)
    ways = [[(dim, order) for order in itertools.permutations(cutting)] for dim, cutting in by_dim.items()]
    want = tuple(map(plain, placed))
    return any(placed_in_order(mesh, dict(chosen)) == want for chosen in itertools.product(*ways))


def check_order(case: Case, here: Here) -> None:
    """Strided shards that write a shard order down hold what its cuts leave, and are read as that order; others are read as none."""
    x = given(case)
    mesh, placed = x.layout.mesh, x.layout.placements
    try:
        spec, entry = compat.name("DTensorSpec"), compat.name("ShardOrderEntry")
        encode, decode = spec._convert_shard_order_to_StridedShard, spec._maybe_convert_StridedShard_to_shard_order
    except (compat.TorchMovedError, AttributeError) as error:
        here.reject(str(error))
    live, at = here.mesh(mesh), here.placements(placed)
    read = decode(tuple(at), live)
    if "cuts" not in case:
        due = decodable(mesh, placed)
        here.require(
            (read is not None) is due, "wrong-value", "decodable", "whether the placements are read as a shard order differs", due, read
        )
        return
    orders = _orders(case)
    plain = tuple(Shard(shard_dim(p) or 0) if shard_dim(p) is not None else Replicate() for p in placed)
    entries = tuple(entry(tensor_dim=dim, mesh_dims=order) for dim, order in sorted(orders.items()))
    written = list(encode(entries, tuple(here.placements(plain)), live))
    here.require(written == at, "wrong-value", "encode", "the order is written down as other placements", at, written)
    if here.require(read is not None, "wrong-value", "decode", "the placements are not read as a shard order", case.get("cuts"), read):
        told = {one.tensor_dim: tuple(one.mesh_dims) for one in read}
        same = told.keys() == orders.keys() and all(
            owned_in_order(x.layout.shape[dim], mesh, told[dim], coord) == owned_in_order(x.layout.shape[dim], mesh, order, coord)
            for dim, order in orders.items()
            for coord in mesh.coords()
        )
        here.require(same, "wrong-value", "decode", "the placements are read as an order of other cuts", orders, told)
    got = distribute_tensor(here.tensor(x.full), live, at, src_data_rank=None).to_local()
    coord = here.coord(mesh)
    if coord is not None:
        here.same(got, _cut(x.full, mesh, orders, coord), "local")


def _cut(full: torch.Tensor, mesh: Mesh, orders: dict[int, Order], coord: tuple[int, ...]) -> torch.Tensor:
    for dim, order in orders.items():
        full = full.index_select(dim, torch.tensor(owned_in_order(full.shape[dim], mesh, order, coord), dtype=torch.int64))
    return full


def script_order(case: Case) -> Script:
    x = given(case)
    mesh, at = x.layout.mesh, scripts.placements(x.layout.placements)
    body = [f"mesh = {scripts.mesh(mesh)}", f"read = DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple({at}), mesh)"]
    imports = ("from torch.distributed.tensor._dtensor_spec import DTensorSpec",)
    if "cuts" not in case:
        made = scripts.compared(case, body, "read is not None", dict.fromkeys(range(case.world), decodable(mesh, x.layout.placements)))
        return Script(made.stages, (*imports, *made.imports), made.constants)
    want = {mesh.rank_at(coord): _cut(x.full, mesh, _orders(case), coord) for coord in mesh.coords()}
    body += [f"d = distribute_tensor({scripts.tensor(x.full)}, mesh, {at}, src_data_rank=None)"]
    lines = [*body, "return (True, WANT[rank]), (read is not None, d.to_local())"]
    made = scripts.script(lines, world=case.world, constants=scripts.tensors("WANT", want))
    return Script(made.stages, (*imports, *made.imports), made.constants)


LAWS = (
    Law(
        id="layout.strided",
        clause="A strided shard of any split factor, whether a shard order has it or not, is cut as it says.",
        source="torch.distributed.tensor.placement_types, docstring of _StridedShard",
        check=check_strided,
        script=script_strided,
        control="layout.strided mesh=2 x=7:_S(0,3) how=distribute",
        planted="split_factors_are_two",
        draw=draw_strided,
        draws=90,
        weight=0.5,
        tier="extended",
    ),
    Law(
        id="layout.order",
        clause="Where cuts are even, strided shards and the shard order that they write down are one layout, each read from the other.",
        source=ORDERS,
        check=check_order,
        script=script_order,
        control="layout.order mesh=2x2 x=8:_S(0,2),S(0) cuts=0:1,0",
        planted="orders_are_written_backwards",
        draw=draw_order,
        draws=70,
        weight=0.3,
        tier="extended",
    ),
)
