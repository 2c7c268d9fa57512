"""Who holds what of a state before it is saved: leaves, in boxes of any size, each held by one rank or by several.

One leaf is one text::

    5x6/0:2,0:6@0+1;2:5,0:6@2      a tensor in two boxes: rows 0 and 1 on ranks 0 and 1, the others on rank 2
    5x6:int64/whole@0+1            a plain tensor of int64, whole on ranks 0 and 1
    ()/()@0                        a tensor without dims, on rank 0
    value@0+1+2                    anything that is no tensor

Nothing keeps boxes from overlapping, leaving holes or being held twice by one rank: what must be refused is written in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.save_plan import Plan, WriteItem
from shardlaw.reference.notation import NotationError, Shape, format_shape, parse_shape
from shardlaw.reference.tensors import DTYPES

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ShardedLeaf:
    """A leaf. ``kind`` is ``boxes``, ``whole`` (a plain tensor) or ``value``; ``parts`` are its boxes with the ranks that hold each."""

    kind: str
    shape: Shape = ()
    dtype: str = "float32"
    parts: tuple[tuple[Box, Ranks], ...] = ()

    @staticmethod
    def parse(text: str) -> ShardedLeaf:
        """The inverse of ``str``. Raises :class:`NotationError`."""
        tensor, slash, where = text.rpartition("/")
        if not slash:
            kind, _, ranks = text.partition("@")
            if kind != "value":
                raise NotationError(f"held {text!r}: want SHAPE[:DTYPE]/BOX@RANKS;..., SHAPE/whole@RANKS or value@RANKS")
            return ShardedLeaf("value", parts=((Box((), ()), _ranks(ranks)),))
        shape_text, _, dtype = tensor.partition(":")
        shape = parse_shape(shape_text)
        if dtype and dtype not in DTYPES:
            raise NotationError(f"held {text!r}: dtype {dtype!r} is none of {', '.join(DTYPES)}")
        parts = []
        kind = "whole" if where.startswith("whole@") else "boxes"
        for part in where.split(";"):
            box, _, ranks = part.partition("@")
            whole = Box((0,) * len(shape), shape)
            parts.append((whole if kind == "whole" else parse_box(box, len(shape)), _ranks(ranks)))
        return ShardedLeaf(kind, shape, dtype or "float32", tuple(parts))

    def __str__(self) -> str:
        ranks = ["+".join(map(str, held)) for _, held in self.parts]
        if self.kind == "value":
            return f"value@{ranks[0]}"
        tensor = format_shape(self.shape) + (f":{self.dtype}" if self.dtype != "float32" else "")
        if self.kind == "whole":
            return f"{tensor}/whole@{ranks[0]}"
        return f"{tensor}/" + ";".join(f"{format_box(box)}@{held}" for (box, _), held in zip(self.parts, ranks, strict=True))

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The different boxes, in order."""
        return tuple(dict.fromkeys(box for box, _ in self.parts))

    def items(self, name: str, rank: int) -> Plan:
        """What ``rank`` can write of it."""
        return tuple(self._item(name, box) for box, ranks in self.parts for holder in ranks if holder == rank)

    def _item(self, name: str, box: Box) -> WriteItem:
        if self.kind == "value":
            return WriteItem(name, replica=True)
        return WriteItem(name, box, self.shape, self.dtype, replica=self.kind == "whole")


def plans_of(leaves: Mapping[str, ShardedLeaf], ranks: int) -> list[Plan]:
    """The local plan of every rank: the items of each leaf, in the order of the leaves."""
    return [tuple(item for name, held in leaves.items() for item in held.items(name, rank)) for rank in range(ranks)]


def _ranks(text: str) -> Ranks:
    if not re.fullmatch(r"\d+(\+\d+)*", text, re.ASCII):
        raise NotationError(f"ranks {text!r}: want ranks joined by '+', such as 0+2")
    return tuple(map(int, text.split("+")))


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
