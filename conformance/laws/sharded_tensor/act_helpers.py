"""Sharded tensors made of boxes, and what one says of itself: plain torch code for the acts of this chapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardlaw.conformance import compat
from shardlaw.conformance.laws.plan.torch_plans import box_slices


def from_boxes(x: torch.Tensor, boxes: Iterable[Any], rank: int, group: Any = None) -> Any:
    """A sharded tensor whose shards on this rank are copies of these boxes of ``x``. All members of the group must
    call it."""
    make = compat.ShardOfTensor.from_tensor_and_offsets
    shards = [make(x[box_slices(offset, size)].contiguous(), [*offset], rank) for offset, size in boxes]
    return compat.init_from_local_shards(shards, *x.shape, process_group=group)


def metadata_boxes(metadata: Any) -> list[Any]:
    """The boxes with elements that the metadata of a sharded tensor names, and their ranks, by where they lie."""
    boxes = [(tuple(s.shard_offsets), tuple(s.shard_sizes), s.placement.rank()) for s in metadata.shards_metadata]
    return sorted(box for box in boxes if 0 not in box[1])


def describe(sharded: Any) -> dict[str, Any]:
    """What a sharded tensor says of itself, and what it holds on this rank, but for what has no elements."""
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
    """What a sharded tensor says of itself and what this rank holds of it; any other tensor as it is."""
    return describe(tensor) if isinstance(tensor, compat.ShardedTensor) else tensor


def spec_boxes(sharded: Any) -> list[Any]:
    """The boxes that the spec of a sharded tensor names."""
    return metadata_boxes(sharded.sharding_spec().build_metadata(sharded.size(), sharded.metadata().tensor_properties))


def outcome(attempt: Callable[..., Any], *arguments: Any) -> Any:
    """The exception that ``attempt`` raises, or the type of what it returns: sharded tensors cannot be printed."""
    try:
        return type(attempt(*arguments)).__name__
    except Exception as error:
        return error
