"""Strategies for sharding specs: equal chunks along a dim, and boxes one by one, each on a rank."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.notation import Shape
from shardlaw.reference.sharded_tensor import ChunkSpec, Spec
from shardlaw.reference.shards import Shards
from shardlaw.strategies._memo import memoized
from shardlaw.strategies.tilings import assign_boxes, single_ranks, tilings

MANY = 1 << 24


@memoized
def chunk_specs(shape: Shape, ranks: Sequence[int], *, every: bool = True) -> SearchStrategy[ChunkSpec]:
    """A spec that cuts ``shape``, which has at least one dim, into chunks along one dim.

    With ``every``, each of ``ranks`` has one chunk; else some may have none, or several.

    Shrinks to the first dim and to ranks in order.
    """

    @st.composite
    def spec(draw: st.DrawFn) -> ChunkSpec:
        dim = draw(st.integers(0, len(shape) - 1))
        order = tuple(draw(st.permutations(sorted(ranks)))) if draw(st.integers(0, 2)) == 2 else tuple(sorted(ranks))
        if not every and draw(st.integers(0, 3)) == 3:
            order = tuple(draw(st.lists(st.sampled_from(order), min_size=1, max_size=len(order) + 1)))
        negative = draw(st.integers(0, 5)) == 5
        return ChunkSpec(dim - len(shape) if negative else dim, order)

    return spec()


def enumerable_specs(shape: Shape, ranks: Sequence[int], *, max_boxes: int = 5) -> SearchStrategy[Shards]:
    """A spec of boxes that tile ``shape``; a rank may hold several of them, or none. Shrinks to one box on the first rank."""
    pairs = st.tuples(tilings(shape, max_boxes=max_boxes), st.integers(0, MANY))
    return pairs.map(lambda pair: assign_boxes(shape, pair[0][1], single_ranks(ranks), pair[1]))


def specs(shape: Shape, ranks: Sequence[int]) -> SearchStrategy[Spec]:
    """A spec of either kind, in which a rank may hold nothing."""
    boxes = enumerable_specs(shape, ranks)
    return boxes if not shape else st.one_of(chunk_specs(shape, ranks, every=False), boxes)
