"""The executable specification of sharding semantics.

Nothing here starts a process, draws a random number or asks ``torch.distributed`` anything: placement math is plain
integers, values are dense CPU tensors. Read :mod:`shardlaw.reference.layout`      first; it holds the one idea that everything else
follows from.

===========================  =====================================================================================
:mod:`shardlaw.reference.notation`    shapes, meshes and placements as one line of text, and back
:mod:`shardlaw.reference.mesh`        who sits where: coordinates, ranks, groups
:mod:`shardlaw.reference.placement`   the words: replicate, shard, strided shard, partial, masked partial
:mod:`shardlaw.reference.layout`      who owns which element, as ordered lists of indices
:mod:`shardlaw.reference.orders`      shard orders: a dim that mesh dims cut in another order than from left to right
:mod:`shardlaw.reference.box`         rectangles of indices: intersection, exact tiling
:mod:`shardlaw.reference.shards`      who holds what, in boxes of any size: by one rank or several, several a rank or none
:mod:`shardlaw.reference.tensors`     dense tensors whose every element is distinct and exact
:mod:`shardlaw.reference.simulate`    a whole world in one process: distribute, assemble, reduce, redistribute
:mod:`shardlaw.reference.checkpoint`  what a checkpoint holds: nested states and their leaves
===========================  =====================================================================================
"""

from shardlaw.reference.box import Box
from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Mesh, MeshError
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard

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
