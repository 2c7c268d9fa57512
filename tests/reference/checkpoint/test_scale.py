"""What is true of all ranks by arithmetic is what is true of them one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlaw.reference.checkpoint.load_plan import read_items
from shardlaw.reference.checkpoint.save_plan import dedup, shard_items
from shardlaw.reference.checkpoint.scale import Grid
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Placements, Replicate, Shard, StridedShard
from shardlaw.reference.shards import Shards

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def grids(draw: st.DrawFn, shape: Shape) -> tuple[Grid, Layout]:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    kinds = [Replicate(), *map(Shard, range(-len(shape), len(shape)))]
    placements: Placements = tuple(draw(st.sampled_from(kinds)) for _ in mesh)
    return Grid(shape, mesh, placements), Layout(shape, Mesh.of(*mesh), placements)


@given(st.data())
def test_counts_are_those_of_the_boxes_of_all_ranks(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    (saved, save), (loaded, load) = data.draw(grids(shape)), data.draw(grids(shape))
    chunks, wanted = (Shards.of_layout(layout).without_empty().boxes for layout in (save, load))
    assert saved.boxes == len(chunks)
    if chunks:
        assert [[tuple(run) for run in runs] for runs in saved.cuts()] == [
            sorted({(box.offset[dim], box.size[dim]) for box in chunks}) for dim in range(len(shape))
        ]
    assert loaded.reads(saved) == len(read_items(chunks, wanted))
    held = [load.box(coord) for coord in load.mesh.coords()]
    assert loaded.elements == sum(box.volume for box in held if box is not None)


@given(st.data())
def test_a_rank_opens_the_files_of_those_that_wrote_what_it_reads(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    (saved, save), (loaded, load) = data.draw(grids(shape)), data.draw(grids(shape))
    plans = dedup([shard_items("x", save, coord) for coord in save.mesh.coords()], lowest=True)
    writers = {item.box: rank for rank, plan in enumerate(plans) for item in plan if item.box is not None and item.box.volume}
    chunks, due = [*writers], {}
    for rank, coord in enumerate(load.mesh.coords()):
        box = load.box(coord)
        assert box is not None
        if box.volume:
            due[rank] = {writers[chunks[item.chunk]] for item in read_items(chunks, [box])}
    assert loaded.files(saved) == due


def test_strided_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="holds no run"):
        Grid((4,), (2,), (StridedShard(0, 2),))
