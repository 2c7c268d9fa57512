"""Shards of one tensor dim that are cut in another order of mesh dims than from left to right.

Placements apply from the left mesh dim to the right (:mod:`shardlaw.reference.layout`). A *shard order* says otherwise: of the mesh dims
that shard a tensor dim, which cuts first. On a 2x2 mesh a dim of 8 in the order ``1,0`` is cut over mesh dim 1 first, each half then over
mesh dim 0:

=================  ==========  ==========  ==========  ==========
coordinate         (0, 0)      (0, 1)      (1, 0)      (1, 1)
=================  ==========  ==========  ==========  ==========
order ``0,1``      ``0 1``     ``2 3``     ``4 5``     ``6 7``
order ``1,0``      ``0 1``     ``4 5``     ``2 3``     ``6 7``
=================  ==========  ==========  ==========  ==========

A strided shard writes such an order down: its split factor is the product of the sizes of those mesh dims that cut before it although
they stand to its right. Where every cut is even the placements and the order mean the same; where one is not, they round up in
different places.

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
    """The indices of a dim of ``size`` that the rank at ``coord`` holds when the mesh dims of ``order`` cut it, the first one first."""
    held: Indices = tuple(range(size))
    for at in order:
        held = chunk(held, mesh.shape[at])[coord[at]]
    return held


def order_placements(mesh: Mesh, orders: dict[int, Order]) -> tuple[Placement, ...]:
    """The placements that write shard orders down, by tensor dim; mesh dims that no order names replicate."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, order in orders.items():
        for position, at in enumerate(order):
            factor = math.prod(mesh.shape[before] for before in order[:position] if before > at)
            placements[at] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return tuple(placements)
