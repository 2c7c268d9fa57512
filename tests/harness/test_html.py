"""The page of a run: everything in it, everything escaped, nothing fetched."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.law.features.features import FEATURES
from shardlaw.conformance.rank.context import show
from shardlaw.conformance.report.html import html
from shardlaw.conformance.report.pictures import Elements, told_by
from shardlaw.conformance.report.run_report import RunReport, UnconfirmedLine
from tests.harness.reports import CASE, expectation, finding, law, report, stored

HOSTILE = "</pre></svg><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;{{ 7*7 }}"
VOID = {"meta", "link", "br", "img", "rect", "hr", "input"}


class Page(HTMLParser):
    """Reads a page: its elements with what they hold, and whether every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == tag]


def rank(number: int, expected: str = "[[1.0, 2.0]] float32 1x2", got: str = "[[1.0, 3.0]] float32 1x2", **more: Any) -> dict[str, Any]:
    said = {"rank": number, "outcome": "deviates", "message": "holds other elements", "expected": expected, "got": got}
    return {**said, "stack": "", "output": "", **more}


def page(folder: Path, made: RunReport, ranks: list[dict[str, Any]] | None = None) -> Page:
    return Page(html(made, stored(folder, made, ranks=ranks)))


def test_a_page_says_what_was_found(tmp_path: Path) -> None:
    known = finding("11111111", "mesh.groups mesh=2@1,0", status="expected", note="ranks are sorted", entry="op.toml:3")
    laws = [law("mesh.groups", "expected"), law("op.forward[mean]", "deviates"), law("mesh.copies", "untested", 0, reason="needs 8 ranks")]
    made = report(laws, [finding(reproducer="findings/0badcafe.py"), known], features_missing=["mesh-3d"])
    made.expectations = [expectation("mesh.groups", hits=3, masked=0.125, features=["permuted"], reason="ranks are sorted", stale=True)]
    made.unconfirmed = [UnconfirmedLine(law="mesh.groups", kind="hang", message="waits", text="mesh.groups mesh=2", case={})]
    made.warnings = ["the disk is slow"]
    seen = page(tmp_path, made, [rank(0, stack="File x", output="printed"), rank(1, stack="File x", output="printed")])
    for words in (
        "1 new finding, 1 expected",
        "torch 2.13.0",
        CASE,
        "rank 0: holds other elements",
        "What op.forward[mean] says.",
        "ranks 0, 1",
        "File x",
        "printed",
        "# 0badcafe",
        "ranks are sorted",
        "12.5 %",
        "stale",
        "needs 8 ranks",
        "the disk is slow",
        FEATURES["mesh-3d"],
        "No fresh world showed these again",
    ):
        assert words in seen.text, words
    assert {"href": "findings/0badcafe.py"} in seen.all("a")


def test_a_page_of_nothing_is_a_page(tmp_path: Path) -> None:
    seen = page(tmp_path, report([], exit=2))
    assert "no case was judged" in seen.text
    assert "Nothing: every law and every feature was reached." in seen.text


def test_what_the_target_declares_is_said(tmp_path: Path) -> None:
    laws = [law("collective.p2p", "untested", 0, reason="the target declares that it cannot do p2p", lacks=["p2p"])]
    assert "cannot p2p: 1 law untested: collective.p2p" in page(tmp_path, report(laws, target={"cannot": ["p2p"]})).text


def test_whatever_is_said_is_escaped(tmp_path: Path) -> None:
    found = finding(message=HOSTILE, note=HOSTILE, kind=HOSTILE, features=[HOSTILE])
    found.text = found.law = HOSTILE
    made = report([law(HOSTILE, "deviates", reason=HOSTILE, features={HOSTILE: 1}), law("x.y", "untested", 0, reason=HOSTILE)], [found])
    made.target.name, made.warnings, made.stopped_by, made.features_missing = HOSTILE, [HOSTILE], HOSTILE, [HOSTILE]
    made.expectations = [expectation(HOSTILE, kind=HOSTILE, reason=HOSTILE, where=HOSTILE, features=[HOSTILE])]
    said = rank(0, f"[[{HOSTILE}]] float32 1x1", HOSTILE, message=HOSTILE, stack=HOSTILE, output=HOSTILE)
    cell = rank(1, "[[<u>]] float32 1x1", "[[<i>]] float32 1x1", outcome=HOSTILE)
    made.unconfirmed = [UnconfirmedLine(law=HOSTILE, kind=HOSTILE, message=HOSTILE, text=HOSTILE, case={}, ranks=[said])]
    seen = page(tmp_path, made, [said, cell])
    assert not {"script", "img", "u", "i"} & {name for name, _ in seen.seen}
    assert all(not name.startswith("on") for _, attributes in seen.seen for name in attributes)
    assert seen.text.count("alert(1)") > 15
    assert "{{ 7*7 }}" in seen.text


def test_a_page_fetches_nothing_and_leads_nowhere_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("SECRET")
    found = [
        finding("0badcafe", reproducer="javascript:alert(1)"),
        finding("11111111", f"{CASE} seed=2", reproducer="findings/11111111.py"),
    ]
    made = report([law("op.forward[mean]", "deviates")], [found[1]])
    folder = stored(tmp_path / "r", made)
    made.findings = [*found, finding("../../x", f"{CASE} seed=3", reproducer="findings/../../secret.py")]
    seen = Page(html(made, folder))
    assert "SECRET" not in seen.text
    links = {attributes["href"] or "" for attributes in seen.all("a")}
    assert {link for link in links if not link.startswith("#")} == {"findings/11111111.py"}
    assert not seen.all("link")
    assert all("src" not in attributes for _, attributes in seen.seen)
    (policy,) = (found["content"] for found in seen.all("meta") if found.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    text = html(made, folder)
    assert "url(" not in text
    assert "@import" not in text


def test_every_table_has_headers_and_every_picture_a_name(tmp_path: Path) -> None:
    made = report([law("op.forward[mean]", "deviates", features={"uneven": 4, "op:aten.mean.dim": 2, "op:aten.sum": 2})], [finding()])
    made.expectations = [expectation("op.forward[mean]")]
    seen = page(tmp_path, made, [rank(0)])
    assert all(attributes.get("scope") in ("col", "row") for attributes in seen.all("th"))
    assert [attributes["aria-label"] for attributes in seen.all("svg")] == [
        "expected by rank 0: float32 1x2, 1 differ",
        "got by rank 0: float32 1x2, 1 differ",
    ]
    levels = [int(name[1]) for name, _ in seen.seen if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes in seen.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(attributes["href"][1:] in ids for attributes in seen.all("a") if (attributes["href"] or "").startswith("#"))


def test_causes_come_first_and_what_is_known_stands_by_its_reason(tmp_path: Path) -> None:
    laws = [
        law("op.forward[mean]", "deviates", wrong=3, features={"uneven": 4}, deviating={"uneven": 3}, source="docs"),
        law("mesh.groups"),
    ]
    new = [
        finding("aaaaaaaa", where="rule, a.py:3", cause="a", waits=["rank 0 waits in all_reduce"]),
        finding("bbbbbbbb", f"{CASE} seed=2", cause="b", kind="raised"),
        finding("cccccccc", f"{CASE} seed=3", where="rule, a.py:3", cause="a"),
    ]
    known = [finding(f"{at:08x}", f"mesh.groups mesh=2@1,0 seed={at}", status="expected", note="ranks are sorted") for at in range(3)]
    made = report(laws, [*new, *known])
    seen = page(tmp_path, made)
    anchors = [attributes["id"] for attributes in seen.all("article")]
    assert anchors == ["finding-aaaaaaaa", "finding-cccccccc", "finding-bbbbbbbb"]
    for words in (
        "Cause 1 of 2",
        "rank 0 waits in all_reduce",
        "What op.forward[mean] says. (docs)",
        f"shardlaw replay {tmp_path}/findings/aaaaaaaa.json",
        "shardlaw show '5x6' --mesh '2' --place 'S(0)'",
        "ranks are sorted (3)",
        "uneven 3/4",
        "Legend",
    ):
        assert words in " ".join(seen.text.split()), words
    assert seen.text.count("ranks are sorted") == 1
    filters = [attributes for attributes in seen.all("input") if attributes["type"] == "radio"]
    assert {attributes["name"] for attributes in filters} == {"f-chapter", "f-kind", "f-loud"}
    chosen = {attributes["id"] for attributes in filters if "id" in attributes}
    rules = set(re.findall(r"main:has\(#(f-\w+-\d+):checked\)", html(made, tmp_path)))
    assert rules == chosen
    marks = [(one["data-kind"], one["data-loud"]) for one in seen.all("article")]
    assert marks == [("v2", "v2"), ("v2", "v2"), ("v1", "v1")]


def test_a_page_of_a_smoke_run_is_made_at_once_and_small(tmp_path: Path) -> None:
    names = [name for name in FEATURES if not name.endswith("*")][:40]
    laws = [law(f"op.forward[f{at}]", features=dict.fromkeys(names, at), deviating=dict.fromkeys(names, 1), wrong=1) for at in range(1500)]
    known = [finding(f"{at:08x}", f"{CASE} seed={at}", status="expected", note=f"a reason {at % 90}") for at in range(100, 500)]
    made = report(laws, [*(finding(f"{at:08x}", f"{CASE} seed={at}") for at in range(20)), *known])
    stored(tmp_path, made, ranks=[rank(at) for at in range(8)])
    began = time.process_time()
    text = html(made, tmp_path)
    assert time.process_time() - began < 5
    assert len(text) < 3_200_000  # here every law deviates; of a smoke run one in ten


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
        found = Elements.parse(show(tensor))
        assert found is not None
        assert found.shape == tuple(tensor.shape)
        assert len(found.elements) == min(64, tensor.numel())


def test_ranks_that_said_the_same_stand_together_and_what_differs_is_marked() -> None:
    held = {"rank": 2, "outcome": "held", "expected": "", "got": "", "message": "", "stack": "", "output": ""}
    both, quiet = told_by([rank(0), rank(1), held])
    assert (both.ranks, quiet.ranks, quiet.pictures) == ("ranks 0, 1", "rank 2", ())
    expected, got = (picture for _, picture in both.pictures)
    assert [(cell.text, cell.differs) for cell in expected.cells] == [("1", False), ("2", True)]
    assert [(cell.text, cell.differs) for cell in got.cells] == [("1", False), ("3", True)]


def test_where_objects_lie_in_memory_keeps_no_ranks_apart() -> None:
    (told,) = told_by([rank(number, got=f"ValueError: not in <Group object at 0x7f5ebf2b0c{number}0>") for number in (1, 2)])
    assert told.ranks == "ranks 1, 2"
    assert told.texts == (("got", "ValueError: not in <Group object at 0x...>"),)


def test_contributions_stand_beside_what_they_reduce_to() -> None:
    (told,) = told_by([rank(0, "[3.0] float32 1", "[4.0] float32 1; rank 0 contributed [2.0] float32 1")])
    assert [(name, [cell.text for cell in picture.cells]) for name, picture in told.pictures] == [
        ("expected", ["3"]),
        ("got", ["4"]),
        ("contributed", ["2"]),
    ]


def test_a_large_tensor_is_cut_with_a_note() -> None:
    import torch

    (told,) = told_by([rank(0, show(torch.arange(900).reshape(30, 30)), "RuntimeError: no")])
    ((name, picture),) = told.pictures
    assert (name, picture.note) == ("expected", f"{len(picture.cells)} of 900 elements are drawn")
    assert 0 < len(picture.cells) <= 64
    assert told.texts == (("got", "RuntimeError: no"),)
    (told,) = told_by([rank(0, show(torch.zeros(0, 3)), show(torch.arange(24).reshape(2, 3, 4)))])
    assert told.pictures[0][1].note == "no elements"
    assert [part.label for part in told.pictures[1][1].slices] == ["[0, :, :]", "[1, :, :]"]
