"""Sharded tensors: a global tensor in boxes, each on the rank that a *sharding spec* names.

There are two specs, each written on one line:

``chunk(0)@0,1,2``            equal chunks along dim 0, the first on rank 0: as ``torch.chunk`` cuts, so that the last ranks may hold
                              less or nothing. ``chunk(-1)@2,0`` counts the dim from the end, and its first chunk lies on rank 2
``0:2,0:6@0;2:5,0:6@2``       boxes one by one (``START:END`` for each dim), each with its rank; a rank may hold several, or none

Ranks are numbers in the world, also where the tensor lives on a group of some of them. A spec says who holds what of a tensor of any
shape (:meth:`Spec.parts`), or why there is no such tensor (:meth:`Spec.errors`).

Source: the documentation of ``torch.distributed._shard`` (``ChunkShardingSpec``, ``EnumerableShardingSpec``, ``ShardedTensor``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardlaw.reference.box import Box, tiling_errors
from shardlaw.reference.checkpoint.sharded_leaf import format_box, parse_box
from shardlaw.reference.layout import chunk
from shardlaw.reference.notation import NotationError, Shape

Part = tuple[Box, int]


@dataclass(frozen=True)
class ChunkSpec:
    """Chunks along ``dim``, the first on the first of ``ranks``."""

    dim: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"chunk({self.dim})@{','.join(map(str, self.ranks))}"

    def errors(self, shape: Shape) -> list[str]:
        """Why a tensor of ``shape`` cannot be cut so; an empty list when it can."""
        return [] if -len(shape) <= self.dim < len(shape) else [f"there is no dim {self.dim} in {len(shape)} dims"]

    def parts(self, shape: Shape) -> list[Part]:
        """A box for each rank, in order; one without elements begins at the end of the dim. Raises ``ValueError``."""
        if self.errors(shape):
            raise ValueError(self.errors(shape)[0])
        dim = self.dim % len(shape)
        found = []
        for rank, run in zip(self.ranks, chunk(tuple(range(shape[dim])), len(self.ranks)), strict=True):
            offset = tuple((run[0] if run else extent) if at == dim else 0 for at, extent in enumerate(shape))
            size = tuple(len(run) if at == dim else extent for at, extent in enumerate(shape))
            found.append((Box(offset, size), rank))
        return found


@dataclass(frozen=True)
class EnumerableSpec:
    """Boxes one by one, each with its rank."""

    boxes: tuple[Part, ...]

    def __str__(self) -> str:
        return ";".join(f"{format_box(box)}@{rank}" for box, rank in self.boxes)

    def errors(self, shape: Shape) -> list[str]:
        """Why the boxes are no tensor of ``shape``: none at all, another number of dims, or no tiling."""
        if not self.boxes:
            return ["there is no box"]
        return tiling_errors(shape, [box for box, _ in self.boxes])

    def parts(self, shape: Shape) -> list[Part]:
        """The boxes with their ranks, in order. Raises ``ValueError`` where they do not tile a tensor of ``shape``."""
        if self.errors(shape):
            raise ValueError("; ".join(self.errors(shape)))
        return list(self.boxes)


Spec = ChunkSpec | EnumerableSpec


def parse_spec(text: str, ndim: int) -> Spec:
    """A spec for tensors of ``ndim`` dims from its text. Raises :class:`NotationError`."""
    chunks = re.fullmatch(r"chunk\((-?\d+)\)@(\d+(?:,\d+)*)", text, re.ASCII)
    if chunks:
        return ChunkSpec(int(chunks[1]), tuple(map(int, chunks[2].split(","))))
    parts = []
    for part in text.split(";"):
        box, at, rank = part.rpartition("@")
        if not (at and rank.isascii() and rank.isdigit()):
            raise NotationError(f"spec {text!r}: want chunk(DIM)@RANK,... or START:END,...@RANK;...")
        parts.append((parse_box(box, ndim), int(rank)))
    return EnumerableSpec(tuple(parts))


def of_rank(parts: Sequence[Part], rank: int) -> list[Box]:
    """The boxes that one rank holds, in order."""
    return [box for box, holder in parts if holder == rank]
