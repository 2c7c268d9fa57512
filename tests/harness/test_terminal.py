"""What a person sees of a run in a terminal."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardlaw.conformance.report.markdown import markdown
from shardlaw.conformance.report.terminal import Terminal, complain, print_summary
from shardlaw.conformance.report.terminal import console as plain_console
from tests.harness.runs import CASE, FakeRun, finding, verdict


def test_the_summary_says_what_was_found_and_what_was_not_reached(run: FakeRun) -> None:
    run.take(finding())
    run.take(finding(status="expected", note="weighs ranks", id="0badcafe"))
    run.unconfirmed.append(verdict())
    out = io.StringIO()
    print_summary(plain_console(out), run.update(1), "shardlaw-report")
    text = out.getvalue()
    assert CASE.text in text
    assert "rank 0: holds other elements" in text
    assert f"python shardlaw-report/findings/{run.findings[0].id}.py" in text
    assert "wrong-value 0badcafe op.forward[mean]: weighs ranks" in text
    assert "needs 8 ranks, the largest world has 4" in text
    assert "unconfirmed" in text
    assert "exit 1: a new finding (1 new finding, 1 expected)" in text
    assert "\x1b" not in text


def test_what_is_new_stands_last_with_its_law_its_features_and_what_all_of_it_has_in_common(run: FakeRun) -> None:
    for at in range(20):
        run.take(finding(status="expected", note="weighs ranks", id=f"{at:08x}"))
    run.take(replace(finding(), features=("group", "uneven")))
    run.take(replace(finding("mesh.groups"), id="0badcafe", features=("async", "group")))
    out = io.StringIO()
    print_summary(plain_console(out), run.update(1), "shardlaw-report")
    text = out.getvalue()
    assert "  law: What op.forward[mean] says.\n  features: group, uneven\n" in text
    assert "and 8 more, each with its reason in the report" in text
    assert text.index("weighs ranks") < text.index("not reached") < text.index("0badcafe") < text.index("exit 1")
    assert "all 2 new findings have in common: group\n" in text
    assert f"2 new findings in 2 laws; begin with {run.findings[20].id} {CASE.text}: later laws stand on what earlier ones try\n" in text
    assert "all 2 new findings have in common: group\n" in markdown(run.update(1), Path("r"))


def test_features_that_were_missed_are_named_where_they_are_few(run: FakeRun) -> None:
    report = run.update(0)
    assert re.search(r"- \d+ features, listed in report.json\n", markdown(report, Path("r")))
    report.features_missing = ["late-rank", "0-d"]
    assert "- 2 features: late-rank, 0-d\n" in markdown(report, Path("r"))


def test_a_run_without_cases_says_why_on_standard_error(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.results = {"mesh.copies": run.results["mesh.copies"]}
    complain(run.update(2))
    assert capsys.readouterr().err == "shardlaw: no case was judged; mesh.copies: needs 8 ranks, the largest world has 4\n"
    complain(run.update(1))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("code", "line"), [(0, "exit 0: nothing new"), (130, "exit 130: interrupted"), (2, "exit 2: no case was judged")])
def test_the_exit_code_is_explained(run: FakeRun, code: int, line: str) -> None:
    out = io.StringIO()
    print_summary(plain_console(out), run.update(code), "r")
    assert line in out.getvalue()


def test_plain_progress_comes_every_ten_seconds(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    out = io.StringIO()
    terminal = Terminal(5, out)
    terminal.law("mesh.groups")
    for _ in range(100):
        now += 0.5
        terminal.case()
    terminal.finding(finding())
    terminal.done(run.results["mesh.groups"])
    terminal.summary(run, 0)  # type: ignore[arg-type]
    lines = [line for line in out.getvalue().splitlines() if line.startswith("[")]
    assert len(lines) == 5
    assert lines[0] == "[  10 s] 1/5 mesh.groups: 20 cases, 2/s, 0 new, 0 expected"
    assert f"wrong-value {finding().id} {CASE.text}\n" in out.getvalue()


def test_a_terminal_shows_one_live_line(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Screen()
    terminal = Terminal(5, out)
    terminal.law("mesh.groups")
    terminal.case()
    terminal.shrinking("mesh.groups", verdict())
    terminal.finding(finding())
    terminal.summary(run, 1)  # type: ignore[arg-type]
    assert "shrinking a wrong-value" in out.getvalue()
    assert "\x1b[1;31m" in out.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Screen()
    terminal = Terminal(5, plain)
    terminal.finding(finding())
    terminal.summary(run, 1)  # type: ignore[arg-type]
    assert "[1;31m" not in plain.getvalue()
