"""Two reports side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.report.comparison import Comparison, compare_reports
from shardlaw.conformance.report.run_report import ExpectationLine, RunReport
from tests.harness.reports import CASE, expectation, finding, law, report, stored

OTHER = "op.forward[sum] mesh=2 x=4:S(0) steps=b=sum(x)"


def side_by_side(folder: Path, first: RunReport, second: RunReport) -> Comparison:
    return compare_reports(stored(folder / "first", first), stored(folder / "second", second))


def test_a_report_beside_itself_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "r", report([law("op.forward[mean]", "deviates")], [finding()]), [f"wrong-value drawn {CASE}"])
    assert cli.main(["compare", str(folder), str(folder / "report.json")]) == 0
    out = capsys.readouterr().out
    assert "1 judged in both, 0 in the first only, 0 in the second only, 0 with another verdict" in out
    assert out.endswith("exit 0: nothing new in the second\n")
    assert "differs" not in out
    assert "\x1b" not in out


def test_a_new_finding_is_worse_and_a_gone_one_is_not(tmp_path: Path) -> None:
    with_it = report([law("op.forward[mean]", "deviates")], [finding()])
    without = report([law("op.forward[mean]")])
    came = side_by_side(tmp_path / "came", without, with_it)
    assert ([found.id for found in came.findings.new], came.findings.gone, came.exit) == (["0badcafe"], [], 1)
    assert came.worse == ["1 new finding"]
    gone = side_by_side(tmp_path / "gone", with_it, without)
    assert ([found.id for found in gone.findings.gone], gone.findings.new, gone.exit) == (["0badcafe"], [], 0)
    assert [(changed.first, changed.second) for changed in gone.laws.changed] == [("deviates", "held")]


def test_findings_belong_together_by_id_or_by_their_case(tmp_path: Path) -> None:
    laws = [law("op.forward[mean]", "deviates")]
    same_case = side_by_side(tmp_path / "a", report(laws, [finding("11111111")]), report(laws, [finding("22222222")]))
    assert (same_case.findings.new, same_case.findings.changed, same_case.exit) == ([], [], 0)
    same_id = side_by_side(tmp_path / "b", report(laws, [finding()]), report(laws, [finding(text=f"{CASE} seed=2")]))
    assert (same_id.findings.new, same_id.findings.changed, same_id.exit) == ([], [], 0)
    neither = side_by_side(tmp_path / "c", report(laws, [finding()]), report(laws, [finding("22222222", f"{CASE} seed=2")]))
    assert (len(neither.findings.new), len(neither.findings.gone), neither.exit) == (1, 1, 1)


def test_what_changed_is_named(tmp_path: Path) -> None:
    laws = [law("op.forward[mean]", "deviates")]
    found = side_by_side(tmp_path / "kind", report(laws, [finding()]), report(laws, [finding(kind="hang", message="waits")]))
    assert [pair.changed for pair in found.findings.changed] == [["kind", "message"]]
    assert found.exit == 1
    found = side_by_side(tmp_path / "message", report(laws, [finding()]), report(laws, [finding(message="rank 1: other")]))
    assert ([pair.changed for pair in found.findings.changed], found.exit) == ([["message"]], 0)
    first, second = (f"rank 0: no file {path} of {size} bytes at {at}" for path, size, at in (("'/a'", 1, "0x1f"), ("'/b'", 23, "0x2e")))
    same = side_by_side(tmp_path / "numbers", report(laws, [finding(message=first)]), report(laws, [finding(message=second)]))
    assert same.findings.changed == []
    known = report([law("op.forward[mean]", "expected")], [finding(status="expected", note="known")])
    found = side_by_side(tmp_path / "status", known, report(laws, [finding()]))
    assert ([pair.changed for pair in found.findings.changed], found.exit) == ([["status"]], 1)
    found = side_by_side(tmp_path / "mended", report(laws, [finding()]), known)
    assert found.exit == 0


def test_an_expected_finding_may_have_another_example_each_night(tmp_path: Path) -> None:
    laws = [law("op.forward[mean]", "expected")]
    first = finding("11111111", status="expected", note="known", entry="/a/op.toml:3")
    second = finding("22222222", OTHER, status="expected", note="known", entry="/b/op.toml:3", message="rank 1: other")
    found = side_by_side(tmp_path, report(laws, [first]), report(laws, [second], seed=8))
    assert (found.findings.new, found.findings.gone, found.findings.changed, found.exit) == ([], [], [], 0)
    assert found.differs == {"seed": [7, 8]}


def test_a_new_expected_finding_is_listed_and_is_no_worse(tmp_path: Path) -> None:
    laws = [law("op.forward[mean]", "expected")]
    found = side_by_side(tmp_path, report([law("op.forward[mean]")]), report(laws, [finding(status="expected", note="known")]))
    assert ([line.status for line in found.findings.new], found.exit) == (["expected"], 0)


def test_what_the_runs_were_given_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = {"name": "mine", "backend": "mine", "torch": "2.14.0", "cannot": ["p2p"]}
    stored(tmp_path / "first", report([law("collective.p2p")], features={"uneven": 3, "0-d": 1}))
    laws = [law("collective.p2p", "untested", 0, reason="the target declares that it cannot do p2p")]
    stored(tmp_path / "second", report(laws, target=theirs, features={"uneven": 3, "mesh-2d": 1}))
    assert cli.main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 0
    out = capsys.readouterr().out
    for line in ("target: gloo -> mine", "torch: 2.13.0 -> 2.14.0", "cannot: nothing -> p2p"):
        assert f"differs  {line}\n" in out
    assert "held -> untested: collective.p2p (the target declares that it cannot do p2p)" in out
    assert "features no longer reached (1):\n  0-d\n" in out
    assert "features reached only in the second (1):\n  mesh-2d\n" in out
    assert "no cases.txt beside it" in out


def test_a_law_that_says_nothing_any_more_is_worse(tmp_path: Path) -> None:
    silent = report([law("mesh.groups", "untested", 0, reason="needs 8 ranks")])
    assert side_by_side(tmp_path / "a", report([law("mesh.groups")]), silent).worse == ["1 law that says nothing any more"]
    assert side_by_side(tmp_path / "b", silent, report([law("mesh.groups")])).exit == 0
    only = side_by_side(tmp_path / "c", report([law("mesh.groups")]), report([law("mesh.copies")]))
    assert (only.laws.only_first, only.laws.only_second, only.exit) == (["mesh.groups"], ["mesh.copies"], 2)
    assert only.apart == ["1 law in the first only", "1 law in the second only"]


def test_findings_of_a_law_that_the_first_never_tried_are_no_news(tmp_path: Path) -> None:
    first, more = report([law("mesh.groups")]), [law("mesh.groups"), law("op.forward[mean]", "deviates")]
    found = side_by_side(tmp_path / "a", first, report(more, [finding()]))
    assert ([line.law for line in found.findings.new], found.worse, found.exit) == (["op.forward[mean]"], [], 2)
    also = finding("22222222", "mesh.groups mesh=2")
    found = side_by_side(tmp_path / "b", first, report([law("mesh.groups", "deviates"), more[1]], [finding(), also]))
    assert (found.worse, found.apart, found.exit) == (["1 new finding"], ["1 law in the second only"], 1)


def test_one_fault_with_two_smallest_cases_is_one_finding(tmp_path: Path) -> None:
    laws = [law("op.forward[mean]", "deviates")]
    shrunk, less = finding("11111111", signature="s"), finding("22222222", f"{CASE} seed=2", signature="s")
    found = side_by_side(tmp_path, report(laws, [less]), report(laws, [shrunk]))
    assert (found.findings.new, found.findings.gone, found.exit) == ([], [], 0)


def test_reports_with_and_without_expectations_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    laws = [law("mesh.groups")]
    stored(tmp_path / "with", report(laws, expectations=[expectation("mesh.groups")]))
    stored(tmp_path / "without", report(laws))
    assert cli.main(["compare", str(tmp_path / "with"), str(tmp_path / "without")]) == 2
    out = capsys.readouterr().out
    assert "differs  expectations: 1 -> 0\n" in out
    assert out.endswith("1 expectations in the first, 0 in the second (the second was told to expect nothing: --no-expect)\n")


def test_a_known_cause_is_mended_where_its_case_holds_or_is_expected_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    laws = [law("mesh.groups", "expected"), law("mesh.copies", "expected")]

    def met(name: str, on: str = "mesh.groups", **more: Any) -> ExpectationLine:
        return expectation(on, cause=name, reason=f"what {name} does", matched={on: 3}, **more)

    before = [
        met("mended", happened=True),
        met("gone", happened=True),
        met("stays", happened=True),
        met("untried", "mesh.copies", happened=True),
    ]
    after = [met("mended", mended=True), met("stays", happened=True), met("stays", mended=True), met("newer", happened=True)]
    second = report([laws[0], law("mesh.copies", "untested", 0)], expectations=after)
    stored(tmp_path / "a", report(laws, expectations=before)), stored(tmp_path / "b", second)
    causes = compare_reports(tmp_path / "a", tmp_path / "b").causes
    assert ([cause.id for cause in causes.mended], [cause.id for cause in causes.came]) == (["mended", "gone"], ["newer"])
    cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "known causes that are mended (2):\n  mended what mended does\n" in capsys.readouterr().out


def test_a_run_that_was_not_finished_is_worse(tmp_path: Path) -> None:
    whole, cut = report([law("mesh.groups")]), report([law("mesh.groups")], complete=False, exit=3, stopped_by="an error of the harness")
    assert side_by_side(tmp_path / "a", whole, cut).worse == ["the second run was not finished"]
    assert side_by_side(tmp_path / "b", cut, whole).exit == 0


def test_cases_of_one_run_only_and_other_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    laws = [law("op.forward[mean]")]
    first = stored(tmp_path / "first", report(laws), [f"held swept {CASE}", f"held drawn {CASE} seed=1"])
    second = stored(tmp_path / "second", report(laws), [f"wrong-value swept {CASE}", f"held drawn {CASE} seed=2"])
    assert cli.main(["compare", "--json", str(first), str(second)]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert cases == {
        "both": 1,
        "only_first": [f"{CASE} seed=1"],
        "only_second": [f"{CASE} seed=2"],
        "changed": [{"text": CASE, "first": "held", "second": "wrong-value"}],
    }
    assert cli.main(["compare", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert f"    held -> wrong-value {CASE}\n" in out
    assert f"    first only: 1 of op.forward[mean], such as {CASE} seed=1\n" in out


def test_json_says_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = report([law("op.forward[mean]")]), report([law("op.forward[mean]", "deviates")], [finding()], seed=8)
    stored(tmp_path / "first", first)
    stored(tmp_path / "second", second)
    assert cli.main(["compare", str(tmp_path / "first"), str(tmp_path / "second"), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["exit"], data["worse"], data["cases"]) == (1, 1, ["1 new finding"], None)
    assert data["differs"] == {"seed": [7, 8]}
    assert data["findings"]["new"][0]["text"] == CASE
    assert data["laws"]["changed"] == [{"id": "op.forward[mean]", "first": "held", "second": "deviates", "reason": None}]


def test_no_report_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = stored(tmp_path / "good", report([law("mesh.groups")]))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "report.json").write_text("[]")
    for other, message in ((tmp_path / "none", "cannot be read"), (tmp_path / "bad", "no report of shardlaw")):
        assert cli.main(["compare", str(good), str(other)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
