"""What a terminal shows of a run: one live line while it goes on, then what was found and what was not reached.

Where the output is no terminal there is a line every ten seconds instead, and no colour. ``NO_COLOR`` is honoured.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardlaw.conformance.report.github import tell
from shardlaw.conformance.report.markdown import declared, headline, in_common, missed, some
from shardlaw.conformance.report.of_run import report_of
from shardlaw.conformance.report.run_report import MEANING, OUTCOMES, FindingLine, RunReport

if TYPE_CHECKING:
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.run.state import Finding, LawResult, RunState

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 10.0
SHOWN_OTHERS = 4
SHOWN_EXPECTED = 12
SHOWN_UNSEEN = 6
STYLES = {"held": "green", "expected": "yellow", "stale": "magenta", "deviates": "bold red", "untested": "dim"}


def standard_output() -> TextIO:
    """Where people look. A duplicate of the real one, so that what a test runner captures of ours still shows."""
    if sys.stdout is sys.__stdout__:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return io.TextIOWrapper(os.fdopen(os.dup(sys.__stdout__.fileno()), "wb"), "utf-8", "replace", line_buffering=True)
    return sys.stdout


def console(file: TextIO | None = None) -> Console:
    """A console that takes texts as they are and leaves long lines to the terminal."""
    return Console(file=file or sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Terminal:
    """Shows one run of ``laws`` laws."""

    def __init__(self, laws: int, file: TextIO | None = None) -> None:
        self.console = console(file or standard_output())
        self._laws = laws
        self._done = 0
        self._cases = 0
        self._new = 0
        self._expected = 0
        self._doing = ""
        self._began = self._shown = time.monotonic()
        self._live: Live | None = None

    def law(self, law_id: str) -> None:
        """A law's turn has come."""
        self._doing = law_id
        self._show(now=self.console.is_terminal)

    def case(self) -> None:
        """One more case was judged."""
        self._cases += 1
        self._show()

    def shrinking(self, law_id: str, verdict: Verdict) -> None:
        """A deviation is being shrunk and confirmed."""
        self._doing = f"{law_id}, shrinking a {verdict.kind}"
        self._show(now=self.console.is_terminal)

    def finding(self, found: Finding) -> None:
        """Something was found."""
        if found.status == "expected":
            self._expected += 1
            return
        self._new += 1
        self._say(Text.assemble((found.kind, "bold red"), f" {found.id} {found.case.text}"))

    def done(self, result: LawResult) -> None:
        """A law is finished."""
        self._done += 1
        self._show()

    def summary(self, run: RunState, exit_code: int, written: RunReport | None = None) -> None:
        """The end of a run, of which this report was ``written``."""
        self._stop()
        report = written or report_of(run, exit_code)
        print_summary(self.console, report, str(run.request.report))
        tell(report, run.request.report, self.console.file)
        if run.failure is None:  # else that has been told
            complain(report)

    def _line(self) -> Text:
        spent = time.monotonic() - self._began
        rate = self._cases / spent if spent > 1 else 0.0
        counts = f"{self._cases} cases, {rate:.0f}/s, {self._new} new, {self._expected} expected"
        return Text(f"[{spent:4.0f} s] {min(self._done + 1, self._laws)}/{self._laws} {self._doing}: {counts}")

    def _show(self, now: bool = False) -> None:
        moment = time.monotonic()
        if not now and moment - self._shown < (LIVE_SECONDS if self.console.is_terminal else PLAIN_SECONDS):
            return
        self._shown = moment
        if not self.console.is_terminal:
            self._say(self._line())
            return
        line = self._line()
        line.truncate(self.console.width, overflow="ellipsis")
        if self._live is None:
            self._live = Live(line, console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(line, refresh=True)

    def _say(self, text: Text) -> None:
        self.console.print(text)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def print_summary(out: Console, report: RunReport, folder: str) -> None:
    """What a report says, for people: chapters, what was expected, what was not reached, and last what is new and the exit code."""
    target, totals = report.target, report.totals
    out.print()
    out.print(
        f"{target.name} ({target.device}, {target.backend}, torch {target.torch}), up to {target.world_size} ranks, "
        f"profile {report.profile}, seed {report.seed}: {totals.cases} cases, {totals.distinct} distinct, in {report.seconds:.0f} s"
        + (f", stopped by {report.stopped_by}" if report.stopped_by else "")
    )
    _print_chapters(out, report)
    _print_known(out, report)
    reasons = report.untested()
    if reasons or report.features_missing or totals.skipped_expected:
        out.print()
        out.print("not reached:")
        for reason, laws in reasons.items():
            out.print(f"  {some(laws, 4, 'laws')} ({reason})")
        if report.features_missing:
            out.print(f"  {missed(report, 16)}")
        if totals.skipped_expected:
            out.print(f"  {totals.skipped_expected} cases that would be an expected hang or crash")
    if target.cannot:
        out.print()
        out.print("declared:")
        for line in declared(report):
            out.print(f"  {line}")
    for line in report.stale():
        out.print(f"stale: {line}")
    if unseen := report.used_unseen():
        out.print(f"expected on a release of torch that nobody tried yet: {some(unseen, SHOWN_UNSEEN, 'causes')}")
    for warning in report.warnings:
        out.print(f"warning: {warning}")
    for error in report.errors:
        out.print(Text.assemble(("error of the harness", "bold red"), f" while {error.law} was tried: {short(error.message)}"))
    _print_new(out, report, folder)
    out.print()
    code = report.exit if report.exit is not None else 3
    why = MEANING.get(code, "")
    if code == 1 and not totals.new:
        why = "a stale expectation, under --strict"
    summed = headline(report)
    out.print(Text(f"exit {code}: {why}" + (f" ({summed})" if summed != why else ""), style="green" if code == 0 else "bold red"))
    out.print(f"report: {folder}/report.html, {folder}/report.md, {folder}/report.json, {folder}/junit.xml")


def _print_chapters(out: Console, report: RunReport) -> None:
    chapters = report.chapters()
    if not chapters:
        return
    width = max(map(len, chapters))
    out.print()
    out.print(Text(f"{'':{width}}  {'laws':>5}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES) + f"{'cases':>9}", style="dim"))
    for chapter, count in chapters.items():
        line = Text(f"{chapter:{width}}  {count['laws']:>5}")
        for outcome in OUTCOMES:
            line.append(f"{count[outcome]:>10}", style=STYLES[outcome] if count[outcome] else "dim")
        line.append(f"{count['cases']:>9}")
        out.print(line)


def complain(report: RunReport) -> None:
    """Say on standard error, in one line, why a run ended with 2: no case was judged."""
    if report.exit == 2:
        reasons = [f"{laws[0]}{f' and {len(laws) - 1} more' * (len(laws) > 1)}: {reason}" for reason, laws in report.untested().items()]
        print("; ".join(["shardlaw: no case was judged", *reasons[:3]]), file=sys.stderr)


def _print_new(out: Console, report: RunReport, folder: str) -> None:
    clauses = {law.id: law.clause for law in report.laws}
    causes = report.causes()
    if len(causes) > 1:
        count = len(report.new())
        out.print()
        out.print(Text(f"{len(causes)} causes, {count} findings" if len(causes) < count else f"{count} findings", style="bold"))
    for found, *others in causes:
        out.print()
        out.print(Text.assemble((found.kind, "bold red"), f" {found.id}"))
        out.print(f"  {found.text}")
        out.print(f"  {short(found.message)}")
        if clauses.get(found.law):
            out.print(f"  law: {short(clauses[found.law])}")
        if found.where:
            out.print(f"  where to look: {short(found.where)}")
        for line in _more(found, folder):
            out.print(f"  {line}")
        if others:
            said = ", ".join(f"{other.id} {other.law}" for other in others[:SHOWN_OTHERS])
            out.print(
                f"  the same cause, by place and kind: {said}" + (f" and {len(others) - SHOWN_OTHERS} more" * (len(others) > SHOWN_OTHERS))
            )
    if lines := in_common(report):
        out.print()
        for line in lines:
            out.print(line)


def _print_known(out: Console, report: RunReport) -> None:
    expected = [found for found in report.findings if found.status == "expected"]
    if expected:
        out.print()
        out.print("expected:")
        for found in expected[:SHOWN_EXPECTED]:
            out.print(f"  {found.kind} {found.id} {found.law}: {short(found.note)}")
        if len(expected) > SHOWN_EXPECTED:
            out.print(f"  and {len(expected) - SHOWN_EXPECTED} more, each with its reason in the report")
    if report.unconfirmed:
        out.print()
        out.print("unconfirmed (a fresh world did not show it again):")
        for seen in report.unconfirmed:
            out.print(f"  {seen.kind} {seen.text}: {short(seen.message)}")


def _more(found: FindingLine, folder: str) -> list[str]:
    lines = [f"features: {', '.join(found.features)}"] if found.features else []
    lines += [f"python {folder}/{found.reproducer}", f"script: {found.script}"] if found.reproducer else []
    return [*lines, *([f"({short(found.note)})"] if found.note else [])]


def short(text: str) -> str:
    """A text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 240 else f"{line[:237]}..."
