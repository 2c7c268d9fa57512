"""Layouts by example: what the documents promise, written down by hand."""

from __future__ import annotations

import re

import pytest

from shardlaw.reference import layout as layouts
from shardlaw.reference.box import Box
from shardlaw.reference.layout import Layout, LayoutError, chunk, strided
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Shard, parse_placements


def layout(shape: tuple[int, ...], mesh: str, placements: str) -> Layout:
    return Layout(shape, Mesh.parse(mesh), parse_placements(placements))


def rows(shape: tuple[int, ...], mesh: str, placements: str) -> list[list[int]]:
    """The indices of the first dim that each coordinate owns."""
    placed = layout(shape, mesh, placements)
    return [list(placed.owned(coord)[0]) for coord in placed.mesh.coords()]


@pytest.mark.parametrize(
    ("length", "parts", "sizes"),
    [
        (5, 4, [2, 2, 1, 0]),
        (4, 3, [2, 2, 0]),
        (7, 2, [4, 3]),
        (1, 3, [1, 0, 0]),
        (0, 2, [0, 0]),
        (6, 3, [2, 2, 2]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
    ],
)
def test_runs_are_rounded_up_and_the_last_ones_go_without(length: int, parts: int, sizes: list[int]) -> None:
    runs = chunk(tuple(range(length)), parts)
    assert [len(run) for run in runs] == sizes
    assert [index for run in runs for index in run] == list(range(length))


def test_a_split_factor_of_one_is_a_plain_shard() -> None:
    indices = tuple(range(11))
    assert strided(indices, 4, 1) == chunk(indices, 4)
    assert layout((5,), "2", "_S(0,1)") != layout((5,), "2", "S(0)")


def test_two_mesh_dims_on_one_tensor_dim_cut_left_first() -> None:
    assert rows((7,), "2x2", "S(0),S(0)") == [[0, 1], [2, 3], [4, 5], [6]]
    assert rows((5,), "2x2", "S(0),S(0)") == [[0, 1], [2], [3], [4]]


def test_a_strided_shard_to_the_left_of_a_shard_cuts_as_if_the_right_one_came_first() -> None:
    # [_S(0,2), S(0)] on 2x2 is what a shard over mesh dim 1 and then over mesh dim 0 leaves
    assert rows((8,), "2x2", "_S(0,2),S(0)") == [[0, 1], [4, 5], [2, 3], [6, 7]]
    flipped = {coord: rows((8,), "2x2", "S(0),S(0)")[2 * coord[1] + coord[0]] for coord in Mesh.of(2, 2).coords()}
    assert list(flipped.values()) == rows((8,), "2x2", "_S(0,2),S(0)")


def test_the_example_of_the_docstring() -> None:
    table = re.findall(r"^    ([01])        (.+)$", layouts.__doc__ or "", re.MULTILINE)
    told = [[int(index) for index in re.findall(r"\d", cell)] for _, line in table for cell in re.split(r"\s{2,}", line.strip())]
    assert told == rows((7,), "2x3", "S(0),_S(0,2)") == [[0, 2], [1, 3], [], [4, 6], [5], []]


def test_the_table_of_both_orders_in_the_docstring() -> None:
    doc = layouts.__doc__ or ""
    for placements in ("S(0),S(0)", "_S(0,2),S(0)"):
        (told,) = re.findall(rf"^    ``{re.escape(placements)}`` (.+)$", doc, re.MULTILINE)
        cells = [[int(index) for index in cell.split()] for cell in re.findall(r"``(.+?)``", told)]
        assert cells == rows((8,), "2x2", placements)


def test_an_empty_shard_begins_at_the_extent() -> None:
    placed = layout((2, 3), "4", "S(0)")
    assert [placed.offset(coord) for coord in placed.mesh.coords()] == [(0, 0), (1, 0), (2, 0), (2, 0)]
    assert [placed.local_shape(coord) for coord in placed.mesh.coords()] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    assert placed.empty_coords() == [(2,), (3,)]


def test_strided_shards_are_boxes_only_where_their_indices_are_a_run() -> None:
    placed = layout((5,), "2", "_S(0,2)")
    assert [placed.owned(coord) for coord in placed.mesh.coords()] == [((0, 1, 3),), ((2, 4),)]
    assert [placed.box(coord) for coord in placed.mesh.coords()] == [None, None]
    assert layout((2,), "2", "_S(0,2)").box((0,)) is None or rows((2,), "2", "_S(0,2)") == [[0, 1], []]
    assert layout((2,), "2", "_S(0,2)").box((0,)) == Box((0,), (2,))


def test_what_does_not_shard_is_held_by_all() -> None:
    placed = layout((4, 4), "2x3", "S(1),R")
    assert placed.replicas() == 3
    assert layout((4, 4), "2x3", "P(sum),P(avg)").replicas() == 6
    assert layout((), "2x2", "R,P(max)").local_shape((1, 1)) == ()


def test_negative_dims_count_from_the_end() -> None:
    assert layout((4, 6), "2", "S(-1)") == layout((4, 6), "2", "S(1)")
    assert layout((4, 6), "2", "_S(-2,3)") == layout((4, 6), "2", "_S(0,3)")


def test_relabelling_ranks_leaves_the_coordinates_alone() -> None:
    plain, odd = layout((5, 3), "2x2", "S(0),S(1)"), layout((5, 3), "2x2@3,1,0,2", "S(0),S(1)")
    assert all(plain.owned(coord) == odd.owned(coord) for coord in plain.mesh.coords())


@pytest.mark.parametrize(
    ("shape", "mesh", "placements", "kind", "words"),
    [
        ((4,), "2x2", "R,R,R", "arity", "3 placements (R,R,R) on mesh 2x2: want one for each of its 2 mesh dims"),
        ((4,), "2x2", "S(0)", "arity", "1 placement (S(0)) on mesh 2x2"),
        ((4,), "2", "R,R", "arity", "want one for each of its 1 mesh dim"),
        ((5, 6), "2", "S(9)", "dim", "S(9) on shape 5x6: it has 2 dims: want a dim from -2 to 1"),
        ((5, 6), "2", "S(-3)", "dim", "S(-3) on shape 5x6: it has 2 dims"),
        ((), "2", "S(0)", "dim", "S(0) on shape (): it has 0 dims: want R or a reduction"),
        ((), "2", "_S(0,2)", "dim", "_S(0,2) on shape ()"),
        ((4,), "2x2", "P(sum),P(max)", "mixed-partial", "P(sum),P(max) mixes the reductions"),
    ],
)
def test_what_means_nothing_is_refused_in_one_line(shape: tuple[int, ...], mesh: str, placements: str, kind: str, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        layout(shape, mesh, placements)
    assert caught.value.kind == kind
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sum_and_avg_may_stand_side_by_side() -> None:
    assert layout((4,), "2x2", "P(sum),P(avg)").has_partial()


def test_replace_places_the_same_tensor_otherwise() -> None:
    assert layout((5,), "2", "R").replace([Shard(-1)]) == layout((5,), "2", "S(0)")


def test_more_runs_than_indices_cost_nothing() -> None:
    assert layout((5,), "2", "_S(0,1000000000)").owned((0,)) == ((0, 1, 2, 3, 4),)
