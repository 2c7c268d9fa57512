"""Strategies for device meshes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from reference.mesh import Mesh
from reference.notation import Shape
from strategies._arguments import check_count, check_range, check_sizes, refuse

# How often the shapes of one number of mesh dims are drawn, and which share of them goes to those with extents of 1.
SLOTS_BY_DIMS = {1: 50, 2: 50, 3: 15}
UNIT_SHARE = {1: 0.1, 2: 0.3, 3: 0.5}

# The ways in which the cells of a mesh are filled with ranks, the plainest first. 12 of 20 are plain.
PLAIN = "plain"
PERMUTED = ("flip-last", "flip-first", "transpose", "rotate", "mix")
SUBMESH = ("gap", "shift", "gap-flip")


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
    a table of ranks that does not ascend: along the last mesh dim, the first, both, or in no order at all. ``submeshes`` leave a
    rank out, the first one or one in the middle. About 60 % of the meshes are plain, all from a small palette, so that
    a world meets most of them more than once.

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
        options = refuse(world_size=world_size, min_dims=least, max_dims=most, min_size=min_size, unit_dims=unit_dims, sizes=allowed)
        raise InvalidArgument(f"{options}: no mesh is like that")
    fillings = (PLAIN,) * 12 + PERMUTED * bool(permuted) + SUBMESH * bool(submeshes)
    if len(fillings) == 12:
        return st.sampled_from(shapes).map(_plain)
    return st.tuples(st.sampled_from(shapes), st.sampled_from(fillings)).map(lambda drawn: fill(drawn[0], drawn[1], world_size))


def exact_meshes(
    world_size: int, *, max_dims: int = 3, unit_dims: bool = True, submeshes: bool = True, permuted: bool = True
) -> SearchStrategy[Mesh]:
    """Meshes that need a world of exactly ``world_size`` ranks: their highest rank is ``world_size - 1``.

    Shrinks to the plain 1-D mesh over all of them. Raises ``InvalidArgument`` where there is none.
    """
    check_count("world_size", world_size, 1)
    check_count("max_dims", max_dims, 1)
    return st.sampled_from(_exact(world_size, max_dims, bool(unit_dims), bool(submeshes), bool(permuted)))


@cache
def _exact(world_size: int, max_dims: int, unit_dims: bool, submeshes: bool, permuted: bool) -> Sequence[Mesh]:
    shapes = tuple(dict.fromkeys(_shapes(world_size, 1, max_dims, 1, unit_dims or world_size == 1, None)))
    plain = [_plain(shape) for shape in shapes if math.prod(shape) == world_size]
    odd = [fill(shape, way, world_size) for way in PERMUTED * permuted + SUBMESH * submeshes for shape in shapes]
    fitting = [mesh for mesh in dict.fromkeys(odd) if max(mesh.ranks) == world_size - 1 and mesh not in plain]
    often = max(1, round(1.5 * len(fitting) / len(plain)))
    return [mesh for mesh in plain for _ in range(often)] + fitting


@cache
def _shapes(  # noqa: PLR0917
    world_size: int, min_dims: int, max_dims: int, min_size: int, unit_dims: bool, sizes: tuple[int, ...] | None
) -> tuple[Shape, ...]:
    """Every mesh shape that the options allow, the plainest first, repeated by its weight."""
    extents = [size for size in range(1, world_size + 1) if (unit_dims or size > 1) and (sizes is None or size in sizes)]
    plain: list[Shape] = []
    odd: list[Shape] = []
    for ndim in range(min_dims, max_dims + 1):
        fitting = [shape for shape in _products(extents, ndim, world_size) if min_size <= math.prod(shape)]
        fitting.sort(key=lambda shape: (math.prod(shape), shape))
        full = [shape for shape in fitting if 1 not in shape]
        unit = [shape for shape in fitting if 1 in shape]
        if ndim > 2:
            # of many dims, leave out the shapes that are all but 1-D, where there are others
            unit = [shape for shape in unit if ndim - shape.count(1) > 1] or unit
        slots, share = SLOTS_BY_DIMS[min(ndim, 3)], UNIT_SHARE[min(ndim, 3)]
        plain += [shape for shape in full for _ in range(max(1, round(slots * (1 - share * bool(unit)) / len(full))))]
        odd += [shape for shape in unit for _ in range(max(1, round(slots * (share if full else 1) / len(unit))))]
    # the first of each number of dims comes before the second, so that a mesh can lose a dim in one step while it is shrunk
    firsts = [next(shape for shape in plain + odd if len(shape) == ndim) for ndim in sorted(set(map(len, plain + odd)))]
    return tuple(firsts + plain + odd)


def _products(extents: Sequence[int], ndim: int, most: int) -> list[Shape]:
    return [shape for shape in itertools.product(extents, repeat=ndim) if math.prod(shape) <= most]


@cache
def _plain(shape: Shape) -> Mesh:
    return Mesh.of(*shape)


@cache
def fill(shape: Shape, way: str, world_size: int) -> Mesh:
    """The mesh of ``shape`` whose cells are filled in one of the ways above; the plain one where the way does not apply."""
    size = math.prod(shape)
    plain = list(range(size))
    if way in SUBMESH:
        if size >= world_size:
            return _plain(shape)
        ranks = list(range(1, size + 1)) if way == "shift" else [*range(size - 1), size]
        return Mesh(shape, tuple(ranks[::-1] if way == "gap-flip" else ranks))
    last, first = shape[-1], shape[0]
    rows = [plain[at : at + last] for at in range(0, size, last)]
    if way == "flip-last" and last > 1:
        return Mesh(shape, tuple(rank for row in rows for rank in reversed(row)))
    if way == "flip-first" and first > 1:
        slab = size // first
        return Mesh(shape, tuple(rank for at in reversed(range(first)) for rank in plain[at * slab : (at + 1) * slab]))
    if way == "transpose" and len([extent for extent in shape if extent > 1]) > 1:
        table = Mesh.of(*reversed(shape))
        return Mesh(shape, tuple(table.rank_at(coord[::-1]) for coord in Mesh.of(*shape).coords()))
    if way == "rotate" and size > 1:
        return Mesh(shape, (*plain[1:], 0))
    if way == "mix" and size > 2:
        return Mesh(shape, (*plain[1::2][::-1], *plain[::2]))
    return _plain(shape)
