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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.rank.context import RankContext
from shardlaw.reference.box import Box
from shardlaw.reference.layout import Layout
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import Shard
from shardlaw.reference.shards import Shards, shards_along

KINDS = ("wrapper", "sharded")


def shards_of_cut(layout: Layout, runs: str = "") -> Shards:
    """Who holds what of a tensor on a 1-D mesh, as the cut ``runs`` hands it out along the dim that the layout shards,
    or as the layout does.

    Raises :class:`NotationError`. A cut may leave a rest, or reach beyond the end: what is made of that is for a law to
    say.
    """
    if not runs:
        shards = Shards.of_layout(layout)
        return shards if 0 in layout.shape else shards.without_empty()
    placement = layout.placements[0]
    if len(layout.placements) > 1 or not isinstance(placement, Shard) or not re.fullmatch(r"\d+@\d+(,\d+@\d+)*", runs):
        raise NotationError(f"cut {runs!r} of {layout}: want SIZE@RANK,... along the one dim that is sharded")
    pairs = [run.split("@") for run in runs.split(",")]
    return shards_along(layout.shape, placement.dim, [(int(size), int(rank)) for size, rank in pairs])


def elements(full: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements in a box, as a new tensor; zeros where it reaches beyond the end."""
    held = full.new_zeros(box.size)
    inside = full[box.slices()]
    held[tuple(map(slice, inside.shape))] = inside
    return held


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


def hold(here: RankContext, kind: str, layout: Layout, own: Sequence[tuple[Box, torch.Tensor]]) -> Any:
    """A tensor whose shards on this rank are ``own``: each box with the elements that are to stand there. All ranks
    must call it."""
    pieces = [(box.offset, here.tensor(shard)) for box, shard in own]
    if kind == "wrapper":
        return wrapped(pieces, here.mesh(layout.mesh), here.placements(layout.placements), layout.shape)
    return sharded(pieces, layout.shape)
