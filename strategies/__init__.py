"""Hypothesis strategies for meshes, shapes, placements, layouts, tensors, ops and states.

They are ordinary strategies, for any test suite of sharded tensors. Nothing here starts a process::

    from hypothesis import given
    from shardlaw.strategies import layouts

    @given(layouts(world_size=6))
    def test_every_element_has_an_owner(layout): ...

=================================  ====================================================================================================
``meshes``, ``exact_meshes``       :class:`shardlaw.reference.mesh.Mesh`: tables of ranks, in and out of order, with ranks left out
``shapes``, ``dim_sizes``          shapes of tensors, extents of one dim
``placements``                     one placement for each dim of a mesh, from :mod:`shardlaw.reference.placement`
``layouts``                        :class:`shardlaw.reference.layout.Layout`: a shape, a mesh, and valid placements
``redistributions``, ``reshards``  two layouts of one tensor, on one mesh or (``reshards``) in two worlds
``placement_pairs``                not a strategy: every pair of placements of a tensor, in a fixed order
``shards``                         :class:`shardlaw.reference.shards.Shards`: tensors in boxes of any size
``specs``, ``dtypes``              :class:`shardlaw.reference.tensors.TensorSpec`: tensors with their elements, dtype and memory
``ops``                            :class:`shardlaw.strategies.ops.Sample`: calls of ops on sharded tensors
``state_dicts``                    nested states, as checkpoints save them
=================================  ====================================================================================================

Every option is keyword-only. Arguments are checked when a strategy is created, and a combination that allows no value raises
``hypothesis.errors.InvalidArgument`` in one line. Values depart from the plainest (a 1-D mesh of two ranks, two elements, float32,
contiguous) in few ways at a time, and shrink to it.
"""

from shardlaw.strategies.layouts import layouts, shards
from shardlaw.strategies.meshes import exact_meshes, meshes
from shardlaw.strategies.op_choice import ops
from shardlaw.strategies.placements import placements
from shardlaw.strategies.redistributions import placement_pairs, redistributions, reshards
from shardlaw.strategies.shapes import dim_sizes, shapes
from shardlaw.strategies.state_dicts import state_dicts
from shardlaw.strategies.tensors import dtypes, specs

__all__ = [
    "dim_sizes",
    "dtypes",
    "exact_meshes",
    "layouts",
    "meshes",
    "ops",
    "placement_pairs",
    "placements",
    "redistributions",
    "reshards",
    "shapes",
    "shards",
    "specs",
    "state_dicts",
]
