"""Shard orders: mesh dims that cut a tensor dim in another order than from left to right.

Placements apply from the left mesh dim to the right (:mod:`shardlaw.reference.layout`). A *shard order* of a tensor dim lists the mesh dims
that shard it, the one that cuts first at the beginning. On a 2x2 mesh a dim of 8 in the order ``1,0`` is cut over mesh dim 1 first, then
each half over mesh dim 0:

=================  ==========  ==========  ==========  ==========
coordinate         (0, 0)      (0, 1)      (1, 0)      (1, 1)
=================  ==========  ==========  ==========  ==========
order ``0,1``      ``0 1``     ``2 3``     ``4 5``     ``6 7``
order ``1,0``      ``0 1``     ``4 5``     ``2 3``     ``6 7``
=================  ==========  ==========  ==========  ==========

Strided shards express such an order: the split factor is the product of the sizes of the mesh dims to the right that cut before. Where
every cut is even, the placements and the order mean the same. Where one is uneven, they round up in different places.

Source: the docstring of ``_StridedShard`` in ``torch.distributed.tensor.placement_types``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardlaw.reference.layout import Indices, chunk
from shardlaw.reference.mesh import Coord, Mesh
from shardlaw.reference.placement import Placement, Replicate, Shard, StridedShard

Order = tuple[int, ...]


def owned_in_order(size: int, mesh: Mesh, order: Sequence[int], coord: Coord) -> Indices:
    """The indices of a dim of ``size`` that the rank at ``coord`` owns when the mesh dims cut it in ``order``."""
    owned: Indices = tuple(range(size))
    for mesh_dim in order:
        owned = chunk(owned, mesh.shape[mesh_dim])[coord[mesh_dim]]
    return owned


def order_placements(mesh: Mesh, orders: dict[int, Order]) -> tuple[Placement, ...]:
    """The placements that express shard orders, given by tensor dim. Mesh dims in no order replicate."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, order in orders.items():
        for position, at in enumerate(order):
            factor = math.prod(mesh.shape[before] for before in order[:position] if before > at)
            placements[at] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return tuple(placements)
