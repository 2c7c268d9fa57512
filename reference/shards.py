"""A tensor in boxes, each with the ranks that hold it.

A layout (:mod:`shardlaw.reference.layout`) follows from placements. Other shardings do not, such as those of embedding tables: a table may
lie on a single rank, be cut into rows of 1, 3, 1 and 3, or into columns of which one rank holds the first and the last. In a checkpoint,
several ranks may hold the same box. All of these are a list of boxes with their ranks. The list is valid when the boxes tile the tensor.
Invalid lists, with overlaps, holes, or a box twice on one rank, can be expressed too, for tests of what must be refused.

The text of a list is ``0:1,0:6@0;1:4,0:6@1+2``: rows 0 on rank 0 and rows 1 to 3 on ranks 1 and 2, of 6 columns each; ``()@0`` is a tensor
without dims on rank 0. The order of the boxes of one rank is the order in which it holds them.

Source: the documentation of ``torch.distributed.checkpoint`` (a tensor's metadata lists its chunks, each an offset and a size).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardlaw.reference.box import Box, format_box, parse_box, tiling_errors
from shardlaw.reference.layout import Layout
from shardlaw.reference.notation import NotationError, Shape

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """A tensor of ``shape`` in ``parts``: boxes, each with the ranks that hold it."""

    shape: Shape
    parts: tuple[tuple[Box, Ranks], ...]

    @staticmethod
    def whole(shape: Shape, ranks: Iterable[int]) -> Shards:
        """A tensor that each of ``ranks`` holds in full."""
        return Shards(shape, ((Box.whole(shape), tuple(ranks)),))

    @staticmethod
    def of_layout(layout: Layout) -> Shards:
        """The boxes of a layout. Raises ``ValueError`` where a rank holds no box, or a contribution to a pending reduction."""
        held: dict[Box, list[int]] = {}
        for coord in layout.mesh.coords():
            box = layout.box(coord)
            if box is None or layout.has_partial():
                raise ValueError(f"the rank at {coord} holds no box of {layout}")
            held.setdefault(box, []).append(layout.mesh.rank_at(coord))
        return Shards(layout.shape, tuple((box, tuple(ranks)) for box, ranks in held.items()))

    @staticmethod
    def parse(shape: Shape, text: str, *, one_rank_each: bool = False) -> Shards:
        """The inverse of ``str``; with ``one_rank_each``, no two ranks may hold one box. Raises :class:`NotationError`."""
        parts = []
        for part in text.split(";"):
            box, _, ranks = part.rpartition("@")
            parts.append((parse_box(box, len(shape)), parse_ranks(ranks)))
        if one_rank_each and any(len(ranks) > 1 for _, ranks in parts):
            raise NotationError(f"shards {text!r}: want one rank for each box")
        return Shards(shape, tuple(parts))

    def __str__(self) -> str:
        return ";".join(f"{format_box(box)}@{format_ranks(ranks)}" for box, ranks in self.parts)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The distinct boxes, in order."""
        return tuple(dict.fromkeys(box for box, _ in self.parts))

    def holdings(self) -> Iterator[tuple[Box, int]]:
        """Every box with every rank that holds it."""
        return ((box, rank) for box, ranks in self.parts for rank in ranks)

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """The boxes that ``rank`` holds, in its order."""
        return tuple(box for box, holder in self.holdings() if holder == rank)

    def without_empty(self) -> Shards:
        """The same without the boxes that have no elements."""
        return Shards(self.shape, tuple((box, ranks) for box, ranks in self.parts if box.volume))

    def errors(self) -> list[str]:
        """Why the boxes do not tile the tensor; an empty list when they do."""
        return tiling_errors(self.shape, [box for box, _ in self.parts])


def parse_ranks(text: str) -> Ranks:
    """``"0+2"``, in the order of the text. Raises :class:`NotationError`."""
    if not re.fullmatch(r"\d+(\+\d+)*", text, re.ASCII):
        raise NotationError(f"ranks {text!r}: want ranks joined by '+', such as 0+2")
    return tuple(map(int, text.split("+")))


def format_ranks(ranks: Ranks) -> str:
    """The inverse of :func:`parse_ranks`."""
    return "+".join(map(str, ranks))


def are_side_by_side(boxes: Sequence[Box]) -> bool:
    """Whether boxes can be concatenated along their last dim: they agree in all others."""
    return len({(box.offset[:-1], box.size[:-1]) for box in boxes}) <= 1


def joined_size(boxes: Sequence[Box]) -> Shape | None:
    """The size of boxes concatenated along their last dim; ``None`` where they cannot be, or there are none."""
    if not boxes or not boxes[0].size or not are_side_by_side(boxes):
        return None
    return (*boxes[0].size[:-1], sum(box.size[-1] for box in boxes))


def shards_along(shape: Shape, dim: int, parts: Iterable[tuple[int, int]]) -> Shards:
    """A tensor cut along ``dim`` into consecutive boxes; ``parts`` has the size and the rank of each."""
    found, start = [], 0
    for size, rank in parts:
        found.append((Box.whole(shape).along(dim, start=start, size=size), (rank,)))
        start += size
    return Shards(shape, tuple(found))
