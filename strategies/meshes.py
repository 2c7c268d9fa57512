"""Strategies for device meshes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.strategies._arguments import check_count, check_range, check_sizes, format_arguments

# The weight of each number of mesh dims, and the share of its shapes that have extents of 1.
DIMS_WEIGHT = {1: 10, 2: 10, 3: 3}
UNIT_SHARE = {1: 0.1, 2: 0.3, 3: 0.5}
SLOTS = 60
# Which ranks a mesh has: the first ones, all but one in the middle, all but rank 0. The order of ranks in its table: ascending, or
# permuted along one mesh dim or several. The plainest come first. 60 % of meshes are plain in both.
MEMBERS = ("first",) * 11 + ("gap", "shift")
ORDERS = ("ascending",) * 12 + ("flip-last", "flip-first", "transpose", "rotate", "mix")


def meshes(
    *,
    world_size: int = 4,
    min_dims: int = 1,
    max_dims: int = 3,
    min_size: int = 1,
    unit_dims: bool = True,
    submeshes: bool = True,
    permuted: bool = True,
    sizes: Iterable[int] | None = None,
) -> SearchStrategy[Mesh]:
    """Meshes over some or all of the ranks ``0..world_size-1``.

    ``min_dims`` and ``max_dims`` bound the number of mesh dims, ``min_size`` the number of ranks in the mesh; ``sizes``, where
    given, are the only extents that a mesh dim may have, and ``unit_dims=False`` excludes extent 1. ``permuted`` meshes have
    a table of ranks that does not ascend along the last mesh dim, the first, or any. ``submeshes`` leave a rank out, the first one
    or one in the middle. About 60 % of the meshes are plain. All are from a small palette, so that a world can reuse them.

    Shrinks to ``2``, the plain mesh of two ranks (or to the first that the options allow): first to fewer mesh dims, without
    extents of 1, over fewer ranks; apart from that to ascending ranks ``0..n-1``.

    Raises ``InvalidArgument`` where no mesh satisfies the options.
    """
    least, most = check_range("min_dims", min_dims, "max_dims", max_dims, 1)
    check_count("world_size", world_size, 1)
    check_count("min_size", min_size, 1)
    allowed = None if sizes is None else check_sizes("sizes", sizes, 1)
    shapes = _shapes(world_size, least, most, min_size, bool(unit_dims), allowed)
    if not shapes:
        options = format_arguments(
            world_size=world_size, min_dims=least, max_dims=most, min_size=min_size, unit_dims=unit_dims, sizes=allowed
        )
        raise InvalidArgument(f"{options}: no mesh is like that")
    # the first of each number of dims comes before the second, so that a mesh can lose a dim in one step while it is shrunk
    ndims = [*shapes, *(ndim for ndim in shapes for _ in range(DIMS_WEIGHT.get(ndim, 1)))]
    members = st.sampled_from(MEMBERS if submeshes else MEMBERS[:1])
    orders = st.sampled_from(ORDERS if permuted else ORDERS[:1])
    drawn_dims = st.sampled_from(ndims)
    by_dims = {ndim: st.sampled_from(some) for ndim, some in shapes.items()}

    @st.composite
    def mesh(draw: st.DrawFn) -> Mesh:
        return fill_mesh(draw(by_dims[draw(drawn_dims)]), draw(members), draw(orders), world_size)

    return mesh()


def exact_meshes(
    world_size: int, *, max_dims: int = 3, unit_dims: bool = True, submeshes: bool = True, permuted: bool = True
) -> SearchStrategy[Mesh]:
    """Meshes that need a world of exactly ``world_size`` ranks: their highest rank is ``world_size - 1``.

    Shrinks to the plain 1-D mesh over all of them. Raises ``InvalidArgument`` where there is none.
    """
    check_count("world_size", world_size, 1)
    check_count("max_dims", max_dims, 1)
    return st.sampled_from(_exact_meshes(world_size, max_dims, bool(unit_dims), bool(submeshes), bool(permuted)))


def palette_meshes(palette: Iterable[str], world_size: int) -> list[Mesh]:
    """The meshes of a palette that fit into ``world_size`` ranks, each as often as it is named, the plainest first.

    In a world of more than four ranks a third of them are :func:`larger_meshes`: with as many dims as some mesh of the palette, permuted or
    without some ranks only where the palette has such meshes.
    """
    fitting = [mesh for mesh in map(Mesh.parse, palette) if max(mesh.ranks) < world_size]
    dims, ways = {mesh.ndim for mesh in fitting}, {False, *map(_is_reordered, fitting)}
    outside = {False, *(max(mesh.ranks) >= mesh.size for mesh in fitting)}
    more = [
        mesh
        for mesh in larger_meshes(world_size)
        if mesh.ndim in dims and _is_reordered(mesh) in ways and (max(mesh.ranks) >= mesh.size) in outside
    ]
    if not more:
        return fitting
    share = 2 * len(more) / len(fitting)
    return fitting * max(1, round(share)) + more * max(1, round(1 / share))


def _is_reordered(mesh: Mesh) -> bool:
    return list(mesh.ranks) != sorted(mesh.ranks)


@cache
def larger_meshes(world_size: int) -> tuple[Mesh, ...]:
    """A few meshes of more than four ranks; few, since creating a mesh costs more than most of what is done on it. Over all ranks: one each
    of one, two and three dims without extents of 1, where there are such, and the last also permuted. And 3x2, with and without rank 0."""
    if world_size <= 4:
        return ()
    by_dims = (
        [shape for shape in _products(range(2, world_size + 1), ndim, world_size) if math.prod(shape) == world_size] for ndim in (1, 2, 3)
    )
    shapes = [fitting[0] for fitting in by_dims if fitting]
    found = [*map(_ascending_mesh, shapes), fill_mesh(shapes[-1], "first", "transpose" if len(shapes) > 1 else "flip-first", world_size)]
    found += [
        fill_mesh((3, 2), "first" if world_size < 7 else who, "ascending", world_size) for who in ("first", "shift") if world_size > 5
    ]
    return tuple(dict.fromkeys(found))


@cache
def _exact_meshes(world_size: int, max_dims: int, unit_dims: bool, submeshes: bool, permuted: bool) -> Sequence[Mesh]:
    by_dims = _shapes(world_size, 1, max_dims, 1, unit_dims or world_size == 1, None)
    weight = {shape: some.count(shape) * DIMS_WEIGHT.get(ndim, 1) for ndim, some in by_dims.items() for shape in some}
    plain = {_ascending_mesh(shape): weight[shape] for shape in weight if math.prod(shape) == world_size}
    ways = [(who, how) for how in (ORDERS[11:] if permuted else ORDERS[:1]) for who in (MEMBERS[10:] if submeshes else MEMBERS[:1])]
    odd = {fill_mesh(shape, *way, world_size): weight[shape] for way in ways for shape in weight}
    odd = {mesh: times for mesh, times in odd.items() if max(mesh.ranks) == world_size - 1 and mesh not in plain}
    drawn: list[Mesh] = []
    for group, share in ((plain, 0.6 if odd else 1.0), (odd, 0.4)):
        whole = sum(group.values())
        drawn += [mesh for mesh, times in group.items() for _ in range(max(1, round(2 * SLOTS * share * times / whole)))]
    firsts = {mesh.ndim: mesh for mesh in reversed(drawn)}
    return [firsts[ndim] for ndim in sorted(firsts)] + drawn


@cache
def _shapes(
    world_size: int, min_dims: int, max_dims: int, min_size: int, unit_dims: bool, sizes: tuple[int, ...] | None
) -> dict[int, list[Shape]]:
    """Every mesh shape that the options allow, by number of dims, the plainest first, repeated by its weight."""
    extents = [size for size in range(1, world_size + 1) if (unit_dims or size > 1) and (sizes is None or size in sizes)]
    found: dict[int, list[Shape]] = {}
    for ndim in range(min_dims, max_dims + 1):
        fitting = [shape for shape in _products(extents, ndim, world_size) if min_size <= math.prod(shape)]
        fitting.sort(key=lambda shape: (math.prod(shape), shape))
        full = [shape for shape in fitting if 1 not in shape]
        unit = [shape for shape in fitting if 1 in shape]
        if ndim > 2:
            # leave out shapes with a single extent above 1, where there are others
            unit = [shape for shape in unit if ndim - shape.count(1) > 1] or unit
        share = UNIT_SHARE[min(ndim, 3)] if full and unit else float(not full)
        drawn = [shape for shape in full for _ in range(max(1, round(SLOTS * (1 - share) / len(full))))]
        drawn += [shape for shape in unit for _ in range(max(1, round(SLOTS * share / len(unit))))]
        if drawn:
            found[ndim] = drawn
    return found


def _products(extents: Sequence[int], ndim: int, most: int) -> list[Shape]:
    return [shape for shape in itertools.product(extents, repeat=ndim) if math.prod(shape) <= most]


@cache
def _ascending_mesh(shape: Shape) -> Mesh:
    return Mesh.of(*shape)


@cache
def fill_mesh(shape: Shape, members: str, order: str, world_size: int) -> Mesh:
    """The mesh of ``shape`` with these ``members`` in this ``order``, one of :data:`MEMBERS` and of :data:`ORDERS`.

    Where an order does not apply to the shape another permutation replaces it, so that a mesh stays permuted while it shrinks.
    """
    size = math.prod(shape)
    ranks, (first, last) = list(range(size)), (shape[0], shape[-1])
    if size < world_size and members != "first":
        ranks = [*range(1, size + 1)] if members == "shift" else [*range(size - 1), size]
    if order == "flip-last" and last > 1:
        ranks = [rank for at in range(0, size, last) for rank in reversed(ranks[at : at + last])]
    elif order == "flip-first" and first > 1:
        slab = size // first
        ranks = [rank for at in reversed(range(first)) for rank in ranks[at * slab : (at + 1) * slab]]
    elif order == "transpose" and sum(extent > 1 for extent in shape) > 1:
        table = Mesh.of(*reversed(shape))
        ranks = [ranks[table.rank_at(coord[::-1])] for coord in Mesh.of(*shape).coords()]
    elif order == "rotate":
        ranks = [*ranks[1:], ranks[0]]
    elif order == "mix" and size > 2:
        ranks = [*ranks[1::2][::-1], *ranks[::2]]
    elif order != "ascending":
        ranks.reverse()
    return Mesh(shape, tuple(ranks))
