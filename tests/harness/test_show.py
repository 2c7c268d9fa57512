"""Who holds what, as text and as a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.commands.show import format_indices, show
from shardlaw.conformance.commands.show_svg import show_svg
from shardlaw.conformance.errors import UsageError
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import parse_shape
from shardlaw.reference.placement import parse_placements

CASES = [
    ("7", "2x2", "S(0),S(0)"),
    ("5x6", "2x3", "_S(0,2),S(1)"),
    ("()", "2", "R"),
    ("3", "2x2@0,3,5,1", "P(sum),S(0)"),
    ("0x3", "2", "S(0)"),
    ("1", "4", "S(-1)"),
    ("5x6", "2x2", "R,S(1)"),
    ("7", "2x3", "S(0),_S(0,2)"),
    ("2x3x4", "2x2", "S(2),R"),
    ("5", "2x2x1", "S(0),R,M(0)"),
]


@pytest.mark.parametrize(("shape", "mesh", "placements"), CASES)
def test_every_rank_stands_with_what_it_owns(shape: str, mesh: str, placements: str) -> None:
    layout = Layout(parse_shape(shape), Mesh.parse(mesh), parse_placements(placements))
    lines = show(shape, mesh, placements).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("rank"))
    rows = lines[start + 1 : start + 1 + layout.mesh.size]
    assert len(rows) == layout.mesh.size
    for row, coord in zip(rows, layout.mesh.coords(), strict=True):
        cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
        assert cells[0] == str(layout.mesh.rank_at(coord))
        local = "x".join(map(str, layout.local_shape(coord))) or "()"
        assert cells[2] == local
        assert cells[4:] == [" ".join(map(str, owned)) or "-" for owned in layout.owned(coord)]
    assert max(map(len, lines)) <= 120


def test_uneven_nested_shards() -> None:
    text = show("7", "2x2", "S(0),S(0)")
    assert "3     (1, 1)      1            (6)     6" in text
    assert "uneven" in text
    assert "rank | 0  0  1  1  2  2  3" in text


def test_strided_shards_in_two_dims() -> None:
    text = show("5x6", "2x3", "_S(0,2),S(1)")
    assert "3     (1, 0)      2x2          (2, 0)  2 4               0 1" in text
    assert "2 | 3  3  4  4  5  5" in text
    assert "not one rectangle" in text


def test_empty_ranks_replicas_and_outsiders_are_named() -> None:
    assert "nothing is held by ranks 1 2 3" in show("1", "4", "S(0)")
    assert "the same elements are held by ranks 0 2" in show("5x6", "2x2", "R,S(1)")
    assert "outside the mesh: ranks 2 4" in show("3", "2x2@0,3,5,1", "R,S(0)")
    assert "contributions to the same elements are held by ranks 0 1" in show("4", "2", "P(max)")
    assert "the tensor has no elements" in show("0x3", "2", "S(0)")


@pytest.mark.parametrize(
    ("shape", "mesh", "placements", "message"),
    [
        ("5x6", "2", "S(", "placement 'S('"),
        ("5x6", "2", "S(9)", "it has 2 dims"),
        ("5x6", "2x2", "R,R,R", "3 placements"),
        ("5x6", "2x2", "R", "1 placement ("),
        ("5y6", "2", "R", "shape '5y6'"),
        ("5x6", "2x", "R", "mesh '2x'"),
        ("5x6", "2@0,0", "R", "distinct"),
        ("5x6", "0", "R", "size 1 or more"),
        ("5x6", "2", "P(mean)", "P(OP)"),
        ("5x6", "2", "", "want one for each mesh dim"),
        ("4", "2x2", "P(sum),P(max)", "mixes"),
        ("()", "2", "S(0)", "it has 0 dims"),
        ("1000000000", "2", "S(0)", "too large"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(shape: str, mesh: str, placements: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        show(shape, mesh, placements)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_large_tensors_have_no_picture() -> None:
    assert "would be too large" in show("4x1000", "4", "S(1)")
    assert "250..499" in show("4x1000", "4", "S(1)")


def test_long_runs_are_cut_short() -> None:
    assert format_indices(range(7)) == "0..6"
    assert format_indices((0, 1, 2, 9)) == "0 1 2 9"
    assert format_indices(()) == "-"
    assert format_indices(range(0, 1000, 2)).endswith("(500 in all)")


SVG = "{http://www.w3.org/2000/svg}"


def held(shape: str, mesh: str, placements: str) -> list[str]:
    """What is written into the cells of a picture, row by row."""
    root = ElementTree.fromstring(show_svg(shape, mesh, placements))
    return [(label.text or "").strip() for label in root.iter(f"{SVG}text") if label.find(f"{SVG}title") is not None]


@pytest.mark.parametrize(
    ("shape", "mesh", "placements", "cells"),
    [
        ("7", "2x3", "S(0),_S(0,2)", "0 1 0 1 3 4 3"),
        ("5", "4", "S(0)", "0 0 1 1 2"),
        ("2x3", "2", "R", "0,1 0,1 0,1 0,1 0,1 0,1"),
        ("3x2", "2x2", "S(0),P(sum)", "0,1 0,1 0,1 0,1 2,3 2,3"),
        ("4", "2x2@0,2,1,3", "R,S(0)", "0,1 0,1 2,3 2,3"),
        ("4x1", "2@3,1", "S(0)", "3 3 1 1"),
        ("()", "2", "R", "0,1"),
        ("0x3", "2", "S(0)", ""),
        ("2x1x2", "2", "S(0)", "0 0 1 1"),
        ("1000x40", "2x4", "S(0),S(1)", "0 1 2 3 4 5 6 7"),
        ("2", "10", "R", "10 ranks 10 ranks"),
    ],
)
def test_a_picture_says_who_holds_what(shape: str, mesh: str, placements: str, cells: str) -> None:
    assert " ".join(held(shape, mesh, placements)) == cells


def test_a_picture_has_a_colour_and_a_line_for_each_rank() -> None:
    root = ElementTree.fromstring(show_svg("5x2", "4@3,1,2,0", "S(0)"))
    lines = [label.text or "" for label in root.iter(f"{SVG}text")]
    assert "rank 0 at (3) holds 0x2, nothing" in lines
    assert "rank 3 at (0) holds 2x2 from (0, 0)" in lines
    assert "uneven: the local shapes differ" in lines
    fills = [rect.get("fill") for rect in root.iter(f"{SVG}rect") if rect.get("fill", "").startswith("#") and rect.get("fill") != "#ffffff"]
    assert len(set(fills[:4])) == 4, "the legend"
    assert fills[4:] == [fills[3]] * 4 + [fills[1]] * 4 + [fills[2]] * 2
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == "tensor 5x2, mesh 4@3,1,2,0, placements S(0)"


def test_a_replica_shows_in_the_colour_of_every_rank() -> None:
    root = ElementTree.fromstring(show_svg("1", "2", "R"))
    stripes = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill", "").startswith("#")][3:]
    assert len({stripe.get("fill") for stripe in stripes}) == 2
    assert len({stripe.get("x") for stripe in stripes}) == 2


def test_what_is_too_much_for_a_picture_is_cut_or_refused() -> None:
    with pytest.raises(UsageError, match="want at most 64"):
        show_svg("5", "100", "R")
    assert "slices, 24 of them drawn" in show_svg("9x5x1x1", "2", "S(3)")
    assert "runs along dim 0, 48 of them drawn" in show_svg("300x1", "2", "_S(0,100)")
    with pytest.raises(UsageError, match="it has 2 dims"):
        show_svg("5x6", "2", "S(9)")


def test_a_picture_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["show", "5x6", "--mesh", "2x3", "--place", "_S(0,2),S(1)"]
    assert cli.main([*asked, "--svg"]) == 0
    printed = capsys.readouterr().out
    assert cli.main([*asked, "--svg", "-o", str(tmp_path / "x.svg")]) == 0
    assert (tmp_path / "x.svg").read_text() == printed == show_svg("5x6", "2x3", "_S(0,2),S(1)")
    assert cli.main([*asked, "-o", str(tmp_path / "x.txt")]) == 0
    assert (tmp_path / "x.txt").read_text() == show("5x6", "2x3", "_S(0,2),S(1)") + "\n"
    assert cli.main([*asked, "--svg", "-o", str(tmp_path / "no" / "x.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err
