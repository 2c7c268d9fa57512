"""Laws of layouts out of the ordinary: any split factor, other orders of cutting, every dtype, local tensors that are not contiguous."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given, target
from conformance.report.reproducer import Script
from reference import simulate
from reference.mesh import Mesh
from reference.orders import Order, owned_in_order, placed_in_order
from reference.placement import Placement, Placements, Replicate, Shard, StridedShard, shard_dim
from reference.tensors import DTYPES, TensorSpec
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


# dtypes that few backends carry, by the whole numbers of the same width that stand for their bits
RARE = {"float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "uint16": "int16", "uint32": "int32", "uint64": "int64"}


def draw_dtype(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, tables=False)
    usual = [name for name in DTYPES if name not in limits.dtypes]
    declared = st.sampled_from(limits.dtypes)
    common, rare = st.sampled_from([*usual, *usual, *limits.dtypes]), st.sampled_from(list(RARE))
    strange, how = st.sampled_from([False] * 3 + [True]), st.sampled_from(["scatter", "full", "move", "move"])
    drawn = draws.moved("layout.dtype", limits, on=on, kinds=("R", "S"), targets=("R", "S"))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(drawn)
        outside = base.mesh().size < base.world  # a rank outside takes no part, and cannot refuse what the others do
        odd = draw(strange) and not outside
        spec, dtype = base.tensor("x"), draw(rare) if odd else draw(declared if outside else common)
        changed = TensorSpec(spec.shape, spec.placements, RARE.get(dtype, dtype), "positive" if odd else "distinct")
        more = {"bits": dtype} if odd else {}
        return base.with_fields(x=changed, how=draw(how), **more)

    return case()


def features_dtype(case: Case) -> set[str]:
    return {"rare-dtype"} if "bits" in case else set()


def check_dtype(case: Case, here: Here) -> None:
    """Elements of every dtype arrive bit by bit, or every rank refuses them; those that the target declares are never refused."""
    x, name = given(case), case.get("bits", case.tensor("x").dtype)
    try:
        _send(case, here)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        text = str(error).lower()
        said = any(word in text for word in ("scalar type", "scalartype", "dtype", "not implemented", "not supported", "unsupported"))
        if name in here.target.dtypes or not said:
            raise
        raise NotImplementedError(f"{name} is not supported: {error}") from None
    here.reached(f"dtype:{x.spec.dtype}")


def _send(case: Case, here: Here) -> None:
    x, how = given(case), case.get("how")
    bits = getattr(torch, case.get("bits", x.spec.dtype))
    live, at = here.mesh(x.layout.mesh), here.placements(x.layout.placements)
    coord, to = here.coord(x.layout.mesh), target(case, x) if how == "move" else x.layout
    local = here.tensor(x.local(coord)).view(bits) if coord is not None else torch.empty(0, dtype=bits, device=here.device)
    source = None if how == "scatter" else DTensor.from_local(local, live, at, shape=x.full.shape, stride=x.full.contiguous().stride())
    if source is None:
        got: Any = distribute_tensor(here.tensor(x.full).view(bits), live, at)
    else:
        got = source.full_tensor() if how == "full" else source.redistribute(placements=here.placements(to.placements))
    if coord is None:
        return
    here.require(got.dtype == bits, "wrong-metadata", "dtype", f"dtype is {got.dtype}, must be {bits}", bits, got.dtype)
    held = got if how == "full" else got.to_local()
    here.same(held.contiguous().view(x.full.dtype), x.full if how == "full" else simulate.take(x.full, to, coord), how)


def script_dtype(case: Case) -> Script:
    x, how = given(case), case.get("how")
    bits = f"torch.{case.get('bits', x.spec.dtype)}"
    to = target(case, x) if how == "move" else x.layout
    constants, body = scripts.source(x, case.world)
    members = {rank: x.full if how == "full" else x.local_of(to, rank) for rank in sorted(x.layout.mesh.ranks)}
    at = scripts.placements(x.layout.placements)
    if how == "scatter":
        constants, body = [], [body[0], f"y = distribute_tensor({scripts.tensor(x.full)}.view({bits}), mesh, {at})"]
    else:
        body[-1] = body[-1].replace("X[rank]", f"X[rank].view({bits})")
        body.append("y = x.full_tensor()" if how == "full" else f"y = x.redistribute(placements={scripts.placements(to.placements)})")
    held = "y" if how == "full" else "y.to_local()"
    table = scripts.tensors("WANT", members)
    lines = [*body, "if rank not in WANT:", "    return None, None"]
    lines += [f"return ({bits}, WANT[rank]), (y.dtype, {held}.contiguous().view({x.full.dtype}))"]
    return scripts.script(lines, world=case.world, constants=[*constants, *table])


LIES = ("sliced", "expanded", "transposed", "channels-last", "offset")


def lie(local: torch.Tensor, how: str) -> torch.Tensor:
    """The same elements (for ``expanded``: the first row repeated), lying in memory as ``how`` says."""
    if how == "channels-last" and local.ndim > 1:
        return local.movedim(1, -1).contiguous().movedim(-1, 1)
    if how == "transposed" and local.ndim > 1:
        order = tuple(reversed(range(local.ndim)))
        return local.permute(order).contiguous().permute(order)
    if how == "expanded" and local.ndim and local.shape[0]:
        return local[:1].clone().expand(local.shape)
    if how == "sliced" and local.ndim:
        wide = torch.zeros((*local.shape[:-1], 2 * local.shape[-1] + 1), dtype=local.dtype)
        wide[..., 1::2] = local
        return wide[..., 1::2]
    buffer = torch.zeros(local.numel() + 3, dtype=local.dtype)
    return buffer[3:].view(local.shape).copy_(local)


def draw_memory(limits: Limits) -> SearchStrategy[Case]:
    law = "layout.memory"
    on = draws.meshes(limits, tables=False)
    deep = draws.moved(law, limits, on=on, kinds=("R", "S"), targets=("R", "S"), dtypes=draws.EXACT)
    lies, how = st.sampled_from(LIES), st.sampled_from(["keep", "full", "move", "move", "scatter"])
    four = st.tuples(st.sampled_from([2, 3, 1]), *[st.sampled_from([2, 3, 4])] * 3)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base, memory = draw(deep), draw(lies)
        spec = base.tensor("x")
        shape = draw(four) if memory == "channels-last" and len(spec.shape) > 1 else spec.shape
        return base.with_fields(x=TensorSpec(shape, spec.placements, spec.dtype), memory=memory, how=draw(how))

    return case()


def check_memory(case: Case, here: Here) -> None:
    """However a tensor lies in memory, from_local and to_local keep it as it lies, and what is sent of it are its elements."""
    x, how, memory = given(case), case.get("how"), case.get("memory")
    live, at, coord = here.mesh(x.layout.mesh), here.placements(x.layout.placements), here.coord(x.layout.mesh)
    if how == "scatter":
        full = lie(x.full, memory)
        got = distribute_tensor(here.tensor(full), live, at)
        here.same_dtensor(got, full, "scatter", mesh=x.layout.mesh, placements=x.layout.placements)
        here.require(
            got.stride() == full.stride(), "wrong-metadata", "stride", "global stride is not the tensor's", full.stride(), got.stride()
        )
        return
    full = _rows_alike(x.full) if memory == "expanded" else x.full
    local = torch.empty(0, dtype=full.dtype) if coord is None else lie(simulate.take(full, x.layout, coord), memory)
    local = here.tensor(local)
    source = DTensor.from_local(local, live, at, shape=x.full.shape, stride=x.full.contiguous().stride())
    if coord is None:
        source.full_tensor() if how == "full" else source.redistribute(placements=here.placements(target(case, x).placements))
        return
    back = source.to_local()
    lies, due = _lies(back), _lies(local)
    here.require(lies == due, "wrong-metadata", "to_local", "to_local gives back a tensor that lies otherwise", due[1:], lies[1:])
    if how == "full":
        here.same(source.full_tensor(), full, "full", what="full tensor")
    elif how == "move":
        to = target(case, x)
        here.same_dtensor(source.redistribute(placements=here.placements(to.placements)), full, "moved", mesh=x.layout.mesh)
    here.same(local, simulate.take(full, x.layout, coord), "input", what="the local tensor that was given")


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where the elements of a tensor lie: steps of dims of one index say nothing, nor does a tensor without elements."""
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return (tensor.data_ptr(), tensor.storage_offset(), steps) if tensor.numel() else ()


def _rows_alike(full: torch.Tensor) -> torch.Tensor:
    return full[:1].expand(full.shape).contiguous() if full.ndim and full.shape[0] else full


def script_memory(case: Case) -> Script:
    x, how, memory = given(case), case.get("how"), case.get("memory")
    at, mesh = scripts.placements(x.layout.placements), x.layout.mesh
    if how == "scatter":
        full = lie(x.full, memory)
        body = [f"mesh = {scripts.mesh(mesh)}", f"d = distribute_tensor({scripts.tensor(full)}, mesh, {at})"]
        return scripts.holds(case, body, "d", full.contiguous(), x.layout)
    full = _rows_alike(x.full) if memory == "expanded" else x.full
    held = {mesh.rank_at(coord): lie(simulate.take(full, x.layout, coord), memory) for coord in mesh.coords()}
    held.update({rank: torch.empty(0, dtype=full.dtype) for rank in range(case.world) if rank not in held})
    whole = f"shape=torch.Size({x.layout.shape}), stride={x.full.contiguous().stride()}" if x.layout.shape else "run_check=False"
    body = [f"mesh = {scripts.mesh(mesh)}", f"d = DTensor.from_local(X[rank], mesh, {at}, {whole})"]
    to = target(case, x) if how == "move" else x.layout.replace(draws.replicated(x.layout)) if how == "full" else x.layout
    moved = "d" if how == "keep" else f"d.redistribute(placements={scripts.placements(to.placements)})"
    return scripts.holds(case, body, moved, full, to, constants=scripts.tensors("X", dict(sorted(held.items()))))


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
    Law(
        id="layout.dtype",
        clause="Elements of every dtype are scattered, gathered and redistributed bit by bit, or refused by all ranks alike.",
        source=f"{DOC}, distribute_tensor, DTensor.full_tensor and DTensor.redistribute: no dtype is excepted",
        check=check_dtype,
        script=script_dtype,
        features=features_dtype,
        control="layout.dtype mesh=2x2 x=5x6:S(0),R:float16 to=R,S(1) how=move",
        planted="gather_rounds_to_bytes",
        draw=draw_dtype,
        draws=110,
        weight=0.8,
        needs=("broadcast", "scatter", "all_gather"),
        refusal="allowed",
    ),
    Law(
        id="layout.memory",
        clause="A local tensor that is not contiguous is kept as it lies, and its elements are what is gathered and redistributed.",
        source=f"{DOC}, DTensor.from_local, DTensor.to_local and DTensor.redistribute: nothing is said of memory",
        check=check_memory,
        script=script_memory,
        control="layout.memory mesh=2 x=5x6:S(0) to=R memory=sliced how=full",
        planted="gather_ignores_strides",
        draw=draw_memory,
        draws=110,
        weight=0.8,
        needs=("broadcast", "scatter", "all_gather"),
    ),
)
