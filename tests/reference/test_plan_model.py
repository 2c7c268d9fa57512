"""Plans against a second model of them, which knows no boxes: it follows single elements through tables of points."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlaw.reference.box import Box, format_boxes, parse_boxes, tiling_errors
from shardlaw.reference.checkpoint.load_plan import cover_errors, read_items
from shardlaw.reference.checkpoint.plan_cache import PlanCache
from shardlaw.reference.checkpoint.save_plan import Metadata, TensorEntry, dedup, describe, metadata_errors
from shardlaw.reference.checkpoint.sharded_leaf import ShardedLeaf, plans_of
from shardlaw.reference.notation import NotationError
from shardlaw.reference.shards import Shards
from shardlaw.strategies.tilings import DAMAGES, damage, damaged_tilings, tilings, wanted_boxes

Point = tuple[int, ...]


def points(box: Box) -> list[Point]:
    """Every index of a box, one by one."""
    return list(itertools.product(*(range(start, start + size) for start, size in zip(box.offset, box.size, strict=True))))


def covers(shape: Point, boxes: list[Box]) -> bool:
    """Whether the points of the boxes are those of the tensor, each once."""
    counted = Counter(point for box in boxes for point in points(box))
    return counted == Counter(points(Box((0,) * len(shape), shape)))


@st.composite
def splits(draw: st.DrawFn) -> tuple[Point, tuple[Box, ...], tuple[Box, ...]]:
    shape, chunks = draw(tilings(empties=draw(st.booleans())))
    return shape, chunks, draw(wanted_boxes(shape))


@given(tilings(empties=True))
def test_a_tiling_has_every_element_once(tiling):
    shape, boxes = tiling
    assert covers(shape, list(boxes))
    assert tiling_errors(shape, boxes) == []


@given(damaged_tilings())
def test_a_damaged_tiling_has_not(found):
    shape, boxes, kind = found
    assert kind in DAMAGES
    assert not covers(shape, list(boxes))
    assert tiling_errors(shape, boxes) != []


def test_every_way_of_damaging_is_told_from_whole_by_both_models():
    rng, seen = random.Random(5), Counter()
    for _ in range(3000):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
        boxes = [Box((0,) * len(shape), shape)]
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(boxes))
            dims = [dim for dim, size in enumerate(boxes[at].size) if size > 1]
            if dims:
                dim = rng.choice(dims)
                box, cut = boxes[at], rng.randint(1, boxes[at].size[dim] - 1)
                low = tuple(cut if d == dim else size for d, size in enumerate(box.size))
                high = tuple(size - cut if d == dim else size for d, size in enumerate(box.size))
                moved = tuple(start + cut if d == dim else start for d, start in enumerate(box.offset))
                boxes[at : at + 1] = [Box(box.offset, low), Box(moved, high)]
        kind = rng.choice(DAMAGES)
        broken = damage(shape, boxes, kind, rng.getrandbits(16))
        whole = covers(shape, list(broken))
        assert (tiling_errors(shape, broken) == []) == whole
        seen[kind] += not whole
    assert all(seen[kind] > 100 for kind in DAMAGES), seen


@given(splits())
def test_reads_carry_every_wanted_element_from_where_it_was_saved(found):
    _, chunks, boxes = found
    items = read_items(chunks, boxes)
    assert cover_errors(items, boxes) == []
    where = {point: number for number, chunk in enumerate(chunks) for point in points(chunk)}
    for at, box in enumerate(boxes):
        carried = {}
        for item in (item for item in items if item.box == at):
            for step in itertools.product(*map(range, item.lengths)):
                local = tuple(a + b for a, b in zip(item.box_offset, step, strict=True))
                source = tuple(a + b + c for a, b, c in zip(item.chunk_offset, step, chunks[item.chunk].offset, strict=True))
                assert where[source] == item.chunk
                assert local not in carried
                carried[local] = source
        assert carried == {tuple(a - b for a, b in zip(point, box.offset, strict=True)): point for point in points(box)}


@given(damaged_tilings(kinds=("gap", "emptied", "overlap", "shifted")))
def test_reads_of_damaged_chunks_do_not_cover_the_tensor(found):
    shape, chunks, _ = found
    whole = Box((0,) * len(shape), shape)
    inside = [box for box in chunks if whole.contains(box)]
    assert bool(cover_errors(read_items(inside, [whole]), [whole])) == (not covers(shape, inside))


@st.composite
def held_by_ranks(draw: st.DrawFn) -> tuple[dict[str, ShardedLeaf], int]:
    ranks = draw(st.integers(1, 4))
    leaves = {}
    for name in "ab"[: draw(st.integers(1, 2))]:
        shape, boxes = draw(tilings())
        some = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(tuple)
        dtype = draw(st.sampled_from(("float32", "bool")))
        leaves[name] = ShardedLeaf("boxes", Shards(shape, tuple((box, draw(some)) for box in boxes)), dtype)
    leaves["n"] = ShardedLeaf.value(range(ranks))
    return leaves, ranks


@given(held_by_ranks(), st.booleans())
def test_what_is_shared_out_is_everything_once_and_nobody_writes_what_it_has_not(found, lowest):
    leaves, ranks = found
    given_plans = plans_of(leaves, ranks)
    shared = dedup(given_plans, lowest=lowest)
    assert len(shared) == ranks
    for name, leaf in leaves.items():
        written = Counter(item.box for plan in shared for item in plan if item.name == name)
        assert set(written.values()) == {1}
        assert {*written} == ({None} if leaf.kind == "value" else {*leaf.shards.boxes})
    for rank, plan in enumerate(shared):
        for item in plan:
            holders = [by for box, by in leaves[item.name].shards.parts if box == item.box or item.box is None]
            assert any(rank in by for by in holders)
            assert not lowest or rank == min(min(by) for by in holders)
    assert metadata_errors(describe(shared)) == []


@given(held_by_ranks())
def test_where_all_hold_all_the_bytes_are_shared_evenly(found):
    leaves, ranks = found
    every = tuple(range(ranks))
    same = {
        name: ShardedLeaf(leaf.kind, Shards(leaf.shape, tuple((box, every) for box in leaf.shards.boxes)), leaf.dtype)
        for name, leaf in leaves.items()
    }
    sizes = [[item.size for item in plan] for plan in dedup(plans_of(same, ranks))]
    assert max(map(sum, sizes)) - min(map(sum, sizes)) <= max(size for plan in sizes for size in plan)


@given(held_by_ranks())
@settings(max_examples=200)
def test_what_is_held_is_read_back_from_its_text(found):
    for leaf in found[0].values():
        assert ShardedLeaf.parse(str(leaf)) == leaf
        assert parse_boxes(format_boxes(leaf.shards.boxes), len(leaf.shape)) == leaf.shards.boxes


@pytest.mark.parametrize(
    "text", ["value", "value@", "value@x", "5/0:2", "5/0:6:1@0", "5x6/0:2@0", "5:f/0:5@0", "x/0:5@0", "5/2:1@0", "5/()@0"]
)
def test_what_means_nothing_is_refused(text):
    with pytest.raises(NotationError):
        ShardedLeaf.parse(text)


def test_a_chunk_is_found_wherever_the_hint_points():
    chunks = (Box((0,), (2,)), Box((2,), (3,)))
    metadata = Metadata({"x": TensorEntry((5,), chunks), "n": None})
    for hint in (None, 0, 1, 2, -1, 99):
        assert metadata.chunk("x", (2,), hint) == chunks[1]
    for name, offset in (("x", (1,)), ("n", (0,))):
        with pytest.raises(KeyError):
            metadata.chunk(name, offset)


@given(st.lists(held_by_ranks(), min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_what_is_kept_gives_what_is_planned_anew(states, order):
    ranks, cache, last = 4, PlanCache(), None
    for at in order:
        leaves, _ = states[at % len(states)]
        plans = plans_of(leaves, ranks)
        paths = [{item.name: (item.name,) for item in plan} for plan in plans]
        told = cache.update(plans, paths)
        assert cache.outcome() == (dedup(plans), describe(dedup(plans)))
        if last is not None:
            assert told == [plan != before for plan, before in zip(plans, last, strict=True)]
        last = plans
    again = {name: ("other", name) for name in leaves}
    assert any(cache.update(plans, [again] * ranks))
