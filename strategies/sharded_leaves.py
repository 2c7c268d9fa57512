"""Strategies for leaves in boxes, each box held by one rank or by several, and for boxes without elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.sharded_leaf import ShardedLeaf
from shardlaw.reference.notation import Shape
from shardlaw.reference.shards import Ranks
from shardlaw.strategies._memo import memoized
from shardlaw.strategies.tilings import assign_boxes, tilings

MANY = 1 << 48


def holder_sets(of: int) -> list[Ranks]:
    """Every set of ranks that may hold a box: each rank alone, then all, then the others."""
    every = [held for size in range(1, of + 1) for held in combinations(range(of), size)]
    return sorted(every, key=lambda held: (len(held) != 1, len(held) != of, held))


@memoized
def sharded_leaves(of: int, dtypes: tuple[str, ...], *, max_boxes: int = 5) -> SearchStrategy[ShardedLeaf]:
    """A tensor of one of ``dtypes`` in boxes that tile it, on ``of`` ranks. Shrinks to one box on rank 0."""

    @st.composite
    def leaf(draw: st.DrawFn) -> ShardedLeaf:
        shape, boxes = draw(tilings(max_boxes=max_boxes))
        dtype = draw(st.sampled_from(dtypes))
        return ShardedLeaf("boxes", assign_boxes(shape, boxes, holder_sets(of), draw(st.integers(0, MANY))), dtype)

    return leaf()


def empty_box(shape: Shape, boxes: Sequence[Box], where: str, number: int) -> Box:
    """A box without elements: at the end of a dim, strictly inside a box where one has room, or beyond the end."""
    number, dim = divmod(number, len(shape))
    if where == "inside":
        roomy = [(box, at) for box in boxes if box.volume for at, size in enumerate(box.size) if size > 1]
        if roomy:
            box, dim = roomy[number % len(roomy)]
            return box.along(dim, start=box.offset[dim] + 1, size=0)
    return Box.whole(shape).along(dim, start=shape[dim] + (1 + number % 3 if where == "beyond" else 0), size=0)
