"""Sharded tensors: a global tensor in boxes, each on the rank that a *sharding spec* names.

There are two kinds of spec:

``chunk(0)@0,1,2``            chunks along dim 0, the first on rank 0, as ``torch.chunk`` cuts: the last ranks may hold less or nothing.
                              In ``chunk(-1)@2,0`` the dim counts from the end, and the first chunk is on rank 2
``0:2,0:6@0;2:5,0:6@2``       boxes one by one, each with its rank; a rank may hold several, or none: :class:`~.shards.Shards`

Ranks are global, also where the tensor lies on a subgroup. :func:`shards_of` gives the boxes of a tensor with a spec, or
:func:`spec_errors` why there is no such tensor.

Source: the documentation of ``torch.distributed._shard`` (``ChunkShardingSpec``, ``EnumerableShardingSpec``, ``ShardedTensor``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardlaw.reference.layout import chunk
from shardlaw.reference.notation import Shape
from shardlaw.reference.shards import Shards, shards_along


@dataclass(frozen=True)
class ChunkSpec:
    """Chunks along ``dim``, the first on the first of ``ranks``."""

    dim: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"chunk({self.dim})@{','.join(map(str, self.ranks))}"

    def errors(self, shape: Shape) -> list[str]:
        """Why a tensor of ``shape`` cannot have this spec; an empty list when it can."""
        return [] if -len(shape) <= self.dim < len(shape) else [f"there is no dim {self.dim} in {len(shape)} dims"]

    def shards(self, shape: Shape) -> Shards:
        """A box for each rank, in order; one without elements begins at the end of the dim. Raises ``ValueError``."""
        if self.errors(shape):
            raise ValueError(self.errors(shape)[0])
        dim = self.dim % len(shape)
        runs = chunk(tuple(range(shape[dim])), len(self.ranks))
        return shards_along(shape, dim, zip(map(len, runs), self.ranks, strict=True))


Spec = ChunkSpec | Shards


def parse_spec(text: str, shape: Shape) -> Spec:
    """A spec for tensors of ``shape`` from its text. Raises :class:`NotationError`."""
    chunks = re.fullmatch(r"chunk\((-?\d+)\)@(\d+(?:,\d+)*)", text, re.ASCII)
    if chunks:
        return ChunkSpec(int(chunks[1]), tuple(map(int, chunks[2].split(","))))
    return Shards.parse(shape, text, one_rank_each=True)


def spec_errors(spec: Spec, shape: Shape) -> list[str]:
    """Why there is no tensor of ``shape`` with this spec; an empty list when there is."""
    if isinstance(spec, ChunkSpec):
        return spec.errors(shape)
    return spec.errors() if spec.parts else ["there is no box"]


def shards_of(spec: Spec, shape: Shape) -> Shards:
    """The boxes of a tensor of ``shape`` with this spec. Raises ``ValueError`` where there is no such tensor."""
    if spec_errors(spec, shape):
        raise ValueError("; ".join(spec_errors(spec, shape)))
    return spec.shards(shape) if isinstance(spec, ChunkSpec) else spec
