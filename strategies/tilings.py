"""Strategies for tilings: boxes that tile a tensor, tilings that were damaged in one way, and assignments of boxes to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.box import Box, tiling_errors
from shardlaw.reference.notation import Shape
from shardlaw.reference.shards import Ranks, Shards
from shardlaw.strategies._arguments import check_choices, check_count, format_arguments, shape_or_strategy
from shardlaw.strategies._memo import memoized
from shardlaw.strategies.shapes import shapes

WAYS = ("guillotine", "grid")
DAMAGES = ("gap", "overlap", "shifted", "grown", "duplicated", "outside", "emptied")
MANY = 1 << 16


@memoized
def tilings(
    shape: Shape | SearchStrategy[Shape] | None = None, *, max_boxes: int = 6, ways: Iterable[str] = WAYS, empties: bool = False
) -> SearchStrategy[tuple[Shape, tuple[Box, ...]]]:
    """A shape and boxes that tile it exactly, at most ``max_boxes`` of them, in any order.

    ``ways``: ``guillotine`` cuts one box after the other in two, anywhere; ``grid`` cuts every dim at a few places, through all of
    the tensor, and may end with more boxes. With ``empties``, up to two boxes without elements stand among the others, each in bounds.

    Shrinks to the whole tensor as one box, in the order of the axes.

    Raises ``InvalidArgument`` where an option is wrong.
    """
    drawn_shape = shape_or_strategy(shape, shapes())
    chosen = check_choices("ways", ways, WAYS)
    most = check_count("max_boxes", max_boxes, 1)
    numbers = st.integers(0, MANY)

    @st.composite
    def tiling(draw: st.DrawFn) -> tuple[Shape, tuple[Box, ...]]:
        cut = draw(drawn_shape)
        boxes = [Box.whole(cut)]
        way = draw(st.sampled_from(chosen))
        for _ in range(draw(st.integers(0, most - 1))):
            if way == "grid":
                boxes = _split_all(boxes, draw(numbers))
            elif len(boxes) < most:
                boxes = _split_one(boxes, draw(numbers))
        if empties:
            boxes += [_empty_box(cut, draw(numbers)) for _ in range(draw(st.integers(0, 2))) if cut]
        order = draw(numbers)
        at = order % len(boxes)
        turned = boxes[at:] + boxes[:at]
        return cut, tuple(reversed(turned) if order // len(boxes) % 2 else turned)

    return tiling()


def _split_one(boxes: list[Box], number: int) -> list[Box]:
    """The boxes with one of them, chosen by ``number``, cut in two; unchanged where none can be."""
    places = [(at, dim) for at, box in enumerate(boxes) if box.volume for dim, size in enumerate(box.size) if size > 1]
    if not places:
        return boxes
    number, choice = divmod(number, len(places))
    at, dim = places[choice]
    return [*boxes[:at], *_halves(boxes[at], dim, boxes[at].offset[dim] + 1 + number % (boxes[at].size[dim] - 1)), *boxes[at + 1 :]]


def _split_all(boxes: list[Box], number: int) -> list[Box]:
    """The boxes with all of them cut at one index of one dim, chosen by ``number``."""
    ends = [max(ends) for ends in zip(*(box.end for box in boxes), strict=True)]
    places = [(dim, index) for dim, end in enumerate(ends) for index in range(1, end)]
    if not places:
        return boxes
    dim, index = places[number % len(places)]
    return [
        part for box in boxes for part in (_halves(box, dim, index) if box.offset[dim] < index < box.end[dim] and box.volume else [box])
    ]


def _halves(box: Box, dim: int, index: int) -> list[Box]:
    first = index - box.offset[dim]
    return [box.along(dim, size=first), box.along(dim, start=index, size=box.size[dim] - first)]


def _empty_box(shape: Shape, number: int) -> Box:
    """A box without elements, in bounds: at the end of a dim, as an empty shard is, or anywhere."""
    number, dim = divmod(number, len(shape))
    number, ends = divmod(number, 2)
    return Box.whole(shape).along(dim, start=shape[dim] if ends else number % (shape[dim] + 1), size=0)


@memoized
def damaged_tilings(
    shape: Shape | SearchStrategy[Shape] | None = None, *, kinds: Iterable[str] = DAMAGES, max_boxes: int = 5
) -> SearchStrategy[tuple[Shape, tuple[Box, ...], str]]:
    """A shape, boxes that do not tile it since they were damaged in one way, and the way.

    ``kinds``: a box is removed (``gap``), added over others (``overlap``), moved by one index (``shifted``), longer by one (``grown``),
    repeated (``duplicated``), moved out of the tensor (``outside``), or without elements (``emptied``).

    Shrinks to one box of few elements. Raises ``InvalidArgument`` where an option is wrong, and where nothing can be damaged so.
    """
    chosen = check_choices("kinds", kinds, DAMAGES)
    if shape is not None and not isinstance(shape, SearchStrategy) and 0 in shape:
        raise InvalidArgument(f"{format_arguments(shape=shape)}: a tensor without elements cannot be damaged")
    # a 0-d tiling can only lose its box or have it twice
    few = 0 if {*chosen} <= {"duplicated"} else 1
    drawn = tilings(shape if shape is not None else shapes(min_dims=few, min_size=1), max_boxes=max_boxes)
    numbers = st.integers(0, MANY)

    @st.composite
    def broken(draw: st.DrawFn) -> tuple[Shape, tuple[Box, ...], str]:
        cut, boxes = draw(drawn)
        kind = draw(st.sampled_from(chosen))
        return cut, damage(cut, boxes, kind, draw(numbers)), kind

    return broken().filter(lambda found: bool(found[1]) and bool(tiling_errors(found[0], found[1])))


def damage(shape: Shape, boxes: Sequence[Box], kind: str, number: int) -> tuple[Box, ...]:
    """The boxes with one of them, chosen by ``number``, damaged; unchanged where it cannot be."""
    full = [at for at, box in enumerate(boxes) if box.volume]
    if not full:
        return tuple(boxes)
    number, choice = divmod(number, len(full))
    at = full[choice]
    box = boxes[at]
    if kind == "gap":
        return (*boxes[:at], *boxes[at + 1 :])
    if kind == "duplicated":
        return (*boxes, box)
    if not shape:
        return tuple(boxes)
    number, dim = divmod(number, len(shape))
    start, size = box.offset[dim], box.size[dim]
    if kind == "emptied":
        return (*boxes[:at], box.along(dim, size=0), *boxes[at + 1 :])
    if kind == "outside":
        return (*boxes[:at], box.along(dim, start=start + shape[dim]), *boxes[at + 1 :])
    if kind == "overlap":
        over = replace(box, size=tuple(1 + number % extent for extent in box.size))
        return (*boxes, over.along(dim, start=start + size - over.size[dim]))
    step = 1 if number % 2 or start == 0 else -1
    if kind == "grown":
        return (*boxes[:at], box.along(dim, start=start + min(step, 0), size=size + 1), *boxes[at + 1 :])
    return (*boxes[:at], box.along(dim, start=start + step), *boxes[at + 1 :])


@memoized
def wanted_boxes(shape: Shape, *, max_boxes: int = 3) -> SearchStrategy[tuple[Box, ...]]:
    """Boxes that a rank may want of a tensor: in bounds, disjoint, seldom without elements; there may be none.

    Shrinks to the whole tensor as one box. Raises ``InvalidArgument`` where an option is wrong.
    """
    check_count("max_boxes", max_boxes, 1)
    numbers = st.integers(0, MANY)

    @st.composite
    def some(draw: st.DrawFn) -> tuple[Box, ...]:
        _, boxes = draw(tilings(shape, max_boxes=max_boxes + 2, ways=("guillotine",), empties=draw(st.integers(0, 4)) == 4))
        left_out = draw(numbers)
        return tuple(box for at, box in enumerate(boxes) if not (left_out >> at) % 2 or len(boxes) == 1)[:max_boxes]

    return some()


def single_ranks(ranks: Iterable[int]) -> list[Ranks]:
    """Each of these ranks by itself."""
    return [(rank,) for rank in ranks]


def assign_boxes(shape: Shape, boxes: Iterable[Box], to: Sequence[Ranks], number: int) -> Shards:
    """The tensor in these boxes, each on the ranks of one entry of ``to``, chosen by ``number``."""
    parts = []
    for box in boxes:
        number, choice = divmod(number, len(to))
        parts.append((box, to[choice]))
    return Shards(shape, tuple(parts))
