"""The part of an optimizer's state that a rank of a model on two axes loads.

Such a model is sharded twice: along one axis every rank holds a *part* of a parameter, which is a box; along the other the ranks of a
group hold the part in chunks of rows. The state of the optimizer has the shape of the parameter, so a rank wants its chunk of the part
from a saved tensor. The tensor that it loads into has the size of the part, and offsets in it are relative to the part. The offset of the
part translates between them and offsets in the saved tensor: :func:`shift_box` and :func:`shift_box_back` are inverse.

Source: the documentation of ``torch.distributed.checkpoint`` (``load_sharded_optimizer_state_dict``).
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.load_plan import ReadItem, read_items
from shardlaw.reference.notation import Shape
from shardlaw.reference.sharded_tensor import ChunkSpec


def part_chunks(part: Box, ranks: Sequence[int], rank: int) -> list[Box]:
    """The chunk that ``rank`` holds of a part that is chunked over ``ranks``, relative to the part: a box with elements, or no box."""
    if not part.size:
        return [Box((), ())]
    return [*ChunkSpec(0, tuple(ranks)).shards(part.size).without_empty().boxes_of(rank)]


def shift_box(box: Box, offset: Shape) -> Box:
    """A box relative to a part, as a box of the tensor in which the part has this ``offset``."""
    return Box(tuple(start + by for start, by in zip(box.offset, offset, strict=True)), box.size)


def shift_box_back(box: Box, offset: Shape) -> Box:
    """The inverse of :func:`shift_box`."""
    return Box(tuple(start - by for start, by in zip(box.offset, offset, strict=True)), box.size)


def part_items(chunks: Sequence[Box], part: Box, wanted: Sequence[Box]) -> list[ReadItem]:
    """The read items that fill boxes of a part, given relative to it, from saved chunks."""
    return read_items(chunks, [shift_box(box, part.offset) for box in wanted])


def surrounding_boxes(part: Box, shape: Shape) -> list[Box]:
    """The boxes before and behind a part that spans all dims but one: with the part they tile a tensor of ``shape``."""
    found = []
    for dim, (start, end, extent) in enumerate(zip(part.offset, part.end, shape, strict=True)):
        for first, last in ((0, start), (end, extent)):
            if first < last:
                found.append(Box.whole(shape).along(dim, start=first, size=last - first))
    return found
