"""Laws of the arithmetic of layouts: torch's own functions from sizes to sizes, asked without any communication.

A case names a mesh and a shape and stands for every combination of placements at every place of the mesh, hundreds or thousands of
questions at once. Where one of them is answered wrongly, the message says which; shrinking then leads to a case that names the placements
(``x=7x5:S(0),S(1)``), so that a finding is as small as any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from conformance.case import Case
from conformance.here import to_torch
from conformance.law import Law, Limits
from conformance.laws.draws import smaller
from conformance.laws.layout import math_scripts as told
from conformance.laws.plan.torch import need, seated
from reference.layout import Layout, split
from reference.mesh import Mesh
from reference.notation import Shape, format_shape
from reference.orders import placed_in_order
from reference.placement import Placement, Placements, Replicate, Shard, StridedShard, format_placements, shard_dim
from reference.tensors import TensorSpec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

SOURCE = "torch.distributed.tensor docs, Shard (torch.chunk semantic); docstring of _StridedShard"
MESHES = [
    Mesh.parse(text)
    for text in (
        *("2", "2x2", "3", "2x3", "4", "2x2x2", "3x2", "5", "2x4", "1x3", "8", "2x1x3", "4x2", "6", "1x2x2", "3x1", "7", "2x2x1"),
        *("1", "1x1", "2x1", "1x2x4", "3x2x1", "1x4", "5x1", "2x1x2", "1x7"),
    )
]
# strided shards of every small split factor on one mesh dim, fewer where combinations multiply
FACTORS = {1: (1, 2, 3, 4, 5), 2: (2, 3), 3: (2,)}


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


class Pairs(Sequence[Case]):
    """Cases of every mesh with every shape, each case by its index."""

    def __init__(self, law: str, meshes: Sequence[Mesh], shapes: Sequence[Shape]) -> None:
        self._law, self._meshes, self._shapes = law, meshes, shapes

    def __len__(self) -> int:
        return len(self._meshes) * len(self._shapes)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        row, column = divmod(at, len(self._meshes))
        shape = self._shapes[(row + 7 * column) % len(self._shapes)]
        return Case.of(self._law, world=1, mesh=self._meshes[column], shape=format_shape(shape))


def placements_of(case: Case) -> list[Placements]:
    """The placements that a case asks about: those of ``x``, or every combination."""
    if "x" in case:
        return [case.tensor("x").placements or ()]
    ndim = len(case.shape())
    return list(itertools.product(single(ndim, case.mesh().ndim), repeat=case.mesh().ndim))


def single(ndim: int, mesh_ndim: int) -> list[Placement]:
    """What one mesh dim may do with a tensor of so many dims."""
    strided = [StridedShard(dim, factor) for dim in range(ndim) for factor in FACTORS[mesh_ndim]]
    return [Replicate(), *map(Shard, range(ndim)), *strided]


def checks(case: Case) -> int:
    """How many questions a case stands for."""
    if case.law == "layout.math[offsets]":
        return len(placements_of(case)) * case.mesh().size
    return 1


def shape_of(case: Case) -> Shape:
    return case.tensor("x").shape if "x" in case else case.shape()


_torch_placement = cache(to_torch)


def check_offsets(case: Case, here: Here) -> None:
    ask, whole = need(here, "local_shape_and_offset_at", "local_shape_and_offset")
    shape, mesh = shape_of(case), case.mesh()
    coords = list(mesh.coords())
    for placements in placements_of(case):
        layout = Layout(shape, mesh, placements)
        given = [_torch_placement(placement) for placement in placements]
        for coord in coords:
            due = layout.local_shape(coord), layout.offset(coord)
            local, offset = ask(shape, mesh.shape, list(coord), given)
            if (tuple(local), tuple(offset)) != due:
                _deviates(here, case, placements, f"at {coord} the local shape is {tuple(local)} and the offset {tuple(offset)}",
                          due, (tuple(local), tuple(offset)))  # fmt: skip
                return
        # the last place of the mesh, asked through the mesh, and for the shape alone
        seat = whole(shape, seated(here, mesh, mesh.rank_at(coords[-1])), given)
        alone = ask(shape, mesh.shape, list(coords[-1]), given, skip_offset=True)[0]
        if (tuple(map(tuple, seat)), tuple(alone)) != (due, due[0]):
            _deviates(here, case, placements, f"at {coords[-1]} asked in another way, {seat} and {alone}", due, (seat, alone))
            return


def _deviates(here: Here, case: Case, placements: Placements, what: str, due: object, got: object) -> None:
    at = f"{format_shape(shape_of(case))} on {case.mesh()} as {format_placements(placements)}"
    here.deviates("wrong-layout", case.law.partition("[")[2].removesuffix("]"), f"{at}: {what}", due, got)


def narrow(case: Case) -> SearchStrategy[Case]:
    """One combination of placements of a shape that is no larger; or all of them, of one that is smaller."""
    shape, mesh = shape_of(case), case.mesh()
    named = case.tensor("x").placements if "x" in case else None
    meshes = [mesh, *(other for other in MESHES if other.ndim <= mesh.ndim and other.size < mesh.size)]

    @st.composite
    def near(draw: st.DrawFn) -> Case:
        cut = draw(smaller(shape)) if shape else ()
        if named is None and draw(st.booleans()):
            on = draw(st.sampled_from(meshes[::-1]))
            return Case.of(case.law, world=1, mesh=on, shape=format_shape(cut))
        placed = tuple(draw(st.sampled_from(single(len(cut), mesh.ndim)[::-1])) for _ in mesh.shape) if named is None else named
        return Case.of(case.law, world=1, mesh=mesh, x=TensorSpec(cut, placed))

    return near()


# Cutting


def check_split(case: Case, here: Here) -> None:
    """The pieces of a tensor that is cut along one dim, padded and not, and what is said of them beforehand."""
    plain, strided = need(here, "split_by_shard", "split_by_strided_shard")
    shape, parts = shape_of(case), case.mesh().size
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    for (placement,) in placements_of(case):
        dim = shard_dim(placement)
        if dim is None:
            continue
        cut = strided if isinstance(placement, StridedShard) else plain
        live: Any = _torch_placement(placement)
        due = split(tuple(range(shape[dim])), parts, placement)
        want = [tensor.index_select(dim, torch.tensor(part, dtype=torch.int64)) for part in due]
        pieces, _ = cut(live, tensor, parts, with_padding=False, contiguous=True)
        if not _alike(pieces, want):
            return _deviates(here, case, (placement,), "the pieces are not its parts", want, pieces)
        padded, pads = cut(live, tensor, parts, with_padding=True)
        longest = max(map(len, due))
        if list(pads) != [longest - len(part) for part in due]:
            return _deviates(here, case, (placement,), "other padding than makes the pieces even", longest, pads)
        # strided pieces are padded elsewhere
        if not isinstance(placement, StridedShard):
            bare = [piece.narrow(dim, 0, max(piece.size(dim) - pad, 0)) for piece, pad in zip(padded, pads, strict=True)]
            if any(piece.size(dim) != longest for piece in padded) or not _alike(bare, want):
                return _deviates(here, case, (placement,), "the padded pieces are not its parts", want, padded)
        for rank, part in enumerate(due):
            size, start = live.local_shard_size_and_offset(shape[dim], parts, rank)
            if size != len(part) or (part and start != part[0]):
                return _deviates(here, case, (placement,), f"piece {rank} is said to have {size} from {start}", part, (size, start))
    return None


def _alike(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(got, want, strict=True))


# The global shape that follows from a local one


def check_global(case: Case, here: Here) -> None:
    (ask,) = need(here, "global_tensor_info")
    local, mesh = shape_of(case), case.mesh()
    live, tensor = seated(here, mesh, mesh.ranks[0]), torch.empty(shape_of(case), device="meta")
    for placements in placements_of(case):
        if any(isinstance(placement, StridedShard) for placement in placements):
            continue
        due = list(local)
        for size, placement in zip(mesh.shape, placements, strict=True):
            dim = shard_dim(placement)
            if dim is not None:
                due[dim] *= size
        shape, stride = ask(tensor, live, [_torch_placement(placement) for placement in placements])
        if list(shape) != due:
            return _deviates(here, case, placements, f"the global shape is {list(shape)}", due, list(shape))
        dense = list(torch.empty(due, device="meta").stride())
        if min(local, default=2) > 1 and list(stride) != dense:
            return _deviates(here, case, placements, f"the global stride is {list(stride)}", dense, list(stride))
    return None


# Shard orders


def orders(mesh: Mesh, dims: int = 2) -> Iterator[dict[int, tuple[int, ...]]]:
    """Every way in which the mesh dims may shard tensor dims, one after the other in any order."""
    for chosen in itertools.product((None, *range(dims)), repeat=mesh.ndim):
        by_dim = [[at for at, dim in enumerate(chosen) if dim == tensor_dim] for tensor_dim in range(dims)]
        for permuted in itertools.product(*(itertools.permutations(cutting) for cutting in by_dim)):
            yield {dim: tuple(order) for dim, order in enumerate(permuted) if order}


def check_orders(case: Case, here: Here) -> None:
    """A shard order is written down as placements and read back; placements that none is written as are not read as one."""
    entry, write, read = need(here, "ShardOrderEntry", "orders_to_placements", "placements_to_orders")
    mesh = case.mesh()
    live = seated(here, mesh, mesh.ranks[0])
    known: dict[Placements, list[dict[int, tuple[int, ...]]]] = {}
    for order in orders(mesh):
        known.setdefault(placed_in_order(mesh, order), []).append(order)
        due = placed_in_order(mesh, order)
        plain = tuple(Replicate() if shard_dim(p) is None else Shard(shard_dim(p) or 0) for p in due)
        named = tuple(entry(tensor_dim=dim, mesh_dims=cuts) for dim, cuts in sorted(order.items()))
        got = write(named, tuple(map(_torch_placement, plain)), live)
        if tuple(got) != tuple(map(_torch_placement, due)):
            return here.deviates("wrong-layout", "written", f"the order {order} on {mesh} is written as {got}", due, got)
    factors = sorted({1, *(math.prod(some) for n in (1, 2) for some in itertools.combinations(mesh.shape, n)), mesh.size, 5})
    choices: list[Placement] = [Replicate(), Shard(0), *(StridedShard(0, factor) for factor in factors if factor > 1)]
    for placements in itertools.product(choices, repeat=mesh.ndim):
        if not any(isinstance(placement, StridedShard) for placement in placements):
            continue
        found = read(tuple(map(_torch_placement, placements)), live)
        as_order = None if found is None else {one.tensor_dim: tuple(one.mesh_dims) for one in found}
        named_so = known.get(placements, [])
        message = f"{format_placements(placements)} on {mesh} is read as {as_order}"
        if (as_order is None) != (not named_so) or (as_order is not None and placed_in_order(mesh, as_order) != placements):
            return here.deviates("wrong-layout", "read", message, named_so, as_order)
    return None


# Layouts of meshes


def check_mesh(case: Case, here: Here) -> None:
    """Parts of a mesh as sizes and strides: which ranks they are, what is beside them, and when two are the same."""
    layout_of, _ = need(here, "MeshLayout", "FlatLayout")
    mesh = case.mesh()
    plain = Mesh.of(*mesh.shape)
    strides = [math.prod(mesh.shape[dim + 1 :]) for dim in range(mesh.ndim)]
    first = next(plain.coords())
    seen: dict[tuple[int, ...], Any] = {}
    for dims in (some for n in range(1, mesh.ndim + 1) for some in itertools.permutations(range(mesh.ndim), n)):
        sizes = tuple(mesh.shape[dim] for dim in dims)
        part = layout_of.from_sizes_strides(sizes, tuple(strides[dim] for dim in dims))
        flat, what = part.collapse(), f"dims {dims} of {mesh}"
        ranks = plain.slice(dims, first).ranks
        told = tuple(flat.all_ranks_from_zero())
        here.require(told == ranks, "wrong-layout", "ranks", f"{what}: other ranks", ranks, told)
        here.require(part.top_level_sizes == sizes, "wrong-layout", "sizes", f"{what}: other sizes", sizes, part.top_level_sizes)
        groups = {plain.slice(dims, coord).ranks for coord in plain.coords()}
        fibres = [tuple(group) for group in flat.global_ranks(mesh.size)]
        here.require({*fibres} == groups and len(fibres) == len(groups), "wrong-layout", "groups", f"{what}: other groups", groups, fibres)
        beside = flat.complement(mesh.size)
        sums = sorted(a + b for a in told for b in beside.all_ranks_from_zero())
        here.require(sums == [*range(mesh.size)], "wrong-layout", "complement", f"{what}: its complement is not what is left", "", sums)
        live = part.remap_to_tensor(torch.tensor(mesh.ranks))
        rows = {tuple(row.flatten().tolist()) for row in live}
        due = {mesh.slice(dims, coord).ranks for coord in mesh.coords()}
        here.require(rows == due and tuple(live.shape[1:]) == sizes, "wrong-layout", "table", f"{what}: other tables", due, rows)
        again = flat.composition(layout_of.from_sizes_strides(sizes))
        unfolded = tuple(again.collapse().all_ranks_from_zero()), again.top_level_sizes
        here.require(unfolded == (ranks, sizes), "wrong-layout", "composition", f"{what}: flattened and unflattened", ranks, unfolded)
        for other_ranks, other in seen.items():
            message = f"{what} and a part with ranks {other_ranks}: equal only where the ranks are"
            here.require((other == flat) == (other_ranks == ranks), "wrong-layout", "equality", message, other, flat)
        seen[ranks] = flat


def sweep_meshes(law: str, *, tables: bool = False) -> Any:
    permuted = [mesh for text in ("2x2@3,1,2,0", "2x3@5,0,3,1,4,2", "3@2,0,1") for mesh in [Mesh.parse(text)]]
    chosen = [mesh for mesh in MESHES if mesh.ndim > 1] + (permuted if tables else [])
    return lambda limits: [Case.of(law, world=1, mesh=mesh) for mesh in chosen]


def _pairs(law: str, *, dims: tuple[int, ...] = (1, 2, 3), least: int = 0) -> Any:
    def sweep(limits: Limits) -> Sequence[Case]:
        return Pairs(law, [mesh for mesh in MESHES if mesh.ndim in dims], [shape for shape in SHAPES if len(shape) >= least])

    return sweep


def law(name: str, **fields: Any) -> Law:
    """The law ``layout.math[NAME]``: served by one process."""
    return Law(id=f"layout.math[{name}]", control=f"layout.math[{name}] world=1 {fields.pop('holds')}", smallest=1,
               **{"weight": 0.4, "source": SOURCE, **fields})  # fmt: skip


LAWS: tuple[Law, ...] = (
    law(
        "offsets",
        clause="At every place of a mesh the local shape is how much is owned of each dim, and the offset the first index of it.",
        source=f"{SOURCE}; torch.distributed.tensor._utils, compute_local_shape_and_global_offset",
        check=check_offsets,
        script=told.offsets,
        holds="mesh=2x3 shape=7x5",
        planted="math_of_the_first_mesh_dim",
        sweep=_pairs("layout.math[offsets]"),
        sweeps=48,
        narrow=narrow,
        checks=checks,
    ),
    law(
        "split",
        clause="A tensor is cut into the parts that its placement names, padded to one length where that is asked for.",
        check=check_split,
        script=told.split_up,
        holds="mesh=3 shape=7x5",
        planted="pieces_in_reverse",
        sweep=_pairs("layout.math[split]", dims=(1,), least=1),
        sweeps=60,
        narrow=narrow,
    ),
    law(
        "global",
        clause="Where all local tensors are of one shape, the global extent of a dim is that times the mesh dims that shard it.",
        source="torch.distributed.tensor docs, DTensor.from_local: the global shape is inferred assuming even shards",
        check=check_global,
        script=told.global_shape,
        holds="mesh=2x3 shape=2x3",
        planted="global_shape_of_one_mesh_dim",
        sweep=_pairs("layout.math[global]", least=1),
        sweeps=60,
        narrow=narrow,
    ),
    law(
        "orders",
        clause="Shard orders are written as placements and read back, and what no order is written as is not read as one.",
        source="torch.distributed.tensor._dtensor_spec, DTensorSpec: shard_order and strided shards",
        check=check_orders,
        holds="mesh=2x3",
        planted="orders_ascend",
        sweep=sweep_meshes("layout.math[orders]"),
        sweeps=20,
    ),
    law(
        "mesh",
        clause="Parts of a mesh, given by sizes and strides, are the ranks along their dims, and equal only where these are.",
        source="torch.distributed._mesh_layout: all_ranks_from_zero, global_ranks, complement, composition, remap_to_tensor",
        check=check_mesh,
        holds="mesh=2x3",
        planted="complement_of_the_whole",
        sweep=sweep_meshes("layout.math[mesh]", tables=True),
        sweeps=24,
    ),
)
