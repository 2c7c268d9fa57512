"""The page of a run: everything in it, everything escaped, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.law.features.features import FEATURES
from shardlaw.conformance.report import html as page_module
from shardlaw.conformance.report.html import render_html
from shardlaw.conformance.report.run_report import RunReport, UnconfirmedLine
from tests.harness.reports import CASE, expectation, finding, law, rank, report, stored

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


def page(folder: Path, made: RunReport, ranks: list[dict[str, Any]] | None = None) -> Page:
    return Page(render_html(made, stored(folder, made, ranks=ranks)))


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
    assert not {"img", "u", "i"} & {name for name, _ in seen.seen}
    assert len(seen.all("script")) == 1
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
    seen = Page(render_html(made, folder))
    assert "SECRET" not in seen.text
    links = {attributes["href"] or "" for attributes in seen.all("a")}
    assert {link for link in links if not link.startswith("#")} == {"findings/11111111.py", "cases.txt"}
    assert not seen.all("link")
    assert all("src" not in attributes for _, attributes in seen.seen)
    (policy,) = (found["content"] for found in seen.all("meta") if found.get("http-equiv") == "Content-Security-Policy")
    text = render_html(made, folder)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    named = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{named}'"
    assert not re.search(r"fetch|XMLHttpRequest|WebSocket|sendBeacon|innerHTML|eval\(|import\(|https?:", script)
    assert "url(" not in text
    assert "@import" not in text


def test_every_table_has_headers_and_every_picture_a_name(tmp_path: Path) -> None:
    made = report([law("op.forward[mean]", "deviates", features={"uneven": 4, "op:aten.mean.dim": 2, "op:aten.sum": 2})], [finding()])
    made.expectations = [expectation("op.forward[mean]")]
    seen = page(tmp_path, made, [rank(0)])
    assert all(attributes.get("scope") in ("col", "row") for attributes in seen.all("th"))
    assert [attributes["aria-label"] for attributes in seen.all("svg")] == ["x: who holds what of 5x6 on mesh 2 as S(0)"]
    assert [attributes["aria-label"] for attributes in seen.all("table") if attributes.get("class") == "t"] == [
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
        finding(
            "aaaaaaaa",
            where="rule, a.py:3",
            places=["rule, a.py:3", "cut, b.py:4", "pad, c.py:5"],
            cause="a",
            waits=["rank 0 waits in all_reduce"],
        ),
        finding("bbbbbbbb", f"{CASE} seed=2", cause="b", kind="raised", features=["0-d"]),
        finding("cccccccc", f"{CASE} seed=3", where="rule, a.py:3", cause="a"),
    ]
    known = [finding(f"{at:08x}", f"mesh.groups mesh=2@1,0 seed={at}", status="expected", note="ranks are sorted") for at in range(3)]
    made = report(laws, [*new, *known])
    seen = page(tmp_path, made)
    anchors = [attributes["id"] for attributes in seen.all("article")]
    assert anchors == ["finding-aaaaaaaa", "finding-cccccccc", "finding-bbbbbbbb"]
    for words in (
        "1 of 2 rule, a.py:3 2 findings of op.forward[mean]",
        "rank 0 waits in all_reduce",
        "where to look: rule, a.py:3 , then cut, b.py:4 , pad, c.py:5",
        "What op.forward[mean] says. (docs)",
        f"shardlaw replay {tmp_path}/findings/aaaaaaaa.json",
        "shardlaw show '5x6' --mesh '2' --place 'S(0)'",
        "ranks are sorted (3)",
        "uneven 3/4",
        "Legend",
    ):
        assert words in seen.text, words
    assert seen.text.index("What is broken") < seen.text.index("New findings") < seen.text.index("Known, by reason")
    assert seen.text.count("ranks are sorted") == 1


def choices(text: str) -> dict[str, list[str]]:
    """By the name of what a page is filtered by, its values."""
    found = re.findall(r'<select name="(\w+)".*?</select>', text, re.DOTALL)
    parts = re.findall(r"<select .*?</select>", text, re.DOTALL)
    return {name: re.findall(r"<option>([^<]*)</option>", part) for name, part in zip(found, parts, strict=True)}


def test_whatever_can_be_chosen_is_marked_on_what_is_shown(tmp_path: Path) -> None:
    laws = [law("op.forward[mean]", "deviates", wrong=3, deviating={"uneven": 3, "world:4": 1}), law("mesh.groups", "expected", wrong=1)]
    known = finding("11111111", "mesh.groups mesh=2@1,0", status="expected", note="ranks are sorted", kind="raised", features=["permuted"])
    made = report(laws, [finding("aaaaaaaa", cause="a"), known])
    seen = page(tmp_path, made)
    offered = choices(render_html(made, tmp_path))
    assert offered == {
        "chapter": ["op", "mesh"],
        "kind": ["raised", "wrong-value"],
        "loud": ["silent", "loud"],
        "feature": ["permuted", "uneven", "world:4"],
        "outcome": ["held", "expected", "stale", "deviates", "untested"],
    }
    (new,) = seen.all("article")
    (old,) = [attributes for attributes in seen.all("p") if attributes.get("id") == "finding-11111111"]
    marks = [[one[f"data-{name}"] for name in ("chapter", "kind", "loud", "feature")] for one in (new, old)]
    assert marks == [["op", "wrong-value", "silent", "uneven"], ["mesh", "raised", "loud", "permuted"]]
    rows = [one for one in seen.all("tr") if "data-outcome" in one]
    assert [(one["data-chapter"], one["data-outcome"], one["data-feature"]) for one in rows] == [
        ("op", "deviates", "uneven world:4"),
        ("mesh", "expected", ""),
    ]


def test_every_count_leads_to_what_it_counts(tmp_path: Path) -> None:
    laws = [
        law(
            "op.forward[mean]",
            "deviates",
            wrong=3,
            features={"uneven": 8},
            deviating={"uneven": 3},
            refused=2,
            refusals={"not possible": 2},
        ),
        law("mesh.groups", "expected", wrong=1, reasons=["ranks are sorted"]),
        law("mesh.copies", "expected", wrong=1, reasons=["ranks are sorted"]),
    ]
    known = finding("11111111", "mesh.groups mesh=2@1,0", status="expected", note="ranks are sorted")
    made = report(laws, [finding("aaaaaaaa", cause="a"), known])
    made.totals.refused = 2
    text = render_html(made, stored(tmp_path, made))
    links = {
        words: (target, chosen) for target, chosen, words in re.findall(r'<a [^>]*?href="(#[^"]*)"(?: data-set="([^"]*)")?>([^<]*)', text)
    }
    for words, leads in {
        "causes": ("#causes", ""),
        "new findings": ("#findings", ""),
        "refused": ("#refusals", ""),
        "3": ("#laws", "feature=uneven"),  # of the features, the last that says 3
        "2": ("#refusals", "q=op.forward%5Bmean%5D"),
    }.items():
        assert links[words] == leads, words
    row = r'<th scope="row"[^>]*>([^<]+)</th><td><span class="tag \w+">\w+</span></td><td>\d+</td><td><a href="#([\w-]+)">'
    counts = re.findall(row, text)
    assert counts == [("op.forward[mean]", "finding-aaaaaaaa"), ("mesh.groups", "finding-11111111"), ("mesh.copies", "known-1")]
    assert 'title="3 of 8 cases of op with uneven deviate"><a href="#laws" data-set="chapter=op&amp;feature=uneven">3</a>' in text


def test_a_page_says_what_changed_since_an_earlier_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = report(
        [law("op.forward[mean]", "deviates"), law("mesh.groups")], [finding("aaaaaaaa", f"{CASE} seed=2")], started="2026-01-01"
    )
    after = report([before.laws[0], law("mesh.groups", "untested", 0)], [finding("bbbbbbbb")], started="2026-01-02")
    stored(tmp_path / "before", before)
    stored(tmp_path / "after", after)
    assert cli.main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--page"]) == 1
    seen = Page((tmp_path / "after" / "report.html").read_text())
    for words in (
        "What changed since 2026-01-01",
        "1 new finding; 1 law that says nothing any more",
        f"1 gone wrong-value aaaaaaaa {CASE} seed=2",
        "mesh.groups: held then, untested now",
    ):
        assert words in seen.text, words
    assert {"href": "#finding-bbbbbbbb"} in seen.all("a")
    assert {"href": "#finding-aaaaaaaa"} not in seen.all("a")
    (tmp_path / "after" / "report.html").unlink()
    (tmp_path / "after" / "report.html").mkdir()
    assert cli.main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--page"]) == 2
    assert "--page: " in capsys.readouterr().err


def test_a_page_has_the_scripts_of_causes_first_and_no_more_than_it_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [finding(f"{at:08x}", f"{CASE} seed={at}", where="ab"[at > 1], reproducer=f"findings/{at:08x}.py") for at in range(4)]
    made = report([law("op.forward[mean]", "deviates")], found)
    monkeypatch.setattr(page_module, "MAX_SCRIPT_CHARS", 25)  # each has 11
    seen = page(tmp_path, made)
    assert [f"# {at:08x}" in seen.text for at in range(4)] == [True, False, True, False]
    assert all({"href": f"findings/{at:08x}.py"} in seen.all("a") for at in range(4))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser to run the page's script in")
def test_a_link_to_a_finding_opens_it(tmp_path: Path) -> None:
    found = [finding(f"{at:08x}", f"{CASE} seed={at}", cause="a") for at in range(3)]
    made = report([law("op.forward[mean]", "deviates")], found)
    (tmp_path / "report.html").write_text(render_html(made, stored(tmp_path, made)))
    command = ["chromium", "--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    url = f"{(tmp_path / 'report.html').as_uri()}#finding-00000002"
    text = subprocess.run([*command, url], capture_output=True, text=True, timeout=60, check=True).stdout
    opened = re.findall(r'<article id="([\w-]+)"[^>]*><details open', text)
    assert opened == ["finding-00000000", "finding-00000002"]
    assert text.count('class="cp"') >= 3
    assert re.search(r'<form id="tools"[^>]*hidden', text) is None


def test_a_page_of_a_smoke_run_is_made_at_once_and_small(tmp_path: Path) -> None:
    names = [name for name in FEATURES if not name.endswith("*")][:40]
    wrong = {"deviating": dict.fromkeys(names, 1), "wrong": 1}
    laws = [law(f"op.forward[f{at}]", features=dict.fromkeys(names, at), **(wrong if at % 8 == 0 else {})) for at in range(1500)]
    known = [finding(f"{at:08x}", f"{CASE} seed={at}", status="expected", note=f"a reason {at % 90}") for at in range(100, 500)]
    made = report(laws, [*(finding(f"{at:08x}", f"{CASE} seed={at}") for at in range(20)), *known])
    made.expectations = [expectation("op.forward[mean]", reason="a reason of some length, as they are " * 2) for _ in range(480)]
    stored(tmp_path, made, ranks=[rank(at) for at in range(8)])
    began = time.process_time()
    text = render_html(made, tmp_path)
    assert time.process_time() - began < 5
    assert len(text) < 1_500_000
