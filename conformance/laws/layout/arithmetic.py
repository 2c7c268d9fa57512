"""Laws of torch's functions that compute sizes and offsets of layouts, without communication.

A case of a mesh and a shape checks every combination of placements at every coordinate: up to thousands of questions.
Shrinking leads to a case that names the placements (``x=7x5:S(0),S(1)``).
"""

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
# split factors of strided shards, by the number of mesh dims
FACTORS = {1: (1, 2, 3, 4, 5), 2: (2, 3), 3: (2,)}
Orders = dict[int, tuple[int, ...]]


def _enumerate_shapes() -> list[Shape]:
    """Every shape of up to three dims of sizes 0 to 9. The numbers of dims alternate; uneven sizes come early."""
    sizes = (5, 3, 7, 0, 2, 8, 1, 4, 9, 6)
    by_dims: list[list[Shape]] = []
    for dims, step in ((1, 1), (2, 37), (3, 379)):
        numbers = [at * step % 10**dims for at in range(10**dims)]
        by_dims.append([tuple(sizes[number // 10**dim % 10] for dim in range(dims)) for number in numbers])
    rows = itertools.zip_longest(*by_dims)
    return [(), *(shape for row in rows for shape in row if shape is not None)]


SHAPES = _enumerate_shapes()


def sweep_shapes(*, dims: tuple[int, ...] = (1, 2, 3), min_dims: int = 0) -> Callable[[Limits], Sequence[Case]]:
    """Every mesh of ``dims`` dims with every shape of at least ``min_dims``, as a lazy sequence."""
    meshes = [mesh for mesh in MESHES if mesh.ndim in dims]
    shapes = [shape for shape in SHAPES if len(shape) >= min_dims]

    def case(at: int) -> Case:
        row, column = divmod(at, len(meshes))
        return fields(world=1, mesh=meshes[column], shape=format_shape(shapes[(row + 7 * column) % len(shapes)]))

    return lambda limits: LazyCases(range(len(meshes) * len(shapes)), case)


def case_shape(case: Case) -> Shape:
    return case.tensor("x").shape if "x" in case else case.shape()


def case_placements(case: Case) -> list[Placements]:
    """The placements that a case checks: those of ``x``, or every combination."""
    if "x" in case:
        return [case.tensor("x").placements or ()]
    ndim = len(case.shape())
    return list(itertools.product(single_placements(ndim, case.mesh().ndim), repeat=case.mesh().ndim))


def has_strided(placements: Placements) -> bool:
    return any(isinstance(placement, StridedShard) for placement in placements)


def single_placements(ndim: int, mesh_ndim: int) -> list[Placement]:
    """The placements that one mesh dim may have for a tensor of ``ndim`` dims."""
    strided = [StridedShard(dim, factor) for dim in range(ndim) for factor in FACTORS[mesh_ndim]]
    return [Replicate(), *map(Shard, range(ndim)), *strided]


def enumerate_orders(mesh: Mesh, dims: int = 2) -> Iterator[Orders]:
    """Every shard order of ``dims`` tensor dims: by tensor dim, the mesh dims that shard it one after the other."""
    for sharded in itertools.product((None, *range(dims)), repeat=mesh.ndim):
        by_dim = [[at for at, dim in enumerate(sharded) if dim == tensor_dim] for tensor_dim in range(dims)]
        for permuted in itertools.product(*map(itertools.permutations, by_dim)):
            yield {dim: tuple(order) for dim, order in enumerate(permuted) if order}


def strided_placements(mesh: Mesh) -> list[Placements]:
    """Combinations with strided shards of tensor dim 0, with split factors that shard orders have and others."""
    sizes = [math.prod(extents) for count in (1, 2) for extents in itertools.combinations(mesh.shape, count)]
    factors = [factor for factor in sorted({*sizes, mesh.size, 5}) if factor > 1]
    choices: list[Placement] = [Replicate(), Shard(0), *(StridedShard(0, factor) for factor in factors)]
    return [*filter(has_strided, itertools.product(choices, repeat=mesh.ndim))]


class ComputedField(Field):
    """What ``read_case`` computes from the mesh and the shape, or ``x``, of a case: a shape, or a list of placements or
    shard orders, which becomes a dict by their texts."""

    takes = "a shape such as 5x6"
    reads = ("mesh", "shape", "x")

    def __init__(self, read_case: Callable[[Case], Any]) -> None:
        self.read_case = read_case

    def read(self, case: Case, name: str) -> Any:
        value = self.read_case(case)
        return {",".join(map(str, item)): item for item in value} if isinstance(value, list) else value

    def build(self, value: Any, here: RankContext) -> Any:
        if not isinstance(value, dict):
            return torch.Size(value)
        return {text: here.placements(item) if isinstance(item, tuple) else item for text, item in value.items()}

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(literal(value if isinstance(value, dict) else torch.Size(value)))


CaseShape = Annotated[torch.Size, ComputedField(case_shape)]
AllPlacements = Annotated[Any, ComputedField(case_placements)]
Unstrided = Annotated[Any, ComputedField(lambda case: [*itertools.filterfalse(has_strided, case_placements(case))])]
Strided = Annotated[Any, ComputedField(lambda case: strided_placements(case.mesh()))]
AllOrders = Annotated[Any, ComputedField(lambda case: {str(order): order for order in enumerate_orders(case.mesh())})]
arithmetic_law = partial(law, smallest=1, weight=0.4)


def checks(case: Case) -> int:
    """How many questions a case stands for."""
    return len(case_placements(case)) * case.mesh().size


def narrow(case: Case) -> SearchStrategy[Case]:
    """One combination of placements of a shape that is no larger; or all of them for a smaller shape."""
    shape, mesh = case_shape(case), case.mesh()
    named = case.tensor("x").placements if "x" in case else None
    meshes = [mesh, *(other for other in MESHES if other.ndim <= mesh.ndim and other.size < mesh.size)]

    @st.composite
    def no_larger(draw: st.DrawFn) -> Case:
        cut = draw(smaller_shapes(shape)) if shape else ()
        if named is None and draw(st.booleans()):
            return fields(world=1, mesh=draw(st.sampled_from(meshes[::-1])), shape=format_shape(cut))
        single = st.sampled_from(single_placements(len(cut), mesh.ndim)[::-1])
        placements = tuple(draw(single) for _ in mesh.shape) if named is None else named
        return fields(world=1, mesh=mesh, x=TensorSpec(cut, placements))

    return no_larger()


def layout_dues(values: dict[str, Any]) -> dict[str, Of]:
    """Due values whose mismatch is a wrong layout."""
    return {name: Of(value, "wrong-layout") for name, value in values.items()}


@arithmetic_law(
    "layout.math[offsets]",
    source=f"{SOURCE}; torch.distributed.tensor._utils, compute_local_shape_and_global_offset",
    control="world=1 mesh=2x3 shape=7x5",
    sweep=sweep_shapes(),
    sweeps=48,
    narrow=narrow,
    checks=checks,
)
def offsets(mesh: MeshTable, shape: CaseShape, choices: AllPlacements, device: Device):
    """At every coordinate of a mesh, the local shape counts the owned indices of each dim; the offset is the first."""
    table, found = torch.tensor(mesh), {}
    coords = [*itertools.product(*map(range, table.shape))]
    last_rank_mesh = compat.mesh_for_rank(device.type, table, int(table.flatten()[-1]))
    for text, placements in choices.items():
        answers = [compat.local_shape_and_offset_at(shape, table.shape, [*coord], placements) for coord in coords]
        # the last coordinate, by a mesh, and without the offset
        answers.append(compat.local_shape_and_offset(shape, last_rank_mesh, placements))
        alone, _ = compat.local_shape_and_offset_at(shape, table.shape, [*coords[-1]], placements, skip_offset=True)
        found[text] = [(tuple(local), tuple(offset)) for local, offset in answers], tuple(alone)
    return {"offsets": found}


@offsets.due
def _(mesh, shape, choices):
    coords, found = [*mesh.coords()], {}
    for text, placements in choices.items():
        layout = Layout(shape, mesh, placements)
        answers = [(layout.local_shape(coord), layout.offset(coord)) for coord in (*coords, coords[-1])]
        found[text] = answers, answers[-1][0]
    return {"offsets": layout_dues(found)}


@arithmetic_law(
    "layout.math[split]",
    source=SOURCE,
    control="world=1 mesh=3 shape=7x5",
    sweep=sweep_shapes(dims=(1,), min_dims=1),
    sweeps=60,
    narrow=narrow,
)
def split_tensor(mesh: MeshTable, shape: CaseShape, choices: AllPlacements):
    """A tensor is split into the shards of its placement, which are padded to one length on request."""
    tensor, count, found = torch.arange(shape.numel()).reshape(shape), len(mesh), {}
    for text, (placement,) in choices.items():
        strided = isinstance(placement, compat.StridedShard)
        split_by = compat.split_by_strided_shard if strided else compat.split_by_shard
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        shards, _ = split_by(placement, tensor, count, with_padding=False, contiguous=True)
        padded, pads = split_by(placement, tensor, count, with_padding=True)
        bare = [shard.narrow(dim, 0, max(shard.size(dim) - pad, 0)) for shard, pad in zip(padded, pads, strict=True)]
        computed = [placement.local_shard_size_and_offset(shape[dim], count, rank) for rank in range(count)]
        found[text] = {
            "pieces": shapes_and_elements(shards),
            "pads": [*pads],
            # the pads of strided shards are not at their end
            "padded": None if strided else ([shard.size(dim) for shard in padded], shapes_and_elements(bare)),
            "said": [(size, start if size else None) for size, start in computed],
        }
    return found


def shapes_and_elements(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [(tuple(tensor.shape), tensor.flatten().tolist()) for tensor in tensors]


@split_tensor.due
def _(mesh, shape, choices):
    tensor, found = torch.arange(math.prod(shape)).reshape(shape), {}
    for text, (placement,) in choices.items():
        dim = shard_dim(placement)
        if dim is None:
            continue
        owned = split(tuple(range(shape[dim])), mesh.size, placement)
        longest = max(map(len, owned))
        shards = [tensor.index_select(dim, torch.tensor(indices, dtype=torch.int64)) for indices in owned]
        pieces = shapes_and_elements(shards)
        found[text] = layout_dues(
            {
                "pieces": pieces,
                "pads": [longest - len(indices) for indices in owned],
                "padded": None if isinstance(placement, StridedShard) else ([longest] * mesh.size, pieces),
                "said": [(len(indices), indices[0] if indices else None) for indices in owned],
            }
        )
    return found


@arithmetic_law(
    "layout.math[global]",
    source="torch.distributed.tensor docs, DTensor.from_local: the global shape is inferred assuming even shards",
    control="world=1 mesh=2x3 shape=2x3",
    sweep=sweep_shapes(min_dims=1),
    sweeps=60,
    narrow=narrow,
)
def global_shapes(mesh: MeshTable, shape: CaseShape, choices: Unstrided, device: Device):
    """If local tensors have one shape, the global size of a dim is the local one times the mesh dims that shard it."""
    table, local = torch.tensor(mesh), torch.empty(shape, device="meta")
    device_mesh, found = compat.mesh_for_rank(device.type, table, int(table.flatten()[0])), {}
    for text, placements in choices.items():
        size, stride = compat.global_tensor_info(local, device_mesh, placements)
        found[text] = [*size], [*stride]
    return {"global": found}


@global_shapes.due
def _(mesh, shape, choices):
    found: dict[str, Any] = {}
    for text, placements in choices.items():
        sizes = [*shape]
        for extent, placement in zip(mesh.shape, placements, strict=True):
            dim = shard_dim(placement)
            if dim is not None:
                sizes[dim] *= extent
        # with a local size of 1 the order of strides is undefined
        stride = [*torch.empty(sizes, device="meta").stride()] if min(shape, default=2) > 1 else None
        found[text] = (Of(sizes, "wrong-layout"), Of(stride, "wrong-layout") if stride is not None else ...)
    return {"global": found}


def sweep_meshes(*more: str) -> Callable[[Limits], list[Case]]:
    meshes = [*(mesh for mesh in MESHES if mesh.ndim > 1), *map(Mesh.parse, more)]
    return lambda limits: [fields(world=1, mesh=mesh) for mesh in meshes]


def placement_texts(placements: Sequence[Any]) -> list[str]:
    """Placements as texts: R, S(dim), _S(dim,split factor)."""
    parts = [(getattr(placement, "dim", None), getattr(placement, "split_factor", None)) for placement in placements]
    return ["R" if dim is None else f"S({dim})" if factor is None else f"_S({dim},{factor})" for dim, factor in parts]


@arithmetic_law(
    "layout.math[orders]",
    source="torch.distributed.tensor._dtensor_spec, DTensorSpec: shard_order and strided shards",
    control="world=1 mesh=2x3",
    sweep=sweep_meshes(),
    sweeps=20,
)
def shard_orders(mesh: MeshTable, orders: AllOrders, choices: Strided, device: Device):
    """A shard order is encoded as placements and decoded from them; placements that encode no order decode to none."""
    table = torch.tensor(mesh)
    device_mesh, written, read = compat.mesh_for_rank(device.type, table, int(table.flatten()[0])), {}, {}
    for text, order in orders.items():
        dims = {mesh_dim: dim for dim, mesh_dims in order.items() for mesh_dim in mesh_dims}
        plain = tuple(dtensor.Shard(dims[at]) if at in dims else dtensor.Replicate() for at in range(table.ndim))
        entries = tuple(compat.ShardOrderEntry(tensor_dim=dim, mesh_dims=order[dim]) for dim in sorted(order))
        written[text] = placement_texts(compat.orders_to_placements(entries, plain, device_mesh))
    for text, placements in choices.items():
        found = compat.placements_to_orders(tuple(placements), device_mesh)
        read[text] = found and {entry.tensor_dim: tuple(entry.mesh_dims) for entry in found}
    return {"written": written, "read": read}


@shard_orders.due
def _(mesh, orders, choices):
    written = {text: order_placements(mesh, order) for text, order in orders.items()}
    encoded: dict[Placements, list[Any]] = {}
    for text, placements in written.items():
        encoded.setdefault(placements, []).append(Of(orders[text], "wrong-layout"))
    none = [Of(None, "wrong-layout")]
    return {
        "written": layout_dues({text: [*map(str, placements)] for text, placements in written.items()}),
        "read": {text: Either((*encoded.get(placements, none),)) for text, placements in choices.items()},
    }


@arithmetic_law(
    "layout.math[mesh]",
    source="torch.distributed._mesh_layout: global_ranks, complement, composition, remap_to_tensor",
    control="world=1 mesh=2x3",
    sweep=sweep_meshes("2x2@3,1,2,0", "2x3@5,0,3,1,4,2", "3@2,0,1"),
    sweeps=24,
)
def mesh_layouts(mesh: MeshTable):
    """A sub-mesh, given by sizes and strides, has the ranks along its dims; sub-meshes are equal if their ranks are."""
    table, layouts, flat_layouts = torch.tensor(mesh), compat.MeshLayout, compat.FlatLayout
    found, flattened = {}, {}
    for dims in dim_sequences(table.ndim):
        sizes = tuple(table.shape[dim] for dim in dims)
        submesh = layouts.from_sizes_strides(sizes, tuple(table.stride(dim) for dim in dims))
        flat, tables = submesh.collapse(), submesh.remap_to_tensor(table.flatten())
        ranks, complement = [*flat.all_ranks_from_zero()], flat.complement(table.numel())
        composed = flat.composition(layouts.from_sizes_strides(sizes))
        found[str(dims)] = {
            "flat": isinstance(flat, flat_layouts),
            "ranks": ranks,
            "sizes": submesh.top_level_sizes,
            "groups": sorted(tuple(group) for group in flat.global_ranks(table.numel())),
            "complement": sorted(rank + start for rank in ranks for start in complement.all_ranks_from_zero()),
            "tables": sorted((tuple(part.shape), *part.flatten().tolist()) for part in tables),
            "composition": ([*composed.collapse().all_ranks_from_zero()], composed.top_level_sizes),
        }
        flattened[str(dims)] = flat
    return {"parts": found, "equal": equal_pairs(flattened)}


def equal_pairs(values):
    """The pairs of keys whose values are equal."""
    return [(a, b) for a, b in itertools.combinations(values, 2) if values[a] == values[b]]


def dim_sequences(ndim):
    """Every sequence of different mesh dims, the shortest first."""
    return [dims for count in range(ndim) for dims in itertools.permutations(range(ndim), count + 1)]


@mesh_layouts.due
def _(mesh):
    plain, found, ranks_by_dims = Mesh.of(*mesh.shape), {}, {}
    for dims in dim_sequences(mesh.ndim):
        sizes, ranks = tuple(mesh.shape[dim] for dim in dims), plain.slice(dims, next(plain.coords())).ranks
        tables = {(sizes, *mesh.slice(dims, coord).ranks) for coord in mesh.coords()}
        found[str(dims)] = layout_dues(
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
        ranks_by_dims[str(dims)] = ranks
    return {"parts": found, "equal": Of(equal_pairs(ranks_by_dims), "wrong-layout")}
