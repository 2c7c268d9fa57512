"""Every strategy checks its arguments when it is asked for, and says in one line what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis.errors import InvalidArgument

from shardlaw.reference.mesh import Mesh
from shardlaw.strategies import dim_sizes, dtypes, exact_meshes, layouts, meshes, placements, redistributions, reshards, shapes, specs

TWO = Mesh.of(2)

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: meshes(world_size=0), "world_size=0: want a whole number, 1 or more"),
    (lambda: meshes(world_size=2.0), "world_size=2.0: want a whole number, 1 or more"),  # type: ignore[arg-type]
    (lambda: meshes(world_size=True), "world_size=True: want a whole number, 1 or more"),
    (lambda: meshes(min_dims=0), "min_dims=0: want a whole number, 1 or more"),
    (lambda: meshes(min_dims=3, max_dims=2), "min_dims=3, max_dims=2: want min_dims <= max_dims"),
    (lambda: meshes(world_size=2, min_size=3), "no mesh is like that"),
    (lambda: meshes(world_size=4, min_dims=3, unit_dims=False), "unit_dims=False, sizes=None: no mesh is like that"),
    (lambda: meshes(sizes=()), "sizes is empty: want at least one choice"),
    (lambda: meshes(sizes=(0,)), "sizes[0]=0: want a whole number, 1 or more"),
    (lambda: meshes(world_size=4, sizes=(5,)), "sizes=(5,): no mesh is like that"),
    (lambda: exact_meshes(0), "world_size=0: want a whole number, 1 or more"),
    (lambda: shapes(min_dims=-1), "min_dims=-1: want a whole number, 0 or more"),
    (lambda: shapes(min_dims=2, max_dims=1), "min_dims=2, max_dims=1: want min_dims <= max_dims"),
    (lambda: shapes(min_size=5, max_size=2), "min_size=5, max_size=2: want min_size <= max_size"),
    (lambda: shapes(sizes=(3, 11), max_size=2), "sizes=(3, 11), min_size=0, max_size=2: no size lies within the bounds"),
    (lambda: shapes(sizes="3"), "sizes='3': want a sequence of choices"),  # type: ignore[arg-type]
    (lambda: dim_sizes(sizes=(1, -1)), "sizes[1]=-1: want a whole number, 0 or more"),
    (lambda: placements("2x2", 1), "mesh='2x2': want a shardlaw.reference.mesh.Mesh"),  # type: ignore[arg-type]
    (lambda: placements(TWO, -1), "ndim=-1: want a whole number, 0 or more"),
    (lambda: placements(TWO, 1, kinds=("R", "Q")), "kinds: 'Q' is none of R, S, _S, P"),
    (lambda: placements(TWO, 1, kinds="RS"), "kinds='RS': want a sequence of choices"),
    (lambda: placements(TWO, 1, kinds=()), "kinds is empty: want at least one choice"),
    (lambda: placements(TWO, 0, kinds=("S", "_S")), "kinds=('S', '_S'), ndim=0: a 0-d tensor cannot be sharded"),
    (lambda: placements(TWO, 1, reduce_ops=("mean",)), "reduce_ops: 'mean' is none of sum, avg"),
    (lambda: placements(TWO, 1, split_factors=(0,)), "split_factors[0]=0: want a whole number, 1 or more"),
    (lambda: layouts(kinds=("X",)), "kinds: 'X' is none of R, S, _S, P"),
    (lambda: layouts(world_size=-4), "world_size=-4: want a whole number, 1 or more"),
    (lambda: layouts(kinds=("P",), reduce_ops=()), "reduce_ops is empty: want at least one choice"),
    (lambda: layouts(shape=(), kinds=("S",)), "kinds=('S',), ndim=0: a 0-d tensor cannot be sharded"),
    (lambda: layouts(shape=(2, -1)), "shape[1]=-1: want a whole number, 0 or more"),
    (lambda: layouts(shape=4), "shape=4: want a tuple of extents, such as (5, 6), or a strategy"),  # type: ignore[arg-type]
    (lambda: layouts(mesh=3), "mesh=3: want a shardlaw.reference.mesh.Mesh or a strategy"),  # type: ignore[arg-type]
    (lambda: dtypes(("float31",)), "allowed: 'float31' is none of float32"),
    (lambda: specs(dtypes=("float",)), "dtypes: 'float' is none of float32"),
    (lambda: specs(fills=("ones",)), "fills: 'ones' is none of distinct"),
    (lambda: specs(fills=("index0",)), "fills: 'index0' is none of distinct"),
    (lambda: specs(memories=("odd",)), "memories: 'odd' is none of plain"),
    (lambda: specs(mesh=TWO, kinds=("P",), reduce_ops=("avg",), dtypes=("float32", "int64")), "int64 has none of these reductions"),
    (lambda: specs(mesh=TWO, placed=(), shape=(2,)), "placed=(): want one of them, the other follows or is not needed"),
    (lambda: redistributions(source_kinds=("Z",)), "source_kinds: 'Z' is none of R, S, _S, P"),
    (lambda: redistributions(target_kinds=()), "target_kinds is empty: want at least one choice"),
    (lambda: redistributions(target_kinds=("P",)), "target_kinds=('P',): want a kind that every tensor can be redistributed to"),
    (lambda: reshards(world_sizes=(0,)), "world_sizes[0]=0: want a whole number, 1 or more"),
    (lambda: reshards(kinds=("P",)), "kinds: 'P' is none of R, S, _S"),
]


@pytest.mark.parametrize(("ask", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_arguments_are_refused_at_once_in_one_line(ask: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ask()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: placements(TWO, 0),
        lambda: placements(TWO, 0, kinds=("S", "P")),
        lambda: shapes(min_size=100, max_size=101),
        lambda: meshes(world_size=1),
        lambda: meshes(min_dims=3, max_dims=5),
        lambda: exact_meshes(1, unit_dims=False),
        lambda: layouts(shape=(), kinds=("S", "R")),
        lambda: specs(mesh=TWO, kinds=("R", "P"), reduce_ops=("avg",), dtypes=("int64",)),
        lambda: reshards(world_sizes=[2]),
    ],
)
def test_what_is_possible_is_not_refused(ask: Callable[[], Any]) -> None:
    ask().validate()


def test_options_may_be_generators() -> None:
    layouts(kinds=iter(("R", "S")), reduce_ops=iter(("sum",))).validate()
    shapes(sizes=iter((3, 4))).validate()
    meshes(sizes=iter((1, 2))).validate()
