"""What can be asked: Hypothesis strategies for meshes, shapes, placements, layouts, tensors and states.

They are ordinary strategies, for any test suite that uses sharded tensors::

    from hypothesis import given
    from strategies import layouts

    @given(layouts(world_size=6))
    def test_every_element_has_an_owner(layout): ...

Every option is keyword-only, every argument is checked when the strategy is made, and a combination that allows nothing raises
``hypothesis.errors.InvalidArgument`` in one line. What is drawn departs from the plain (a 1-D mesh of two ranks, two elements,
float32, contiguous) in few ways at a time, and shrinks back to it.
"""

from strategies.layouts import layouts, shards
from strategies.meshes import exact_meshes, meshes
from strategies.placements import placements
from strategies.redistributions import placement_pairs, redistributions, reshards
from strategies.shapes import dim_sizes, shapes
from strategies.state_dicts import state_dicts
from strategies.tensors import dtypes, specs

__all__ = [
    "dim_sizes",
    "dtypes",
    "exact_meshes",
    "layouts",
    "meshes",
    "placement_pairs",
    "placements",
    "redistributions",
    "reshards",
    "shapes",
    "shards",
    "specs",
    "state_dicts",
]
