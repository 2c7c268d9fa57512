"""Tensors in boxes and shard orders, against sets of points and against plain layouts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlaw.reference.box import Box
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError, parse_shape
from shardlaw.reference.orders import order_placements, owned_in_order
from shardlaw.reference.placement import Replicate, Shard, StridedShard, parse_placements
from shardlaw.reference.shards import Shards, are_side_by_side, joined_size, shards_along
from shardlaw.strategies import shards
from shardlaw.strategies.layouts import WAYS

MESHES = {"rows": "4", "columns": "3", "table": "1@2", "grid": "2x2"}


@given(st.data(), st.sampled_from(WAYS))
def test_every_element_of_what_is_drawn_is_held_once(data: st.DataObject, way: str) -> None:
    drawn = data.draw(shards(Mesh.parse(MESHES[way]), way=way))
    held = [
        point
        for box, _ in drawn.parts
        for point in itertools.product(*(range(start, end) for start, end in zip(box.offset, box.end, strict=True)))
    ]
    assert sorted(held) == sorted(itertools.product(*map(range, drawn.shape)))
    assert drawn.errors() == []
    assert {rank for _, rank in drawn.holdings()} <= set(Mesh.parse(MESHES[way]).ranks)


@given(st.data(), st.sampled_from(WAYS))
def test_shards_are_told_and_read_back(data: st.DataObject, way: str) -> None:
    drawn = data.draw(shards(Mesh.parse(MESHES[way]), way=way))
    if drawn.parts:
        assert Shards.parse(drawn.shape, str(drawn)) == Shards.parse(drawn.shape, str(drawn), one_rank_each=True) == drawn


def test_runs_of_any_length() -> None:
    rows = shards_along((8, 2), 0, [(1, 0), (3, 1), (1, 2), (3, 3)])
    assert str(rows) == "0:1,0:2@0;1:4,0:2@1;4:5,0:2@2;5:8,0:2@3"
    assert rows.boxes_of(3) == (Box((5, 0), (3, 2)),)


def test_what_does_not_tile_is_told() -> None:
    assert Shards.parse((4,), "0:2@0;1:4@1").errors() == ["[1:4] and [0:2] overlap"]
    assert Shards.parse((4,), "0:2@0").errors() == ["2 of 4 elements are covered"]


@pytest.mark.parametrize("text", ["", "0:2", "0:2@a", "2:0@0", "0:2,0:1@0", "0:2@0;", "0-2@0"])
def test_what_is_no_list_of_boxes_is_refused(text: str) -> None:
    with pytest.raises(NotationError, match="want"):
        Shards.parse((4,), text)


def test_a_box_may_be_held_by_several_ranks_or_twice_by_one() -> None:
    held = Shards.parse((5,), "0:2@0+1;2:5@2;0:2@1;5:5@3")
    assert str(held) == "0:2@0+1;2:5@2;0:2@1;5:5@3"
    assert held.boxes_of(1) == (Box((0,), (2,)),) * 2
    assert held.boxes == (Box((0,), (2,)), Box((2,), (3,)), Box((5,), (0,)))
    assert str(held.without_empty()) == "0:2@0+1;2:5@2;0:2@1"
    with pytest.raises(NotationError, match="want one rank for each box"):
        Shards.parse((5,), str(held), one_rank_each=True)


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ("5x6 on 2 as S(0)", "0:3,0:6@0;3:5,0:6@1"),
        ("5x6 on 2x2@0,2,1,3 as S(0),R", "0:3,0:6@0+2;3:5,0:6@1+3"),
        ("2 on 3 as S(0)", "0:1@0;1:2@1;2:2@2"),
        ("() on 2@1,3 as R", "()@1+3"),
    ],
)
def test_placements_say_who_holds_what(layout: str, held: str) -> None:
    shape, _, mesh, _, placements = layout.split(" ")
    found = Shards.of_layout(Layout(parse_shape(shape), Mesh.parse(mesh), parse_placements(placements)))
    assert str(found) == held
    assert Shards.parse(found.shape, held) == found
    assert found.errors() == []


@pytest.mark.parametrize("placement", ["_S(0,2)", "P(sum)"])
def test_what_is_no_box_is_held_by_nobody(placement: str) -> None:
    with pytest.raises(ValueError, match="holds no box"):
        Shards.of_layout(Layout((5,), Mesh.of(2), parse_placements(placement)))


def test_boxes_lie_side_by_side_when_only_the_last_dim_differs() -> None:
    assert are_side_by_side([Box((0, 0), (2, 1)), Box((0, 3), (2, 2))])
    assert not are_side_by_side([Box((0, 0), (2, 1)), Box((2, 0), (1, 1))])
    assert joined_size([Box((0, 0), (2, 1)), Box((0, 3), (2, 2))]) == (2, 3)
    assert joined_size([Box((0, 0), (2, 1)), Box((2, 0), (1, 1))]) is joined_size([]) is joined_size([Box((), ())]) is None


@given(st.sampled_from(["2x2", "2x3", "2x2x2", "3x2x1"]), st.data(), st.integers(1, 3))
def test_where_every_cut_is_even_a_shard_order_is_what_its_placements_say(text: str, data: st.DataObject, times: int) -> None:
    mesh = Mesh.parse(text)
    order = tuple(data.draw(st.permutations(range(mesh.ndim))))[: data.draw(st.integers(1, mesh.ndim))]
    layout = Layout((mesh.size * times,), mesh, order_placements(mesh, {0: order}))
    for coord in mesh.coords():
        assert layout.owned(coord)[0] == owned_in_order(mesh.size * times, mesh, order, coord)


def test_an_order_is_written_down_by_split_factors() -> None:
    mesh = Mesh.of(4, 3, 2)
    assert order_placements(mesh, {0: (2, 0, 1)}) == (StridedShard(0, 2), StridedShard(0, 2), Shard(0))
    assert order_placements(mesh, {1: (2, 0)}) == (StridedShard(1, 2), Replicate(), Shard(1))
    assert order_placements(mesh, {0: (0, 1, 2)}) == (Shard(0),) * 3
