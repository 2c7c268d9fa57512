"""Show a run on the terminal: the request at once, a live line while it runs, the first finding in full, at the end causes and counts.

If the output is no terminal, there is a line every ten seconds instead of the live one, and no colour. ``NO_COLOR`` is honoured.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardlaw import __version__
from shardlaw.conformance.report.wording import count_noun, one_line

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.report.run_report import FindingLine, RunReport
    from shardlaw.conformance.run.request import RunRequest
    from shardlaw.conformance.run.state import LawResult, RunState

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 10.0
ESTIMATE_SECONDS = 5.0  # no estimate of the remaining time before
ESTIMATE_SHARE = 0.02
SHOWN_CAUSES = 3
SHOWN_FURTHER = 6
SHOWN_OTHERS = 4
SHOWN_EXPECTED = 5
SHOWN_LINES = 4
SHOWN_UNSEEN = 6
# a silent deviation is worse than a loud one
SEVERITY = ("wrong-value", "wrong-layout", "wrong-metadata", "crash", "hang", "divergence", "raised", "wrong-error")
STYLES = {"held": "green", "expected": "yellow", "stale": "magenta", "deviates": "bold red", "untested": "dim"}


def standard_output() -> TextIO:
    """A duplicate of the real standard output, which pytest does not capture; or the current one if it was replaced."""
    if sys.stdout is sys.__stdout__:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return io.TextIOWrapper(os.fdopen(os.dup(sys.__stdout__.fileno()), "wb"), "utf-8", "replace", line_buffering=True)
    return sys.stdout


def make_console(file: TextIO | None = None) -> Console:
    """A console without markup and highlighting, which does not wrap lines."""
    return Console(file=file or sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Terminal:
    """Shows one run; ``folder`` is that of its report."""

    def __init__(self, folder: str = "", file: TextIO | None = None) -> None:
        self.console = make_console(file or standard_output())
        self._folder = folder
        self._shares: dict[str, float] = {}
        self._laws = self._laws_done = self._cases = self._scouted = self._new = self._expected = 0
        self._done_share = 0.0
        self._worst = self._activity = ""
        self._worst_rank = len(SEVERITY)
        self._start = self._turns_start = self._last_refresh = time.monotonic()
        self._live: Live | None = None

    def show_request(self, request: RunRequest, target: Target) -> None:
        """Show the request, before torch is loaded."""
        where = "" if target.name == target.backend else f" ({target.device}, {target.backend})"
        selection = " ".join([*request.laws, *(f"--op {op}" for op in request.ops)]) or "all laws"
        if request.resumed_smoke_shares is not None:
            selection = f"the {len(request.laws)} laws that were left"
        selection = f"certificate {request.certify}" if request.certify else f"profile {request.profile}, {selection}"
        self._print(
            Text(f"shardlaw {__version__} on {target.name}{where}: {selection}, seed {request.seed}; loading torch and starting ranks")
        )

    def on_run_begin(self, laws: Sequence[Law], planned: int) -> None:
        """Show how many laws and cases there are."""
        self._laws = len(laws)
        weights, counts = sum(law.weight for law in laws) or 1.0, sum(law.sweeps + law.draws for law in laws)
        # the mean of a law's share by weight and by number of cases estimates its time well
        by_weight = {law.id: law.weight / weights for law in laws}
        by_count = {law.id: (law.sweeps + law.draws) / counts for law in laws} if counts else by_weight
        self._shares = {name: (by_weight[name] + by_count[name]) / 2 for name in by_weight}
        self._print(Text(f"{count_noun(self._laws, 'law')}, up to {planned:,} cases"))
        self._start = self._turns_start = self._last_refresh = time.monotonic()

    def on_scouted(self, law_id: str) -> None:
        """A case was tried before the turn of its law."""
        self._scouted += 1
        self._activity = f"a few cases of each law, now {law_id}"
        self._refresh()

    def on_law_begin(self, law_id: str) -> None:
        """A law's turn begins."""
        if self._scouted:
            self._scouted, self._turns_start = 0, time.monotonic()
        self._activity = law_id
        self._refresh(now=self.console.is_terminal)

    def on_case(self) -> None:
        """A case was judged."""
        self._cases += 1
        self._refresh()

    def on_shrink(self, law_id: str, verdict: Verdict) -> None:
        """A deviation is being shrunk and confirmed."""
        self._activity = f"{law_id}, shrinking a {verdict.kind}"
        self._refresh(now=self.console.is_terminal)

    def on_proving(self, count: int) -> None:
        """All cases were judged; ``count`` scripts of findings have not been run yet."""
        self._activity = f"running the last {count} scripts of findings"
        self._refresh(now=self.console.is_terminal)

    def on_finding(self, found: FindingLine, clause: str) -> None:
        """Show a new finding: the first in full, each further one in a line."""
        if found.status == "expected":
            self._expected += 1
            return
        self._new += 1
        rank = SEVERITY.index(found.kind) if found.kind in SEVERITY else len(SEVERITY)
        if rank < self._worst_rank:
            self._worst_rank, self._worst = rank, f"{found.kind} of {found.law}"
        if self._new > 1:
            self._print(Text.assemble((found.kind, "bold red"), f" {found.id} {found.text}"))
            return
        self._print(Text(f"\nfirst finding, {time.monotonic() - self._start:.0f} s after the start:"))
        print_finding(self.console, found, clause, self._folder)
        self._print(Text(""))

    def on_law_end(self, result: LawResult) -> None:
        """A law is finished."""
        self._laws_done += 1
        self._done_share += self._shares.get(result.law.id, 0.0)
        self._refresh()

    def on_run_end(self, run: RunState, exit_code: int, last_report: RunReport | None = None) -> None:
        """Show the summary of a run; ``last_report`` is its report as written."""
        from shardlaw.conformance.report.build import build_report
        from shardlaw.conformance.report.github import annotate

        self._stop()
        report = last_report or build_report(run, exit_code)
        is_shown = self._new == 1 and report.stopped_by == "-x"  # the finding is what was printed last
        print_summary(self.console, report, str(run.request.report), with_findings=not is_shown)
        annotate(report, run.request.report, self.console.file)
        if run.failure is None:  # else the failure was printed
            print_not_judged(report)

    def _line(self) -> Text:
        now = time.monotonic()
        spent, cases = now - self._turns_start, self._scouted or self._cases
        rate = cases / spent if spent > 1 else 0.0
        pace = f", {rate:.0f}/s" if rate >= 1 else ""
        counts = f"{count_noun(cases, 'case')}{pace}, {self._new} new, {self._expected} expected"
        remaining = ""
        if spent >= ESTIMATE_SECONDS and ESTIMATE_SHARE <= self._done_share < 1:
            remaining = f", {_approximate_time(spent * (1 - self._done_share) / self._done_share)} left"
        worst = f"; worst: {self._worst}" if self._worst else ""
        turn = "" if self._scouted else f"{min(self._laws_done + 1, self._laws)}/{self._laws} "
        return Text(f"[{now - self._start:4.0f} s{remaining}] {turn}{self._activity}: {counts}{worst}")

    def _refresh(self, now: bool = False) -> None:
        moment = time.monotonic()
        if not now and moment - self._last_refresh < (LIVE_SECONDS if self.console.is_terminal else PLAIN_SECONDS):
            return
        self._last_refresh = moment
        if not self.console.is_terminal:
            self._print(self._line())
            return
        line = self._line()
        line.truncate(self.console.width, overflow="ellipsis")
        if self._live is None:
            self._live = Live(line, console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(line, refresh=True)

    def _print(self, text: Text) -> None:
        self.console.print(text)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _approximate_time(seconds: float) -> str:
    """A rounded time: ``about 20 s``."""
    return f"about {max(1, round(seconds / 10)) * 10} s" if seconds < 100 else f"about {round(seconds / 60)} min"


def print_finding(out: Console, found: FindingLine, clause: str, folder: str) -> None:
    """Print a finding as a self-contained paragraph."""
    out.print(Text.assemble((found.kind, "bold red"), f" {found.id}"))
    out.print(f"  {found.text}")
    _prose(out, one_line(found.message))
    if clause:
        _prose(out, f"law: {one_line(clause)}")
    for line in found.waits[:SHOWN_LINES]:
        _prose(out, line)
    if found.where:
        _prose(out, f"where to look: {one_line(found.where)}")
    if found.next_places:
        _prose(out, f"then: {'; '.join(map(one_line, found.next_places))}")
    if found.features:
        _prose(out, f"features: {', '.join(found.features)}")
    if found.reproducer:
        out.print(f"  python {folder}/{found.reproducer}")
        _prose(out, f"script: {found.script}")
    else:
        out.print(f"  shardlaw replay {folder}/findings/{found.id}.json")
    if found.note:
        _prose(out, f"({one_line(found.note)})")


def print_summary(out: Console, report: RunReport, folder: str, *, with_findings: bool = True) -> None:
    """Print a report on one screen: new findings by cause, counts, what was not reached, and the exit code."""
    from shardlaw.conformance.report.markdown import MANY_FEATURES, count_and_list, declared_lines, headline, missing_features
    from shardlaw.conformance.report.run_report import EXIT_MEANINGS

    target, totals = report.target, report.totals
    if with_findings:
        out.print()
        _print_new(out, report, folder)
    out.print(
        f"{target.name} ({target.device}, {target.backend}, torch {target.torch}), up to {target.world_size} ranks, "
        f"profile {report.profile}, seed {report.seed}: {count_noun(totals.cases, 'case')}, {totals.distinct} distinct, "
        f"in {report.seconds:.0f} s{report.ended_early}"
    )
    _print_counts(out, report)
    _print_expected(out, report)
    _print_list(
        out, [f"not reached: {count_and_list(laws, SHOWN_OTHERS, 'laws')} ({reason})" for reason, laws in report.untested().items()]
    )
    if 0 < len(report.features_missing) <= MANY_FEATURES:  # a run of some laws misses most
        _prose(out, f"not reached: {missing_features(report, 16)}", "")
    if totals.skipped_expected:
        out.print(f"not reached: {totals.skipped_expected} cases that would be an expected hang or crash")
    if target.cannot:
        out.print("declared:")
        for line in declared_lines(report):
            out.print(f"  {line}")
    _print_list(out, [f"stale: {line}" for line in report.stale()])
    if unseen := report.used_unseen():
        out.print(f"expected on a release of torch that nobody tried yet: {count_and_list(unseen, SHOWN_UNSEEN, 'causes')}")
    _print_list(out, [f"warning: {warning}" for warning in report.warnings])
    for error in report.errors[:SHOWN_LINES]:
        out.print(Text.assemble(("error of the harness", "bold red"), f" while {error.law} was tried: {one_line(error.message)}"))
    if report.certificate is not None:
        out.print(Text(report.certificate.line(), style="green" if report.certificate.passed else "bold red"))
    code = report.exit if report.exit is not None else 3
    why = EXIT_MEANINGS.get(code, "")
    if code == 1 and not totals.new:
        why = "a stale expectation, under --strict"
    summed = headline(report)
    out.print(Text(f"exit {code}: {why}" + (f" ({summed})" if summed != why else ""), style="green" if code == 0 else "bold red"))
    out.print(f"report: {folder}/report.html, {folder}/report.md, {folder}/report.json, {folder}/junit.xml")


def _prose(out: Console, text: str, indent: str = "  ") -> None:
    """Print prose, wrapped between words on a terminal. Not for cases and commands, which people copy."""
    if out.is_terminal:
        text = "\n".join(
            textwrap.wrap(text, max(40, out.width - 1), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        )
        out.print(text)
    else:
        out.print(f"{indent}{text}")


def _print_list(out: Console, lines: Sequence[str]) -> None:
    for line in lines[:SHOWN_LINES]:
        _prose(out, line, "")
    if len(lines) > SHOWN_LINES:
        out.print(f"  and {len(lines) - SHOWN_LINES} more such lines in the report")


def _print_counts(out: Console, report: RunReport) -> None:
    """Print how many laws have each outcome, and the chapters with laws that deviate."""
    from shardlaw.conformance.report.run_report import OUTCOMES

    counts = {outcome: sum(law.outcome == outcome for law in report.laws) for outcome in OUTCOMES}
    line = Text(f"{count_noun(len(report.laws), 'law')}:")
    for outcome, count in counts.items():
        if count:
            line.append(f"{',' if line.plain[-1] != ':' else ''} {count} ").append(outcome, style=STYLES[outcome])
    bad = [f"{chapter} ({count['deviates']})" for chapter, count in report.chapters().items() if count["deviates"]]
    out.print(line + Text(f"; those that deviate are of {', '.join(bad)}" if bad else ""))


def print_not_judged(report: RunReport) -> None:
    """If a run ended with 2 (no case was judged), print why on standard error, in one line."""
    if report.exit == 2:
        reasons = [f"{laws[0]}{f' and {len(laws) - 1} more' * (len(laws) > 1)}: {reason}" for reason, laws in report.untested().items()]
        print("; ".join(["shardlaw: no case was judged", *reasons[:3]]), file=sys.stderr)


def _print_new(out: Console, report: RunReport, folder: str) -> None:
    from shardlaw.conformance.report.markdown import common_lines

    clauses = {law.id: law.clause for law in report.laws}
    causes = report.causes()
    if not causes:
        return
    count = len(report.new())
    if count > 1:
        out.print(
            Text(
                f"{count_noun(len(causes), 'cause')}, {count} findings" if len(causes) < count else f"{count} findings",
                style="bold",
            )
        )
    for found, *others in causes[:SHOWN_CAUSES]:
        print_finding(out, found, clauses.get(found.law, ""), folder)
        if others:
            names = ", ".join(f"{other.id} {other.law}" for other in others[:SHOWN_OTHERS])
            more = f" and {len(others) - SHOWN_OTHERS} more" * (len(others) > SHOWN_OTHERS)
            _prose(out, f"likely the same cause: {names}{more}")
        out.print()
    further = causes[SHOWN_CAUSES:]
    for found, *others in further[:SHOWN_FURTHER]:
        more = f" and {len(others)} more of this cause" * bool(others)
        out.print(Text.assemble((found.kind, "bold red"), f" {found.id} {found.text}{more}"))
    if len(further) > SHOWN_FURTHER:
        out.print(f"and {len(further) - SHOWN_FURTHER} further causes in the report")
    shared = common_lines(report)
    for line in shared:
        _prose(out, line, "")
    if shared or further:
        out.print()


def _print_expected(out: Console, report: RunReport) -> None:
    expected = [found for found in report.findings if found.status == "expected"]
    if expected:
        reasons = list(dict.fromkeys(found.note for found in expected))
        out.print(f"expected: {count_noun(len(expected), 'finding')} of {count_noun(len(reasons), 'known cause')}")
        for reason in reasons[:SHOWN_EXPECTED]:
            _prose(out, one_line(reason))
        if len(reasons) > SHOWN_EXPECTED:
            out.print(f"  and {len(reasons) - SHOWN_EXPECTED} more, each with its reason in the report")
    _print_list(
        out,
        [
            f"unconfirmed (a fresh world did not show it again): {seen.kind} {seen.text}: {one_line(seen.message)}"
            for seen in report.unconfirmed
        ],
    )
