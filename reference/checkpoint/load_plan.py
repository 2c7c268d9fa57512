"""Plans of a load: the parts of saved chunks that fill the wanted boxes.

A rank wants one box of a tensor for each shard that it holds. Each intersection of a saved chunk with a wanted box is one *read item*: an
offset in the chunk, an offset in the box, and lengths. When the chunks tile the tensor, the items of a wanted box tile the box, so that
every element is read exactly once; anything else is an error.

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

    ``chunk_offset`` is relative to the chunk, ``box_offset`` to the box; all are in elements, for each dim.
    """

    chunk: int
    box: int
    chunk_offset: Shape
    box_offset: Shape
    lengths: Shape


class LoadError(ValueError):
    """A destination that the checkpoint cannot fill: a missing name, another size or kind, or elements that are not saved."""


def read_items(chunks: Sequence[Box], wanted: Sequence[Box]) -> list[ReadItem]:
    """Every intersection of a chunk with a wanted box, by box and then by chunk. A 0-d chunk and a 0-d box share their one element."""
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
    """Why the items do not fill every wanted box, each element once; an empty list when they do."""
    found = []
    for at, box in enumerate(wanted):
        parts = [Box(item.box_offset, item.lengths) for item in items if item.box == at]
        found += [f"box {at}: {error}" for error in tiling_errors(box.size, parts)]
    return found


def plan_reads(metadata: Metadata, wanted: Mapping[str, TensorEntry | None], *, partial: bool = False) -> dict[str, list[ReadItem]]:
    """The read items of every tensor of a destination, by name; ``wanted`` gives its shape and the boxes that a rank holds of it.

    With ``partial``, names that are not in the checkpoint are left out. Raises :class:`LoadError`, with the name.
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
    """Copy the elements of all items, converted to the dtype of the destination, in place."""
    for item in items:
        source = chunks[item.chunk][Box(item.chunk_offset, item.lengths).slices()]
        wanted[item.box][Box(item.box_offset, item.lengths).slices()] = source.to(wanted[item.box].dtype)
