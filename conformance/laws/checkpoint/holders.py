"""Tensors with any boxes as shards, several on a rank or none, in one of three holders.

A *cut* assigns the indices of one tensor dim to ranks: ``1@0,3@1,2@0`` assigns the first row to rank 0, the next three
to rank 1, and the last two to rank 0. Without a cut, the shards are those of the layout. The holders:

``wrapper``  a DTensor around a ``LocalShardsWrapper``, as recommender tables use it
``sharded``  a ``ShardedTensor``
``described``  a plain tensor with the fields of a ``CheckpointableTensor``, which has its shards between rows of zeros
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.laws.shared.newer import require_attribute
from shardlaw.conformance.rank.context import RankContext
from shardlaw.reference.box import Box
from shardlaw.reference.layout import Layout
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import Shard
from shardlaw.reference.shards import Shards, shards_along


def shards_of_cut(layout: Layout, runs: str = "") -> Shards:
    """The shards of a tensor on a 1-D mesh: by the cut ``runs`` of the dim that the layout shards, or by the layout.

    A cut may end before or beyond the extent of the dim. Raises :class:`NotationError`.
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
    """The elements in a box, as a new tensor; zeros beyond the end of ``full``."""
    shard = full.new_zeros(box.size)
    inside = full[box.slices()]
    shard[tuple(map(slice, inside.shape))] = inside
    return shard


def wrapper_dtensor(
    shards: Sequence[tuple[Any, torch.Tensor]], mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """A DTensor around a wrapper of the shards of this rank, which are pairs of offsets and elements."""
    wrapper = compat.LocalShardsWrapper([shard for _, shard in shards], [offset for offset, _ in shards])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(wrapper, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def sharded_tensor(shards: Sequence[tuple[Any, torch.Tensor]], shape: Sequence[int]) -> Any:
    """A ``ShardedTensor`` of all ranks' shards, which are pairs of offsets and elements. Collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        make = compat.ShardOfTensor.from_tensor_and_offsets
        return compat.init_from_local_shards(
            [make(shard, [*offset], dist.get_rank()) for offset, shard in shards], *shape
        )


def described_tensor(shards: Sequence[tuple[Any, torch.Tensor]], shape: Sequence[int]) -> Any:
    """A plain tensor with the shards of this rank, which are pairs of offsets and elements, one below the other after
    a row of zeros each, and with fields that say which part of a tensor of this shape they are. Raises
    :class:`NotImplementedError` before torch 2.14."""
    require_attribute(dcp, "CheckpointableTensor")
    sizes = [tuple(shard.shape) for _, shard in shards]
    starts = [1 + sum(size[0] + 1 for size in sizes[:at]) for at in range(len(sizes) + 1)]
    widths = [max((size[dim] for size in sizes), default=0) for dim in range(1, len(shape))]
    like = shards[0][1] if shards else torch.empty(0)
    local: Any = like.new_zeros((starts[-1], *widths))
    for start, (_, shard) in zip(starts, shards, strict=False):
        local[start : start + shard.shape[0]][tuple(map(slice, shard.shape))] = shard
    local.global_shape, local.global_offsets = tuple(shape), tuple(tuple(offset) for offset, _ in shards)
    local.local_offsets, local.local_sizes = tuple((start, *[0] * len(widths)) for start in starts[:-1]), tuple(sizes)
    return local


def described_boxes(local: Any) -> list[Box]:
    """Where the shards lie in a plain tensor with such fields."""
    return [Box(*pair) for pair in zip(local.local_offsets, local.local_sizes, strict=True)]


HOLDERS = {"sharded": sharded_tensor, "described": described_tensor}


def build_holder(here: RankContext, holder: str, layout: Layout, local: Sequence[tuple[Box, torch.Tensor]]) -> Any:
    """A tensor in a ``holder`` whose shards on this rank are ``local``, boxes with their elements. Collective."""
    shards = [(box.offset, here.tensor(shard)) for box, shard in local]
    if holder == "wrapper":
        return wrapper_dtensor(shards, here.mesh(layout.mesh), here.placements(layout.placements), layout.shape)
    return HOLDERS[holder](shards, layout.shape)
