"""``report.json``: what a run tried and what it found, in the form that other programs read.

The file is written as the run goes, each time as a whole, so that a run that is killed leaves a readable report: ``complete`` is
false and ``exit`` null until the end. Beside it stand ``findings/``, ``cases.txt`` (a line for each judged case) and, at the end,
``junit.xml`` and ``report.md``.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from conformance import __version__
from conformance.errors import UsageError
from conformance.report.finding_file import to_json, told, write_finding, write_text

if TYPE_CHECKING:
    from conformance.engine import LawResult, Run
    from conformance.expectations import Entry
    from conformance.findings import Finding
    from conformance.verdict import Verdict

SCHEMA = 1
OUTCOMES = ("held", "expected", "stale", "deviates", "untested")
MEANING = {
    0: "nothing new",
    1: "a new finding",
    2: "no case was judged",
    3: "the run could not be finished",
    130: "interrupted",
    143: "terminated",
}


class LawLine(msgspec.Struct, kw_only=True):
    """One law: ``cases`` were judged (``refused`` of them by every rank alike), which put ``checks`` questions; ``rejected`` ones meant
    nothing."""

    id: str
    chapter: str
    tier: str
    clause: str
    outcome: str
    cases: int = 0
    checks: int = 0
    rejected: int = 0
    refused: int = 0
    skipped_expected: int = 0
    seconds: float = 0.0
    reason: str | None = None


class FindingLine(msgspec.Struct, kw_only=True):
    """One finding. ``reproducer`` is a path below the report's folder; where there is none, ``note`` says why."""

    id: str
    law: str
    kind: str
    status: str
    message: str
    text: str
    case: dict[str, Any]
    features: list[str]
    reproducer: str | None = None
    signature: str = ""
    minimal: bool = True
    confirmed: list[int] = []
    note: str = ""


class UnconfirmedLine(msgspec.Struct, kw_only=True):
    """A deviation that no fresh world showed again."""

    law: str
    kind: str
    message: str
    text: str
    case: dict[str, Any]
    ranks: list[dict[str, Any]] = []


class ExpectationLine(msgspec.Struct, kw_only=True):
    """What became of one expectation; ``masked`` is the largest share of a law's cases that it would match."""

    law: str
    kind: str
    hits: int
    masked: float
    stale: bool
    features: list[str] = []
    reason: str = ""
    finding: str = ""
    where: str = ""
    wide: bool = False
    refused: bool = False


class TargetLine(msgspec.Struct, kw_only=True):
    """What was validated, and with what."""

    name: str
    device: str
    backend: str
    world_size: int
    torch: str
    python: str
    storage: str
    cannot: list[str] = []


class Totals(msgspec.Struct, kw_only=True):
    """Sums over all laws. ``drawn`` of the ``cases`` came from a strategy, the others from an enumerator or stored findings."""

    cases: int = 0
    checks: int = 0
    distinct: int = 0
    drawn: int = 0
    rejected: int = 0
    refused: int = 0
    skipped_expected: int = 0
    findings: int = 0
    new: int = 0
    unconfirmed: int = 0


class RunReport(msgspec.Struct, kw_only=True):
    """One run."""

    schema: int = SCHEMA
    harness: str = __version__
    seed: int = 0
    profile: str = "smoke"
    strict: bool = False
    shard: str = "1/1"
    started: str = ""
    seconds: float = 0.0
    complete: bool = False
    stopped_by: str | None = None
    exit: int | None = None
    target: TargetLine
    laws: list[LawLine] = []
    findings: list[FindingLine] = []
    unconfirmed: list[UnconfirmedLine] = []
    expectations: list[ExpectationLine] = []
    warnings: list[str] = []
    features: dict[str, int] = {}
    features_missing: list[str] = []
    totals: Totals

    def new(self) -> list[FindingLine]:
        """The findings that nobody expected."""
        return [found for found in self.findings if found.status == "new"]

    def chapters(self) -> dict[str, Counter[str]]:
        """For each chapter how many laws came to which outcome, and under ``laws`` and ``cases`` how many there were."""
        found: dict[str, Counter[str]] = {}
        for law in self.laws:
            chapter = found.setdefault(law.chapter, Counter())
            chapter.update({law.outcome: 1, "laws": 1, "cases": law.cases})
        return found

    def untested(self) -> dict[str, list[str]]:
        """The laws that say nothing, by the reason why."""
        found: dict[str, list[str]] = {}
        for law in self.laws:
            if law.outcome == "untested":
                found.setdefault(law.reason or "not reached yet", []).append(law.id)
        return found


def read_report(path: Path) -> RunReport:
    """A report from its file or its folder. Raises :class:`UsageError`."""
    path = path / "report.json" if os.path.isdir(path) else path
    try:
        report = msgspec.json.decode(path.read_bytes(), type=RunReport)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: no report of shardlaw: {error}") from None
    if report.schema != SCHEMA:
        raise UsageError(f"{path}: report schema {report.schema}, this version reads {SCHEMA}")
    return report


Scripts = Mapping[str, tuple[str | None, str]]


def report_of(run: Run, exit_code: int | None = None, scripts: Scripts | None = None) -> RunReport:
    """The report of a run as it stands. ``scripts`` gives by a finding's id its reproducer, and what is to be noted."""
    import torch

    from conformance.features import missing

    request, target, results = run.request, run.target, list(run.results.values())
    too_wide = {id(found.entry): str(found) for found in run.expectations.too_wide()}
    ours = {result.law.id for result in results}
    entries = [entry for entry in run.expectations.entries if ours.intersection(entry.laws)]
    findings = [_finding_line(found, *(scripts or {}).get(found.id, (None, found.note))) for found in run.findings]
    return RunReport(
        seed=request.seed,
        profile=request.profile,
        strict=request.strict,
        shard=f"{request.shard[0]}/{request.shard[1]}",
        started=run.started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - run.clock, 2),
        complete=exit_code is not None and exit_code not in (3, 130, 143),
        stopped_by=run.stopped_by,
        exit=exit_code,
        target=TargetLine(
            name=target.name,
            device=target.device,
            backend=target.backend,
            world_size=request.world_size,
            torch=str(torch.__version__),
            python=platform.python_version(),
            storage=target.storage,
            cannot=list(target.cannot),
        ),
        laws=[_law_line(result) for result in results],
        findings=findings,
        unconfirmed=[_unconfirmed_line(verdict) for verdict in run.unconfirmed],
        expectations=[_expectation_line(entry, run, id(entry) in too_wide) for entry in entries],
        warnings=list(too_wide.values()),
        features=dict(sorted(run.features.items())),
        features_missing=missing(run.features),
        totals=Totals(
            cases=run.judged,
            checks=sum(result.checks for result in results),
            distinct=len(run.distinct),
            drawn=run.drawn,
            rejected=sum(result.rejected for result in results),
            refused=sum(result.refused for result in results),
            skipped_expected=sum(result.skipped_expected for result in results),
            findings=len(findings),
            new=sum(found.status == "new" for found in findings),
            unconfirmed=len(run.unconfirmed),
        ),
    )


def _law_line(result: LawResult) -> LawLine:
    law = result.law
    return LawLine(
        id=law.id,
        chapter=law.chapter,
        tier=law.tier,
        clause=law.clause,
        outcome=result.outcome,
        cases=result.cases,
        checks=result.checks,
        rejected=result.rejected,
        refused=result.refused,
        skipped_expected=result.skipped_expected,
        seconds=round(result.seconds, 2),
        reason=result.reason,
    )


def _finding_line(found: Finding, script: str | None, note: str) -> FindingLine:
    return FindingLine(
        id=found.id,
        law=found.law,
        kind=found.kind,
        status=found.status,
        message=found.message,
        text=found.case.text,
        case=found.case.to_json(),
        features=sorted(found.features),
        reproducer=script,
        signature=found.signature,
        minimal=found.minimal,
        confirmed=list(found.confirmed),
        note=note,
    )


def _unconfirmed_line(verdict: Verdict) -> UnconfirmedLine:
    return UnconfirmedLine(
        law=verdict.case.law,
        kind=verdict.kind or "",
        message=verdict.message,
        text=verdict.case.text,
        case=verdict.case.to_json(),
        ranks=[told(answer) for answer in verdict.ranks],
    )


def _expectation_line(entry: Entry, run: Run, refused: bool) -> ExpectationLine:
    return ExpectationLine(
        law=entry.law,
        kind=entry.kind,
        hits=entry.hits,
        masked=round(run.expectations.masked(entry), 4),
        stale=entry.stale,
        features=sorted(entry.features),
        reason=entry.reason,
        finding=entry.finding,
        where=entry.where,
        wide=entry.wide,
        refused=refused,
    )


class ReportWriter:
    """Writes the files of one run into ``folder``. Raises :class:`UsageError` where that cannot be done, before anything has started.

    What an earlier run left in the folder goes with the first word that is written, so that a request that is refused leaves the old
    report as it was. A folder with somebody else's ``report.json`` is refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._scripts: dict[str, tuple[str | None, str]] = {}
        self._unwritten: list[str] = []
        self.last: RunReport | None = None
        self._cases: TextIO | None = None
        _check(folder)

    def case(self, verdict: Verdict, drawn: bool) -> None:
        """Note one judged case."""
        self._unwritten.append(f"{verdict.kind or verdict.status} {'drawn' if drawn else 'swept'} {verdict.case.text}\n")
        if len(self._unwritten) >= 1000:
            self._write_cases()

    def finding(self, found: Finding, run: Run) -> None:
        """Write a finding and, where it is new, its script."""
        from conformance.laws import find
        from conformance.report.reproducer import ScriptError, reproducer

        self._begin()
        script, note = None, found.note
        if found.status == "new":
            try:
                text = reproducer(find(found.law), found.case, found.kind)
            except ScriptError as error:
                note = "; ".join(filter(None, [note, f"no reproducer: {error}"]))
            else:
                script = f"findings/{found.id}.py"
                write_text(self.folder / script, text)
        self._scripts[found.id] = (script, note)
        write_finding(self.folder / "findings", found, run.target, run.request.seed, reproducer=script, note=note)

    def update(self, run: Run, exit_code: int | None = None) -> RunReport:
        """Write ``report.json`` as the run stands; with an exit code, also what is written at the end."""
        self._write_cases()
        report = self.last = report_of(run, exit_code, self._scripts)
        write_text(self.folder / "report.json", to_json(report))
        if exit_code is not None:
            from conformance.report.junit import junit
            from conformance.report.markdown import markdown

            write_text(self.folder / "junit.xml", junit(report))
            write_text(self.folder / "report.md", markdown(report, self.folder))
        return report

    def _write_cases(self) -> None:
        file = self._begin()
        file.write("".join(self._unwritten))
        file.flush()
        self._unwritten.clear()

    def _begin(self) -> TextIO:
        """Make room for this run, once; returns the open file of cases."""
        if self._cases is None:
            _clear(self.folder)
            (self.folder / "findings").mkdir(parents=True, exist_ok=True)
            self._cases = open(self.folder / "cases.txt", "w", encoding="utf-8")  # noqa: SIM115
        return self._cases


def _check(folder: Path) -> None:
    """Raises :class:`UsageError` where a report cannot be written, or would take another's place."""
    here = folder
    while not os.path.lexists(here) and here != here.parent:
        here = here.parent
    if not here.is_dir():
        raise UsageError(f"--report {folder}: cannot be written: {here} is no folder")
    if not os.access(here, os.W_OK | os.X_OK):
        raise UsageError(f"--report {folder}: cannot be written: no permission for {here}")
    if (folder / "report.json").exists():
        try:
            read_report(folder)
        except UsageError as error:
            raise UsageError(f"--report {folder}: {error}; want a folder of its own") from None


def _clear(folder: Path) -> None:
    """Remove what an earlier run left, and nothing else."""
    for name in ("report.json", "report.md", "junit.xml", "cases.txt"):
        (folder / name).unlink(missing_ok=True)
    for path in (folder / "findings").glob("*"):
        if re.fullmatch(r"[0-9a-f]{8}\.(json|py)", path.name):
            path.unlink()
