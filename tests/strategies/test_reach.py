"""What the strategies draw: every feature within a thousand draws, plain meshes most often, nothing without meaning."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw import strategies
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.features.layout_features import mesh_features, placement_features, shape_features
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import REDUCE_OPS, Partial, StridedShard, format_placements, shard_dim
from shardlaw.reference.simulate import can_reduce
from shardlaw.reference.tensors import DTYPES, FILLS, MEMORIES, TensorSpec
from shardlaw.strategies import (
    dim_sizes,
    dtypes,
    exact_meshes,
    layouts,
    meshes,
    placement_pairs,
    placements,
    redistributions,
    reshards,
    shapes,
    specs,
)

T = TypeVar("T")


def drawn(strategy: SearchStrategy[T], count: int = 1_000) -> list[T]:
    """The first ``count`` draws under a fixed seed."""
    found: list[T] = []

    @seed(1)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def take(value: T) -> None:
        found.append(value)

    take()
    return found


def counted(values: Iterable[T], features: Callable[[T], frozenset[str]]) -> Counter[str]:
    return Counter(feature for value in values for feature in features(value))


@cache
def drawn_layouts() -> list[Layout]:
    return drawn(layouts())


@cache
def drawn_meshes() -> list[Mesh]:
    return drawn(meshes())


def of(layout: Layout) -> frozenset[str]:
    world = max(layout.mesh.ranks) + 1
    return (
        shape_features(layout.shape)
        | mesh_features(layout.mesh, world)
        | placement_features(layout.shape, str(layout.mesh), format_placements(layout.placements))
    )


SIZES = ("uneven", "empty-shard", "size-0", "size-1", "0-d")
MESHES = ("mesh-2d", "mesh-3d", "unit-mesh-dim", "permuted", "submesh", "nested")
STRIDED = ("strided", "no-box", "strided-stacked", "strided-uneven")


def test_layouts_reach_every_feature_of_a_layout() -> None:
    reached = counted(drawn_layouts(), of)
    assert {feature: reached[feature] for feature in SIZES + MESHES + STRIDED if reached[feature] < 10} == {}


def test_layouts_with_reductions_reach_every_operation() -> None:
    reached = counted(drawn(layouts(kinds=("R", "S", "P"), reduce_ops=REDUCE_OPS)), of)
    wanted = [f"partial:{op}" for op in REDUCE_OPS] + ["partial-twice"]
    assert {feature: reached[feature] for feature in wanted if reached[feature] < 10} == {}
    assert "mixed-partials" not in reached
    assert counted(drawn(layouts(kinds=("P",), reduce_ops=("sum", "avg"))), of)["partial-mixed"] > 10


def test_nested_shards_are_common_on_meshes_of_several_dims() -> None:
    found = [layout for layout in drawn_layouts() if layout.mesh.ndim > 1]
    assert sum("nested" in of(layout) for layout in found) > len(found) / 4


def test_meshes_are_plain_most_often_and_come_from_a_small_palette() -> None:
    found = drawn_meshes()
    plain = sum("@" not in str(mesh) for mesh in found)
    assert len(found) / 2 < plain < len(found) * 0.8
    assert len(set(found)) < 110
    by_dims = Counter(mesh.ndim for mesh in found)
    assert min(by_dims[1], by_dims[2]) > len(found) / 4
    assert by_dims[3] > len(found) / 20


def test_ranks_fail_to_ascend_along_each_mesh_dim() -> None:
    def falls(mesh: Mesh, dim: int) -> bool:
        return any(list(group) != sorted(group) for group in (mesh.group(dim, coord) for coord in mesh.coords()))

    square = [mesh for mesh in drawn(meshes(sizes=(2,), min_dims=2)) if mesh.shape == (2, 2)]
    ways = Counter((falls(mesh, 0), falls(mesh, 1), list(mesh.ranks) == sorted(mesh.ranks)) for mesh in square)
    assert {(True, False, False), (False, True, False), (True, True, False), (False, False, False), (False, False, True)} <= set(ways)


def test_sub_meshes_leave_out_the_first_rank_or_one_in_the_middle() -> None:
    texts = {str(mesh) for mesh in drawn_meshes()}
    assert {"2@0,2", "2@1,2", "3@0,1,3"} <= texts


@pytest.mark.parametrize(
    ("strategy", "holds"),
    [
        (meshes(world_size=3), lambda mesh: max(mesh.ranks) < 3),
        (meshes(min_size=3), lambda mesh: mesh.size >= 3),
        (meshes(min_dims=2, max_dims=2), lambda mesh: mesh.ndim == 2),
        (meshes(sizes=(1, 3)), lambda mesh: set(mesh.shape) <= {1, 3}),
        (meshes(unit_dims=False), lambda mesh: 1 not in mesh.shape),
        (meshes(permuted=False), lambda mesh: list(mesh.ranks) == sorted(mesh.ranks)),
        (meshes(submeshes=False), lambda mesh: max(mesh.ranks) == mesh.size - 1),
        (meshes(submeshes=False, permuted=False), lambda mesh: "@" not in str(mesh)),
        (exact_meshes(3), lambda mesh: max(mesh.ranks) == 2),
        (exact_meshes(4, max_dims=1, submeshes=False), lambda mesh: mesh.shape == (4,)),
        (shapes(min_dims=2, max_dims=4), lambda shape: 2 <= len(shape) <= 4),
        (shapes(min_size=3, max_size=6), lambda shape: all(3 <= size <= 6 for size in shape)),
        (shapes(sizes=(6, 11), max_size=20), lambda shape: set(shape) <= {6, 11}),
        (shapes(min_size=20, max_size=22), lambda shape: all(20 <= size <= 22 for size in shape)),
        (dim_sizes(min_size=1), lambda size: size >= 1),
        (layouts(kinds=("S",)), lambda layout: all(shard_dim(placement) is not None for placement in layout.placements)),
        (layouts(split_factors=(5,)), lambda layout: all(p.split_factor == 5 for p in layout.placements if isinstance(p, StridedShard))),
        (layouts(shape=(3, 4), mesh=Mesh.of(2, 2)), lambda layout: (layout.shape, layout.mesh) == ((3, 4), Mesh.of(2, 2))),
        (dtypes(("int64", "bool")), lambda dtype: dtype in ("int64", "bool")),
        (
            reshards(world_sizes=(2, 4)),
            lambda pair: all(max(end.mesh.ranks) + 1 in (2, 4) for end in pair) and pair[0].shape == pair[1].shape,
        ),
        (redistributions(), lambda pair: (pair[0].mesh, pair[0].shape) == (pair[1].mesh, pair[1].shape) and not pair[1].has_partial()),
        (
            redistributions(target_kinds=("S",)),
            lambda pair: pair[1].shape != () and all(shard_dim(p) is not None for p in pair[1].placements),
        ),
        (redistributions(source=Layout((4,), Mesh.of(2), (Partial(),))), lambda pair: pair[0] == Layout((4,), Mesh.of(2), (Partial(),))),
        (redistributions(source=layouts(kinds=("S",))), lambda pair: not pair[0].has_partial()),
    ],
)
def test_options_are_kept(strategy: SearchStrategy[T], holds: Callable[[T], bool]) -> None:
    found = drawn(strategy, 300)
    assert [value for value in found if not holds(value)] == []


def test_pending_reductions_are_kept_or_done_but_never_made() -> None:
    pairs = drawn(redistributions(source_kinds=("R", "S", "P"), target_kinds=("R", "S", "P"), reduce_ops=("sum", "max")))
    for source, target in pairs:
        for old, new in zip(source.placements, target.placements, strict=True):
            assert not isinstance(new, Partial) or new == old
    assert sum(target.has_partial() for _, target in pairs) > 30


def test_pairs_of_placements_are_all_of_them_each_once() -> None:
    pairs = list(placement_pairs(2, 2, kinds=("R", "S"), reduce_ops=("sum",)))
    assert len(pairs) == len(set(pairs)) == 9 * 9 - 9
    pending = list(placement_pairs(1, 1, kinds=("R", "S", "P"), reduce_ops=("sum", "max")))
    texts = [(format_placements(source), format_placements(target)) for source, target in pending]
    assert texts == [("R", "S(0)"), ("S(0)", "R"), ("P(sum)", "R"), ("P(max)", "R"), ("P(sum)", "S(0)"), ("P(max)", "S(0)")]
    for source, target in placement_pairs(2, 2):
        assert all(not isinstance(new, Partial) or new == old for old, new in zip(source, target, strict=True))


def test_reshards_cross_worlds() -> None:
    worlds = Counter((max(save.mesh.ranks) + 1, max(load.mesh.ranks) + 1) for save, load in drawn(reshards()))
    assert len(worlds) == 16


def test_negative_dims_come_where_they_are_asked_for() -> None:
    found = drawn(placements(Mesh.of(2, 2), 3, negative=True))
    dims = Counter(shard_dim(placement) for placed in found for placement in placed)
    assert {-3, -2, -1, 0, 1, 2} <= set(dims)
    assert not any((shard_dim(p) or 0) < 0 for placed in drawn(placements(Mesh.of(2, 2), 3)) for p in placed)


def test_tensors_reach_every_dtype_fill_and_memory() -> None:
    strategy = specs(mesh=Mesh.of(2), dtypes=DTYPES, fills=(*FILLS, "index7"), memories=MEMORIES, reduce_ops=REDUCE_OPS, negative=True)
    found = drawn(strategy, 2_000)
    assert {spec.dtype for spec in found} == set(DTYPES)
    assert {spec.fill for spec in found} == {*FILLS, "index7"}
    assert {spec.memory for spec in found} == set(MEMORIES)
    features = Counter(feature for spec in found for feature in features_of(Case.of("any.law", mesh=Mesh.of(2), a=spec)))
    wanted = {f"dtype:{name}" for name in DTYPES if name != "float32"} | {f"partial:{op}" for op in REDUCE_OPS}
    wanted |= {"noncontiguous", "memory:transposed", "memory:sliced", "memory:expanded", "tie", "negative-shard", "cancelling"}
    assert wanted - set(features) == set()
    for spec in found:
        assert all(can_reduce(spec.torch_dtype, placement.op) for placement in spec.placements or () if isinstance(placement, Partial))


def test_plain_tensors_have_no_placements() -> None:
    assert {spec.placements for spec in drawn(specs(), 50)} == {None}
    placed = Layout((2,), Mesh.of(2), (Partial(),)).placements
    assert {spec.placements for spec in drawn(specs(shape=(2,), placed=placed), 5)} == {placed}
    assert drawn(specs(shape=st.just((3,)), placed=st.just(None)), 1) == [TensorSpec((3,))]


def test_one_seed_draws_the_same() -> None:
    assert drawn(redistributions(), 200) == drawn(redistributions(), 200)


def test_strategies_import_neither_the_harness_nor_torch_distributed() -> None:
    for path in Path(strategies.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong = [name for name in names if name.startswith("shardlaw.conformance") or name.startswith("torch.distributed")]
            assert not wrong, f"{path.name} imports {wrong}"
