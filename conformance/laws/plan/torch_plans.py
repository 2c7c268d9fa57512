"""Plans of torch from plain values, and plain values from plans of torch: what the acts of this chapter do with them.

A plan is made by every rank for itself and then by one of them for all, and none of it communicates. So one process
plays all ranks.
As plain values, a box is its offset and its size; a write item is its name, box, the shape and dtype of the tensor,
and whether every
rank holds that whole, or its name alone where it is no tensor; a saved tensor is its shape, its dtype and its chunks,
``None`` a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, zip_longest
from typing import TYPE_CHECKING, Any

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

from shardlaw.conformance import compat
from shardlaw.reference.mesh import Mesh

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
Item = tuple[Any, ...]


# to torch


def chunk_metadata(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))


def write_item(
    hint: int | None,
    name: str,
    box: Box | None = None,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    everywhere: bool = True,
) -> WriteItem:
    if box is None:
        return WriteItem(MetadataIndex(name, index=hint), WriteItemType.BYTE_IO)
    data = TensorWriteData(chunk_metadata(box), TensorProperties(dtype), torch.Size(shape))
    kind = WriteItemType.TENSOR if everywhere else WriteItemType.SHARD
    return WriteItem(MetadataIndex(name, torch.Size(box[0]), hint), kind, tensor_data=data)


def to_save_plans(plans: Iterable[Iterable[Item]], hints: Sequence[int | None] = (None,)) -> list[SavePlan]:
    """Local plans as ranks send them, each leaf with its name as its path; the items take the hints in turn."""
    next_hints = cycle(hints)
    local_plans = []
    for items in plans:
        paths = {name: (name,) for name, *_ in items}
        local_plans.append(SavePlan([write_item(next(next_hints), *item) for item in items], planner_data=paths))
    return local_plans


def tensor_metadata(shape: Shape, dtype: torch.dtype, chunks: Iterable[Box]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [chunk_metadata(box) for box in chunks])


def to_metadata(saved: Mapping[str, Any]) -> Metadata:
    return Metadata(
        {name: BytesStorageMetadata() if leaf is None else tensor_metadata(*leaf) for name, leaf in saved.items()}
    )


# from torch


def plain_item(item: WriteItem) -> Item:
    if item.tensor_data is None:
        return (item.index.fqn,)
    data = item.tensor_data
    box = (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if item.index.offset is None or tuple(item.index.offset) != box[0]:
        raise ValueError(f"the index of {item.index.fqn} says {item.index.offset}, its chunk begins at {box[0]}")
    return item.index.fqn, box, tuple(data.size), data.properties.dtype, item.type == WriteItemType.TENSOR


def has_elements(item: Item) -> bool:
    """Whether an item is no tensor, or one with elements."""
    return len(item) == 1 or 0 not in item[1][1]


def leaves_of(metadata: Metadata) -> dict[str, Any]:
    """What metadata says of every leaf, by name; of tensors the chunks that have elements, in the order of their
    places."""
    found: dict[str, Any] = {}
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        found[name] = None
        if isinstance(entry, TensorStorageMetadata):
            found[name] = (tuple(entry.size), entry.properties.dtype, nonempty_boxes(entry.chunks))
    return found


def nonempty_boxes(chunks: Iterable[ChunkStorageMetadata]) -> list[Box]:
    return sorted((tuple(one.offsets), tuple(one.sizes)) for one in chunks if 0 not in one.sizes)


def paths_of(metadata: Metadata) -> dict[str, Any]:
    return dict(sorted(metadata.planner_data.items()))


# what is asked of torch


def local_plan(state: dict[str, Any], coordinator: bool = False, planner: SavePlanner | None = None) -> SavePlan:
    """The plan of one rank for its state."""
    planner = planner or DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=coordinator)
    return planner.create_local_plan()


def global_plan(plans: list[SavePlan], lowest: bool = False) -> tuple[list[SavePlan], Metadata]:
    """The plans of all ranks, as the coordinator shares them out, and the metadata."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    planner.set_up_planner({}, is_coordinator=True)
    return planner.create_global_plan(plans)


def load_items(state: dict[str, Any], metadata: Metadata, partial: bool = False) -> list[ReadItem]:
    """What one rank is to read for its state."""
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    planner.set_up_planner(state, metadata)
    return planner.create_local_plan().items


# what is found


def box_slices(offset: Shape, size: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in zip(offset, size, strict=True))


def untiled_elements(shape: Shape, boxes: Sequence[Box]) -> list[Any]:
    """The elements of a tensor that boxes do not cover once, and the boxes with elements that reach beyond its end."""
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
    """The elements of a tensor as their numbers."""
    return torch.arange(math.prod(shape)).reshape(shape)


def differing_pairs(ones: Iterable[Any], others: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The pairs of two lists that are not equal."""
    return [(one, other) for one, other in zip_longest(ones, others) if one != other]


# for laws that have a check of their own


def need(here: RankContext, *keys: str) -> list[Any]:
    """Private names of torch; where one is gone, the case is given up, and with all cases the law."""
    try:
        return [compat.name(key) for key in keys]
    except compat.TorchMovedError as moved:
        here.reject(str(moved))
        raise


def seated(here: RankContext, mesh: Mesh, rank: int) -> Any:
    """The mesh as ``rank`` sees it."""
    try:
        return compat.mesh_for_rank(here.device.type, torch.tensor(mesh.ranks).reshape(mesh.shape), rank)
    except compat.TorchMovedError as moved:
        here.reject(str(moved))
