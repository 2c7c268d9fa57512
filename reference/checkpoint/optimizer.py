"""The part of an optimizer's state that a rank of a model on two axes loads.

Such a model is cut twice: along one axis every rank holds a *part* of a parameter, a box of it; along the other the ranks of a group
share the part in chunks of rows. The state of the optimizer has the shape of the parameter, so what a rank wants of a saved tensor
is its chunk of the part. The tensor that it fills knows nothing of the parameter: it has the size of the part and counts from its
beginning. So there are two ways to name a wanted box, by where it lies in the part and by where it lies in what was saved, and the
offset of the part leads from one to the other and back: :func:`shifted` and :func:`shifted_back` are inverse.

Source: the documentation of ``torch.distributed.checkpoint`` (``load_sharded_optimizer_state_dict``).
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.load_plan import ReadItem, read_items
from shardlaw.reference.notation import Shape
from shardlaw.reference.sharded_tensor import ChunkSpec


def part_chunks(part: Box, ranks: Sequence[int], rank: int) -> list[Box]:
    """The boxes that ``rank`` holds of a part that ``ranks`` share, counted from the beginning of the part: one with elements, or none."""
    if not part.size:
        return [Box((), ())]
    return [*ChunkSpec(0, tuple(ranks)).shards(part.size).without_empty().boxes_of(rank)]


def shift_box(box: Box, offset: Shape) -> Box:
    """A box of a part, as a box of the tensor in which the part begins at ``offset``."""
    return Box(tuple(start + by for start, by in zip(box.offset, offset, strict=True)), box.size)


def shift_box_back(box: Box, offset: Shape) -> Box:
    """The inverse of :func:`shifted`."""
    return Box(tuple(start - by for start, by in zip(box.offset, offset, strict=True)), box.size)


def part_items(chunks: Sequence[Box], part: Box, wanted: Sequence[Box]) -> list[ReadItem]:
    """What must be read of saved chunks to fill boxes of a part; offsets in a box are the same in either way to name it."""
    return read_items(chunks, [shift_box(box, part.offset) for box in wanted])


def surrounding_boxes(part: Box, shape: Shape) -> list[Box]:
    """Boxes that tile a tensor of ``shape`` together with a part that spans all dims but one: what lies before it, and behind it."""
    found = []
    for dim, (start, end, extent) in enumerate(zip(part.offset, part.end, shape, strict=True)):
        for first, last in ((0, start), (end, extent)):
            if first < last:
                found.append(Box.whole(shape).along(dim, start=first, size=last - first))
    return found
