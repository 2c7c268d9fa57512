"""Strategies for placements: one for each mesh dim."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from reference.mesh import Mesh
from reference.placement import REDUCE_OPS, Partial, Placement, Placements, Replicate, Shard, StridedShard, shard_dim
from strategies._arguments import check_choices, check_count, check_sizes, refuse

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
        raise InvalidArgument(f"{refuse(mesh=mesh)}: want a reference.mesh.Mesh")
    check_count("ndim", ndim)
    chosen = check_choices("kinds", kinds, KINDS)
    ops = check_choices("reduce_ops", reduce_ops, REDUCE_OPS) if "P" in chosen else ()
    factors = check_sizes("split_factors", split_factors, 1) if "_S" in chosen else ()
    return _placements(mesh.ndim, ndim, tuple(kind for kind in KINDS if kind in chosen), ops, factors, bool(negative))


@cache
def _placements(  # noqa: PLR0917
    mesh_ndim: int, ndim: int, kinds: tuple[str, ...], ops: tuple[str, ...], factors: tuple[int, ...], negative: bool
) -> SearchStrategy[Placements]:
    options = {favoured: st.sampled_from(_options(ndim, kinds, ops, factors, negative, favoured)) for favoured in (None, *range(ndim))}
    if mesh_ndim == 1:
        return options[None].map(lambda placement: (placement,))

    @st.composite
    def drawn(draw: st.DrawFn) -> Placements:
        placed: list[Placement] = []
        favoured: int | None = None
        for _ in range(mesh_ndim):
            placement = draw(options[favoured])
            dim = shard_dim(placement)
            favoured = favoured if dim is None else dim % ndim
            placed.append(_unmixed(placement, placed))
        return tuple(placed)

    return drawn()


# How many times each kind stands among the options of a mesh dim.
WEIGHT = {"R": 24, "S": 54, "_S": 12, "P": 18}
FAVOUR = 0.7


@cache
def _options(  # noqa: PLR0917
    ndim: int, kinds: tuple[str, ...], ops: tuple[str, ...], factors: tuple[int, ...], negative: bool, favoured: int | None
) -> tuple[Placement, ...]:
    """The placements of one mesh dim, the plainest first, repeated by weight.

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
    given = [placement for kind in kinds for placement in parts[kind]]
    if not given:
        raise InvalidArgument(f"{refuse(kinds=kinds, ndim=ndim)}: a 0-d tensor cannot be sharded, and no other kind is allowed")
    return tuple(given)


def _dims(ndim: int, weight: int, favoured: int | None) -> list[int]:
    """The dims of a tensor in blocks, ``favoured`` first and most often.

    There are at least three blocks, the first for the first dim, and so on; those to spare are shared by all dims.
    """
    if not ndim:
        return []
    order = list(range(ndim))
    blocks = max(3, ndim)
    width = [max(1, weight // blocks)] * blocks
    if favoured is not None:
        order.insert(0, order.pop(favoured))
        width = [round(weight * FAVOUR), *[max(1, round(weight * (1 - FAVOUR) / (blocks - 1)))] * (blocks - 1)]
    spare = [order[at * ndim // sum(width[ndim:])] for at in range(sum(width[ndim:]))]
    return [dim for dim, times in zip(order, width, strict=False) for _ in range(times)] + spare


def _unmixed(placement: Placement, earlier: list[Placement]) -> Placement:
    """``placement``, with the reduction of an earlier mesh dim where the two may not stand side by side."""
    if isinstance(placement, Partial):
        for other in earlier:
            if isinstance(other, Partial) and not {other.op, placement.op} <= {"sum", "avg"}:
                return other
    return placement
