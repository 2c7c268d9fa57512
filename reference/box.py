"""Boxes: rectangles of global indices, and when they tile a tensor.

A box is an offset and a size for each tensor dim, in elements. Plans of checkpoints consist of boxes: a saved chunk is a box, a shard to
be loaded is a box, and a read item is their intersection.

The text of a box is ``2:5,0:6``, START:END for each dim; a box without dims is ``()``. Boxes are joined by ``;``; ``-`` stands for none.

Source: the documentation of ``torch.distributed.checkpoint`` (the chunks of a tensor's metadata, and the items of a load plan).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardlaw.reference.notation import NotationError, Shape, format_shape


@dataclass(frozen=True)
class Box:
    """The half-open rectangle ``offset[d] <= index < offset[d] + size[d]`` along every dim ``d``."""

    offset: Shape
    size: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            raise ValueError(f"box offset {self.offset} and size {self.size} have different numbers of dims")

    @staticmethod
    def whole(shape: Shape) -> Box:
        """All of a tensor of ``shape``."""
        return Box((0,) * len(shape), shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{end}" for start, end in zip(self.offset, self.end, strict=True)) + "]"

    @property
    def volume(self) -> int:
        """How many elements the box holds; 1 for a 0-d box."""
        return math.prod(self.size)

    @property
    def end(self) -> Shape:
        """One past the last index of every dim."""
        return tuple(offset + size for offset, size in zip(self.offset, self.size, strict=True))

    def along(self, dim: int, *, start: int | None = None, size: int | None = None) -> Box:
        """The box with another ``start`` or ``size`` along ``dim``."""
        offset, sizes = list(self.offset), list(self.size)
        offset[dim] = offset[dim] if start is None else start
        sizes[dim] = sizes[dim] if size is None else size
        return Box(tuple(offset), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Whether every index of ``other`` lies in this box. An empty box lies in every box."""
        return other.volume == 0 or all(
            start <= other_start and other_end <= end
            for start, other_start, other_end, end in zip(self.offset, other.offset, other.end, self.end, strict=True)
        )

    def slices(self, origin: Shape | None = None) -> tuple[slice, ...]:
        """Slices that cut this box out of a tensor whose first element has the global index ``origin`` (default 0)."""
        origin = origin or (0,) * len(self.offset)
        return tuple(slice(start - base, end - base) for start, end, base in zip(self.offset, self.end, origin, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes of the same number of dims, or ``None`` when they share no element."""
    offset = tuple(map(max, a.offset, b.offset))
    size = tuple(min(x, y) - start for x, y, start in zip(a.end, b.end, offset, strict=True))
    return Box(offset, size) if all(extent > 0 for extent in size) else None


def tiling_errors(shape: Shape, boxes: Iterable[Box]) -> list[str]:
    """Why ``boxes`` do not tile a tensor of ``shape``; an empty list when they do.

    Boxes without elements are ignored, wherever they lie. In bounds, pairwise disjoint and of the
    right total volume is the same as an exact cover, for every number of dims, 0 included.
    """
    whole = Box.whole(shape)
    errors: list[str] = []
    full: list[Box] = []
    for box in boxes:
        if len(box.size) != len(shape):
            errors.append(f"{box} has {len(box.size)} dims, the tensor {len(shape)}")
        elif not whole.contains(box):
            errors.append(f"{box} lies outside shape {format_shape(shape)}")
        elif box.volume:
            full.append(box)
    for i, box in enumerate(full):
        errors += [f"{box} and {other} overlap" for other in full[:i] if intersect(box, other)]
    covered = sum(box.volume for box in full)
    if not errors and covered != whole.volume:
        errors.append(f"{covered} of {whole.volume} elements are covered")
    return errors


def tiles_exactly(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether every element of a tensor of ``shape`` lies in exactly one of ``boxes``."""
    return not tiling_errors(shape, boxes)


def parse_box(text: str, ndim: int) -> Box:
    """``"0:2,0:6"``, or ``"()"`` for a box without dims. Raises :class:`NotationError`."""
    runs = [] if text == "()" else text.split(",")
    found = [re.fullmatch(r"(\d+):(\d+)", run, re.ASCII) for run in runs]
    ends = [(int(match[1]), int(match[2])) for match in found if match]
    if len(ends) != len(runs) or len(ends) != ndim or any(start > end for start, end in ends):
        raise NotationError(f"box {text!r}: want START:END for each of {ndim} dims, or () where there are none")
    return Box(tuple(start for start, _ in ends), tuple(end - start for start, end in ends))


def format_box(box: Box) -> str:
    """The inverse of :func:`parse_box`."""
    return ",".join(f"{start}:{end}" for start, end in zip(box.offset, box.end, strict=True)) or "()"


def parse_boxes(text: str, ndim: int) -> tuple[Box, ...]:
    """Boxes joined by ``;``, or ``-`` for none. Raises :class:`NotationError`."""
    return () if text == "-" else tuple(parse_box(part, ndim) for part in text.split(";"))


def format_boxes(boxes: Iterable[Box]) -> str:
    """The inverse of :func:`parse_boxes`."""
    return ";".join(map(format_box, boxes)) or "-"
