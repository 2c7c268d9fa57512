"""The part of an optimizer's state that a rank loads: shares, the two ways to name a box, and what is read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardlaw.reference.box import Box, tiles_exactly
from shardlaw.reference.checkpoint.load_plan import cover_errors
from shardlaw.reference.checkpoint.optimizer import part_chunks, part_items, shift_box, shift_box_back, surrounding_boxes
from shardlaw.strategies import shapes
from shardlaw.strategies.tilings import tilings


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, tuple[Box, ...]]:
    """A shape, a part of it, and chunks that tile it."""
    shape = draw(shapes(min_dims=1, min_size=1))
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim] - 1))
    size = draw(st.integers(1, shape[dim] - start))
    offset = tuple(start if at == dim else 0 for at in range(len(shape)))
    part = Box(offset, tuple(size if at == dim else extent for at, extent in enumerate(shape)))
    return shape, part, draw(tilings(shape))[1]


@given(parts(), st.integers(1, 4))
def test_the_shares_of_a_part_tile_it_and_are_filled(drawn: tuple[tuple[int, ...], Box, tuple[Box, ...]], count: int) -> None:
    shape, part, chunks = drawn
    ranks = tuple(range(count))
    boxes = [box for rank in ranks for box in part_chunks(part, ranks, rank)]
    assert tiles_exactly(part.size, boxes)
    there = [shift_box(box, part.offset) for box in boxes]
    assert [shift_box_back(box, part.offset) for box in there] == boxes
    assert all(part.contains(box) for box in there)
    assert not cover_errors(part_items(chunks, part, boxes), there)
    assert tiles_exactly(shape, [part, *surrounding_boxes(part, shape)])
