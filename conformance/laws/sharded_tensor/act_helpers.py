"""Plain torch code for the acts of this chapter: creates a sharded tensor from boxes, and describes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardlaw.conformance import compat
from shardlaw.conformance.laws.plan.torch_plans import box_slices


def from_boxes(x: torch.Tensor, boxes: Iterable[Any], rank: int, group: Any = None) -> Any:
    """A sharded tensor whose local shards are copies of these boxes of ``x``. All members of the group must call it."""
    make_shard = compat.ShardOfTensor.from_tensor_and_offsets
    shards = [make_shard(x[box_slices(offset, size)].contiguous(), [*offset], rank) for offset, size in boxes]
    return compat.init_from_local_shards(shards, *x.shape, process_group=group)


def metadata_boxes(metadata: Any) -> list[Any]:
    """The offset, size and rank of each nonempty shard in the metadata of a sharded tensor, sorted."""
    boxes = [(tuple(s.shard_offsets), tuple(s.shard_sizes), s.placement.rank()) for s in metadata.shards_metadata]
    return sorted(box for box in boxes if 0 not in box[1])


def describe(sharded: Any) -> dict[str, Any]:
    """The metadata of a sharded tensor, and its nonempty local shards."""
    metadata = sharded.metadata()
    shards = {
        (tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)): s.tensor for s in sharded.local_shards()
    }
    boxes = sorted(box for box in shards if 0 not in box[1])
    return {
        "size": [tuple(metadata.size), tuple(sharded.size())],
        "dtype": [metadata.tensor_properties.dtype, sharded.dtype],
        "metadata": metadata_boxes(metadata),
        "places": boxes,
        "shards": [shards[box].detach().clone() for box in boxes],
    }


def describe_if_sharded(tensor: Any) -> Any:
    """The description of a sharded tensor; any other tensor unchanged."""
    return describe(tensor) if isinstance(tensor, compat.ShardedTensor) else tensor


def spec_boxes(sharded: Any) -> list[Any]:
    """The offset, size and rank of each nonempty shard by the spec of a sharded tensor, sorted."""
    return metadata_boxes(sharded.sharding_spec().build_metadata(sharded.size(), sharded.metadata().tensor_properties))


def outcome(attempt: Callable[..., Any], *arguments: Any) -> Any:
    """The exception that ``attempt`` raises, or the type of its result: a sharded tensor itself cannot be printed."""
    try:
        return type(attempt(*arguments)).__name__
    except Exception as error:
        return error
