"""Who writes what: the write items of every rank, the global plan that is made of them, and what must be true of it.

Each rank says what it holds: one *write item* for every piece of a tensor, with the box that the piece fills, and one for every other
leaf. Then one rank, the coordinator, sees the plans of all ranks. What several ranks hold is kept in one plan and struck from the
others (:func:`dedup`); the chunks of each tensor are listed in the order of the ranks that write them (:func:`describe`), and
must tile the tensor: in bounds, disjoint, covering (:func:`errors`).

Two items are the same thing held twice when they have one name and one offset. So the box of a rank that holds nothing of a
tensor must not begin where that of another does: by rule it begins at the end of the tensor.

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
    """Something that a rank can write under ``name``.

    ``box`` is the part of the tensor of ``shape`` and ``dtype`` that it holds, ``None`` for a leaf that is no tensor.
    ``replica``: every rank is expected to hold it whole, as it does a plain tensor or any other leaf.
    """

    name: str
    box: Box | None = None
    shape: Shape = ()
    dtype: str = "float32"
    replica: bool = False

    @property
    def offset(self) -> Shape | None:
        """Where the piece begins: with the name, what makes two items one."""
        return None if self.box is None else self.box.offset

    @property
    def size(self) -> int:
        """What the item counts when writes are shared out: the bytes that it has, 1 where it has none or they are not known."""
        return self.box.volume * DTYPES[self.dtype].itemsize or 1 if self.box is not None else 1


Key = tuple[str, Shape | None]
Plan = tuple[WriteItem, ...]


@dataclass(frozen=True)
class TensorEntry:
    """What metadata says of a tensor: its global shape, the chunks that are stored of it, in order, and its dtype."""

    shape: Shape
    chunks: tuple[Box, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Metadata:
    """What a checkpoint says of itself: an entry a name, ``None`` for a leaf that is no tensor."""

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
    """The items of a rank that holds any boxes of a tensor."""
    return tuple(WriteItem(name, box, shape, dtype) for box in boxes)


def plain_items(name: str, shape: Shape, dtype: str = "float32") -> Plan:
    """The item of a tensor that every rank holds whole."""
    return (WriteItem(name, Box.whole(shape), shape, dtype, replica=True),)


def value_items(name: str) -> Plan:
    """The item of a leaf that is no tensor."""
    return (WriteItem(name, replica=True),)


def dedup(plans: Sequence[Plan], *, lowest: bool = False) -> list[Plan]:
    """The same plans, each item left in one of those that hold it.

    Items are shared out in the order in which they are first met, rank by rank. Each goes to the rank to which least has gone so
    far, the lowest of several; or, with ``lowest``, to the lowest rank that holds it.
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
    """The metadata of a checkpoint that is written by these plans. Raises ``ValueError`` where one leaf is written twice."""
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
    """What keeps the chunks of any tensor from tiling it; an empty list when every tensor is stored whole, each element once."""
    found = []
    for name, entry in metadata.entries.items():
        if entry is not None:
            found += [f"{name}: {error}" for error in tiling_errors(entry.shape, entry.chunks)]
    return found


def split_by_thread(items: Sequence[WriteItem], threads: int) -> list[list[WriteItem]]:
    """How a rank shares its items among the files of its threads: other leaves in turn, tensors by size, the largest first, each to
    the file with the least in it."""
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
