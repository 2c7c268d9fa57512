"""What a person sees of a run in a terminal."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer
from shardlaw.conformance.report.build import finding_line
from shardlaw.conformance.report.markdown import render_markdown
from shardlaw.conformance.report.run_report import FindingLine
from shardlaw.conformance.report.terminal import Terminal, print_not_judged, print_summary
from shardlaw.conformance.report.terminal import make_console as plain_console
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.run.state import Finding
from tests.harness.runs import CASE, FakeRun, finding, verdict

SCREEN = 60  # lines


def line_of(found: Finding) -> FindingLine:
    return finding_line(found, None, "", "")


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
    assert "expected: 1 finding of 1 known cause\n  weighs ranks\n" in text
    assert "needs 8 ranks, the largest world has 4" in text
    assert "unconfirmed" in text
    assert "exit 1: a new finding (1 new finding, 1 expected)" in text
    assert "\x1b" not in text


def test_what_is_new_stands_first_with_its_law_its_features_and_what_all_of_it_has_in_common(run: FakeRun) -> None:
    for at in range(20):
        run.take(finding(status="expected", note=f"weighs ranks {at}", id=f"{at:08x}"))
    run.take(replace(finding(), features=("group", "uneven")))
    run.take(replace(finding("mesh.groups"), id="0badcafe", features=("async", "group")))
    out = io.StringIO()
    print_summary(plain_console(out), run.update(1), "shardlaw-report")
    text = out.getvalue()
    assert "  law: What op.forward[mean] says.\n  features: group, uneven\n" in text
    assert "expected: 20 findings of 20 known causes\n" in text
    assert "and 15 more, each with its reason in the report" in text
    assert text.index("0badcafe") < text.index("weighs ranks") < text.index("not reached") < text.index("exit 1")
    assert "all 2 new findings have in common: group\n" in text
    assert f"2 new findings in 2 laws; begin with {run.findings[20].id} {CASE.text}: later laws build on what earlier ones check\n" in text
    assert "all 2 new findings have in common: group\n" in render_markdown(run.update(1), Path("r"))


def test_a_summary_fits_a_screen(run: FakeRun) -> None:
    for at in range(60):
        law_id = list(run.results)[at % 4]
        places = tuple(f"function_{at + more}, torch/distributed/tensor/_api.py:{at}" for at in [100 * at] for more in range(4))
        run.take(replace(finding(law_id), id=f"{at:08x}", where=places[0], places=places))
        run.take(finding(status="expected", note=f"a known cause {at}", id=f"{at + 100:08x}"))
    run.unconfirmed += [verdict()] * 9
    out = io.StringIO()
    print_summary(plain_console(out), run.update(1), "shardlaw-report")
    assert out.getvalue().count("\n") <= SCREEN
    assert "60 causes" not in out.getvalue()  # each cause has one finding: there is one number to say
    assert "and 51 further causes in the report" in out.getvalue()
    spots = [f"function_{at}, torch/distributed/tensor/_api.py:0" for at in range(3)]
    assert f"  where to look: {spots[0]}\n  then: {spots[1]}; {spots[2]}\n" in out.getvalue()
    assert f"where to look: {', then '.join(spots)}".replace("_", r"\_") in render_markdown(run.update(1), Path("r"))


def test_a_finding_without_a_script_says_how_to_try_it_again_and_where_ranks_wait(run: FakeRun) -> None:
    stack = """Current thread 0x1 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 4287 in all_reduce
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/mine/hb.py", line 10 in step
"""
    silent = verdict(kind="hang", ranks=(Answer(0, "silent", stack=stack), Answer(1, "silent", stack=stack)))
    run.take(replace(finding("op.forward[sum]"), kind="hang", verdict=silent))
    out = io.StringIO()
    print_summary(plain_console(out), run.update(1), "r")
    assert "  ranks 0, 1 wait in all_reduce (distributed_c10d.py:4287), called at /mine/hb.py:10\n" in out.getvalue()
    assert f"  shardlaw replay r/findings/{run.findings[0].id}.json\n" in out.getvalue()


def test_no_word_is_broken_on_a_terminal_and_no_case_is_cut(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    message = "rank 0: " + "something-that-is-long and other words " * 5
    run.take(replace(finding(), message=message))
    out = Screen()
    print_summary(plain_console(out), run.update(1), "r")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.getvalue().splitlines()]
    assert f"  {CASE.text}" in lines
    told = [line for line in lines if "something-that-is-long" in line]
    assert len(told) > 1
    assert all(len(line) < 60 for line in told)


def test_features_that_were_missed_are_named_where_they_are_few(run: FakeRun) -> None:
    report = run.update(0)
    assert re.search(r"- \d+ features, listed in report.json\n", render_markdown(report, Path("r")))
    report.features_missing = ["late-rank", "0-d"]
    assert "- 2 features: late-rank, 0-d\n" in render_markdown(report, Path("r"))


def test_a_run_without_cases_says_why_on_standard_error(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.results = {"mesh.copies": run.results["mesh.copies"]}
    print_not_judged(run.update(2))
    assert capsys.readouterr().err == "shardlaw: no case was judged; mesh.copies: needs 8 ranks, the largest world has 4\n"
    print_not_judged(run.update(1))
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
    terminal = Terminal("r", out)
    terminal.on_run_begin([result.law for result in run.results.values()], 50)
    terminal.on_law_begin("mesh.groups")
    for _ in range(100):
        now += 0.5
        terminal.on_case()
    terminal.on_finding(line_of(finding()), "What it says.")
    terminal.on_law_end(run.results["mesh.groups"])
    now += 11
    terminal.on_case()
    terminal.on_run_end(run, 0)  # type: ignore[arg-type]
    lines = [line for line in out.getvalue().splitlines() if line.startswith("[")]
    assert len(lines) == 6
    assert lines[0] == "[  10 s] 1/5 mesh.groups: 20 cases, 2/s, 0 new, 0 expected"
    assert lines[5].startswith("[  61 s, about 4 min left] 2/5 mesh.groups: 101 cases, 2/s, 1 new, 0 expected; worst: wrong-value of op")
    assert out.getvalue().startswith("5 laws, up to 50 cases\n")
    assert f"first finding, 50 s after the start:\nwrong-value {finding().id}\n  {CASE.text}\n  rank 0: holds" in out.getvalue()


def test_the_finding_that_ends_a_run_is_shown_once_and_what_was_tried_before_it_is_counted(run: FakeRun) -> None:
    out = io.StringIO()
    terminal = Terminal("r", out)
    run.scouted = {replace(CASE, law=f"op.forward[{at}]"): None for at in range(6)} | {CASE: None}
    run.distinct, run.stopped_by = {CASE}, "-x"
    run.take(finding())
    terminal.on_finding(line_of(run.findings[0]), "What it says.")
    terminal.on_run_end(run, 1)  # type: ignore[arg-type]
    text = out.getvalue()
    assert text.count("wrong-value ") == 1
    assert re.search(r" s, stopped by -x after 6 cases of all laws in turn\n5 laws: ", text)
    run.stopped_by = None
    assert run.update(0).ahead == 0


def test_the_pace_of_turns_is_counted_from_the_first(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    out = io.StringIO()
    terminal = Terminal("r", out)
    terminal.on_run_begin([result.law for result in run.results.values()], 50)
    for _ in range(30):
        now += 1.0
        terminal.on_scouted("mesh.copies")
    terminal.on_law_begin("mesh.groups")
    now += 11
    for _ in range(22):
        terminal.on_case()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("[")]
    assert lines[0] == "[  10 s] a few cases of each law, now mesh.copies: 10 cases, 1/s, 0 new, 0 expected"
    assert lines[3] == "[  41 s] 1/5 mesh.groups: 1 case, 0 new, 0 expected"


def test_progress_says_nothing_before_ten_seconds_of_cases_and_no_rate_of_none(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    out = io.StringIO()
    terminal = Terminal("r", out)
    now += 15  # torch is loaded
    terminal.on_run_begin([result.law for result in run.results.values()], 50)
    terminal.on_law_begin("mesh.groups")
    now += 11
    terminal.on_case()
    assert out.getvalue() == "5 laws, up to 50 cases\n[  11 s] 1/5 mesh.groups: 1 case, 0 new, 0 expected\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_first_line_says_what_was_asked_for() -> None:
    out = io.StringIO()
    Terminal("r", out).show_request(RunRequest(laws=("mesh.*",), seed=3), Target())
    assert re.fullmatch(r"shardlaw \S+ on gloo: profile smoke, mesh.\*, seed 3; loading torch and starting ranks\n", out.getvalue())


def test_a_terminal_shows_one_live_line(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Screen()
    terminal = Terminal("r", out)
    terminal.on_run_begin([result.law for result in run.results.values()], 50)
    terminal.on_law_begin("mesh.groups")
    terminal.on_case()
    terminal.on_shrink("mesh.groups", verdict())
    terminal.on_finding(line_of(finding()), "")
    terminal.on_run_end(run, 1)  # type: ignore[arg-type]
    assert "shrinking a wrong-value" in out.getvalue()
    assert "\x1b[1;31m" in out.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Screen()
    terminal = Terminal("r", plain)
    terminal.on_finding(line_of(finding()), "")
    terminal.on_run_end(run, 1)  # type: ignore[arg-type]
    assert "[1;31m" not in plain.getvalue()
