"""Plans of saves and loads: who writes what, what is read from where, and that it is everything once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlaw.reference import simulate
from shardlaw.reference.box import Box, tiles_exactly
from shardlaw.reference.checkpoint.load_plan import LoadError, ReadItem, copy_items, cover_errors, plan_reads, read_items
from shardlaw.reference.checkpoint.save_plan import (
    Metadata,
    TensorEntry,
    WriteItem,
    box_items,
    dedup,
    describe,
    metadata_errors,
    plain_items,
    shard_items,
    split_by_thread,
    value_items,
)
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import parse_placements
from shardlaw.reference.tensors import dense
from shardlaw.strategies import reshards


def layout(shape: tuple[int, ...], mesh: str, placed: str) -> Layout:
    return Layout(shape, Mesh.parse(mesh), parse_placements(placed))


def plans_of(name: str, of: Layout, world: int) -> list[tuple[WriteItem, ...]]:
    return [shard_items(name, of, of.mesh.coord(rank)) for rank in range(world)]


def boxed(of: Layout) -> bool:
    return all(of.box(coord) is not None for coord in of.mesh.coords())


PAIRS = reshards(kinds=("R", "S")).filter(lambda pair: boxed(pair[0]) and boxed(pair[1]))


@given(PAIRS, st.booleans())
def test_what_is_saved_tiles_every_tensor_whoever_writes_it(pair, lowest):
    saved, _ = pair
    world = max(saved.mesh.ranks) + 1
    plans = dedup(plans_of("x", saved, world), lowest=lowest)
    assert metadata_errors(describe(plans)) == []
    held = [item.box for plan_ in plans for item in plan_ if item.box and item.box.volume]
    assert len(held) == len(set(held))
    for rank, plan_ in enumerate(plans):
        assert set(plan_) <= set(shard_items("x", saved, saved.mesh.coord(rank)))
    if lowest:
        first = {item.offset: rank for rank, plan_ in reversed([*enumerate(plans_of("x", saved, world))]) for item in plan_}
        assert all(first[item.offset] == rank for rank, plan_ in enumerate(plans) for item in plan_)


@given(PAIRS)
def test_what_is_read_fills_every_shard_once(pair):
    saved, loaded = pair
    metadata = describe(dedup(plans_of("x", saved, max(saved.mesh.ranks) + 1)))
    entry = metadata.entries["x"]
    full = dense(saved.shape, torch.int64, "distinct", 3)
    chunks = [full[chunk.slices()].clone() for chunk in entry.chunks]
    for coord in loaded.mesh.coords():
        box = loaded.box(coord)
        items = plan_reads(metadata, {"x": TensorEntry(loaded.shape, (box,))})["x"]
        assert cover_errors(items, [box]) == []
        assert all(min(item.lengths, default=1) > 0 for item in items)
        local = torch.full(box.size, 10**6)
        copy_items(items, chunks, [local])
        assert torch.equal(local, simulate.take(full, loaded, coord))


def test_replicas_are_shared_out_by_what_went_to_each_rank_before():
    plans = [(*plain_items("big", (100,)), *plain_items("small", (1,)), *plain_items("little", (2,)), *value_items("n"))] * 2
    first, second = dedup(plans)
    assert [item.name for item in first] == ["big"]
    assert [item.name for item in second] == ["small", "little", "n"]
    assert dedup(plans, lowest=True) == [plans[0], ()]


def test_a_rank_outside_the_mesh_writes_nothing():
    of = layout((5,), "2@0,2", "S(0)")
    assert [len(items) for items in plans_of("x", of, 3)] == [1, 0, 1]


def test_an_empty_shard_begins_at_the_end():
    of = layout((2, 3), "3", "S(0)")
    assert [item.box for plan_ in plans_of("x", of, 3) for item in plan_] == [Box((0, 0), (1, 3)), Box((1, 0), (1, 3)), Box((2, 0), (0, 3))]


@pytest.mark.parametrize(("mesh", "placed"), [("2", "_S(0,2)"), ("2", "P(sum)")])
def test_what_is_no_box_cannot_be_saved(mesh, placed):
    with pytest.raises(ValueError, match="no box"):
        plans_of("x", layout((8,), mesh, placed), 2)


@pytest.mark.parametrize(
    ("boxes", "told"),
    [
        ([Box((0,), (2,)), Box((3,), (1,))], "3 of 4"),
        ([Box((0,), (3,)), Box((2,), (2,))], "overlap"),
        ([Box((0,), (3,)), Box((3,), (2,))], "outside"),
        ([Box((0,), (3,))], "3 of 4"),
    ],
)
def test_damaged_tilings_are_told(boxes, told):
    found = metadata_errors(describe([box_items("x", (4,), boxes)]))
    assert len(found) >= 1
    assert told in found[0]
    assert found[0].startswith("x: ")


def test_a_tensor_without_dims_is_stored_once():
    assert metadata_errors(Metadata({"x": TensorEntry((), (Box((), ()),))})) == []
    assert metadata_errors(Metadata({"x": TensorEntry((), (Box((), ()), Box((), ())))})) != []
    assert metadata_errors(Metadata({"x": TensorEntry((), ())})) != []
    assert read_items([Box((), ())], [Box((), ())]) == [ReadItem(0, 0, (), (), ())]


def test_one_leaf_is_not_written_twice():
    with pytest.raises(ValueError, match="n is written twice"):
        describe([value_items("n"), value_items("n")])


METADATA = describe([(*box_items("x", (4,), [Box((0,), (3,))]), *plain_items("w", (2, 2)), *value_items("n"))])


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"y": None}, "y is not"),
        ({"n": TensorEntry((1,), ())}, "no tensor"),
        ({"w": None}, "a tensor in"),
        ({"w": TensorEntry((4,), ())}, "shape"),
        ({"x": TensorEntry((4,), (Box((2,), (2,)),))}, "1 of 2"),
    ],
)
def test_what_cannot_be_filled_is_refused_by_name(wanted, told):
    with pytest.raises(LoadError, match=next(iter(wanted))) as error:
        plan_reads(METADATA, wanted)
    assert told in str(error.value)


def test_a_partial_load_leaves_out_what_is_missing():
    assert plan_reads(METADATA, {"y": None, "n": None}, partial=True) == {"n": []}


def test_items_are_shared_among_threads():
    items = [
        *value_items("a"),
        *plain_items("s", (1,)),
        *value_items("b"),
        *plain_items("l", (9,)),
        *plain_items("m", (4,)),
        *value_items("c"),
    ]
    assert split_by_thread(items, 1) == [items]
    assert [[item.name for item in bucket] for bucket in split_by_thread(items, 2)] == [["a", "c", "l"], ["b", "m", "s"]]


@given(PAIRS)
def test_read_items_are_exact(pair):
    saved, loaded = pair
    chunks = [saved.box(coord) for coord in saved.mesh.coords()]
    for coord in loaded.mesh.coords():
        box = loaded.box(coord)
        for item in read_items(chunks, [box]):
            from_chunk = tuple(a + b for a, b in zip(item.chunk_offset, chunks[item.chunk].offset, strict=True))
            from_box = tuple(a + b for a, b in zip(item.box_offset, box.offset, strict=True))
            assert from_chunk == from_box
            assert chunks[item.chunk].contains(Box(from_chunk, item.lengths))
            assert box.contains(Box(from_box, item.lengths))
        unique = list(dict.fromkeys(chunks))
        parts = [Box(item.box_offset, item.lengths) for item in read_items(unique, [box])]
        assert tiles_exactly(box.size, parts)
