"""Plain torch code for the acts of this chapter: sharded tensors in chunks of rows, and nested ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.laws.sharded_tensor.act_helpers import from_boxes


def from_rows(tensor: torch.Tensor, group: Any = None) -> Any:
    """A sharded tensor of a full tensor, in chunks of rows on the ranks of a group. All its members must call it."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    count = -(-len(tensor) // len(ranks))
    first = min(ranks.index(rank) * count, len(tensor))
    rows = ([first, *[0] * (tensor.ndim - 1)], [min(count, len(tensor) - first), *tensor.shape[1:]])
    return from_boxes(tensor, [rows], rank, group)


def nested_parameter(inner: Any, shape: torch.Size, part: tuple[Sequence[int], Sequence[int]]) -> Any:
    """A parameter of ``shape`` whose local shard, the box ``part``, is the sharded tensor ``inner``, as in a model that
    is sharded on two axes."""
    rank, device = dist.get_rank(), inner.local_shards()[0].tensor.device
    own = compat.ShardMetadata([*part[0]], [*part[1]], remote_device(rank, device))
    other = remote_device((rank + 1) % dist.get_world_size(), device)
    others = [compat.ShardMetadata(offset, size, other) for offset, size in boxes_around(shape, *part)]
    metadata = compat.ShardedTensorMetadata([own, *others], shape, compat.TensorProperties(dtype=inner.dtype))
    return compat.init_from_local_shards_and_metadata([compat.ShardOfTensor(inner, own)], metadata)


def remote_device(rank: int, device: torch.device) -> str:
    """The placement of a shard on a rank; ``device`` is that of this rank."""
    return f"rank:{rank}/{device.type}" + (
        "" if device.index is None else f":{rank % torch.accelerator.device_count()}"
    )


def boxes_around(shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The boxes before and after a box that spans all dims but one."""
    boxes = []
    for dim, extent in enumerate(shape):
        for start, end in ((0, offset[dim]), (offset[dim] + size[dim], extent)):
            if start < end:
                sizes = [*shape[:dim], end - start, *shape[dim + 1 :]]
                boxes.append(([start if at == dim else 0 for at in range(len(shape))], sizes))
    return boxes
