"""Runs that stand on an earlier one: what it left to do, and what failed in it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.report.reporter import Reporter
from shardlaw.conformance.report.run_report import read_report
from tests.harness import reports
from tests.harness.shells import Shell, refused

# in the order of a run; of the second and the last but one something deviates
LAWS = "mesh.coordinates", "mesh.local-rank", "mesh.groups", "mesh.group-order", "mesh.equality"


def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "shardlaw-report" / "report.json").read_text())
    return found


def end_at_first_deviation(patch: pytest.MonkeyPatch) -> None:
    """Have the run end itself, as from outside, as soon as it knows of a case that deviates."""
    on_case = Reporter.on_case

    def ending(self: Reporter, verdict: Verdict, is_drawn: bool) -> None:
        on_case(self, verdict, is_drawn)
        if verdict.status == "deviates":
            signal.raise_signal(signal.SIGTERM)

    patch.setattr(Reporter, "on_case", ending)


@pytest.mark.ranks
def test_a_run_that_was_ended_goes_on_and_comes_to_the_report_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    shardlaw = Shell(tmp_path, capsys)
    arguments = ["run", *LAWS, "--no-expect"]
    monkeypatch.chdir(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        end_at_first_deviation(patch)
        assert shardlaw(*arguments).returncode == 143
    first = told(tmp_path)
    assert first["stopped_by"] == "SIGTERM"
    outcomes = {law["id"]: law["outcome"] for law in first["laws"]}
    assert outcomes["mesh.coordinates"] == "held"
    assert outcomes["mesh.equality"] == "untested"
    assert "mesh.local-rank" in (tmp_path / "shardlaw-report" / "cases.txt").read_text()
    # what was ended keeps its ranks to itself: these have cases left that nobody waits for
    request.getfixturevalue("one_server")
    done = shardlaw("run", "--resume", "--no-expect")
    assert done.returncode == 1, done
    assert "laws that were left" in done.stdout.splitlines()[0]
    resumed = told(tmp_path)
    assert {law["id"]: law["outcome"] for law in resumed["laws"]}["mesh.equality"] == "held"
    assert [found["law"] for found in resumed["findings"]][:1] == ["mesh.local-rank"]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert shardlaw(*arguments, "--report", str(whole / "shardlaw-report")).returncode == 1
    at_once = told(whole)
    for name in ("cases", "findings", "new", "distinct", "drawn"):
        assert resumed["totals"][name] == at_once["totals"][name], name
    assert [law["outcome"] for law in resumed["laws"]] == [law["outcome"] for law in at_once["laws"]]
    assert resumed["features"] == at_once["features"]
    lines = [sorted((folder / "shardlaw-report" / "cases.txt").read_text().splitlines()) for folder in (tmp_path, whole)]
    assert lines[0] == lines[1]
    said = refused(shardlaw("run", "--resume", "--no-expect"))
    assert said == "--resume shardlaw-report: that run was finished: there is nothing left"
    done = shardlaw("run", "--last-failed", "--no-expect")
    assert done.returncode == 1, done
    assert [law["id"] for law in told(tmp_path)["laws"]] == ["mesh.local-rank", "mesh.group-order"]
    assert (tmp_path / "shardlaw-report" / "cases.txt").read_text().split("\n")[0].startswith("wrong-value")


def stored(tmp_path: Path, outcome: str = "held", **more: Any) -> Path:
    made = reports.report([reports.law("mesh.groups", outcome), reports.law("mesh.copies", "untested", cases=0)], **more)
    return reports.stored(tmp_path / "shardlaw-report", made, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--last-failed"], "--last-failed: no law deviates in shardlaw-report: there is nothing to try again"),
        (["--resume"], "--resume shardlaw-report: that run had --seed 7, this one 0"),
        (["--resume", "--seed", "7", "--profile", "ci"], "that run had --profile smoke, this one ci"),
        (["--resume", "--seed", "7", "mesh.*"], "want no LAW and no --op"),
        (["--resume", "--last-failed"], "--last-failed and --resume: want one of them"),
        (["--resume", "--report", "nowhere"], "--resume: nowhere: cannot be read: No such file"),
    ],
)
def test_what_cannot_go_on_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path / "shardlaw-report"))
    assert cli.main(["run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert sorted(os.listdir(tmp_path / "shardlaw-report")) == before
    assert read_report(tmp_path / "shardlaw-report").seed == 7


def test_a_trend_says_what_came_and_what_went(tmp_path: Path) -> None:
    nights = []
    for day, found in ((1, ["aaaaaaaa"]), (2, ["aaaaaaaa", "bbbbbbbb"]), (3, ["cccccccc"])):
        lines = [reports.finding(one, cause=f"<rule> {one}") for one in found]
        made = reports.report([reports.law("op.forward[mean]", "deviates")], lines, started=f"2026-01-0{day}T00:00:00+00:00")
        nights.append(str(reports.stored(tmp_path / f"night-{day}", made)))
    page = tmp_path / "trend.html"
    assert cli.main(["trend", *reversed(nights), "-o", str(page)]) == 0
    text = page.read_text()
    assert "2026-01-01 to 2026-01-03" in text
    assert text.index("came with the last run (1)") < text.index("&lt;rule&gt; cccccccc") < text.index("gone (2)")
    assert 'href="night-2/report.html#finding-bbbbbbbb">new</a>' in text
    assert text.count(">held<") == 5
    assert "<script" not in text
    assert "<rule>" not in text
