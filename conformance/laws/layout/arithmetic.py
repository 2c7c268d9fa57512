"""Laws of the arithmetic of layouts: torch's own functions from sizes to sizes, asked without any communication.

A case names a mesh and a shape and stands for every combination of placements at every place of the mesh, hundreds or
thousands of questions at once. Where one of them is answered wrongly, the message says which; shrinking then leads to
a case that names the placements (``x=7x5:S(0),S(1)``), so that a finding is as small as any other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed.tensor as dtensor
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of
from shardlaw.conformance.law.fields import Device, Field, MeshTable, ScriptArgument
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import literal
from shardlaw.conformance.laws.shared.draws import LazyCases, smaller_shapes
from shardlaw.reference.layout import Layout, split
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape, format_shape
from shardlaw.reference.orders import order_placements
from shardlaw.reference.placement import Placement, Placements, Replicate, Shard, StridedShard, shard_dim
from shardlaw.reference.tensors import TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

SOURCE = "torch.distributed.tensor docs, Shard (torch.chunk semantic); docstring of _StridedShard"
ORDINARY = "2 2x2 3 2x3 4 2x2x2 3x2 5 2x4 1x3 8 2x1x3 4x2 6 1x2x2 3x1 7 2x2x1"
MESHES = [Mesh.parse(text) for text in f"{ORDINARY} 1 1x1 2x1 1x2x4 3x2x1 1x4 5x1 2x1x2 1x7".split()]
# strided shards of every small split factor on one mesh dim, fewer where combinations multiply
FACTORS = {1: (1, 2, 3, 4, 5), 2: (2, 3), 3: (2,)}
Orders = dict[int, tuple[int, ...]]


def _in_turn() -> list[Shape]:
    """Every shape of up to three dims of 0 to 9, the numbers of dims in turn, the odd sizes early."""
    sizes = (5, 3, 7, 0, 2, 8, 1, 4, 9, 6)
    by_dims: list[list[Shape]] = []
    for dims, step in ((1, 1), (2, 37), (3, 379)):
        numbers = [at * step % 10**dims for at in range(10**dims)]
        by_dims.append([tuple(sizes[number // 10**dim % 10] for dim in range(dims)) for number in numbers])
    found: list[Shape] = [()]
    for row in itertools.zip_longest(*by_dims):
        found += [shape for shape in row if shape is not None]
    return found


SHAPES = _in_turn()


def pairs(*, dims: tuple[int, ...] = (1, 2, 3), least: int = 0) -> Callable[[Limits], Sequence[Case]]:
    """Every mesh with every shape, each case made when it is asked for."""
    meshes = [mesh for mesh in MESHES if mesh.ndim in dims]
    shapes = [shape for shape in SHAPES if len(shape) >= least]

    def case(at: int) -> Case:
        row, column = divmod(at, len(meshes))
        return fields(world=1, mesh=meshes[column], shape=format_shape(shapes[(row + 7 * column) % len(shapes)]))

    return lambda limits: LazyCases(range(len(meshes) * len(shapes)), case)


def shape_of(case: Case) -> Shape:
    return case.tensor("x").shape if "x" in case else case.shape()


def placements_of(case: Case) -> list[Placements]:
    """The placements that a case asks about: those of ``x``, or every combination."""
    if "x" in case:
        return [case.tensor("x").placements or ()]
    ndim = len(case.shape())
    return list(itertools.product(single(ndim, case.mesh().ndim), repeat=case.mesh().ndim))


def unstrided(case: Case) -> list[Placements]:
    return [some for some in placements_of(case) if not any(isinstance(one, StridedShard) for one in some)]


def single(ndim: int, mesh_ndim: int) -> list[Placement]:
    """What one mesh dim may do with a tensor of so many dims."""
    strided = [StridedShard(dim, factor) for dim in range(ndim) for factor in FACTORS[mesh_ndim]]
    return [Replicate(), *map(Shard, range(ndim)), *strided]


def orders_of(mesh: Mesh, dims: int = 2) -> Iterator[Orders]:
    """Every way in which the mesh dims may shard tensor dims, one after the other in any order."""
    for chosen in itertools.product((None, *range(dims)), repeat=mesh.ndim):
        by_dim = [[at for at, dim in enumerate(chosen) if dim == tensor_dim] for tensor_dim in range(dims)]
        for permuted in itertools.product(*(itertools.permutations(cutting) for cutting in by_dim)):
            yield {dim: tuple(order) for dim, order in enumerate(permuted) if order}


def strided_on(mesh: Mesh) -> list[Placements]:
    """Strided shards of one tensor dim, beside others of it: of split factors that shard orders have, and others."""
    sizes = [math.prod(some) for count in (1, 2) for some in itertools.combinations(mesh.shape, count)]
    factors = [factor for factor in sorted({*sizes, mesh.size, 5}) if factor > 1]
    choices: list[Placement] = [Replicate(), Shard(0), *(StridedShard(0, factor) for factor in factors)]
    every = itertools.product(choices, repeat=mesh.ndim)
    return [placements for placements in every if any(isinstance(one, StridedShard) for one in placements)]


class AskedField(Field):
    """What a case asks about: a shape, or what questions ask about, by their texts."""

    takes = "a shape such as 5x6"

    def __init__(self, ask: Callable[[Case], Any]) -> None:
        self.ask = ask

    def fields(self, name: str) -> tuple[str, ...]:
        return "mesh", "shape", "x"

    def read(self, case: Case, name: str) -> Any:
        asked = self.ask(case)
        return {",".join(map(str, some)): some for some in asked} if isinstance(asked, list) else asked

    def build(self, value: Any, here: RankContext) -> Any:
        if not isinstance(value, dict):
            return torch.Size(value)
        return {text: here.placements(some) if isinstance(some, tuple) else some for text, some in value.items()}

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(literal(value if isinstance(value, dict) else torch.Size(value)))


AskedShape = Annotated[torch.Size, AskedField(shape_of)]
Asked = Annotated[dict[str, list[Any]], AskedField(placements_of)]
Unstrided = Annotated[dict[str, list[Any]], AskedField(unstrided)]
Strided = Annotated[dict[str, list[Any]], AskedField(lambda case: strided_on(case.mesh()))]
AllOrders = Annotated[dict[str, Orders], AskedField(lambda case: {str(one): one for one in orders_of(case.mesh())})]
arithmetic_law = partial(law, smallest=1, weight=0.4)


def checks(case: Case) -> int:
    """How many questions a case stands for."""
    return len(placements_of(case)) * case.mesh().size


def narrow(case: Case) -> SearchStrategy[Case]:
    """One combination of placements of a shape that is no larger; or all of them, of one that is smaller."""
    shape, mesh = shape_of(case), case.mesh()
    named = case.tensor("x").placements if "x" in case else None
    meshes = [mesh, *(other for other in MESHES if other.ndim <= mesh.ndim and other.size < mesh.size)]

    @st.composite
    def near(draw: st.DrawFn) -> Case:
        cut = draw(smaller_shapes(shape)) if shape else ()
        if named is None and draw(st.booleans()):
            return fields(world=1, mesh=draw(st.sampled_from(meshes[::-1])), shape=format_shape(cut))
        placed = (
            tuple(draw(st.sampled_from(single(len(cut), mesh.ndim)[::-1])) for _ in mesh.shape)
            if named is None
            else named
        )
        return fields(world=1, mesh=mesh, x=TensorSpec(cut, placed))

    return near()


def wrong_layouts(answers: dict[str, Any]) -> dict[str, Of]:
    return {question: Of(answer, "wrong-layout") for question, answer in answers.items()}


@arithmetic_law(
    "layout.math[offsets]",
    source=f"{SOURCE}; torch.distributed.tensor._utils, compute_local_shape_and_global_offset",
    control="world=1 mesh=2x3 shape=7x5",
    sweep=pairs(),
    sweeps=48,
    narrow=narrow,
    checks=checks,
)
def offsets(mesh: MeshTable, shape: AskedShape, asked: Asked, device: Device):
    """At every place of a mesh the local shape is how much is owned of each dim, the offset the first index of it."""
    table, found = torch.tensor(mesh), {}
    places = [*itertools.product(*map(range, table.shape))]
    seat = compat.mesh_for_rank(device.type, table, int(table.flatten()[-1]))
    for text, placements in asked.items():
        answers = [compat.local_shape_and_offset_at(shape, table.shape, [*at], placements) for at in places]
        # the last place of the mesh, asked through the mesh, and for the shape alone
        answers.append(compat.local_shape_and_offset(shape, seat, placements))
        alone, _ = compat.local_shape_and_offset_at(shape, table.shape, [*places[-1]], placements, skip_offset=True)
        found[text] = [(tuple(local), tuple(offset)) for local, offset in answers], tuple(alone)
    return {"offsets": found}


@offsets.due
def _(mesh, shape, asked):
    coords, found = [*mesh.coords()], {}
    for text, placements in asked.items():
        layout = Layout(shape, mesh, placements)
        answers = [(layout.local_shape(coord), layout.offset(coord)) for coord in (*coords, coords[-1])]
        found[text] = answers, answers[-1][0]
    return {"offsets": wrong_layouts(found)}


@arithmetic_law(
    "layout.math[split]",
    source=SOURCE,
    control="world=1 mesh=3 shape=7x5",
    sweep=pairs(dims=(1,), least=1),
    sweeps=60,
    narrow=narrow,
)
def cut_up(mesh: MeshTable, shape: AskedShape, asked: Asked):
    """A tensor is cut into the parts that its placement names, padded to one length where that is asked for."""
    tensor, parts, found = torch.arange(shape.numel()).reshape(shape), len(mesh), {}
    for text, (placement,) in asked.items():
        strided = isinstance(placement, compat.StridedShard)
        cut = compat.split_by_strided_shard if strided else compat.split_by_shard
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        pieces, _ = cut(placement, tensor, parts, with_padding=False, contiguous=True)
        padded, pads = cut(placement, tensor, parts, with_padding=True)
        bare = [piece.narrow(dim, 0, max(piece.size(dim) - pad, 0)) for piece, pad in zip(padded, pads, strict=True)]
        said = [placement.local_shard_size_and_offset(shape[dim], parts, rank) for rank in range(parts)]
        found[text] = {
            "pieces": shapes_and_elements(pieces),
            "pads": [*pads],
            # strided pieces are padded elsewhere
            "padded": None if strided else ([piece.size(dim) for piece in padded], shapes_and_elements(bare)),
            "said": [(size, start if size else None) for size, start in said],
        }
    return found


def shapes_and_elements(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [(tuple(tensor.shape), tensor.flatten().tolist()) for tensor in tensors]


@cut_up.due
def _(mesh, shape, asked):
    tensor, found = torch.arange(math.prod(shape)).reshape(shape), {}
    for text, (placement,) in asked.items():
        dim = shard_dim(placement)
        if dim is None:
            continue
        owned = split(tuple(range(shape[dim])), mesh.size, placement)
        longest = max(map(len, owned))
        pieces = shapes_and_elements(
            [tensor.index_select(dim, torch.tensor(part, dtype=torch.int64)) for part in owned]
        )
        padded = None if isinstance(placement, StridedShard) else ([longest] * mesh.size, pieces)
        pads, said = [longest - len(part) for part in owned], [(len(part), part[0] if part else None) for part in owned]
        found[text] = wrong_layouts({"pieces": pieces, "pads": pads, "padded": padded, "said": said})
    return found


@arithmetic_law(
    "layout.math[global]",
    source="torch.distributed.tensor docs, DTensor.from_local: the global shape is inferred assuming even shards",
    control="world=1 mesh=2x3 shape=2x3",
    sweep=pairs(least=1),
    sweeps=60,
    narrow=narrow,
)
def global_shapes(mesh: MeshTable, shape: AskedShape, asked: Unstrided, device: Device):
    """Where all local tensors are of one shape, a dim's global extent is that times the mesh dims that shard it."""
    table, local = torch.tensor(mesh), torch.empty(shape, device="meta")
    seat, found = compat.mesh_for_rank(device.type, table, int(table.flatten()[0])), {}
    for text, placements in asked.items():
        whole, stride = compat.global_tensor_info(local, seat, placements)
        found[text] = [*whole], [*stride]
    return {"global": found}


@global_shapes.due
def _(mesh, shape, asked):
    found: dict[str, Any] = {}
    for text, placements in asked.items():
        whole = [*shape]
        for size, placement in zip(mesh.shape, placements, strict=True):
            dim = shard_dim(placement)
            if dim is not None:
                whole[dim] *= size
        # a local extent of 1 leaves the order of strides open
        stride = [*torch.empty(whole, device="meta").stride()] if min(shape, default=2) > 1 else None
        found[text] = (Of(whole, "wrong-layout"), Of(stride, "wrong-layout") if stride is not None else ...)
    return {"global": found}


def meshes_of_dims(*more: str) -> Callable[[Limits], list[Case]]:
    chosen = [*(mesh for mesh in MESHES if mesh.ndim > 1), *map(Mesh.parse, more)]
    return lambda limits: [fields(world=1, mesh=mesh) for mesh in chosen]


def notation(placements: Sequence[Any]) -> list[str]:
    """Placements as texts: R, S(dim), _S(dim,split factor)."""
    parts = [(getattr(one, "dim", None), getattr(one, "split_factor", None)) for one in placements]
    return ["R" if dim is None else f"S({dim})" if factor is None else f"_S({dim},{factor})" for dim, factor in parts]


@arithmetic_law(
    "layout.math[orders]",
    source="torch.distributed.tensor._dtensor_spec, DTensorSpec: shard_order and strided shards",
    control="world=1 mesh=2x3",
    sweep=meshes_of_dims(),
    sweeps=20,
)
def shard_orders(mesh: MeshTable, orders: AllOrders, asked: Strided, device: Device):
    """Shard orders are written as placements and read back, and what no order is written as is not read as one."""
    table = torch.tensor(mesh)
    seat, written, read = compat.mesh_for_rank(device.type, table, int(table.flatten()[0])), {}, {}
    for text, order in orders.items():
        dims = {mesh_dim: dim for dim, cuts in order.items() for mesh_dim in cuts}
        plain = tuple(dtensor.Shard(dims[at]) if at in dims else dtensor.Replicate() for at in range(table.ndim))
        entries = tuple(compat.ShardOrderEntry(tensor_dim=dim, mesh_dims=cuts) for dim, cuts in sorted(order.items()))
        written[text] = notation(compat.orders_to_placements(entries, plain, seat))
    for text, placements in asked.items():
        found = compat.placements_to_orders(tuple(placements), seat)
        read[text] = found and {entry.tensor_dim: tuple(entry.mesh_dims) for entry in found}
    return {"written": written, "read": read}


@shard_orders.due
def _(mesh, orders, asked):
    written = {text: order_placements(mesh, order) for text, order in orders.items()}
    known: dict[Placements, list[Any]] = {}
    for text, placements in written.items():
        known.setdefault(placements, []).append(Of(orders[text], "wrong-layout"))
    read = {text: Either((*known.get(some, [Of(None, "wrong-layout")]),)) for text, some in asked.items()}
    return {"written": wrong_layouts({text: [*map(str, some)] for text, some in written.items()}), "read": read}


@arithmetic_law(
    "layout.math[mesh]",
    source="torch.distributed._mesh_layout: global_ranks, complement, composition, remap_to_tensor",
    control="world=1 mesh=2x3",
    sweep=meshes_of_dims("2x2@3,1,2,0", "2x3@5,0,3,1,4,2", "3@2,0,1"),
    sweeps=24,
)
def mesh_layouts(mesh: MeshTable):
    """Parts of a mesh, given by sizes and strides, are the ranks along their dims, and equal only where these are."""
    table, layouts, flat_layouts = torch.tensor(mesh), compat.MeshLayout, compat.FlatLayout
    found, seen, equal = {}, [], []  # type: ignore[var-annotated]
    for dims in (some for count in range(table.ndim) for some in itertools.permutations(range(table.ndim), count + 1)):
        sizes = tuple(table.shape[dim] for dim in dims)
        part = layouts.from_sizes_strides(sizes, tuple(table.stride(dim) for dim in dims))
        flat, tables = part.collapse(), part.remap_to_tensor(table.flatten())
        ranks, beside = [*flat.all_ranks_from_zero()], flat.complement(table.numel())
        again = flat.composition(layouts.from_sizes_strides(sizes))
        found[str(dims)] = {
            "flat": isinstance(flat, flat_layouts),
            "ranks": ranks,
            "sizes": part.top_level_sizes,
            "groups": sorted(tuple(group) for group in flat.global_ranks(table.numel())),
            "complement": sorted(one + other for one in ranks for other in beside.all_ranks_from_zero()),
            "tables": sorted((tuple(one.shape), *one.flatten().tolist()) for one in tables),
            "composition": ([*again.collapse().all_ranks_from_zero()], again.top_level_sizes),
        }
        equal += [sorted((str(dims), other)) for other, layout in seen if layout == flat]
        seen.append((str(dims), flat))
    return {"parts": found, "equal": equal}


@mesh_layouts.due
def _(mesh):
    plain, found = Mesh.of(*mesh.shape), {}
    first, equal = next(plain.coords()), []
    by_ranks: list[tuple[str, tuple[int, ...]]] = []
    for dims in (some for count in range(mesh.ndim) for some in itertools.permutations(range(mesh.ndim), count + 1)):
        sizes, ranks = tuple(mesh.shape[dim] for dim in dims), plain.slice(dims, first).ranks
        tables = {(sizes, *mesh.slice(dims, coord).ranks) for coord in mesh.coords()}
        found[str(dims)] = wrong_layouts(
            {
                "flat": True,
                "ranks": [*ranks],
                "sizes": sizes,
                "groups": sorted({plain.slice(dims, coord).ranks for coord in plain.coords()}),
                "complement": [*range(mesh.size)],
                "tables": sorted(tables),
                "composition": ([*ranks], sizes),
            }
        )
        equal += [sorted((str(dims), other)) for other, others in by_ranks if others == ranks]
        by_ranks.append((str(dims), ranks))
    return {"parts": found, "equal": Of(equal, "wrong-layout")}
