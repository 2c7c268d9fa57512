"""The listener of a run: passes its events to the report writer and the terminal."""

from __future__ import annotations

import os
import time
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
    """Writes the report of a run into ``folder`` and, unless ``quiet``, shows it on the terminal. ``before``: the run that this one
    resumes. Raises :class:`UsageError` if the folder cannot be written."""

    def __init__(self, folder: Path, before: EarlierRun | None = None, *, quiet: bool = False) -> None:
        self._writer = ReportWriter(folder, before)
        self.terminal = Terminal(str(folder), open(os.devnull, "w") if quiet else None)  # noqa: SIM115

    def show_request(self, request: RunRequest, target: Target) -> None:
        self.terminal.show_request(request, target)

    def on_run_begin(self, run: RunState) -> None:
        self.terminal.on_run_begin(run.laws, run.planned())

    def on_scouted(self, law_id: str) -> None:
        self.terminal.on_scouted(law_id)

    def on_law_begin(self, law_id: str) -> None:
        self.terminal.on_law_begin(law_id)

    def on_case(self, verdict: Verdict, is_drawn: bool) -> None:
        self._writer.add_case(verdict, is_drawn)
        self.terminal.on_case()

    def on_shrink(self, law_id: str, verdict: Verdict) -> None:
        self._writer.expect_scripts()
        self.terminal.on_shrink(law_id, verdict)

    def on_finding(self, found: Finding, run: RunState) -> None:
        self.terminal.on_finding(self._writer.add_finding(found, run), run.results[found.law].law.clause)

    def on_law_end(self, result: LawResult) -> None:
        self.terminal.on_law_end(result)

    def wait_for_scripts(self) -> None:
        while count := self._writer.unproven():
            self.terminal.on_proving(count)
            time.sleep(0.1)

    def write_report(self, run: RunState, exit_code: int | None = None) -> None:
        self._writer.write(run, exit_code)

    def on_run_end(self, run: RunState, exit_code: int) -> None:
        self.terminal.on_run_end(run, exit_code, self._writer.last_report)
