"""Strategies for layouts (a shape, a mesh, and valid placements), and for tensors in boxes of any size."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.box import Box
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.shards import Shards, shards_along
from shardlaw.strategies._arguments import check_choices, mesh_or_strategy, shape_or_strategy
from shardlaw.strategies.meshes import meshes
from shardlaw.strategies.placements import KINDS, placements
from shardlaw.strategies.shapes import shapes


def layouts(
    *,
    world_size: int = 4,
    mesh: Mesh | SearchStrategy[Mesh] | None = None,
    shape: Shape | SearchStrategy[Shape] | None = None,
    kinds: Iterable[str] = ("R", "S", "_S"),
    reduce_ops: Iterable[str] = ("sum",),
    split_factors: Iterable[int] = (2, 3),
) -> SearchStrategy[Layout]:
    """Layouts of tensors on meshes of up to ``world_size`` ranks.

    ``mesh`` and ``shape`` are values or strategies; left out, they are :func:`~shardlaw.strategies.meshes.meshes` of this world size
    and :func:`~shardlaw.strategies.shapes.shapes`. The other options are those of :func:`~shardlaw.strategies.placements.placements`;
    pending reductions (``P``) come only where ``kinds`` asks for them.

    Shrinks to ``2 on 2 as R``: mesh, shape and placements each by themselves, in this order.

    Raises ``InvalidArgument`` where an option is wrong.
    """
    chosen = check_choices("kinds", kinds, KINDS)
    ops, factors = tuple(reduce_ops), tuple(split_factors)
    mesh_drawn = mesh_or_strategy(mesh, meshes(world_size=world_size))
    shape_drawn = shape_or_strategy(shape, shapes(min_dims=0 if {"R", "P"} & set(chosen) else 1))
    some_dims = len(shape) if isinstance(shape, tuple) else 1
    placements(Mesh.of(2), some_dims, kinds=chosen, reduce_ops=ops, split_factors=factors)

    @st.composite
    def layout(draw: st.DrawFn) -> Layout:
        on, extents = draw(mesh_drawn), draw(shape_drawn)
        placed = draw(placements(on, len(extents), kinds=chosen, reduce_ops=ops, split_factors=factors))
        return Layout(extents, on, placed)

    return layout()


WAYS = ("rows", "columns", "table", "grid")
RUNS = (2, 1, 3, 4, 0)


def shards(mesh: Mesh, *, way: str = "rows", sparse: bool = True) -> SearchStrategy[Shards]:
    """Tensors whose boxes, each on a rank of ``mesh``, tile them.

    ``rows``: any number of rows for each rank, in order; 0 rows are no box. ``columns``: any numbers of columns of a matrix, or elements of
    a vector, in any order of ranks, several boxes on one rank and none on another. ``table``: one rank has the tensor. ``grid``: on a 2-D
    mesh, any rows by any columns. Unless ``sparse``, every rank of the mesh has a box.

    Shrinks to two indices for each rank, in order. Raises ``InvalidArgument`` for another ``way``.
    """
    check_choices("way", (way,), WAYS)
    full = st.sampled_from(RUNS[:-1])
    run = st.sampled_from(RUNS) if sparse else full

    @st.composite
    def sharded(draw: st.DrawFn) -> Shards:
        ranks = mesh.ranks
        if way == "table":
            shape = draw(shapes(min_dims=1, max_dims=3, min_size=1))
            return shards_along(shape, 0, [(shape[0], ranks[0])])
        if way == "grid":
            rows, columns = ([draw(full) for _ in range(size)] for size in mesh.shape)
            boxes = [
                (Box((sum(rows[:i]), sum(columns[:j])), (rows[i], columns[j])), (mesh.rank_at((i, j)),))
                for i in range(len(rows))
                for j in range(len(columns))
            ]
            return Shards((sum(rows), sum(columns)), tuple(boxes))
        if way == "rows":
            parts = [(draw(run), rank) for rank in ranks]
            rest = draw(shapes(min_dims=0, max_dims=2, min_size=1, max_size=5))
        else:
            first = ranks[: draw(st.integers(1, len(ranks)))] if sparse else ranks
            parts = [(draw(full), rank) for rank in first] + draw(st.lists(st.tuples(full, st.sampled_from(ranks)), max_size=3))
            rest = draw(shapes(min_dims=0, max_dims=1, min_size=1, max_size=5))
        extent = sum(size for size, _ in parts)
        shape = (extent, *rest) if way == "rows" else (*rest, extent)
        return shards_along(shape, 0 if way == "rows" else len(shape) - 1, parts).without_empty()

    return sharded()
