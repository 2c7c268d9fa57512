"""Tensors that are handed out in boxes: any rectangles, uneven, several a rank or none.

A layout of :mod:`shardlaw.reference.layout` follows from placements. Tables of embeddings do not: one lies on a single rank, the next is
cut into rows of 1, 3, 1 and 3, a third into columns of which a rank holds the first and the last. What such a tensor is, is a list of
boxes, each with the rank that holds it; it is sound when the boxes tile the tensor.

The text of a list is ``0:1,0:6@0;1:4,0:6@1``: rows 0 on rank 0 and rows 1 to 3 on rank 1, of 6 columns each. The order of the boxes of
one rank is the order in which it holds them.

Source: the documentation of ``torch.distributed.checkpoint`` (a tensor's metadata lists its chunks, each an offset and a size).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardlaw.reference.box import Box, tiling_errors
from shardlaw.reference.notation import NotationError, Shape


@dataclass(frozen=True)
class Shards:
    """A tensor of ``shape`` in boxes, each with the rank that holds it."""

    shape: Shape
    boxes: tuple[tuple[Box, int], ...]

    @staticmethod
    def parse(shape: Shape, text: str) -> Shards:
        """The inverse of ``str``. Raises :class:`NotationError`."""
        found = []
        for part in text.split(";"):
            match = re.fullmatch(r"(\d+:\d+(?:,\d+:\d+)*)@(\d+)", part, re.ASCII)
            ends = [tuple(map(int, run.split(":"))) for run in match[1].split(",")] if match else []
            if match is None or len(ends) != len(shape) or any(start > end for start, end in ends):
                raise NotationError(f"shards {text!r}: want BOX@RANK;..., a box being START:END for each of {len(shape)} dims")
            box = Box(tuple(start for start, _ in ends), tuple(end - start for start, end in ends))
            found.append((box, int(match[2])))
        return Shards(shape, tuple(found))

    def __str__(self) -> str:
        return ";".join(
            f"{','.join(f'{start}:{end}' for start, end in zip(box.offset, box.end, strict=True))}@{rank}" for box, rank in self.boxes
        )

    def of(self, rank: int) -> tuple[Box, ...]:
        """The boxes that ``rank`` holds, in its order."""
        return tuple(box for box, holder in self.boxes if holder == rank)

    def errors(self) -> list[str]:
        """What keeps the boxes from being the tensor, each element once; nothing when they are."""
        return tiling_errors(self.shape, [box for box, _ in self.boxes])


def side_by_side(boxes: Sequence[Box]) -> bool:
    """Whether boxes of one rank can be put together along their last dim: in all other dims they are alike."""
    return len({(box.offset[:-1], box.size[:-1]) for box in boxes}) <= 1


def cut(shape: Shape, dim: int, parts: Iterable[tuple[int, int]]) -> Shards:
    """Runs of tensor dim ``dim``, one behind the other: each of so many indices, for so-and-so's rank."""
    boxes, start = [], 0
    for size, rank in parts:
        offset = tuple(start if at == dim else 0 for at in range(len(shape)))
        boxes.append((Box(offset, tuple(size if at == dim else whole for at, whole in enumerate(shape))), rank))
        start += size
    return Shards(shape, tuple(boxes))
