"""Strategies for placements: one for each mesh dim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import REDUCE_OPS, Partial, Placement, Placements, Replicate, Shard, StridedShard, shard_dim
from shardlaw.strategies._arguments import check_choices, check_count, check_sizes, format_arguments

KINDS = ("R", "S", "_S", "P")


def placements(
    mesh: Mesh,
    ndim: int,
    *,
    kinds: Iterable[str] = KINDS,
    reduce_ops: Iterable[str] = ("sum",),
    split_factors: Iterable[int] = (2, 3),
    negative: bool = False,
) -> SearchStrategy[Placements]:
    """Placements of a tensor of ``ndim`` dims on ``mesh``: a tuple with one placement for each mesh dim.

    ``kinds`` says which ones: ``R`` replicate, ``S`` shard, ``_S`` strided shard (with one of ``split_factors``), ``P`` partial
    (with one of ``reduce_ops``). A 0-d tensor is never sharded. Reductions are not mixed, except ``sum`` with ``avg``. On a mesh
    of several dims two of them often shard the same tensor dim. With ``negative``, some dims count from the end: ``S(-1)``.

    Shrinks to all ``R`` (or the first of ``kinds``), each mesh dim by itself, in the order of :data:`KINDS`; shards to dim 0, then
    to the dim that an earlier mesh dim shards.

    Raises ``InvalidArgument`` where no placement satisfies the options.
    """
    if not isinstance(mesh, Mesh):
        raise InvalidArgument(f"{format_arguments(mesh=mesh)}: want a shardlaw.reference.mesh.Mesh")
    check_count("ndim", ndim)
    chosen = check_choices("kinds", kinds, KINDS)
    ops = check_choices("reduce_ops", reduce_ops, REDUCE_OPS) if "P" in chosen else ()
    factors = check_sizes("split_factors", split_factors, 1) if "_S" in chosen else ()
    return _placements(mesh.ndim, ndim, tuple(kind for kind in KINDS if kind in chosen), ops, factors, bool(negative))


@cache
def _placements(
    mesh_ndim: int, ndim: int, kinds: tuple[str, ...], ops: tuple[str, ...], factors: tuple[int, ...], negative: bool
) -> SearchStrategy[Placements]:
    first = placement_options(ndim, kinds, ops, factors, negative)
    if mesh_ndim == 1:
        return first.map(lambda placement: (placement,))

    @st.composite
    def drawn(draw: st.DrawFn) -> Placements:
        placed: list[Placement] = []
        for _ in range(mesh_ndim):
            favoured = favoured_dim(placed, ndim)
            placed.append(match_reduction(draw(placement_options(ndim, kinds, ops, factors, negative, favoured)), placed))
        return tuple(placed)

    return drawn()


def favoured_dim(placed: Sequence[Placement], ndim: int) -> int | None:
    """The tensor dim that the last sharding mesh dim shards; the next mesh dim is likely to shard it too."""
    dims = [dim % ndim for dim in map(shard_dim, placed) if dim is not None]
    return dims[-1] if dims else None


# The weight of each kind among the options of a mesh dim, and of the favoured dim among the dims of a shard.
WEIGHT = {"R": 24, "S": 54, "_S": 12, "P": 18}
FAVOUR = 0.7


@cache
def placement_options(
    ndim: int,
    kinds: tuple[str, ...],
    ops: tuple[str, ...],
    factors: tuple[int, ...],
    negative: bool = False,
    favoured: int | None = None,
) -> SearchStrategy[Placement]:
    """The placements of one mesh dim, the plainest first, repeated by weight; ``kinds`` in the order of :data:`KINDS`.

    The options of two tensors differ in nothing but the dims, so that a tensor can lose dims while it is shrunk and keep its
    placements.
    """
    parts: dict[str, list[Placement]] = {
        "R": [Replicate()] * WEIGHT["R"],
        "S": [Shard(dim) for dim in _dims(ndim, WEIGHT["S"], favoured)],
        "_S": [StridedShard(dim, factor) for factor in factors for dim in _dims(ndim, WEIGHT["_S"] // len(factors), favoured)],
        "P": [Partial(op) for op in ops for _ in range(max(1, WEIGHT["P"] // len(ops)))],
    }
    if negative:
        parts["S"] += [Shard(dim - ndim) for dim in _dims(ndim, WEIGHT["S"] // 4, None)]
        parts["_S"] += [StridedShard(dim - ndim, factor) for factor in factors for dim in _dims(ndim, 3, None)]
    # a 0-d tensor has this in place of shards
    instead: Placement | None = Replicate() if "R" in kinds else Partial(ops[0]) if ops else None
    if not ndim and instead is None:
        raise InvalidArgument(f"{format_arguments(kinds=kinds, ndim=ndim)}: a 0-d tensor cannot be sharded, and no other kind is allowed")
    given = [placement for kind in kinds for placement in parts[kind]]
    return st.sampled_from([instead if instead and not ndim and shard_dim(placement) is not None else placement for placement in given])


def _dims(ndim: int, weight: int, favoured: int | None) -> list[int]:
    """The dims of a tensor, repeated in blocks, ``favoured`` first and most often.

    There are at least three blocks, one for each dim in order; the places of spare blocks are divided among all dims.
    """
    order = list(range(max(ndim, 1)))
    blocks = max(3, ndim)
    width = [max(1, weight // blocks)] * blocks
    if favoured is not None:
        order.insert(0, order.pop(favoured))
        width = [round(weight * FAVOUR), *[max(1, round(weight * (1 - FAVOUR) / (blocks - 1)))] * (blocks - 1)]
    left = sum(width[len(order) :])
    spare = [order[at * len(order) // left] for at in range(left)]
    return [dim for dim, times in zip(order, width, strict=False) for _ in range(times)] + spare


def match_reduction(placement: Placement, earlier: Sequence[Placement]) -> Placement:
    """``placement``; instead of a reduction that must not be mixed with that of an earlier mesh dim, the earlier one."""
    if isinstance(placement, Partial):
        for other in earlier:
            if isinstance(other, Partial) and not {other.op, placement.op} <= {"sum", "avg"}:
                return other
    return placement
