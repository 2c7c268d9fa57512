"""The executable specification of sharding semantics.

Nothing here starts a process, draws a random number or calls ``torch.distributed``: placement math is plain integers, values are dense CPU
tensors. Read :mod:`shardlaw.reference.layout` first: everything else follows from its idea.

===========================  =====================================================================================
:mod:`shardlaw.reference.notation`    shapes, meshes and placements as one line of text, and back
:mod:`shardlaw.reference.mesh`        tables of ranks: coordinates, groups, slices
:mod:`shardlaw.reference.placement`   replicate, shard, strided shard, partial, masked partial
:mod:`shardlaw.reference.layout`      which rank owns which element, as ordered lists of indices
:mod:`shardlaw.reference.orders`      shard orders: a dim that mesh dims shard in another order than from left to right
:mod:`shardlaw.reference.box`         rectangles of indices: intersection, exact tiling
:mod:`shardlaw.reference.shards`      tensors in boxes of any size, each held by one or more ranks
:mod:`shardlaw.reference.tensors`     dense tensors whose every element is distinct and exact
:mod:`shardlaw.reference.simulate`    all ranks in one process: distribute, assemble, reduce, redistribute
:mod:`shardlaw.reference.checkpoint`  checkpoints: nested states, plans of a save and a load
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
