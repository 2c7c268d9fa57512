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
def _placements(
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


@cache
def _options(
    ndim: int, kinds: tuple[str, ...], ops: tuple[str, ...], factors: tuple[int, ...], negative: bool, favoured: int | None
) -> tuple[Placement, ...]:
    """The placements of one mesh dim, the plainest first, repeated by weight. The length does not depend on ``favoured``."""
    dims = list(range(ndim))
    if favoured is not None:
        dims.insert(0, dims.pop(favoured))
    shards: list[Placement] = []
    strided: list[Placement] = []
    for dim in dims:
        often = 3 if favoured is None else 1 + 2 * ndim * (dim == favoured)
        shards += [Shard(dim)] * often
        strided += [StridedShard(dim, factor) for factor in factors for _ in range(often)]
    if negative:
        shards += [Shard(dim - ndim) for dim in dims]
        strided += [StridedShard(dim - ndim, factor) for dim in dims for factor in factors[:1]]
    parts: dict[str, list[Placement]] = {"R": [Replicate()], "S": shards, "_S": strided, "P": [Partial(op) for op in ops]}
    weight = {"R": 4, "S": 9, "_S": 2, "P": 3}
    given = {kind: parts[kind] for kind in kinds if parts[kind]}
    if not given:
        raise InvalidArgument(f"{refuse(kinds=kinds, ndim=ndim)}: a 0-d tensor cannot be sharded, and no other kind is allowed")
    longest = max(len(part) for part in given.values())
    return tuple(
        placement for kind, part in given.items() for placement in part for _ in range(max(1, round(weight[kind] * longest / len(part))))
    )


def _unmixed(placement: Placement, earlier: list[Placement]) -> Placement:
    """``placement``, with the reduction of an earlier mesh dim where the two may not stand side by side."""
    if isinstance(placement, Partial):
        for other in earlier:
            if isinstance(other, Partial) and not {other.op, placement.op} <= {"sum", "avg"}:
                return other
    return placement
