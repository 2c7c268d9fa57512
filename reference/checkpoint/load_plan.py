"""What must be read: the parts of saved chunks that fill the boxes that are wanted.

A rank wants one box of a tensor for every shard that it holds. Wherever a saved chunk and a wanted box meet there is one *read item*:
a part of the chunk, the same part of the box, and the lengths of both. When the chunks tile the tensor, the items of a wanted box
tile the box, so that every element is read exactly once; anything else is refused.

Source: the documentation of ``torch.distributed.checkpoint`` (``LoadPlanner``, ``ReadItem``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardlaw.reference.box import Box, intersect, tiling_errors
from shardlaw.reference.checkpoint.save_plan import Metadata, TensorEntry
from shardlaw.reference.notation import Shape


@dataclass(frozen=True)
class ReadItem:
    """Elements that go from chunk number ``chunk`` to wanted box number ``box``.

    ``chunk_offset`` counts from the beginning of the chunk, ``box_offset`` from that of the box, in elements along every dim.
    """

    chunk: int
    box: int
    chunk_offset: Shape
    box_offset: Shape
    lengths: Shape


class LoadError(ValueError):
    """A destination that the checkpoint cannot fill: a name that it has not, another size, another kind, a hole."""


def read_items(chunks: Sequence[Box], wanted: Sequence[Box]) -> list[ReadItem]:
    """Every meeting of a chunk with a wanted box, by box and then by chunk. A 0-d chunk meets a 0-d box in its one element."""
    found = []
    for at, box in enumerate(wanted):
        for number, chunk in enumerate(chunks):
            common = intersect(chunk, box)
            if common is not None:
                found.append(
                    ReadItem(number, at, _relative(common.offset, chunk.offset), _relative(common.offset, box.offset), common.size)
                )
    return found


def _relative(offset: Shape, origin: Shape) -> Shape:
    return tuple(a - b for a, b in zip(offset, origin, strict=True))


def cover_errors(items: Sequence[ReadItem], wanted: Sequence[Box]) -> list[str]:
    """What keeps the items from filling every wanted box, each element once."""
    found = []
    for at, box in enumerate(wanted):
        parts = [Box(item.box_offset, item.lengths) for item in items if item.box == at]
        found += [f"box {at}: {error}" for error in tiling_errors(box.size, parts)]
    return found


def plan_reads(metadata: Metadata, wanted: Mapping[str, TensorEntry | None], *, partial: bool = False) -> dict[str, list[ReadItem]]:
    """The read items of every tensor of a destination, by name; ``wanted`` gives its shape and the boxes that a rank holds of it.

    With ``partial``, names that the checkpoint has not are left out. Raises :class:`LoadError`, which names the culprit.
    """
    found: dict[str, list[ReadItem]] = {}
    for name, entry in wanted.items():
        if name not in metadata.entries:
            if partial:
                continue
            raise LoadError(f"{name} is not in the checkpoint")
        saved = metadata.entries[name]
        if (saved is None) != (entry is None):
            raise LoadError(f"{name} is {'no ' if saved is None else 'a '}tensor in the checkpoint, and the other thing here")
        if saved is None or entry is None:
            found[name] = []
            continue
        if saved.shape != entry.shape:
            raise LoadError(f"{name} was saved with shape {saved.shape}, and has {entry.shape} here")
        items = read_items(saved.chunks, entry.chunks)
        holes = cover_errors(items, entry.chunks)
        if holes:
            raise LoadError(f"{name}: {'; '.join(holes)}")
        found[name] = items
    return found


def copy_items(items: Sequence[ReadItem], chunks: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Carry the items out: copy, and convert to the dtype of the destination, in place."""
    for item in items:
        source = chunks[item.chunk][Box(item.chunk_offset, item.lengths).slices()]
        wanted[item.box][Box(item.box_offset, item.lengths).slices()] = source.to(wanted[item.box].dtype)
