"""The algebra of boxes against sets of points."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlaw.reference.box import Box, intersect, tiles_exactly, tiling_errors
from shardlaw.reference.layout import Layout
from shardlaw.reference.placement import StridedShard
from shardlaw.strategies import layouts

Point = tuple[int, ...]


def points(box: Box) -> set[Point]:
    return set(itertools.product(*(range(start, start + size) for start, size in zip(box.offset, box.size, strict=True))))


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    return Box(tuple(draw(st.integers(0, 4)) for _ in range(ndim)), tuple(draw(st.integers(0, 3)) for _ in range(ndim)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    ndim = draw(st.integers(0, 3))
    return draw(boxes(ndim)), draw(boxes(ndim))


@given(pairs())
def test_two_boxes_meet_where_their_points_do(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = intersect(a, b)
    assert (points(common) if common else set()) == points(a) & points(b)
    assert common == intersect(b, a)
    assert common is None or common.volume > 0
    assert a.contains(b) == (points(b) <= points(a))
    assert a.volume == len(points(a))


def test_0_d_boxes_hold_one_point() -> None:
    assert Box((), ()).volume == 1
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    assert tiles_exactly((), [Box((), ())])
    assert not tiles_exactly((), [])
    assert not tiles_exactly((), [Box((), ()), Box((), ())])


def tiling(rng: random.Random, whole: Box, depth: int) -> list[Box]:
    """Random cuts through a box: an exact tiling, empty boxes included."""
    if depth == 0 or not whole.size:
        return [whole]
    dim = rng.randrange(len(whole.size))
    at = rng.randint(0, whole.size[dim])
    halves = [(whole.offset[dim], at), (whole.offset[dim] + at, whole.size[dim] - at)]
    cut = [
        Box((*whole.offset[:dim], start, *whole.offset[dim + 1 :]), (*whole.size[:dim], size, *whole.size[dim + 1 :]))
        for start, size in halves
    ]
    return [box for half in cut for box in tiling(rng, half, depth - 1)]


def spoiled(rng: random.Random, boxes: list[Box]) -> list[Box]:
    """The same boxes with one moved, resized, doubled or taken away."""
    at = rng.randrange(len(boxes))
    box, how = boxes[at], rng.randrange(4)
    if how == 0:
        return boxes[:at] + boxes[at + 1 :]
    if how == 1:
        return [*boxes, box]
    dim = rng.randrange(len(box.size)) if box.size else None
    if dim is None:
        return boxes
    step = rng.choice((-1, 1))
    moved = [value + step * (d == dim) for d, value in enumerate(box.offset if how == 2 else box.size)]
    if min(moved) < 0:
        return boxes
    changed = Box(tuple(moved), box.size) if how == 2 else Box(box.offset, tuple(moved))
    return [*boxes[:at], changed, *boxes[at + 1 :]]


def test_a_tiling_covers_every_point_once() -> None:
    rng = random.Random(11)
    found = {True: 0, False: 0}
    for _ in range(4_000):
        shape = tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3)))
        cut = tiling(rng, Box((0,) * len(shape), shape), rng.randint(0, 3))
        if rng.random() < 0.7:
            cut = spoiled(rng, cut)
        held = [point for box in cut for point in points(box)]
        exact = sorted(held) == sorted(itertools.product(*map(range, shape)))
        assert tiles_exactly(shape, cut) == exact, (shape, cut, tiling_errors(shape, cut))
        found[exact] += 1
    assert min(found.values()) > 500


def test_what_is_wrong_is_said() -> None:
    assert tiling_errors((4,), [Box((0,), (2,))]) == ["2 of 4 elements are covered"]
    assert "lies outside" in tiling_errors((4,), [Box((3,), (2,))])[0]
    assert "overlap" in tiling_errors((4,), [Box((0,), (3,)), Box((2,), (2,))])[0]
    assert "has 2 dims" in tiling_errors((4,), [Box((0, 0), (4, 1))])[0]
    assert tiling_errors((4,), [Box((9,), (0,)), Box((0,), (4,))]) == []
    with pytest.raises(ValueError, match="different numbers of dims"):
        Box((0,), (1, 2))


@given(layouts(world_size=6))
def test_the_boxes_of_a_layout_tile_the_tensor(layout: Layout) -> None:
    boxes = {layout.box(coord) for coord in layout.mesh.coords()}
    full = [box for box in boxes if box is not None]
    if None in boxes:
        assert any(isinstance(placement, StridedShard) for placement in layout.placements)
    else:
        # an empty shard's box is repeated at most; the others are distinct or replicas
        assert tiles_exactly(layout.shape, full)


@given(layouts(kinds=("R", "S")))
def test_slices_cut_the_box_out_of_the_tensor_and_out_of_a_part_of_it(layout: Layout) -> None:
    for coord in layout.mesh.coords():
        box = layout.box(coord)
        assert box is not None
        cut = [list(range(size))[part] for size, part in zip(layout.shape, box.slices(), strict=True)]
        assert cut == [list(owned) for owned in layout.owned(coord)]
        own = [list(owned)[part] for owned, part in zip(layout.owned(coord), box.slices(box.offset), strict=True)]
        assert own == cut
