"""Strategies for pairs of layouts of one tensor: a redistribution within a mesh, a reshard from one world to another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Partial, Placement, Placements, Replicate, Shard, StridedShard
from shardlaw.strategies._arguments import check_choices, check_sizes, format_arguments, mesh_or_strategy, shape_or_strategy
from shardlaw.strategies.meshes import exact_meshes, meshes
from shardlaw.strategies.placements import KINDS, favoured_dim, match_reduction, placement_options, placements
from shardlaw.strategies.shapes import shapes


def redistributions(
    *,
    source: Layout | SearchStrategy[Layout] | None = None,
    world_size: int = 4,
    mesh: Mesh | SearchStrategy[Mesh] | None = None,
    shape: Shape | SearchStrategy[Shape] | None = None,
    source_kinds: Iterable[str] = KINDS,
    target_kinds: Iterable[str] = ("R", "S", "_S"),
    reduce_ops: Iterable[str] = ("sum",),
    split_factors: Iterable[int] = (2, 3),
) -> SearchStrategy[tuple[Layout, Layout]]:
    """Pairs (source, target) of layouts of one shape on one mesh.

    ``source`` is a layout or a strategy of layouts; left out, it is drawn by the options of :func:`~shardlaw.strategies.layouts.layouts`.
    With ``P`` among ``target_kinds`` a mesh dim may *keep* the pending reduction of the source; nothing can be redistributed to a
    new one.

    Shrinks to ``R`` on both sides, each mesh dim by itself.

    Raises ``InvalidArgument`` where an option is wrong.
    """
    begin = check_choices("source_kinds", source_kinds, KINDS)
    end = check_choices("target_kinds", target_kinds, KINDS)
    ops, factors = tuple(reduce_ops), tuple(split_factors)
    if shape is None and ("R" not in end or not {"R", "P"} & set(begin)):
        shape = shapes(min_dims=1)
    free = tuple(kind for kind in KINDS if kind in end and kind != "P")
    if not free:
        raise InvalidArgument(f"{format_arguments(target_kinds=end)}: want a kind that every tensor can be redistributed to, R, S or _S")
    placements(Mesh.of(2), 1, kinds=begin, reduce_ops=ops, split_factors=factors)
    placements(Mesh.of(2), 1, kinds=free, split_factors=factors)
    mesh_drawn = mesh_or_strategy(mesh, meshes(world_size=world_size))
    shape_drawn = shape_or_strategy(shape, shapes())
    source_drawn = st.just(source) if isinstance(source, Layout) else source
    begin = tuple(kind for kind in KINDS if kind in begin)

    @st.composite
    def pair(draw: st.DrawFn) -> tuple[Layout, Layout]:
        given = None if source_drawn is None else draw(source_drawn)
        on = draw(mesh_drawn) if given is None else given.mesh
        extents = draw(shape_drawn) if given is None else given.shape
        first: list[Placement] = []
        last: list[Placement] = []
        for at in range(on.ndim):
            # source and target of a mesh dim are one draw, so that shrinking can remove a mesh dim with both
            drawn_first = placement_options(len(extents), begin, ops, factors, False, favoured_dim(first, len(extents)))
            drawn_last = placement_options(len(extents), free, (), factors, False, favoured_dim(last, len(extents)))
            new = draw(_mesh_dim_pairs(drawn_first if given is None else None, drawn_last, "P" in end))
            first.append(match_reduction(new[0], first) if given is None else given.placements[at])
            last.append(first[-1] if new[2] and isinstance(first[-1], Partial) else new[1])
        return Layout(extents, on, tuple(first)), Layout(extents, on, tuple(last))

    return pair()


def placement_pairs(
    mesh_ndim: int, ndim: int, *, kinds: Iterable[str] = KINDS, reduce_ops: Iterable[str] = ("sum", "max", "avg"), split_factor: int = 2
) -> Iterator[tuple[Placements, Placements]]:
    """Every pair (source, target) of placements of a tensor of ``ndim`` dims on a mesh of ``mesh_ndim`` dims, each once.

    A pending reduction of the source is done or kept; the target has no new ones. Mixed with other placements it is by the first of
    ``reduce_ops``; where all mesh dims are pending, by each of them in turn. Pairs of equal placements are left out.
    """
    chosen = check_choices("kinds", kinds, KINDS)
    shards: list[Placement] = [Shard(dim) for dim in range(ndim)] if "S" in chosen else []
    shards += [StridedShard(dim, split_factor) for dim in range(ndim)] if "_S" in chosen else []
    unreduced = [*([Replicate()] if "R" in chosen else []), *shards]
    ops = tuple(reduce_ops)
    sources = [*unreduced, Partial(ops[0])] if "P" in chosen else unreduced
    for source in itertools.product(sources, repeat=mesh_ndim):
        ends = [[*unreduced, *([placement] if isinstance(placement, Partial) else [])] for placement in source]
        for to in itertools.product(*ends):
            if source == to:
                continue
            yield source, to
            if all(isinstance(placement, Partial) for placement in source):
                for op in ops[1:]:
                    yield (Partial(op),) * mesh_ndim, tuple(Partial(op) if isinstance(p, Partial) else p for p in to)


@cache
def _mesh_dim_pairs(
    first: SearchStrategy[Placement] | None, last: SearchStrategy[Placement], keeps: bool
) -> SearchStrategy[tuple[Placement, Placement, bool]]:
    """The source and target placements of one mesh dim, and whether a pending reduction is kept."""
    return st.tuples(st.none() if first is None else first, last, st.booleans() if keeps else st.just(False))


def reshards(
    *,
    world_sizes: Iterable[int] = (1, 2, 3, 4),
    shape: Shape | SearchStrategy[Shape] | None = None,
    kinds: Iterable[str] = ("R", "S", "_S"),
    split_factors: Iterable[int] = (2, 3),
    max_dims: int = 3,
    unit_dims: bool = True,
    submeshes: bool = True,
    permuted: bool = True,
) -> SearchStrategy[tuple[Layout, Layout]]:
    """Pairs (save, load) of layouts of one shape, each on a mesh of its own, for worlds of ``world_sizes`` ranks.

    The meshes are independent: they differ in size, dims and order of ranks. ``max_dims``, ``unit_dims``, ``submeshes`` and
    ``permuted`` are options of both meshes, as in :func:`~shardlaw.strategies.meshes.meshes`.

    Shrinks to the first world size on both sides, plain 1-D meshes, and ``R``; save before load.

    Raises ``InvalidArgument`` where an option is wrong.
    """
    sizes = check_sizes("world_sizes", world_sizes, 1)
    chosen = check_choices("kinds", kinds, KINDS[:3])
    factors = tuple(split_factors)
    by_size = {size: exact_meshes(size, max_dims=max_dims, unit_dims=unit_dims, submeshes=submeshes, permuted=permuted) for size in sizes}
    drawn_shape = shape_or_strategy(shape, shapes(min_dims=0 if "R" in chosen else 1))
    drawn_size = st.sampled_from(sizes)

    @st.composite
    def pair(draw: st.DrawFn) -> tuple[Layout, Layout]:
        save, load = draw(by_size[draw(drawn_size)]), draw(by_size[draw(drawn_size)])
        extents = draw(drawn_shape)
        saved = draw(placements(save, len(extents), kinds=chosen, split_factors=factors))
        loaded = draw(placements(load, len(extents), kinds=chosen, split_factors=factors))
        return Layout(extents, save, saved), Layout(extents, load, loaded)

    return pair()
