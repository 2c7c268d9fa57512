"""What a page draws: tensors read back from texts, and who holds what of a case's tensors."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.rank.context import describe_value
from shardlaw.conformance.report.layouts import draw_layouts
from shardlaw.conformance.report.pictures import Elements, group_answers
from tests.harness.reports import rank


@pytest.mark.parametrize(
    ("text", "shape", "elements"),
    [
        ("[[1.0, 2.0], [3.0, nan]] float32 2x2", (2, 2), ("1.0", "2.0", "3.0", "nan")),
        ("[True, False] bool 2", (2,), ("True", "False")),
        ("3.5 float64 ()", (), ("3.5",)),
        ("[] int64 0", (0,), ()),
        ("[[], []] int64 2x0", (2, 0), ()),
        ("[(1+2j), -inf] complex64 2", (2,), ("(1+2j)", "-inf")),
        ("[1, 2] ... int64 5x6", (5, 6), ("1", "2")),
    ],
)
def test_a_tensor_is_read_back(text: str, shape: tuple[int, ...], elements: tuple[str, ...]) -> None:
    found = Elements.parse(text)
    assert found is not None
    assert (found.shape, found.elements) == (shape, elements)


@pytest.mark.parametrize("text", ["", "an error", "torch.float32", "(2, 3)", "[1, 2] int64 3", "[1, 2] int64 1", "[1] x y", "[1, 2]"])
def test_what_is_no_tensor_stays_a_text(text: str) -> None:
    assert Elements.parse(text) is None


def test_what_a_law_shows_is_read_back() -> None:
    import torch

    for tensor in (torch.arange(6.0).reshape(2, 3), torch.zeros(0, 3), torch.tensor(True), torch.arange(100), torch.zeros(2, 2, 2) * 1j):
        found = Elements.parse(describe_value(tensor))
        assert found is not None
        assert found.shape == tuple(tensor.shape)
        assert len(found.elements) == min(64, tensor.numel())


def test_ranks_that_said_the_same_stand_together_and_what_differs_is_marked() -> None:
    held = {"rank": 2, "outcome": "held", "expected": "", "got": "", "message": "", "stack": "", "output": ""}
    both, quiet = group_answers([rank(0), rank(1), held])
    assert (both.ranks, quiet.ranks, quiet.pictures) == ("ranks 0, 1", "rank 2", ())
    expected, got = (picture for _, picture in both.pictures)
    assert [(cell.text, cell.differs) for cell in expected.cells] == [("1", False), ("2", True)]
    assert [(cell.text, cell.differs) for cell in got.cells] == [("1", False), ("3", True)]


def test_where_objects_lie_in_memory_keeps_no_ranks_apart() -> None:
    (told,) = group_answers([rank(number, got=f"ValueError: not in <Group object at 0x7f5ebf2b0c{number}0>") for number in (1, 2)])
    assert told.ranks == "ranks 1, 2"
    assert told.texts == (("got", "ValueError: not in <Group object at 0x...>"),)


def test_contributions_stand_beside_what_they_reduce_to() -> None:
    (told,) = group_answers([rank(0, "[3.0] float32 1", "[4.0] float32 1; rank 0 contributed [2.0] float32 1")])
    assert [(name, [cell.text for cell in picture.cells]) for name, picture in told.pictures] == [
        ("expected", ["3"]),
        ("got", ["4"]),
        ("contributed", ["2"]),
    ]


def test_a_large_tensor_is_cut_with_a_note() -> None:
    import torch

    (told,) = group_answers([rank(0, describe_value(torch.arange(900).reshape(30, 30)), "RuntimeError: no")])
    ((name, picture),) = told.pictures
    assert (name, picture.note) == ("expected", f"{len(picture.cells)} of 900 elements are drawn")
    assert 0 < len(picture.cells) <= 64
    assert told.texts == (("got", "RuntimeError: no"),)
    (told,) = group_answers([rank(0, describe_value(torch.zeros(0, 3)), describe_value(torch.arange(24).reshape(2, 3, 4)))])
    assert told.pictures[0][1].note == "no elements"
    assert [part.label for part in told.pictures[1][1].slices] == ["[0, :, :]", "[1, :, :]"]


@pytest.mark.parametrize(
    ("text", "areas"),
    [
        ("x.y mesh=2 x=4x3:S(0) to=R", [["0", "1"], ["0,1"]]),
        ("x.y mesh=2@1,0 x=4x3:S(0)", [["1", "0"]]),
        ("x.y mesh=2x2 x=5:_S(0,3),S(0)", [["0", "2", "0", "3", "1"]]),
        ("x.y mesh=2x4 x=3:R,R", [["8 ranks"]]),
        ("x.y mesh=2 x=2x2x3:S(1)", [["0", "1", "0", "1"]]),
        ("x.y mesh=2 x=():R", [["0,1"]]),
        ("x.y mesh=2 x=0x3:S(0)", [[]]),
        ("x.y mesh=2 x=40x3:S(0)", [[]]),
        ("x.y mesh=2 x=4x3", []),
        ("x.y x=4x3:S(0)", []),
    ],
)
def test_a_layout_is_drawn_by_who_holds_what(text: str, areas: list[list[str]]) -> None:
    found = draw_layouts(Case.parse(text).to_json())
    assert [[area.text for area in sorted(one.areas, key=lambda area: (area.y, area.x))] for one in found] == areas
    for one in found:
        inside = all(0 <= area.x <= one.width and 0 <= area.y <= one.height + 4 for area in one.areas)
        assert inside
        assert sum(part.width * part.height for part in one.stripes) == pytest.approx(one.width * one.height, rel=0.02)
