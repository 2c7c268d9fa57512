"""Tensors whose shards are no even chunks: any boxes of a tensor, several a rank or none, held by a wrapper or a sharded tensor.

A *cut* says how one dim of a tensor is handed out: ``1@0,3@1,2@0`` gives its first row to rank 0, the next three to rank 1, and the last
two to rank 0 again. Without a cut, the shards are those of the layout. Two things can hold them:

``wrapper``  a DTensor around a ``LocalShardsWrapper``, as recommender tables use it
``sharded``  a ``ShardedTensor``
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from conformance import compat
from conformance.here import Here
from reference.box import Box
from reference.layout import Layout
from reference.notation import NotationError
from reference.placement import Shard

KINDS = ("wrapper", "sharded")


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the rank that holds it."""

    box: Box
    rank: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Its elements, as a new tensor; zeros where it reaches beyond the end."""
        held = full.new_zeros(self.box.size)
        inside = full[self.box.slices()]
        held[tuple(map(slice, inside.shape))] = inside
        return held


def pieces(layout: Layout, cut: str = "") -> list[Piece]:
    """The pieces of a tensor on a 1-D mesh, as ``cut`` hands them out along the dim that the layout shards, or as the layout does.

    Raises :class:`NotationError`. A cut may leave a rest, or reach beyond the end: what is made of that is for a law to say.
    """
    if not cut:
        held = [(layout.offset(coord), layout.local_shape(coord), layout.mesh.rank_at(coord)) for coord in layout.mesh.coords()]
        return [Piece(Box(offset, size), rank) for offset, size, rank in held if 0 not in size or 0 in layout.shape]
    placement = layout.placements[0]
    if len(layout.placements) > 1 or not isinstance(placement, Shard) or not re.fullmatch(r"\d+@\d+(,\d+@\d+)*", cut):
        raise NotationError(f"cut {cut!r} of {layout}: want SIZE@RANK,... along the one dim that is sharded")
    found, start = [], 0
    for part in cut.split(","):
        size, rank = map(int, part.split("@"))
        offset = tuple(start if dim == placement.dim else 0 for dim in range(len(layout.shape)))
        extent = tuple(size if dim == placement.dim else whole for dim, whole in enumerate(layout.shape))
        found.append(Piece(Box(offset, extent), rank))
        start += size
    return found


def hold(here: Here, kind: str, layout: Layout, own: Sequence[tuple[Piece, torch.Tensor]]) -> Any:
    """A tensor whose shards on this rank are ``own``: each piece with the elements that are to stand there. All ranks must call it."""
    shards = [here.tensor(shard) for _, shard in own]
    offsets = [piece.box.offset for piece, _ in own]
    if kind == "wrapper":
        wrapper = compat.name("LocalShardsWrapper")(shards, offsets)
        stride = torch.empty(layout.shape, device="meta").stride()
        places = here.placements(layout.placements)
        return DTensor.from_local(wrapper, here.mesh(layout.mesh), places, run_check=False, shape=torch.Size(layout.shape), stride=stride)
    make = compat.name("ShardOfTensor").from_tensor_and_offsets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        held = [make(shard, list(offset), here.rank) for shard, offset in zip(shards, offsets, strict=True)]
        return compat.name("init_from_local_shards")(held, *layout.shape)


def judge(here: Here, kind: str, own: Sequence[Piece], full: torch.Tensor, got: Any, *, place: str, check: str) -> None:
    """Hold what this rank holds, piece by piece, against the elements that must be there."""
    if kind == "wrapper":
        if not here.require(isinstance(got, DTensor), "wrong-metadata", check, f"{place} is a {type(got).__name__}, must be a DTensor"):
            return
        wrapper = got.to_local()
        held, offsets = wrapper.local_shards(), [tuple(offset) for offset in wrapper.local_offsets()][: len(wrapper.local_shards())]
        _judge_shape(here, own, wrapper, place, check)
    else:
        want = compat.name("ShardedTensor")
        if not here.require(
            isinstance(got, want), "wrong-metadata", check, f"{place} is a {type(got).__name__}, must be a {want.__name__}"
        ):
            return
        shards = got.local_shards()
        held, offsets = [shard.tensor for shard in shards], [tuple(shard.metadata.shard_offsets) for shard in shards]
    due = [piece.box.offset for piece in own]
    if here.require(offsets == due, "wrong-layout", check, f"{place} holds shards at other offsets than it must", due, offsets):
        for piece, shard in zip(own, held, strict=True):
            here.same(shard, piece.of(full), check, what=f"the shard at {piece.box.offset} of {place}")


def _judge_shape(here: Here, own: Sequence[Piece], wrapper: Any, place: str, check: str) -> None:
    """A wrapper has the shape of its shards side by side: columns of a table, elements of a vector."""
    if not own or (len(own) > 1 and len({piece.box.offset[0] for piece in own}) > 1 and len(own[0].box.size) > 1):
        return
    last = len(own[0].box.size) - 1
    due = (*own[0].box.size[:last], sum(piece.box.size[last] for piece in own))
    shape = tuple(wrapper.size())
    here.require(
        shape == due, "wrong-metadata", check, f"the wrapper around the shards of {place} has shape {shape}, must have {due}", due, shape
    )
