"""Write the files of a report.

``report.json``, ``junit.xml``, ``findings/`` and ``cases.txt`` (a line for each judged case) are written during the run, ``report.md`` and
``report.html`` at its end.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.report.build import build_report, finding_line
from shardlaw.conformance.report.certificate import FILE as VERDICTS
from shardlaw.conformance.report.certificate import certify_run
from shardlaw.conformance.report.run_report import FindingLine, RunReport, read_report
from shardlaw.conformance.run.finding_file import to_json, write_finding, write_text
from shardlaw.conformance.run.proof import NOT_YET, PROVEN, Prover

if TYPE_CHECKING:
    from concurrent.futures import Future

    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.report.resume import EarlierRun
    from shardlaw.conformance.run.state import Finding, RunState

SIGNAL_CODES = (130, 143)
REPORT_FILES = ("report.json", "report.md", "report.html", "junit.xml", "cases.txt", VERDICTS)


class ReportWriter:
    """Writes the files of one run into ``folder``. Raises :class:`UsageError` if the folder cannot be written, or has a ``report.json``
    that is not ours.

    The files of an earlier run are removed with the first write, so that a request that is refused leaves the old report. ``before`` is the
    run that this one resumes: its finished part is kept.
    """

    def __init__(self, folder: Path, before: EarlierRun | None = None) -> None:
        self.folder = folder
        self._before = before
        self._scripts: dict[str, tuple[str | None, str, str]] = {}
        self._prover = Prover()
        self._is_first = True
        self._unproven: list[tuple[Finding, str, Future[str]]] = []
        self._unwritten: list[str] = []
        self.last_report: RunReport | None = None
        self._cases: TextIO | None = None
        check_folder("--report", folder)

    def add_case(self, verdict: Verdict, is_drawn: bool) -> None:
        """Add a judged case to ``cases.txt``; buffered."""
        self._unwritten.append(f"{verdict.word} {'drawn' if is_drawn else 'swept'} {verdict.case.text}\n")
        if len(self._unwritten) >= 1000:
            self._write_cases()

    def expect_scripts(self) -> None:
        """Get ready to prove scripts: a finding is coming."""
        self._prover.load_torch()

    def add_finding(self, found: Finding, run: RunState) -> FindingLine:
        """Write a finding and, if it is new, its script; a script that does not show the fault is not written. Returns the report's line.

        The script of the first new finding is proven at once; those of others are while the run goes on, and :meth:`write` adds them."""
        from shardlaw.conformance.law.script import ScriptError
        from shardlaw.conformance.laws import find
        from shardlaw.conformance.report.reproducer import FaultInfo, ScriptTarget, render_reproducer

        self._open_cases_file()
        if found.status != "new":
            return self._write_finding(found, run)
        try:
            text = render_reproducer(
                find(found.law), found.case, FaultInfo.from_verdict(found.verdict), join=ScriptTarget.from_target(run.target)
            )
        except ScriptError as error:
            return self._write_finding(found, run, proof=str(error))
        proof = self._prover.submit(text)
        self._unproven.append((found, text, proof))
        line = self._write_finding(found, run, proof=NOT_YET)
        if not self._is_first:
            return line
        self._is_first = False
        return self._write_finding(found, run, text, proof.result())

    def _write_finding(self, found: Finding, run: RunState, text: str = "", proof: str = "") -> FindingLine:
        """Write a finding, and its script if that is proven."""
        from shardlaw.conformance.report.reproducer import LONG_SCRIPT_LINES

        path, notes = None, [found.note]
        if proof == PROVEN:
            path = f"findings/{found.id}.py"
            write_text(self.folder / path, text)
            lines = text.count("\n")
            notes += [f"its script has {lines} lines"] * (lines > LONG_SCRIPT_LINES)
        elif proof:
            notes += [f"no reproducer: {proof}"]
        note = "; ".join(filter(None, notes))
        self._scripts[found.id] = (path, note, proof)
        write_finding(self.folder / "findings", found, run.target, run.request.seed, reproducer=path, note=note, script=proof)
        return finding_line(found, path, note, proof)

    def unproven(self) -> int:
        """The number of scripts that have not been run yet."""
        return sum(not proof.done() for _, _, proof in self._unproven)

    def _write_proven(self, run: RunState, wait: bool) -> None:
        """Write the findings again whose scripts have been run; with ``wait`` all of them."""
        pending, self._unproven = self._unproven, []
        for found, text, proof in pending:
            if wait or proof.done():
                self._write_finding(found, run, text, proof.result())
            else:
                self._unproven.append((found, text, proof))

    def write(self, run: RunState, exit_code: int | None = None) -> RunReport:
        """Write ``report.json`` with the state so far; with an exit code, also the files of the end."""
        self._write_cases()
        if exit_code in SIGNAL_CODES:
            self._prover.stop()
        self._write_proven(run, wait=exit_code is not None)
        report = build_report(run, exit_code, self._scripts)
        report = self.last_report = self._before.join(report) if self._before is not None else report
        if (certified := certify_run(run, exit_code)) is not None:
            write_text(self.folder / VERDICTS, certified[1])
        write_report(self.folder, report)
        return report

    def _write_cases(self) -> None:
        file = self._open_cases_file()
        file.write("".join(self._unwritten))
        file.flush()
        self._unwritten.clear()

    def _open_cases_file(self) -> TextIO:
        """The open ``cases.txt``. The first call removes the files of an earlier run and writes those of ``before``."""
        if self._cases is None:
            clear_report(self.folder)
            (self.folder / "findings").mkdir(parents=True, exist_ok=True)
            self._cases = open(self.folder / "cases.txt", "w", encoding="utf-8")  # noqa: SIM115
            if self._before is not None:
                self._cases.writelines(f"{line}\n" for line in self._before.cases)
                for name, text in self._before.files.items():
                    write_text(self.folder / name, text)
        return self._cases


def write_report(folder: Path, report: RunReport) -> None:
    """Write ``report.json`` and ``junit.xml`` and, once the run has an exit code, the files of the end."""
    from shardlaw.conformance.report.junit import render_junit

    write_text(folder / "report.json", to_json(report))
    write_text(folder / "junit.xml", render_junit(report))
    if report.exit is not None:
        from shardlaw.conformance.report.html import render_html
        from shardlaw.conformance.report.markdown import render_markdown

        write_text(folder / "report.md", render_markdown(report, folder))
        write_text(folder / "report.html", render_html(report, folder))


def check_folder(option: str, folder: Path) -> None:
    """Raise :class:`UsageError`, naming the ``option``, if a report cannot be written, or would replace another ``report.json``."""
    here = folder
    while not os.path.lexists(here) and here != here.parent:
        here = here.parent
    if not here.is_dir():
        raise UsageError(f"{option} {folder}: cannot be written: {here} is no folder")
    if not os.access(here, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: cannot be written: no permission for {here}")
    try:
        with tempfile.TemporaryDirectory(dir=here):
            pass
    except OSError:
        raise UsageError(f"{option} {folder}: cannot be written: {here} takes no folder: want another place") from None
    if (folder / "report.json").exists():
        try:
            read_report(folder)
        except UsageError as error:
            raise UsageError(f"{option} {folder}: {error}; want a folder of its own") from None


def clear_report(folder: Path) -> None:
    """Remove the files of an earlier run, and nothing else."""
    for name in REPORT_FILES:
        (folder / name).unlink(missing_ok=True)
    for path in (folder / "findings").glob("*"):
        if re.fullmatch(r"[0-9a-f]{8}\.(json|py)", path.name):
            path.unlink()
