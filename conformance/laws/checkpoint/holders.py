"""Tensors whose shards are no even chunks: any boxes of a tensor, several a rank or none, held by a wrapper or a
sharded tensor.

A *cut* says how one dim of a tensor is handed out: ``1@0,3@1,2@0`` gives its first row to rank 0, the next three to
rank 1, and the last two to rank 0 again. Without a cut, the shards are those of the layout. Two things can hold them:

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
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.rank.context import RankContext
from shardlaw.reference.box import Box
from shardlaw.reference.layout import Layout
from shardlaw.reference.notation import NotationError, Shape
from shardlaw.reference.placement import Shard

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
    """The pieces of a tensor on a 1-D mesh, as ``cut`` hands them out along the dim that the layout shards, or as the
    layout does.

    Raises :class:`NotationError`. A cut may leave a rest, or reach beyond the end: what is made of that is for a law to
    say.
    """
    if not cut:
        held = [
            (layout.offset(coord), layout.local_shape(coord), layout.mesh.rank_at(coord))
            for coord in layout.mesh.coords()
        ]
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


def wrapped(
    pieces: Sequence[tuple[Any, torch.Tensor]], mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """A DTensor around the shards of this rank, given by their offsets."""
    wrapper = compat.LocalShardsWrapper([shard for _, shard in pieces], [offset for offset, _ in pieces])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(wrapper, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def sharded(pieces: Sequence[tuple[Any, torch.Tensor]], shape: Sequence[int]) -> Any:
    """A sharded tensor of the shards of all ranks, given by their offsets. All ranks must call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        make = compat.ShardOfTensor.from_tensor_and_offsets
        return compat.init_from_local_shards(
            [make(shard, [*offset], dist.get_rank()) for offset, shard in pieces], *shape
        )


def hold(here: RankContext, kind: str, layout: Layout, own: Sequence[tuple[Piece, torch.Tensor]]) -> Any:
    """A tensor whose shards on this rank are ``own``: each piece with the elements that are to stand there. All ranks
    must call it."""
    pieces = [(piece.box.offset, here.tensor(shard)) for piece, shard in own]
    if kind == "wrapper":
        return wrapped(pieces, here.mesh(layout.mesh), here.placements(layout.placements), layout.shape)
    return sharded(pieces, layout.shape)


def judge(
    here: RankContext, kind: str, own: Sequence[Piece], full: torch.Tensor, got: Any, *, place: str, check: str
) -> None:
    """Hold what this rank holds, piece by piece, against the elements that must be there."""
    if kind == "wrapper":
        if not here.require(
            isinstance(got, DTensor), "wrong-metadata", check, f"{place} is a {type(got).__name__}, must be a DTensor"
        ):
            return
        wrapper = got.to_local()
        held, offsets = (
            wrapper.local_shards(),
            [tuple(offset) for offset in wrapper.local_offsets()][: len(wrapper.local_shards())],
        )
        _judge_shape(here, own, wrapper, place, check)
    else:
        want = compat.name("ShardedTensor")
        if not here.require(
            isinstance(got, want),
            "wrong-metadata",
            check,
            f"{place} is a {type(got).__name__}, must be a {want.__name__}",
        ):
            return
        shards = got.local_shards()
        held, offsets = [shard.tensor for shard in shards], [tuple(shard.metadata.shard_offsets) for shard in shards]
    due = [piece.box.offset for piece in own]
    if here.require(
        offsets == due, "wrong-layout", check, f"{place} holds shards at other offsets than it must", due, offsets
    ):
        for piece, shard in zip(own, held, strict=True):
            here.same(shard, piece.of(full), check, what=f"the shard at {piece.box.offset} of {place}")


def wrapper_shape(own: Sequence[Piece]) -> Shape | None:
    """A wrapper has the shape of its shards side by side: columns of a table, elements of a vector. Of others nothing
    is said."""
    if not own or (len(own) > 1 and len({piece.box.offset[0] for piece in own}) > 1 and len(own[0].box.size) > 1):
        return None
    last = len(own[0].box.size) - 1
    return (*own[0].box.size[:last], sum(piece.box.size[last] for piece in own))


def _judge_shape(here: RankContext, own: Sequence[Piece], wrapper: Any, place: str, check: str) -> None:
    due, shape = wrapper_shape(own), tuple(wrapper.size())
    if due is None:
        return
    here.require(
        shape == due,
        "wrong-metadata",
        check,
        f"the wrapper around the shards of {place} has shape {shape}, must have {due}",
        due,
        shape,
    )
