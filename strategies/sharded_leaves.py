"""Strategies for leaves in boxes, each held by one or more ranks, and boxes without elements."""

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


def holder_sets(world_size: int) -> list[Ranks]:
    """Every set of ranks that may hold a box: each rank alone, then all ranks, then the other sets."""
    sets = [ranks for size in range(1, world_size + 1) for ranks in combinations(range(world_size), size)]
    return sorted(sets, key=lambda ranks: (len(ranks) != 1, len(ranks) != world_size, ranks))


@memoized
def sharded_leaves(world_size: int, dtypes: tuple[str, ...], *, max_boxes: int = 5) -> SearchStrategy[ShardedLeaf]:
    """A tensor of one of ``dtypes`` in boxes that tile it, on ``world_size`` ranks. Shrinks to one box on rank 0."""

    @st.composite
    def leaf(draw: st.DrawFn) -> ShardedLeaf:
        shape, boxes = draw(tilings(max_boxes=max_boxes))
        dtype = draw(st.sampled_from(dtypes))
        return ShardedLeaf("boxes", assign_boxes(shape, boxes, holder_sets(world_size), draw(st.integers(0, MANY))), dtype)

    return leaf()


def empty_box(shape: Shape, boxes: Sequence[Box], where: str, number: int) -> Box:
    """A box without elements: at the end of a dim; for ``where="inside"`` strictly inside a box, if one has room; for ``beyond`` past the
    end of a dim."""
    number, dim = divmod(number, len(shape))
    if where == "inside":
        roomy = [(box, at) for box in boxes if box.volume for at, size in enumerate(box.size) if size > 1]
        if roomy:
            box, dim = roomy[number % len(roomy)]
            return box.along(dim, start=box.offset[dim] + 1, size=0)
    return Box.whole(shape).along(dim, start=shape[dim] + (1 + number % 3 if where == "beyond" else 0), size=0)
