"""The executable specification of sharding semantics.

Nothing here starts a process, draws a random number or asks ``torch.distributed`` anything: placement math is plain
integers, values are dense CPU tensors. Read :mod:`reference.layout`      first; it holds the one idea that everything else
follows from.

===========================  =====================================================================================
:mod:`reference.notation`    shapes, meshes and placements as one line of text, and back
:mod:`reference.mesh`        who sits where: coordinates, ranks, groups
:mod:`reference.placement`   the words: replicate, shard, strided shard, partial, masked partial
:mod:`reference.layout`      who owns which element, as ordered lists of indices
:mod:`reference.orders`      shard orders: a dim that mesh dims cut in another order than from left to right
:mod:`reference.box`         rectangles of indices: intersection, exact tiling
:mod:`reference.shards`      tensors that are handed out in boxes of any size, several a rank or none
:mod:`reference.tensors`     dense tensors whose every element is distinct and exact
:mod:`reference.simulate`    a whole world in one process: distribute, assemble, reduce, redistribute
:mod:`reference.checkpoint`  what a checkpoint holds: nested states and their leaves
===========================  =====================================================================================
"""

from reference.box import Box
from reference.layout import Layout, LayoutError
from reference.mesh import Mesh, MeshError
from reference.notation import NotationError
from reference.placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard

__all__ = [
    "Box",
    "Layout",
    "LayoutError",
    "MaskPartial",
    "Mesh",
    "MeshError",
    "NotationError",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
]
