"""What a run leaves behind."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from xml.etree import ElementTree

import msgspec
import pytest

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.report.junit import render_junit
from shardlaw.conformance.report.markdown import render_markdown
from shardlaw.conformance.report.run_report import read_report
from shardlaw.conformance.report.writer import ReportWriter
from shardlaw.conformance.run import proof
from shardlaw.conformance.run.engine import Run
from shardlaw.conformance.run.entry import Entry
from shardlaw.conformance.run.expectations import Expectations
from shardlaw.conformance.run.finding_file import read_cases, read_finding, write_finding
from tests.harness.runs import CASE, LAWS, FakeRun, finding, verdict


def test_the_report_is_readable_while_the_run_goes_on(run: FakeRun) -> None:
    run.results["roundtrip.dtensor"].outcome = "untested"
    run.update()
    report = read_report(run.writer.folder)
    assert (report.complete, report.exit) == (False, None)
    run.take(finding())
    run.update()
    assert [found.status for found in read_report(run.writer.folder).findings] == ["new"]
    assert not list(run.writer.folder.glob(".*")), "a temporary file was left"
    told = ElementTree.parse(run.writer.folder / "junit.xml").iter("testcase")
    assert [case.get("name") for case in told] == [law for law in LAWS if law != "roundtrip.dtensor"], "a law has not had its turn"


def test_no_two_findings_of_a_run_have_one_id() -> None:
    run = SimpleNamespace(findings=[], listener=Mock(), write=lambda: None, _write_if_due=lambda: None)
    for world in (2, 3):
        Run.add_finding(run, finding(case=Case.parse(f"op.forward[mean] mesh={world} x=5x6:S(0) steps=b=mean(x)")))  # type: ignore[arg-type]
    assert len({found.id for found in run.findings}) == 2


def test_report_json_has_the_documented_keys(run: FakeRun) -> None:
    run.take(finding())
    run.unconfirmed.append(verdict())
    entry = Entry("mesh.groups", "hang", "waits", frozenset({"submesh"}), laws=("mesh.groups",), file=Path("mesh.toml"), line=3)
    run.expectations = Expectations([entry, Entry("plan.x", "hang", "waits", laws=("plan.x",))])
    run.expectations.count_case(Case.parse("mesh.groups mesh=2@1,2"), {"submesh"})
    run.results["op.forward[mean]"].features.update({"uneven": 4, "0-d": 1})
    run.update(1)
    data = json.loads((run.writer.folder / "report.json").read_text())
    assert {"schema", "harness", "seed", "profile", "started", "seconds", "complete", "stopped_by", "exit"} <= data.keys()
    assert (data["schema"], data["seed"], data["exit"], data["complete"]) == (1, 7, 1, True)
    target = {
        "name": "gloo",
        "device": "cpu",
        "backend": "gloo",
        "world_size": 4,
        "torch": data["target"]["torch"],
        "python": data["target"]["python"],
        "storage": "filesystem",
        "cannot": [],
    }
    assert target.items() <= data["target"].items()
    assert {"id", "chapter", "tier", "clause", "outcome", "cases", "rejected", "seconds", "reason"} <= data["laws"][0].keys()
    (found,) = data["findings"]
    assert {"id", "law", "kind", "status", "message", "text", "case", "features", "reproducer"} <= found.keys()
    assert found["reproducer"] == f"findings/{found['id']}.py"
    assert Case.from_json(found["case"]).text == found["text"]
    assert data["unconfirmed"][0]["text"] == CASE.text
    (expectation,) = data["expectations"]
    assert (expectation["law"], expectation["hits"], expectation["masked"], expectation["stale"]) == ("mesh.groups", 0, 1.0, False)
    assert (expectation["matched"], expectation["happened"]) == ({"mesh.groups": 1}, False)
    assert data["laws"][0]["features"] == {"0-d": 1, "uneven": 4}
    assert data["features"] == {"dtype:bool": 2, "uneven": 8}
    assert "mesh-3d" in data["features_missing"]
    assert data["totals"]["cases"] == 40
    assert data["totals"]["distinct"] == 1
    assert data["totals"]["findings"] == data["totals"]["new"] == 1


def test_of_the_code_that_a_finding_ran_the_report_keeps_what_new_findings_name(run: FakeRun) -> None:
    found = finding(places=("one, a.py:1",), ran={"one, a.py:1": 0, "other, a.py:2": 2, "common, a.py:3": 5}, similar=5)
    further = finding("op.forward[sum]", case=Case.parse("op.forward[sum] mesh=2 x=5x6:S(0) steps=b=sum(x)"), places=("other, a.py:2",))
    for each in (found, further):
        run.take(each)
    assert {line.law: line.ran for line in run.update(1).findings} == {found.law: {"one, a.py:1": 0, "other, a.py:2": 2}, further.law: {}}


@pytest.mark.parametrize(("code", "complete"), [(0, True), (1, True), (2, True), (3, False), (130, False), (143, False)])
def test_a_run_that_was_cut_is_not_complete(run: FakeRun, code: int, complete: bool) -> None:
    run.update(code)
    report = read_report(run.writer.folder)
    assert (report.exit, report.complete) == (code, complete)


def test_a_finding_is_written_with_what_every_rank_said(run: FakeRun) -> None:
    found = finding()
    run.take(found)
    data = read_finding(run.writer.folder / "findings" / f"{found.id}.json")
    assert data["case"] == found.case
    assert data["raw_case"] == CASE
    assert data["ranks"][0] == {
        "rank": 0,
        "outcome": "deviates",
        "expected": "[1]",
        "got": "[2]",
        "message": "holds other elements",
        "stack": "",
        "output": "printed\x1b[0m",
    }
    assert data["ranks"][1]["got"] == "ValueError: no"
    assert data["ranks"][1]["stack"] == "the stack"
    assert (data["seed"], data["confirmed"], data["shrink_steps"], data["target"]["name"]) == (7, [2, 2], 31, "gloo")
    script = (run.writer.folder / "findings" / f"{found.id}.py").read_text()
    assert "What op.forward[mean] says." in script
    assert [case.text for case in read_cases(run.writer.folder)] == [found.case.text]


def test_scripts_after_the_first_are_run_while_the_run_goes_on(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = finding(), finding("mesh.groups")
    run.take(first)
    ended = threading.Event()
    monkeypatch.setattr(proof, "prove", lambda text, stopped: proof.PROVEN if ended.wait(20) else "")
    run.take(second)
    folder = run.writer.folder / "findings"
    assert run.writer.unproven() == 1
    assert read_finding(folder / f"{second.id}.json")["script"] == proof.NOT_YET
    ended.set()
    run.update(1)
    assert (folder / f"{second.id}.py").exists()
    assert read_finding(folder / f"{second.id}.json")["script"] == proof.PROVEN
    assert {line.script for line in read_report(run.writer.folder).findings} == {proof.PROVEN}


def test_a_run_that_is_interrupted_ends_the_scripts_that_run(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.take(finding())
    monkeypatch.setattr(proof, "prove", lambda text, stopped: proof.run_script("import time; time.sleep(80)", stopped=stopped).proof)
    last = finding("mesh.groups")
    run.take(last)
    run.update(130)
    assert read_finding(run.writer.folder / "findings" / f"{last.id}.json")["script"] == proof.INTERRUPTED


def test_a_finding_without_a_script_says_why(run: FakeRun) -> None:
    run.take(finding("op.forward[sum]"))
    run.take(finding(status="expected", note="known", id="0badcafe"))
    expected, without = run.update(1).findings  # in the order of the laws, not as they were met
    assert without.reproducer is None
    assert without.note == "no reproducer: op.forward[sum] has no reproducer"
    assert (expected.status, expected.reproducer, expected.note) == ("expected", None, "known")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1, 2]", "no finding"),
        (b'{"schema": 1, "laws": []}', "no finding"),
        (b'{"schema": 9, "id": "x", "law": "y", "case": {}}', "finding schema 9, this version reads 1"),
        (b'{"schema": 1, "id": "x", "law": "y", "case": {}}', "no case"),
        (b'{"schema": 1, "id": 3, "law": "y", "case": {"schema": 1, "law": "y", "fields": {}, "after": []}}', "id is no text"),
    ],
)
def test_a_foreign_file_is_no_finding(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(UsageError, match=message) as refused:
        read_finding(tmp_path / "f.json")
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="No such file"):
        read_finding(tmp_path / "none.json")


def test_findings_of_any_case_are_read_back(tmp_path: Path) -> None:
    case = Case.parse("redistribute.local mesh=2x2@0,2,1,3 x=5x6:S(0),R to=R,S(1)").with_after((Case.parse("mesh.groups mesh=2"),))
    found = replace(finding(), case=case)
    path = write_finding(tmp_path / "deep" / "findings", found, Target(), 1)
    assert read_finding(path)["case"] == case


def test_every_judged_case_is_a_line(run: FakeRun) -> None:
    for at in range(1500):
        run.writer.add_case(Verdict(CASE.with_fields(seed=at), "held"), at % 2 == 0)
    run.writer.add_case(verdict(), True)
    run.update()
    lines = (run.writer.folder / "cases.txt").read_text().splitlines()
    assert len(lines) == 1501
    assert lines[1] == f"held swept {CASE.with_fields(seed=1).text}"
    assert lines[-1] == f"wrong-value drawn {CASE.text}"


def test_an_earlier_report_is_replaced_and_nothing_else(run: FakeRun) -> None:
    run.take(finding())
    run.update(1)
    folder = run.writer.folder
    (folder / "findings" / "notes.txt").write_text("mine")
    (folder / "mine.md").write_text("mine")
    ReportWriter(folder)
    assert read_report(folder).exit == 1, "a request that is refused later leaves the old report"
    ReportWriter(folder).add_finding(finding(status="expected"), run)  # type: ignore[arg-type]
    (folder / "findings" / f"{run.findings[0].id}.json").unlink()
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["cases.txt", "mine.md", "notes.txt"]


def test_somebody_elses_report_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"theirs": true}')
    with pytest.raises(UsageError, match="want a folder of its own"):
        ReportWriter(tmp_path)
    assert (tmp_path / "report.json").read_text() == '{"theirs": true}'
    assert not (tmp_path / "cases.txt").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"--report .*cannot be written: .*file is no folder"):
            ReportWriter(folder)
    ReportWriter(tmp_path / "new" / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_people_read_is_written_at_the_end(run: FakeRun) -> None:
    run.take(finding())
    run.update()
    assert sorted(path.name for path in run.writer.folder.glob("*.*")) == ["cases.txt", "junit.xml", "report.json"]
    run.update(1)
    names = sorted(path.name for path in run.writer.folder.glob("*.*"))
    assert names == ["cases.txt", "junit.xml", "report.html", "report.json", "report.md"]
    page = (run.writer.folder / "report.html").read_text()
    assert CASE.text in page
    assert "the stack" in page
    assert f'href="findings/{run.findings[0].id}.py"' in page


def test_what_is_known_is_an_xfail_with_its_reason(run: FakeRun) -> None:
    run.results["mesh.groups"].outcome, run.results["mesh.groups"].reasons = "expected", ["ranks are sorted", "views are shared"]
    root = ElementTree.fromstring(render_junit(run.update(0)))
    (case,) = (case for case in root.iter("testcase") if case.get("name") == "mesh.groups")
    assert case[0].attrib == {"type": "pytest.xfail", "message": "ranks are sorted; views are shared"}
    assert root[0].get("skipped") == "2"  # with the law that needs more ranks


def test_an_id_that_xml_cannot_hold_is_replaced(run: FakeRun) -> None:
    report = run.update(0)
    report.laws[0].id = "mine.\x1b[31mred"
    assert ElementTree.fromstring(render_junit(report)).find(".//testcase").get("name") == "mine.\N{REPLACEMENT CHARACTER}[31mred"  # type: ignore[union-attr]


def test_junit_has_a_test_case_for_each_law(run: FakeRun) -> None:
    run.take(finding(message="bad \x00 text & <tag>"))
    root = ElementTree.fromstring(render_junit(run.update(1)))
    suite = root.find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "1", "1")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert cases.keys() == LAWS.keys()
    failure = cases["op.forward[mean]"].find("failure")
    assert failure is not None
    assert "bad \ufffd text & <tag>" in (failure.text or "")
    skipped = cases["mesh.copies"].find("skipped")
    assert skipped is not None
    assert "needs 8 ranks" in (skipped.get("message") or "")
    assert cases["mesh.groups"].find("failure") is None


def test_a_stale_law_fails_under_strict_only(run: FakeRun) -> None:
    run.results["mesh.groups"].outcome = "stale"
    report = run.update(0)
    assert 'failures="1"' in render_junit(report)
    assert 'failures="2"' in render_junit(msgspec.structs.replace(report, strict=True))


def test_report_md_is_one_screen(run: FakeRun) -> None:
    for at in range(30):
        run.take(finding(id=f"{at:08x}", where=f"rule_{at}, torch/rules.py:{at}"))
    report = run.update(1)
    text = render_markdown(report, Path("shardlaw-report"))
    assert len(text.splitlines()) <= 70
    assert "30 new findings" in text
    assert "and 20 more" in text
    assert f"`{CASE.text}`" in text
    assert "`python shardlaw-report/findings/00000000.py` exits 1" in text
    assert "needs 8 ranks" in text
    assert (run.writer.folder / "report.md").read_text() == render_markdown(report, run.writer.folder)


def test_a_folder_of_other_json_is_no_folder_of_findings(tmp_path: Path) -> None:
    assert list(read_cases(tmp_path)) == []
    (tmp_path / "0badcafe.json").write_text("{")
    with pytest.raises(UsageError, match=r"0badcafe\.json: no finding: not JSON"):
        list(read_cases(tmp_path))
    (tmp_path / "0badcafe.json").rename(tmp_path / "mine.json")
    with pytest.raises(UsageError, match="want the folder of a report"):
        list(read_cases(tmp_path))
