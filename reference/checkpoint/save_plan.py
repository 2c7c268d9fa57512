"""Plans of a save: the write items of every rank, the global plan, and when it is valid.

Each rank lists what it holds: a *write item* for every box of a tensor, and one for every other leaf. The coordinator then sees the plans
of all ranks. An item that several ranks hold stays in one plan and is removed from the others (:func:`dedup`). Metadata lists the chunks
of each tensor in the order of the ranks that write them (:func:`describe`); they must tile the tensor (:func:`metadata_errors`).

Two items with the same name and offset are duplicates. So the empty box of a rank that holds nothing of a tensor must not begin where the
box of another rank does: by rule it begins at the end of the tensor.

Source: the documentation of ``torch.distributed.checkpoint`` (``SavePlanner``, ``DefaultSavePlanner``, ``dedup_save_plans``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardlaw.reference.box import Box, tiling_errors
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Coord
from shardlaw.reference.notation import Shape
from shardlaw.reference.tensors import DTYPES


@dataclass(frozen=True)
class WriteItem:
    """A leaf, or a part of one, that a rank can write under ``name``.

    ``box`` is the part of the tensor of ``shape`` and ``dtype`` that it holds, ``None`` for a leaf that is no tensor.
    ``replica``: every rank holds all of it, as of a plain tensor or of a leaf that is no tensor.
    """

    name: str
    box: Box | None = None
    shape: Shape = ()
    dtype: str = "float32"
    replica: bool = False

    @property
    def offset(self) -> Shape | None:
        """Where the box begins. Items with the same name and offset are duplicates."""
        return None if self.box is None else self.box.offset

    @property
    def size(self) -> int:
        """The weight of the item when writes are balanced: its size in bytes, 1 where that is 0 or unknown."""
        return self.box.volume * DTYPES[self.dtype].itemsize or 1 if self.box is not None else 1


Key = tuple[str, Shape | None]
Plan = tuple[WriteItem, ...]


@dataclass(frozen=True)
class TensorEntry:
    """The metadata of a tensor: its global shape, its stored chunks in order, and its dtype."""

    shape: Shape
    chunks: tuple[Box, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Metadata:
    """The metadata of a checkpoint: an entry for each name, ``None`` for a leaf that is no tensor."""

    entries: dict[str, TensorEntry | None] = field(default_factory=dict)

    def chunk(self, name: str, offset: Shape, hint: int | None = None) -> Box:
        """The chunk of a tensor that begins at ``offset``. ``hint`` is a position to look at first; a wrong one changes nothing.

        Raises ``KeyError`` where there is no such chunk.
        """
        entry = self.entries[name]
        chunks = () if entry is None else entry.chunks
        first = chunks[hint : hint + 1] if hint is not None and hint >= 0 else ()
        for box in (*first, *chunks):
            if box.offset == offset:
                return box
        raise KeyError((name, offset))


def shard_items(name: str, layout: Layout, coord: Coord | None, dtype: str = "float32") -> Plan:
    """The items of a sharded tensor on the rank at ``coord``: one, or none for a rank outside the mesh.

    Raises ``ValueError`` where what the rank holds is no box, or holds contributions of a reduction that is pending.
    """
    if coord is None:
        return ()
    box = layout.box(coord)
    if box is None or layout.has_partial():
        raise ValueError(f"{name}: the rank at {coord} holds no box of {layout}")
    return (WriteItem(name, box, layout.shape, dtype),)


def box_items(name: str, shape: Shape, boxes: Iterable[Box], dtype: str = "float32") -> Plan:
    """The items of a rank that holds ``boxes`` of a tensor."""
    return tuple(WriteItem(name, box, shape, dtype) for box in boxes)


def plain_items(name: str, shape: Shape, dtype: str = "float32") -> Plan:
    """The item of a plain tensor, which every rank holds in full."""
    return (WriteItem(name, Box.whole(shape), shape, dtype, replica=True),)


def value_items(name: str) -> Plan:
    """The item of a leaf that is no tensor."""
    return (WriteItem(name, replica=True),)


def dedup(plans: Sequence[Plan], *, lowest: bool = False) -> list[Plan]:
    """The plans, with each item in only one of those that have it.

    Items are assigned in order, rank by rank. Each goes to the holder with the smallest load so far, the lowest of several; or, with
    ``lowest``, to the lowest rank that holds it.
    """
    holders: dict[Key, list[int]] = {}
    items: dict[Key, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan:
            ranks = holders.setdefault((item.name, item.offset), [])
            if rank not in ranks:
                ranks.append(rank)
            items[item.name, item.offset] = item
    load = [0] * len(plans)
    writer: dict[Key, int] = {}
    for key, ranks in holders.items():
        chosen = min(ranks) if lowest else min(ranks, key=lambda rank: (load[rank], rank))
        load[chosen] += items[key].size
        writer[key] = chosen
    return [tuple(item for item in plan if writer[item.name, item.offset] == rank) for rank, plan in enumerate(plans)]


def describe(plans: Sequence[Plan]) -> Metadata:
    """The metadata of a checkpoint that these plans write. Raises ``ValueError`` where a leaf is written twice."""
    entries: dict[str, TensorEntry | None] = {}
    for plan in plans:
        for item in plan:
            if item.replica and item.name in entries:
                raise ValueError(f"{item.name} is written twice")
            if item.box is None:
                entries[item.name] = None
                continue
            known = entries.get(item.name)
            entry = known if known is not None else TensorEntry(item.shape, (), item.dtype)
            entries[item.name] = TensorEntry(entry.shape, (*entry.chunks, item.box), entry.dtype)
    return Metadata(entries)


def metadata_errors(metadata: Metadata) -> list[str]:
    """Why chunks do not tile their tensors; an empty list when every element of every tensor is stored once."""
    found = []
    for name, entry in metadata.entries.items():
        if entry is not None:
            found += [f"{name}: {error}" for error in tiling_errors(entry.shape, entry.chunks)]
    return found


def split_by_thread(items: Sequence[WriteItem], threads: int) -> list[list[WriteItem]]:
    """The items of a rank by the thread that writes them. Leaves that are no tensors are assigned in turn, tensors by size, the largest
    first, each to the thread with the least bytes."""
    if threads == 1:
        return [list(items)]
    shared: list[list[WriteItem]] = [[] for _ in range(threads)]
    load = [0] * threads
    for at, item in enumerate(item for item in items if item.box is None):
        shared[at % threads].append(item)
    for item in sorted((item for item in items if item.box is not None), key=_tensor_bytes, reverse=True):
        least = load.index(min(load))
        shared[least].append(item)
        load[least] += _tensor_bytes(item)
    return shared


def _tensor_bytes(item: WriteItem) -> int:
    return math.prod(item.shape) * DTYPES[item.dtype].itemsize
