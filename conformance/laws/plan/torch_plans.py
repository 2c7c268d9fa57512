"""Conversions between the plans of torch and plain values, for the acts of this chapter.

Local plans and the global plan are computed without communication, so one process computes those of all ranks.

Plain values: a box is ``(offset, size)``. A write item is ``(name, box, shape, dtype, is_replicated)``, or ``(name,)``
if it is not a tensor. A saved tensor is ``(shape, dtype, chunks)``, any other saved value ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, zip_longest
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
Item = tuple[Any, ...]


# Plain values to torch


def chunk_metadata(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))


def write_item(
    hint: int | None,
    name: str,
    box: Box | None = None,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    is_replicated: bool = True,
) -> WriteItem:
    if box is None:
        return WriteItem(MetadataIndex(name, index=hint), WriteItemType.BYTE_IO)
    data = TensorWriteData(chunk_metadata(box), TensorProperties(dtype), torch.Size(shape))
    kind = WriteItemType.TENSOR if is_replicated else WriteItemType.SHARD
    return WriteItem(MetadataIndex(name, torch.Size(box[0]), hint), kind, tensor_data=data)


def to_save_plans(plans: Iterable[Iterable[Item]], hints: Sequence[int | None] = (None,)) -> list[SavePlan]:
    """Local plans of torch; the path of a leaf is its name, and the items take the index hints in turn."""
    next_hints = cycle(hints)
    return [
        SavePlan(
            [write_item(next(next_hints), *item) for item in items],
            planner_data={name: (name,) for name, *_ in items},
        )
        for items in plans
    ]


def tensor_metadata(shape: Shape, dtype: torch.dtype, chunks: Iterable[Box]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [chunk_metadata(box) for box in chunks])


def to_metadata(saved: Mapping[str, Any]) -> Metadata:
    return Metadata(
        {name: BytesStorageMetadata() if leaf is None else tensor_metadata(*leaf) for name, leaf in saved.items()}
    )


# torch to plain values


def plain_item(item: WriteItem) -> Item:
    if item.tensor_data is None:
        return (item.index.fqn,)
    data = item.tensor_data
    box = (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if item.index.offset is None or tuple(item.index.offset) != box[0]:
        raise ValueError(f"the index of {item.index.fqn} says {item.index.offset}, its chunk begins at {box[0]}")
    return item.index.fqn, box, tuple(data.size), data.properties.dtype, item.type == WriteItemType.TENSOR


def has_elements(item: Item) -> bool:
    """Whether a write item is a value, or a part of a tensor that is not empty."""
    return len(item) == 1 or 0 not in item[1][1]


def leaves_of(metadata: Metadata) -> dict[str, Any]:
    """The entries of metadata as plain values, by name, without empty chunks."""
    return {
        name: (tuple(entry.size), entry.properties.dtype, nonempty_boxes(entry.chunks))
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in sorted(metadata.state_dict_metadata.items())
    }


def nonempty_boxes(chunks: Iterable[ChunkStorageMetadata]) -> list[Box]:
    return sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if 0 not in chunk.sizes)


def paths_of(metadata: Metadata) -> dict[str, Any]:
    return dict(sorted(metadata.planner_data.items()))


# Planners of torch


def local_plan(state: dict[str, Any], coordinator: bool = False, planner: SavePlanner | None = None) -> SavePlan:
    """The local save plan of a rank for its state."""
    planner = planner or DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=coordinator)
    return planner.create_local_plan()


def global_plan(plans: list[SavePlan], lowest: bool = False) -> tuple[list[SavePlan], Metadata]:
    """The deduplicated plan of each rank, and the metadata."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    planner.set_up_planner({}, is_coordinator=True)
    return planner.create_global_plan(plans)


def load_items(state: dict[str, Any], metadata: Metadata, partial: bool = False) -> list[ReadItem]:
    """The read items of a rank for its state."""
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    planner.set_up_planner(state, metadata)
    return planner.create_local_plan().items


# Boxes and comparisons


def box_slices(offset: Shape, size: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in zip(offset, size, strict=True))


def untiled_elements(shape: Shape, boxes: Sequence[Box]) -> list[Any]:
    """The indices of elements that not exactly one box covers, and the nonempty boxes that are out of bounds."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for offset, size in boxes:
        counts[box_slices(offset, size)] += 1
    beyond = [
        box
        for box in boxes
        if 0 not in box[1] and any(a + n > extent for a, n, extent in zip(*box, shape, strict=True))
    ]
    return [*(counts != 1).nonzero().tolist(), *beyond]


def element_numbers(shape: Shape) -> torch.Tensor:
    """A tensor whose elements are numbered from 0, in row-major order."""
    return torch.arange(math.prod(shape)).reshape(shape)


def differing_pairs(first: Iterable[Any], second: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The pairs at the same position that are not equal."""
    return [pair for pair in zip_longest(first, second) if pair[0] != pair[1]]
