"""Strategies for sharding specs: equal chunks along a dim, and boxes one by one, each on a rank."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.notation import Shape
from shardlaw.reference.sharded_tensor import ChunkSpec, Spec
from shardlaw.reference.shards import Shards
from shardlaw.strategies._kept import kept
from shardlaw.strategies.tilings import alone, handed_out, tilings

MANY = 1 << 24


@kept
def chunk_specs(shape: Shape, ranks: Sequence[int], *, every: bool = True, beyond: int = 12) -> SearchStrategy[tuple[Shape, ChunkSpec]]:
    """A shape and a spec that cuts it into chunks along one of its dims; ``shape`` has at least one.

    ``every``: each of ``ranks`` gets one chunk; otherwise some may get none, or several. Where a chunk without elements would begin beyond
    the end of the dim, the dim is made as long as there are ranks, except in one case of ``beyond``.

    Shrinks to the first dim and to ranks in order.
    """

    @st.composite
    def spec(draw: st.DrawFn) -> tuple[Shape, ChunkSpec]:
        dim = draw(st.integers(0, len(shape) - 1))
        order = tuple(draw(st.permutations(sorted(ranks)))) if draw(st.integers(0, 2)) == 2 else tuple(sorted(ranks))
        if not every and draw(st.integers(0, 3)) == 3:
            order = tuple(draw(st.lists(st.sampled_from(order), min_size=1, max_size=len(order) + 1)))
        extents, count = list(shape), len(order)
        if -(-extents[dim] // count) * (count - 1) > extents[dim] and draw(st.integers(1, beyond)) < beyond:
            extents[dim] = count
        negative = draw(st.integers(0, 5)) == 5
        return tuple(extents), ChunkSpec(dim - len(shape) if negative else dim, order)

    return spec()


def enumerable_specs(shape: Shape, ranks: Sequence[int], *, max_boxes: int = 5) -> SearchStrategy[Shards]:
    """A spec of boxes that tile ``shape``; a rank may hold several of them, or none. Shrinks to one box on the first rank."""
    drawn = st.tuples(tilings(shape, max_boxes=max_boxes), st.integers(0, MANY))
    return drawn.map(lambda drawn: handed_out(shape, drawn[0][1], alone(ranks), drawn[1]))


def specs(shape: Shape, ranks: Sequence[int]) -> SearchStrategy[tuple[Shape, Spec]]:
    """A shape and a spec of either kind, in which a rank may hold nothing."""
    boxes = enumerable_specs(shape, ranks).map(lambda spec: (shape, spec))
    return boxes if not shape else st.one_of(chunk_specs(shape, ranks, every=False), boxes)
