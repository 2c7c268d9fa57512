"""Strategies for layouts: a shape, a mesh, and placements that mean something for both."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import Shape
from strategies._arguments import check_choices, mesh_or_strategy, shape_or_strategy
from strategies.meshes import meshes
from strategies.placements import KINDS, placements
from strategies.shapes import shapes


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

    ``mesh`` and ``shape`` are values or strategies; left out, they are :func:`~strategies.meshes.meshes` of this world size
    and :func:`~strategies.shapes.shapes`. The other options are those of :func:`~strategies.placements.placements`; pending
    reductions (``P``) come only where ``kinds`` asks for them.

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
