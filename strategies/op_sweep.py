"""Every placement of every tensor argument of an op, by index.

:class:`Sweep` is a sequence of samples that is never built as a whole. It has two parts. The first, a few dozen samples, is chosen: every
variant of the op with every shard of every argument and with a pending sum, then each other reduction, dtype, an empty and
a zero-size shard, a table of ranks that does not ascend, nested shards, on meshes of one and two dims with even and
uneven sizes. The second is the full product of variants, meshes, sizes, dtypes and placements, in a fixed order that
strides through it, so that any stretch is a fair sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import overload

from reference.mesh import Mesh
from reference.placement import Partial, Placement, Placements, Replicate, Shard
from strategies.ops import Arg, Op, Sample, Variant, single_placements

REDUCE_OPS = ("avg", "max", "min", "product")
ALL_OPS = ("sum", *REDUCE_OPS)


@dataclass(frozen=True)
class Board:
    """A mesh, and sizes for the dims of a variant in order of appearance."""

    mesh: Mesh
    sizes: tuple[int, ...]

    def of(self, variant: Variant) -> dict[str, int]:
        return variant.fits({name: self.sizes[at % len(self.sizes)] for at, name in enumerate(variant.symbols)})


def _board(mesh: str, *sizes: int) -> Board:
    return Board(Mesh.parse(mesh), sizes)


UNEVEN = _board("2", 5, 3, 3, 2)
EVEN = _board("2", 4, 6, 2, 2)
THREE = _board("3", 7, 5, 4, 2)
SHORT = _board("3", 2, 4, 1, 5)
SMALL = _board("2", 1, 3, 2, 1)
SQUARE = _board("2x2", 5, 6, 3, 2)
SQUARE_EVEN = _board("2x2", 4, 8, 4, 2)
ZERO = _board("2", 0, 3, 2, 3)
ZERO_LAST = _board("2", 3, 0, 2, 3)
PLAINEST = _board("2", 2)
PERMUTED = _board("2@1,0", 5, 4, 3, 2)
BOARDS = (UNEVEN, EVEN, THREE, SQUARE, SMALL, SQUARE_EVEN, SHORT, ZERO, PERMUTED, ZERO_LAST)
ROTATION = (UNEVEN, EVEN, UNEVEN, EVEN, THREE, EVEN, UNEVEN, SQUARE_EVEN, SMALL, EVEN, UNEVEN, SQUARE, EVEN)


class Sweep(Sequence[Sample]):
    """The samples of ``op`` whose meshes fit into ``world_size`` ranks."""

    def __init__(self, op: Op, world_size: int = 4) -> None:
        self.op = op
        self.boards = tuple(board for board in BOARDS if self._fits(board.mesh, world_size) and (op.zeros or 0 not in board.sizes))
        self.chosen = tuple(sample for sample in _chosen(op) if self._fits(sample.mesh, world_size))

    def _fits(self, mesh: Mesh, world_size: int) -> bool:
        return max(mesh.ranks) < world_size and not (self.op.flat and mesh.ndim > 1)

    def __len__(self) -> int:
        return len(self.chosen) + self._total

    @overload
    def __getitem__(self, at: int) -> Sample: ...

    @overload
    def __getitem__(self, at: slice) -> list[Sample]: ...

    def __getitem__(self, at: int | slice) -> Sample | list[Sample]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self.chosen[at] if at < len(self.chosen) else self._decode((at - len(self.chosen)) * self._stride % self._total)

    @cached_property
    def _blocks(self) -> tuple[tuple[int, Variant, Board, str, tuple[tuple[Placements, ...], ...]], ...]:
        """For each variant, board and dtype: how many samples, and the choices of each argument."""
        blocks = []
        for variant, board in itertools.product(self.op.variants, self.boards):
            for dtype in variant.dtypes:
                choices = tuple(_choices(board.mesh.ndim, arg, dtype) for arg in variant.args)
                blocks.append((math.prod(map(len, choices)), variant, board, dtype, choices))
        return tuple(blocks)

    @cached_property
    def _total(self) -> int:
        return sum(count for count, *_ in self._blocks)

    @cached_property
    def _stride(self) -> int:
        """About the golden part of the total, and coprime to it: multiples visit every index once, evenly spread."""
        stride = max(1, round(self._total * 0.6180339887))
        while math.gcd(stride, self._total) != 1:
            stride += 1
        return stride

    def _decode(self, index: int) -> Sample:
        for count, variant, board, dtype, choices in self._blocks:
            if index < count:
                placed = {}
                for arg, options in zip(variant.args, choices, strict=True):
                    index, at = divmod(index, len(options))
                    placed[arg.name] = options[at]
                return variant.sample(board.mesh, board.of(variant), placed, dtype)
            index -= count
        raise IndexError(index)


@lru_cache(maxsize=1024)
def _choices(mesh_ndim: int, arg: Arg, dtype: str) -> tuple[Placements, ...]:
    """All placements of one tensor; reductions are not mixed."""
    singles = single_placements(arg, dtype, ALL_OPS if mesh_ndim == 1 else ("sum", "max"))
    return tuple(row for row in itertools.product(singles, repeat=mesh_ndim) if len({p.op for p in row if isinstance(p, Partial)}) < 2)


def _line(arg: Arg, dtype: str) -> list[Placement]:
    """The placements that every variant must meet: each shard, and a pending sum; for indices and masks, replicated instead."""
    placements = single_placements(arg, dtype)
    shards = [placement for placement in placements if isinstance(placement, Shard)]
    return [*shards, Replicate()] if arg.dtype else [*shards, *placements[len(shards) + 1 :]] or [Replicate()]


def _row(variant: Variant, board: Board, r: int, shift: int, dtype: str = "") -> Sample:
    """Sample ``r`` of a variant: every argument at its ``r``-th placement, arguments ``shift`` apart."""
    chosen = dtype or variant.dtypes[0]
    placed = {}
    for j, arg in enumerate(variant.args):
        line = _line(arg, chosen)
        placed[arg.name] = tuple(line[(r + j * shift + k) % len(line)] for k in range(board.mesh.ndim))
    return variant.sample(board.mesh, board.of(variant), placed, chosen)


def _placed(variant: Variant, board: Board, *placements: Placement, dtype: str = "") -> Sample:
    """Every argument placed as said, one after the other, the last one repeated; replicated where it cannot be."""
    chosen = dtype or variant.dtypes[0]
    placed = {}
    for j, arg in enumerate(variant.args):
        placement = placements[min(j, len(placements) - 1)]
        placed[arg.name] = (placement if placement in single_placements(arg, chosen, ALL_OPS) else Replicate(),) * board.mesh.ndim
    return variant.sample(board.mesh, board.of(variant), placed, chosen)


def plainest(op: Op) -> Sample:
    """The first variant of an op with sizes of 2, sharded on the first dim of every argument."""
    return _row(op.variants[0], PLAINEST, 0, 0)


@lru_cache(maxsize=1024)
def _chosen(op: Op) -> tuple[Sample, ...]:
    return tuple(dict.fromkeys(_choose_few(op) if op.light else _choose(op)))


def _choose(op: Op) -> Iterator[Sample]:
    """Rows first, and after every third of them a reduction and something else out of the way, so that any beginning has of all."""
    rows, reductions, rest = _rows(op), _reductions(op), _rest(op)
    ended = object()
    while True:
        taken = [*itertools.islice(rows, 3), next(reductions, ended), next(rest, ended)]
        found = [sample for sample in taken if sample is not ended]
        if not found:
            return
        yield from found  # type: ignore[misc]


def _rows(op: Op) -> Iterator[Sample]:
    boards = itertools.cycle(ROTATION)
    count = [max(len(_line(arg, variant.dtypes[0])) for arg in variant.args) for variant in op.variants]
    for r in range(max(count)):
        for at, variant in enumerate(op.variants):
            if r < count[at]:
                yield _row(variant, next(boards), r, (at + r) % 2)


def _rest(op: Op) -> Iterator[Sample]:
    first = op.variants[0]
    if op.pairs:
        pairs = _pairs(op)
        yield from itertools.islice(pairs, 2)
    if len(first.args) > 1:
        yield from _mixed(first)
    if op.square:
        yield from (_row(variant, SQUARE_EVEN, r, 1) for r in (1, 0) for variant in op.variants)
    yield from _corners(op)
    yield _placed(first, UNEVEN, Replicate())
    if op.pairs:
        yield from pairs


def _choose_few(op: Op) -> Iterator[Sample]:
    """For one of many ops of a kind: the same, each thing once."""
    boards = itertools.cycle(ROTATION)
    first = op.variants[0]
    yield _row(first, UNEVEN, 0, 0)
    yield from _reductions(op)
    yield _row(first, SQUARE, 0, 0)
    yield _row(first, EVEN, 1, 1)
    for at, variant in enumerate(op.variants[1:]):
        yield _row(variant, next(boards), at % 3, at % 2)
    yield _placed(first, SHORT, Shard(1))
    for dtype in first.dtypes[1:2]:
        yield _placed(first, UNEVEN, Shard(0), dtype=dtype)
        yield _placed(first, EVEN, Partial("sum"), dtype=dtype)
    yield _placed(first, PERMUTED, Shard(0))
    yield _placed(first, UNEVEN, Replicate())
    yield _placed(first, ZERO, Shard(0))


def _reductions(op: Op) -> Iterator[Sample]:
    """Each reduction pending, on variants in turn."""
    cycle = itertools.cycle([variant for variant in op.variants if variant.args[0].dims] or op.variants)
    for reduce_op in ALL_OPS:
        yield _placed(next(cycle), EVEN if reduce_op == "product" else UNEVEN, Partial(reduce_op))


def _mixed(variant: Variant) -> Iterator[Sample]:
    """Arguments that are placed unlike each other."""
    yield _placed(variant, UNEVEN, Shard(1), Shard(0))
    yield _placed(variant, EVEN, Shard(0), Shard(1))
    yield _placed(variant, UNEVEN, Shard(0), Replicate())
    yield _placed(variant, EVEN, Replicate(), Shard(0))


def _corners(op: Op) -> Iterator[Sample]:
    """Further dtypes, empty and zero-size shards, a permuted mesh, nested shards: one sample each."""
    cycle = itertools.cycle(op.variants)
    for dtype in op.variants[0].dtypes[1:]:
        yield _placed(op.variants[0], UNEVEN, Shard(0), dtype=dtype)
    for board in (PERMUTED, SHORT, SQUARE, *((ZERO, ZERO_LAST) if op.zeros else ())):
        yield _placed(next(cycle), board, Shard(0))
    yield _placed(next(cycle), SHORT, Shard(1))
    for dtype in op.variants[0].dtypes[1:3]:
        yield _placed(op.variants[0], EVEN, Partial("sum"), dtype=dtype)


def _pairs(op: Op) -> Iterator[Sample]:
    """Pending reductions beside each other, beside a replicated and beside a sharded argument."""
    variant = next((v for v in op.variants if len(v.args) > 1), op.variants[0])
    whole = Replicate()
    for pair in zip(("sum", "avg", "max", "min"), ("avg", "max", "min", "sum"), strict=True):
        one, other = map(Partial, pair)
        yield _placed(variant, EVEN, one, one)
        yield _placed(variant, UNEVEN, one, whole)
        yield _placed(variant, EVEN, whole, one)
        yield _placed(variant, EVEN, one, Shard(0))
        yield _placed(variant, UNEVEN, Shard(1), one)
        yield _placed(variant, UNEVEN, one, other)
