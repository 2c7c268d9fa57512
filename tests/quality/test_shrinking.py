"""The search finds what is rare, and what it finds shrinks to the smallest mesh, shape and placement.

Each property stands for a fault: what is found must be the plainest layout that shows it, whatever it was found in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import REDUCE_OPS, Partial, Shard, StridedShard, format_placements, shard_dim
from shardlaw.strategies import layouts, meshes, placements, redistributions, reshards, shapes, specs

pytestmark = [pytest.mark.ranks, pytest.mark.quality]
SETTINGS = settings(
    max_examples=4_000, database=None, deadline=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck)
)
SEEDS = (0, 1, 2)


def smallest(strategy: SearchStrategy[object], shows: Callable[..., bool], seed: int) -> str:
    found = find(strategy, shows, settings=SETTINGS, random=random.Random(seed))
    return " -> ".join(map(str, found)) if isinstance(found, tuple) and isinstance(found[0], Layout) else str(found)


def names(rows: list[Any]) -> list[str]:
    return [f"{at}-{text}" for at, (_, _, text) in enumerate(rows)]


def whole(layout: Layout) -> bool:
    return layout.replicas() == layout.mesh.size and not layout.has_partial()


def only_uneven(layout: Layout) -> bool:
    return uneven(layout) and not some_empty(layout)


def uneven(layout: Layout) -> bool:
    return not layout.is_even()


def some_empty(layout: Layout) -> bool:
    return 0 not in layout.shape and bool(layout.empty_coords())


def nested(layout: Layout) -> bool:
    dims = [shard_dim(placement) for placement in layout.placements if shard_dim(placement) is not None]
    return len(set(dims)) < len(dims)


def flipped(layout: Layout) -> bool:
    first, *others = layout.placements
    return isinstance(first, StridedShard) and Shard(first.dim) in others


def permuted(mesh: Mesh) -> bool:
    return list(mesh.ranks) != sorted(mesh.ranks)


PLAIN = layouts(kinds=("R", "S"))
REDUCED = layouts(kinds=("R", "S", "P"), reduce_ops=REDUCE_OPS)
LAYOUTS: list[tuple[SearchStrategy[Layout], Callable[[Layout], bool], str]] = [
    (layouts(), lambda layout: True, "2 on 2 as R"),
    (PLAIN, lambda layout: layout.replicas() < layout.mesh.size, "2 on 2 as S(0)"),
    (PLAIN, only_uneven, "3 on 2 as S(0)"),
    (layouts(mesh=Mesh.of(2), kinds=("R", "S")), some_empty, "1 on 2 as S(0)"),
    (layouts(mesh=Mesh.of(3), kinds=("R", "S")), some_empty, "2 on 3 as S(0)"),
    (layouts(), lambda layout: 0 in layout.shape, "0 on 2 as R"),
    (layouts(), lambda layout: layout.shape == (), "() on 2 as R"),
    (PLAIN, nested, "2 on 2x2 as S(0),S(0)"),
    (PLAIN, lambda layout: nested(layout) and only_uneven(layout), "5 on 2x2 as S(0),S(0)"),
    (PLAIN, lambda layout: any(shard_dim(placement) == 1 for placement in layout.placements), "2x2 on 2 as S(1)"),
    (PLAIN, lambda layout: len({*map(shard_dim, layout.placements)} - {None}) == 2, "2x2 on 2x2 as S(0),S(1)"),
    (layouts(), Layout.is_strided, "2 on 2 as _S(0,2)"),
    (layouts(), lambda layout: None in map(layout.box, layout.mesh.coords()), "3 on 2 as _S(0,2)"),
    (layouts(), lambda layout: flipped(layout) and 4 in layout.shape, "4 on 2x2 as _S(0,2),S(0)"),
    (layouts(), lambda layout: sum(isinstance(p, StridedShard) for p in layout.placements) == 2, "2 on 2x2 as _S(0,2),_S(0,2)"),
    (layouts(), lambda layout: permuted(layout.mesh), "2 on 2@1,0 as R"),
    (layouts(), lambda layout: permuted(layout.mesh) and only_uneven(layout), "3 on 2@1,0 as S(0)"),
    (layouts(), lambda layout: layout.mesh.ndim == 2, "2 on 2x2 as R,R"),
    (layouts(), lambda layout: layout.mesh.ndim == 3, "2 on 1x2x2 as R,R,R"),
    (layouts(world_size=8), lambda layout: layout.mesh.ndim == 3, "2 on 2x2x2 as R,R,R"),
    (REDUCED, Layout.has_partial, "2 on 2 as P(sum)"),
    (REDUCED, lambda layout: Partial("avg") in layout.placements, "2 on 2 as P(avg)"),
    (REDUCED, lambda layout: Partial("max") in layout.placements and 0 in layout.shape, "0 on 2 as P(max)"),
    (layouts(kinds=("R", "S", "P")), lambda layout: layout.has_partial() and only_uneven(layout), "3 on 2x2 as S(0),P(sum)"),
    (layouts(kinds=("P",), reduce_ops=("sum", "avg")), lambda layout: len(set(layout.placements)) == 2, "2 on 2x2 as P(sum),P(avg)"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("strategy", "shows", "text"), LAYOUTS, ids=names(LAYOUTS))
def test_layouts(strategy: SearchStrategy[Layout], shows: Callable[[Layout], bool], text: str, seed: int) -> None:
    assert smallest(strategy, shows, seed) == text


MESHES: list[tuple[SearchStrategy[Mesh], Callable[[Mesh], bool], str]] = [
    (meshes(), lambda mesh: True, "2"),
    (meshes(min_size=3), lambda mesh: True, "3"),
    (meshes(min_dims=2), lambda mesh: True, "2x2"),
    (meshes(sizes=(1, 4)), lambda mesh: True, "4"),
    (meshes(world_size=1), lambda mesh: True, "1"),
    (meshes(), permuted, "2@1,0"),
    (meshes(), lambda mesh: max(mesh.ranks) >= mesh.size > 1, "2@0,2"),
    (meshes(), lambda mesh: 0 not in mesh.ranks and mesh.size > 1, "2@1,2"),
    (meshes(max_dims=2), lambda mesh: 1 in mesh.shape and mesh.size > 1, "1x2"),
    (meshes(sizes=(2,)), lambda mesh: permuted(mesh) and mesh.ndim == 2, "2x2@1,0,3,2"),
    (meshes(sizes=(2,)), lambda mesh: mesh.ndim == 2 and mesh.ranks[0] > mesh.ranks[2] and mesh.ranks[0] < mesh.ranks[1], "2x2@2,3,0,1"),
    (meshes(sizes=(2,)), lambda mesh: mesh.ndim == 2 and mesh.ranks == (0, 2, 1, 3), "2x2@0,2,1,3"),
    (meshes(world_size=6), lambda mesh: mesh.ndim == 2 and len(set(mesh.shape)) == 2 and 1 not in mesh.shape, "2x3"),
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("strategy", "shows", "text"), MESHES, ids=names(MESHES))
def test_meshes(strategy: SearchStrategy[Mesh], shows: Callable[[Mesh], bool], text: str, seed: int) -> None:
    assert smallest(strategy, shows, seed) == text


REDISTRIBUTIONS: list[tuple[SearchStrategy[object], Callable[[tuple[Layout, Layout]], bool], str]] = [
    (redistributions(), lambda pair: True, "2 on 2 as R -> 2 on 2 as R"),
    (redistributions(), lambda pair: whole(pair[0]) and not whole(pair[1]), "2 on 2 as R -> 2 on 2 as S(0)"),
    (redistributions(), lambda pair: pair[0].has_partial() and not pair[1].has_partial(), "2 on 2 as P(sum) -> 2 on 2 as R"),
    (redistributions(target_kinds=("R", "S", "P")), lambda pair: pair[1].has_partial(), "2 on 2 as P(sum) -> 2 on 2 as P(sum)"),
    (redistributions(source_kinds=("S",), target_kinds=("S",)), lambda pair: pair[0] != pair[1], "2x2 on 2 as S(0) -> 2x2 on 2 as S(1)"),
    (redistributions(), lambda pair: pair[0].is_strided() and not pair[1].is_strided(), "2 on 2 as _S(0,2) -> 2 on 2 as R"),
    (redistributions(), lambda pair: pair[1].is_strided(), "2 on 2 as R -> 2 on 2 as _S(0,2)"),
    (reshards(), lambda pair: True, "2 on 1 as R -> 2 on 1 as R"),
    (reshards(world_sizes=(2, 3, 4)), lambda pair: [str(end.mesh) for end in pair] == ["2", "3"], "2 on 2 as R -> 2 on 3 as R"),
    (
        reshards(world_sizes=(2, 4), kinds=("S",)),
        lambda pair: pair[0].mesh.ndim < pair[1].mesh.ndim,
        "2 on 2 as S(0) -> 2 on 1x2 as S(0),S(0)",
    ),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("strategy", "shows", "text"), REDISTRIBUTIONS, ids=names(REDISTRIBUTIONS))
def test_pairs_of_layouts(strategy: SearchStrategy[object], shows: Callable[[tuple[Layout, Layout]], bool], text: str, seed: int) -> None:
    assert smallest(strategy, shows, seed) == text


@pytest.mark.parametrize("seed", SEEDS)
def test_parts(seed: int) -> None:
    assert smallest(shapes(), lambda shape: True, seed) == "(2,)"
    assert smallest(shapes(), lambda shape: 1 in shape, seed) == "(1,)"
    assert smallest(shapes(), lambda shape: len(shape) == 3 and 0 in shape, seed) == "(2, 2, 0)"
    assert smallest(shapes(), lambda shape: max(shape, default=0) > 4, seed) == "(5,)"
    assert smallest(shapes(min_size=1, max_size=1), lambda shape: True, seed) == "(1,)"
    placed = placements(Mesh.of(2, 2), 2, kinds=("R", "S", "P"), negative=True).map(format_placements)
    assert smallest(placed, lambda text: True, seed) == "R,R"
    assert smallest(placed, lambda text: "-" in text, seed) in ("S(-2),R", "R,S(-2)")
    assert smallest(placed, lambda text: "P" in text, seed) in ("P(sum),R", "R,P(sum)")


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors(seed: int) -> None:
    fills, memories = ("distinct", "ties"), ("plain", "transposed", "sliced")
    some = specs(mesh=Mesh.of(2), dtypes=("float32", "int64", "bool"), memories=memories, fills=fills)
    assert smallest(some, lambda spec: True, seed) == "2:R"
    assert smallest(some, lambda spec: spec.dtype == "bool", seed) == "2:R:bool"
    assert smallest(some, lambda spec: spec.memory == "sliced", seed) == "2:R:float32:distinct:sliced"
    assert smallest(some, lambda spec: spec.fill == "ties" and str(spec.placements[0]) == "S(1)", seed) == "2x2:S(1):float32:ties"
