"""Leaves of a state in boxes of any size, each held by one or more ranks.

One leaf is one text::

    5x6/0:2,0:6@0+1;2:5,0:6@2      a tensor in two boxes: rows 0 and 1 on ranks 0 and 1, the others on rank 2
    5x6:int64/whole@0+1            a plain tensor of int64 on ranks 0 and 1
    ()/()@0                        a tensor without dims, on rank 0
    value@0+1+2                    anything that is no tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.save_plan import Plan, WriteItem
from shardlaw.reference.notation import NotationError, Shape, format_shape, parse_shape
from shardlaw.reference.shards import Shards, format_ranks, parse_ranks
from shardlaw.reference.tensors import DTYPES


@dataclass(frozen=True)
class ShardedLeaf:
    """A leaf. ``kind`` is ``boxes``, ``whole`` (a plain tensor) or ``value`` (no tensor; ``shards`` are then those of a 0-d tensor)."""

    kind: str
    shards: Shards
    dtype: str = "float32"

    @staticmethod
    def value(ranks: Iterable[int]) -> ShardedLeaf:
        """A leaf that is no tensor, on each of ``ranks``."""
        return ShardedLeaf("value", Shards.whole((), ranks))

    @staticmethod
    def parse(text: str) -> ShardedLeaf:
        """The inverse of ``str``. Raises :class:`NotationError`."""
        tensor, slash, where = text.rpartition("/")
        kind, _, ranks = where.partition("@")
        if not slash:
            if kind != "value":
                raise NotationError(f"held {text!r}: want SHAPE[:DTYPE]/BOX@RANKS;..., SHAPE/whole@RANKS or value@RANKS")
            return ShardedLeaf.value(parse_ranks(ranks))
        shape_text, _, dtype = tensor.partition(":")
        shape = parse_shape(shape_text)
        if dtype and dtype not in DTYPES:
            raise NotationError(f"held {text!r}: dtype {dtype!r} is none of {', '.join(DTYPES)}")
        dtype = dtype or "float32"
        if kind == "whole":
            return ShardedLeaf("whole", Shards.whole(shape, parse_ranks(ranks)), dtype)
        return ShardedLeaf("boxes", Shards.parse(shape, where), dtype)

    def __str__(self) -> str:
        where = str(self.shards)
        if self.kind != "boxes":
            where = f"{self.kind}@{format_ranks(self.shards.parts[0][1])}"
        if self.kind == "value":
            return where
        return format_shape(self.shape) + (f":{self.dtype}" if self.dtype != "float32" else "") + f"/{where}"

    @property
    def shape(self) -> Shape:
        return self.shards.shape

    def items(self, name: str, rank: int) -> Plan:
        """The write items of ``rank``."""
        return tuple(self._item(name, box) for box in self.shards.boxes_of(rank))

    def _item(self, name: str, box: Box) -> WriteItem:
        if self.kind == "value":
            return WriteItem(name, replica=True)
        return WriteItem(name, box, self.shape, self.dtype, replica=self.kind == "whole")


def plans_of(leaves: Mapping[str, ShardedLeaf], ranks: int) -> list[Plan]:
    """The local plan of every rank: the items of each leaf, in the order of the leaves."""
    return [tuple(item for name, leaf in leaves.items() for item in leaf.items(name, rank)) for rank in range(ranks)]
