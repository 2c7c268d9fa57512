"""Every placement of every tensor argument of an op, by index.

:class:`Sweep` is a lazy sequence of samples in two parts. The first, a few dozen samples, is chosen: every variant of the op with every
shard of every argument and with a pending sum, then each other reduction and dtype, an empty and a zero-size shard, a permuted mesh,
nested and strided shards, on meshes of one to three dims with even and uneven sizes. The second enumerates *blocks* (a variant, a mesh with
sizes, and a dtype), each with the placements of all arguments: every combination or, for three arguments and more, so many that every two
placements of every two arguments meet. It takes one sample of each block in turn, so that any stretch has samples of all blocks.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TypeVar, overload

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Placement, Placements, Replicate, Shard, StridedShard
from shardlaw.strategies.ops import Arg, Op, Sample, Variant, single_placements

Item = TypeVar("Item")
REDUCE_OPS = ("avg", "max", "min", "product")
ALL_OPS = ("sum", *REDUCE_OPS)


@dataclass(frozen=True)
class MeshSizes:
    """A mesh, and sizes for the symbols of a variant in order of appearance; they repeat where there are more symbols."""

    mesh: Mesh
    sizes: tuple[int, ...]

    def sizes_of(self, variant: Variant) -> dict[str, int]:
        return variant.fits({name: self.sizes[at % len(self.sizes)] for at, name in enumerate(variant.symbols)})


def _mesh_sizes(mesh: str, *sizes: int) -> MeshSizes:
    return MeshSizes(Mesh.parse(mesh), sizes)


UNEVEN = _mesh_sizes("2", 5, 3, 3, 2)
EVEN = _mesh_sizes("2", 4, 6, 2, 2)
THREE = _mesh_sizes("3", 7, 5, 4, 2)
SHORT = _mesh_sizes("3", 2, 4, 1, 5)
SMALL = _mesh_sizes("2", 1, 3, 2, 1)
SQUARE = _mesh_sizes("2x2", 5, 6, 3, 2)
SQUARE_EVEN = _mesh_sizes("2x2", 4, 8, 4, 2)
ZERO = _mesh_sizes("2", 0, 3, 2, 3)
ZERO_LAST = _mesh_sizes("2", 3, 0, 2, 3)
PLAINEST = _mesh_sizes("2", 2)
PERMUTED = _mesh_sizes("2@1,0", 5, 4, 3, 2)
FLAT_CUBE = _mesh_sizes("2x2x1", 5, 6, 4, 2)
THIN_CUBE = _mesh_sizes("1x2x2", 4, 5, 3, 2)
CUBE = _mesh_sizes("2x2x2", 6, 9, 4, 2)
STRIPED = _mesh_sizes("2", 4, 8, 2, 4)
STRIPED_LAST = _mesh_sizes("2", 2, 8, 4, 4)
STRIPED_SQUARE = _mesh_sizes("2x2", 8, 4, 8, 2)
MESH_SIZES = (UNEVEN, EVEN, THREE, SQUARE, SMALL, SQUARE_EVEN, SHORT, ZERO, PERMUTED, ZERO_LAST, FLAT_CUBE, THIN_CUBE, CUBE)
ROTATION = (UNEVEN, EVEN, UNEVEN, EVEN, THREE, EVEN, UNEVEN, SQUARE_EVEN, SMALL, EVEN, UNEVEN, SQUARE, EVEN)


class LazySequence(Sequence[Item]):
    """A sequence that computes its items when they are read, by :meth:`item`."""

    def item(self, at: int) -> Item:
        """Item ``at``, from 0 to ``len(self) - 1``."""
        raise NotImplementedError

    @overload
    def __getitem__(self, at: int) -> Item: ...

    @overload
    def __getitem__(self, at: slice) -> list[Item]: ...

    def __getitem__(self, at: int | slice) -> Item | list[Item]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self.item(at)


class Sweep(LazySequence[Sample]):
    """The samples of ``op`` whose meshes fit into ``world_size`` ranks."""

    def __init__(self, op: Op, world_size: int = 4) -> None:
        self.op = op
        self.world_size = world_size

    @cached_property
    def size_choices(self) -> tuple[MeshSizes, ...]:
        return tuple(
            mesh_sizes for mesh_sizes in MESH_SIZES if self._fits(mesh_sizes.mesh) and (self.op.zeros or 0 not in mesh_sizes.sizes)
        )

    @cached_property
    def chosen(self) -> tuple[Sample, ...]:
        """The samples that come first."""
        return tuple(sample for sample in _chosen_samples(self.op) if self._fits(sample.mesh))

    def _fits(self, mesh: Mesh) -> bool:
        return max(mesh.ranks) < self.world_size and not (self.op.flat and mesh.ndim > 1) and not (self.op.shallow and mesh.ndim > 2)

    def __len__(self) -> int:
        return len(self.chosen) + self._sums[-1]

    def item(self, at: int) -> Sample:
        return self.chosen[at] if at < len(self.chosen) else self._decode(at - len(self.chosen))

    @property
    def combinations(self) -> int:
        """How many samples the full cross product of placements would have."""
        return len(self.chosen) + sum(math.prod(map(len, choices)) for *_, choices in self._blocks)

    @cached_property
    def _blocks(self) -> tuple[tuple[int, Variant, MeshSizes, str, tuple[tuple[Placements, ...], ...]], ...]:
        """The blocks: how many samples, variant, mesh with sizes, dtype, and the placements of each argument."""
        blocks = []
        met: set[tuple[Variant, Mesh, tuple[int, ...]]] = set()
        for variant, mesh_sizes in itertools.product(self.op.variants, self.size_choices):
            key = (variant, mesh_sizes.mesh, tuple(mesh_sizes.sizes_of(variant).values()))
            if key in met:
                continue
            met.add(key)
            for dtype in variant.dtypes:
                choices = tuple(_all_placements(mesh_sizes.mesh.ndim, arg, dtype) for arg in variant.args)
                blocks.append((combination_count(choices), variant, mesh_sizes, dtype, choices))
        return tuple(blocks)

    @cached_property
    def _counts(self) -> list[int]:
        """The sizes of the blocks, ascending."""
        return sorted(count for count, *_ in self._blocks)

    @cached_property
    def _sums(self) -> list[int]:
        """Entry ``n`` is how many samples the ``n`` smallest blocks have together."""
        return [0, *itertools.accumulate(self._counts)]

    def _before(self, turn: int) -> int:
        """How many samples precede ``turn``. In each turn every block that has samples left gives one."""
        ended = bisect_left(self._counts, turn)
        return self._sums[ended] + (len(self._counts) - ended) * turn

    def _decode(self, index: int) -> Sample:
        turn = bisect_right(range(self._counts[-1]), index, key=self._before) - 1
        left = [block for block in self._blocks if block[0] > turn]
        count, variant, mesh_sizes, dtype, choices = left[(index - self._before(turn)) * _stride(len(left)) % len(left)]
        placed = combination(choices, turn * _stride(count) % count)
        names = (arg.name for arg in variant.args)
        return variant.sample(mesh_sizes.mesh, mesh_sizes.sizes_of(variant), dict(zip(names, placed, strict=True)), dtype)


@cache
def _stride(total: int) -> int:
    """A number near the golden section of ``total`` and coprime to it: its multiples visit every index once, evenly spread."""
    stride = max(1, round(total * 0.6180339887))
    while math.gcd(stride, total) != 1:
        stride += 1
    return stride


def combination_count(choices: Sequence[Sequence[Placements]]) -> int:
    """How many combinations of ``choices``, one list for each argument, :func:`combination` enumerates."""
    full = math.prod(map(len, choices))
    return full if len(choices) < 3 else min(full, _array_order(choices) ** 2)


def combination(choices: Sequence[Sequence[Placements]], index: int) -> tuple[Placements, ...]:
    """Combination ``index`` of ``choices``, from all of them or from an orthogonal array of strength two.

    The array is that of Bose and Bush: with a prime ``q`` no smaller than any list nor than the number of lists less one, row ``i*q+j``
    has ``j`` in the first column and ``i+j*c mod q`` in column ``c`` of the others, so that every two columns meet in every pair.
    """
    if combination_count(choices) == math.prod(map(len, choices)):
        found = []
        for options in choices:
            index, at = divmod(index, len(options))
            found.append(options[at])
        return tuple(found)
    order = _array_order(choices)
    i, j = divmod(index, order)
    return tuple(options[(i + j * (c - 1) if c else j) % order % len(options)] for c, options in enumerate(choices))


def _array_order(choices: Sequence[Sequence[Placements]]) -> int:
    """The smallest prime that :func:`combination` can use for ``q``."""
    order = max(2, len(choices) - 1, *map(len, choices))
    while any(order % factor == 0 for factor in range(2, math.isqrt(order) + 1)):
        order += 1
    return order


@lru_cache(maxsize=1024)
def _all_placements(mesh_ndim: int, arg: Arg, dtype: str) -> tuple[Placements, ...]:
    """All placements of one tensor, without mixed reductions. On three mesh dims only sums are pending: with others DTensor may take many
    seconds to plan a matrix product."""
    singles = single_placements(arg, dtype, (ALL_OPS, ("sum", "max"), ("sum",))[mesh_ndim - 1])
    return tuple(row for row in itertools.product(singles, repeat=mesh_ndim) if len({p.op for p in row if isinstance(p, Partial)}) < 2)


def _essential_placements(arg: Arg, dtype: str) -> list[Placement]:
    """The placements with which every variant is tried: each shard, and a pending sum; for indices and masks a replica instead."""
    placements = single_placements(arg, dtype)
    shards = [placement for placement in placements if isinstance(placement, Shard)]
    return [*shards, Replicate()] if arg.dtype else [*shards, *placements[len(shards) + 1 :]] or [Replicate()]


def row_sample(
    variant: Variant,
    mesh_sizes: MeshSizes,
    r: int,
    shift: int,
    dtype: str = "",
    placements: Callable[[Arg, str], list[Placement]] = _essential_placements,
) -> Sample:
    """Sample ``r`` of a variant: argument ``j`` has entry ``r + j * shift`` of its ``placements``, cyclically, and the next entry on each
    further mesh dim."""
    chosen = dtype or variant.dtypes[0]
    placed = {}
    for j, arg in enumerate(variant.args):
        line = placements(arg, chosen)
        placed[arg.name] = tuple(line[(r + j * shift + k) % len(line)] for k in range(mesh_sizes.mesh.ndim))
    return variant.sample(mesh_sizes.mesh, mesh_sizes.sizes_of(variant), placed, chosen)


def _placed_sample(variant: Variant, mesh_sizes: MeshSizes, *placements: Placement, dtype: str = "") -> Sample:
    """Argument ``j`` has entry ``j`` of ``placements`` (further arguments the last) on all mesh dims; a replica where it cannot have it."""
    chosen = dtype or variant.dtypes[0]
    placed = {}
    for j, arg in enumerate(variant.args):
        placement = placements[min(j, len(placements) - 1)]
        placed[arg.name] = (placement if placement in single_placements(arg, chosen, ALL_OPS) else Replicate(),) * mesh_sizes.mesh.ndim
    return variant.sample(mesh_sizes.mesh, mesh_sizes.sizes_of(variant), placed, chosen)


def plainest(op: Op) -> Sample:
    """The first variant of an op with sizes of 2, sharded on the first dim of every argument."""
    return row_sample(op.variants[0], PLAINEST, 0, 0)


@lru_cache(maxsize=1024)
def _chosen_samples(op: Op) -> tuple[Sample, ...]:
    return tuple(dict.fromkeys(_light_samples(op) if op.light else _interleave(op)))


def _interleave(op: Op) -> Iterator[Sample]:
    """Three row samples, a pending reduction, a further sample, and so on, so that any prefix has samples of every kind."""
    strided = _strided_samples(op)
    early = itertools.islice(strided, 2 * len(op.variants) if op.square else 2)
    rows, reductions, rest = _row_samples(op), _pending_samples(op), itertools.chain(early, _further_samples(op, strided))
    ended = object()
    while True:
        taken = [*itertools.islice(rows, 3), next(reductions, ended), next(rest, ended)]
        found = [sample for sample in taken if sample is not ended]
        if not found:
            return
        yield from found  # type: ignore[misc]


def _row_samples(op: Op) -> Iterator[Sample]:
    rotation = itertools.cycle(ROTATION)
    count = [max(len(_essential_placements(arg, variant.dtypes[0])) for arg in variant.args) for variant in op.variants]
    for r in range(max(count)):
        for at, variant in enumerate(op.variants):
            if r < count[at]:
                yield row_sample(variant, next(rotation), r, (at + r) % 2)


def _further_samples(op: Op, strided: Iterator[Sample]) -> Iterator[Sample]:
    first = op.variants[0]
    if op.pairs:
        pairs = _pending_pairs(op)
        yield from itertools.islice(pairs, 2)
    if len(first.args) > 1:
        yield from _mixed_samples(first)
    if op.square:
        yield from (row_sample(variant, SQUARE_EVEN, r, 1) for r in (1, 0) for variant in op.variants)
    yield from _corner_samples(op)
    yield from strided
    yield _placed_sample(first, UNEVEN, Replicate())
    if op.pairs:
        yield from pairs


def _light_samples(op: Op) -> Iterator[Sample]:
    """Fewer samples of the same kinds, for one of many similar ops."""
    rotation = itertools.cycle(ROTATION)
    first = op.variants[0]
    yield row_sample(first, UNEVEN, 0, 0)
    yield row_sample(first, EVEN, 1, 1)
    yield from _pending_samples(op)
    yield row_sample(first, SQUARE, 0, 0)
    for at, variant in enumerate(op.variants[1:]):
        yield row_sample(variant, next(rotation), at % 3, at % 2)
    yield _placed_sample(first, SHORT, Shard(1))
    for dtype in first.dtypes[1:2]:
        yield _placed_sample(first, UNEVEN, Shard(0), dtype=dtype)
        yield _placed_sample(first, EVEN, Partial("sum"), dtype=dtype)
    yield _placed_sample(first, PERMUTED, Shard(0))
    yield from _strided_samples(op)
    yield _placed_sample(first, UNEVEN, Replicate())
    yield _placed_sample(first, ZERO, Shard(0))
    yield from (
        row_sample(first, mesh_sizes, r, 1) for r, mesh_sizes in enumerate((FLAT_CUBE, THIN_CUBE, CUBE)) if not (op.flat or op.shallow)
    )


def _pending_samples(op: Op) -> Iterator[Sample]:
    """One sample with each reduction pending, of the variants in turn."""
    cycle = itertools.cycle([variant for variant in op.variants if variant.args[0].dims] or op.variants)
    for reduce_op in ALL_OPS:
        yield _placed_sample(next(cycle), EVEN if reduce_op == "product" else UNEVEN, Partial(reduce_op))


def _mixed_samples(variant: Variant) -> Iterator[Sample]:
    """Samples whose arguments have different placements."""
    yield _placed_sample(variant, UNEVEN, Shard(1), Shard(0))
    yield _placed_sample(variant, EVEN, Shard(0), Shard(1))
    yield _placed_sample(variant, UNEVEN, Shard(0), Replicate())
    yield _placed_sample(variant, EVEN, Replicate(), Shard(0))


def _strided_samples(op: Op) -> Iterator[Sample]:
    """Strided shards on 1-D meshes and on the last dim of 2-D ones, of variants with a dim that can be cut so."""
    fitting = [mesh_sizes for mesh_sizes in (STRIPED, STRIPED_LAST, STRIPED_SQUARE) if not (op.flat and mesh_sizes.mesh.ndim > 1)]
    for turn, (at, variant) in itertools.product(range(len(fitting)), enumerate(op.variants)):
        if turn and at and not op.square:
            continue
        mesh_sizes = fitting[(at + turn) % len(fitting)]
        placed = {arg.name: _strided_placements(variant, arg, mesh_sizes) for arg in variant.args}
        if any(isinstance(placements[-1], StridedShard) for placements in placed.values()):
            yield variant.sample(mesh_sizes.mesh, mesh_sizes.sizes_of(variant), placed, variant.dtypes[0])


def _strided_placements(variant: Variant, arg: Arg, mesh_sizes: MeshSizes) -> Placements:
    """A strided shard along the last mesh dim, with split factor 2, of the first dim that it cuts evenly; a replica where there is none."""
    allowed = single_placements(arg, variant.dtypes[0])
    for dim, extent in enumerate(arg.shape(mesh_sizes.sizes_of(variant))):
        if extent and extent % (2 * mesh_sizes.mesh.shape[-1]) == 0 and Shard(dim) in allowed:
            return (*(Replicate(),) * (mesh_sizes.mesh.ndim - 1), StridedShard(dim, 2))
    return (Replicate(),) * mesh_sizes.mesh.ndim


def _corner_samples(op: Op) -> Iterator[Sample]:
    """One sample each: further dtypes, empty and zero-size shards, a permuted mesh, nested shards."""
    cycle = itertools.cycle(op.variants)
    for dtype in op.variants[0].dtypes[1:]:
        yield _placed_sample(op.variants[0], UNEVEN, Shard(0), dtype=dtype)
    for mesh_sizes in (PERMUTED, SHORT, SQUARE, *((ZERO, ZERO_LAST) if op.zeros else ())):
        yield _placed_sample(next(cycle), mesh_sizes, Shard(0))
    yield _placed_sample(next(cycle), SHORT, Shard(1))
    for dtype in op.variants[0].dtypes[1:3]:
        yield _placed_sample(op.variants[0], EVEN, Partial("sum"), dtype=dtype)
    yield from (
        row_sample(next(cycle), mesh_sizes, r, 1)
        for r, mesh_sizes in enumerate((FLAT_CUBE, THIN_CUBE, CUBE))
        if not (op.flat or op.shallow)
    )


def _pending_pairs(op: Op) -> Iterator[Sample]:
    """Pending reductions of two arguments, and beside a replica or a shard."""
    variant = next((v for v in op.variants if len(v.args) > 1), op.variants[0])
    whole = Replicate()
    for pair in zip(("sum", "avg", "max", "min"), ("avg", "max", "min", "sum"), strict=True):
        one, other = map(Partial, pair)
        yield _placed_sample(variant, EVEN, one, one)
        yield _placed_sample(variant, UNEVEN, one, whole)
        yield _placed_sample(variant, EVEN, whole, one)
        yield _placed_sample(variant, EVEN, one, Shard(0))
        yield _placed_sample(variant, UNEVEN, Shard(1), one)
        yield _placed_sample(variant, UNEVEN, one, other)
