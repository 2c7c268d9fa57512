"""Who listens to a run: the writer of its report and the terminal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.report.terminal import Terminal
from shardlaw.conformance.report.writer import ReportWriter

if TYPE_CHECKING:
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.report.resume import EarlierRun
    from shardlaw.conformance.run.request import RunRequest
    from shardlaw.conformance.run.state import Finding, LawResult, RunState


class Reporter:
    """Writes the report of a run into ``folder`` and shows it on the terminal, or not where somebody else has that. Raises
    :class:`UsageError` where it cannot be written."""

    def __init__(self, folder: Path, before: EarlierRun | None = None, *, quiet: bool = False) -> None:
        self._writer = ReportWriter(folder, before)
        self.terminal = Terminal(str(folder), open(os.devnull, "w") if quiet else None)  # noqa: SIM115

    def start(self, request: RunRequest, target: Target) -> None:
        self.terminal.start(request, target)

    def begin(self, run: RunState) -> None:
        self.terminal.begin(run.laws, run.planned())

    def law(self, law_id: str) -> None:
        self.terminal.law(law_id)

    def case(self, verdict: Verdict, drawn: bool) -> None:
        self._writer.case(verdict, drawn)
        self.terminal.case()

    def shrinking(self, law_id: str, verdict: Verdict) -> None:
        self.terminal.shrinking(law_id, verdict)

    def finding(self, found: Finding, run: RunState) -> None:
        self.terminal.finding(self._writer.finding(found, run), run.results[found.law].law.clause)

    def done(self, result: LawResult) -> None:
        self.terminal.done(result)

    def update(self, run: RunState, exit_code: int | None = None) -> None:
        self._writer.update(run, exit_code)

    def summary(self, run: RunState, exit_code: int) -> None:
        self.terminal.summary(run, exit_code, self._writer.last)
