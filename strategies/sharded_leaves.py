"""Strategies for leaves in boxes, each box held by one rank or by several, and for boxes without elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.sharded_leaf import Ranks, ShardedLeaf
from shardlaw.reference.notation import Shape
from shardlaw.strategies.tilings import tilings

MANY = 1 << 48


def holders(of: int) -> list[Ranks]:
    """Every set of ranks that may hold a box: each rank alone, then all, then the others."""
    every = [held for size in range(1, of + 1) for held in combinations(range(of), size)]
    return sorted(every, key=lambda held: (len(held) != 1, len(held) != of, held))


def hand_out(boxes: Iterable[Box], of: int, number: int, *, single: bool = False) -> tuple[tuple[Box, Ranks], ...]:
    """Each box with the ranks that hold it, chosen by ``number``; with ``single``, by one rank each."""
    sets = holders(of)[: of if single else None]
    parts = []
    for box in boxes:
        number, choice = divmod(number, len(sets))
        parts.append((box, sets[choice]))
    return tuple(parts)


def sharded_leaves(of: int, dtypes: Sequence[str], *, max_boxes: int = 5) -> SearchStrategy[ShardedLeaf]:
    """A tensor of one of ``dtypes`` in boxes that tile it, on ``of`` ranks. Shrinks to one box on rank 0."""

    @st.composite
    def leaf(draw: st.DrawFn) -> ShardedLeaf:
        shape, boxes = draw(tilings(max_boxes=max_boxes))
        dtype = draw(st.sampled_from(dtypes))
        return ShardedLeaf("boxes", shape, dtype, hand_out(boxes, of, draw(st.integers(0, MANY))))

    return leaf()


def empty_box(shape: Shape, boxes: Sequence[Box], where: str, number: int) -> Box:
    """A box without elements: at the end of a dim, strictly inside a box where one has room, or beyond the end."""
    number, dim = divmod(number, len(shape))
    if where == "inside":
        roomy = [(box, at) for box in boxes if box.volume for at, size in enumerate(box.size) if size > 1]
        if roomy:
            box, dim = roomy[number % len(roomy)]
            offset = [start + (1 if at == dim else 0) for at, start in enumerate(box.offset)]
            return Box(tuple(offset), tuple(0 if at == dim else size for at, size in enumerate(box.size)))
    start = shape[dim] + (1 + number % 3 if where == "beyond" else 0)
    return Box(
        tuple(start if at == dim else 0 for at in range(len(shape))),
        tuple(0 if at == dim else size for at, size in enumerate(shape)),
    )
