"""``report.json``: what a run tried and what it found, in the form that other programs read.

The file is written as the run goes, each time as a whole, so that a run that is killed leaves a readable report: ``complete`` is
false and ``exit`` null until the end. :mod:`shardlaw.conformance.report.build` makes a report of a run,
:mod:`shardlaw.conformance.report.writer` writes it and what stands beside it.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from shardlaw import __version__
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.target import BACK_END
from shardlaw.conformance.law.verdict import spots
from shardlaw.conformance.report.causes import group_by_cause

SCHEMA = 1
OUTCOMES = ("held", "expected", "stale", "deviates", "untested")
EXIT_MEANINGS = {
    0: "nothing new",
    1: "a new finding",
    2: "no case was judged",
    3: "the run could not be finished",
    130: "interrupted",
    143: "terminated",
}


class LawLine(msgspec.Struct, kw_only=True):
    """One law: ``cases`` were judged (``refused`` of them by every rank alike), which put ``checks`` questions; ``rejected`` ones meant
    nothing; ``swept`` came from the enumerator, which has ``combinations`` (0: not asked). ``refusals`` counts refused cases by the text
    of the refusal,
    ``expected`` the deviating cases that an expectation accounts for, with what these say as ``reasons``. ``features`` counts the cases
    that reached each, ``deviating`` those of them that deviate, of which there are ``wrong`` in all.
    ``lacks`` is what it needs of what the target declares that it cannot do."""

    id: str
    chapter: str
    tier: str
    clause: str
    outcome: str
    cases: int = 0
    checks: int = 0
    rejected: int = 0
    refused: int = 0
    refusals: dict[str, int] = {}
    expected: int = 0
    skipped_expected: int = 0
    swept: int = 0
    combinations: int = 0
    seconds: float = 0.0
    reason: str | None = None
    lacks: list[str] = []
    features: dict[str, int] = {}
    reasons: list[str] = []
    source: str = ""
    wrong: int = 0
    deviating: dict[str, int] = {}


class FindingLine(msgspec.Struct, kw_only=True):
    """One finding. ``reproducer`` is a path below the report's folder, of a script that was run and showed the fault: ``script`` is then
    ``proven``, and says else why there is none. ``where`` is the place in torch to look at first, ``places`` the likeliest three,
    ``calls`` the collectives that the first rank that deviated has called; findings of one ``cause`` have the same place and depart alike.

    ``number`` says which of its law's cases showed it first (0: one that was known before), and ``entry`` where an expected one is
    written down. ``waits``: of a new one where ranks that did not answer wait.
    """

    id: str
    law: str
    kind: str
    status: str
    message: str
    text: str
    case: dict[str, Any]
    features: list[str]
    reproducer: str | None = None
    script: str = ""
    where: str = ""
    places: list[str] = []
    calls: list[str] = []
    cause: str = ""
    signature: str = ""
    minimal: bool = True
    confirmed: list[int] = []
    note: str = ""
    number: int = 0
    entry: str = ""
    waits: list[str] = []

    @property
    def in_back_end(self) -> bool:
        """Whether a back end that is not torch's is to be looked at."""
        return self.where.startswith(BACK_END)

    @property
    def spots(self) -> frozenset[str]:
        """Where an expectation may say that it is."""
        return spots(self.where, self.calls)


class UnconfirmedLine(msgspec.Struct, kw_only=True):
    """A deviation that no fresh world showed again."""

    law: str
    kind: str
    message: str
    text: str
    case: dict[str, Any]
    ranks: list[dict[str, Any]] = []


class ErrorLine(msgspec.Struct, kw_only=True):
    """An error of the harness, or of a law's own text: no finding. ``text`` is its traceback."""

    law: str
    message: str
    text: str


class ExpectationLine(msgspec.Struct, kw_only=True):
    """What became of one expectation.

    ``matched`` counts by law the cases that it would match, ``deviated`` those of them that deviate as it says, ``masked`` is the largest
    share of a law's cases that it would match. ``happened`` is set also where a later layer's entry took the hits, ``mended`` where its
    own ``case`` was judged and does not deviate, ``unseen`` where nobody had tried its ``cause`` on this release of torch.
    """

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
    rare: bool = False
    refused: bool = False
    happened: bool = False
    cause: str = ""
    case: str = ""
    mended: bool = False
    unseen: bool = False
    matched: dict[str, int] = {}
    deviated: dict[str, int] = {}


class TargetLine(msgspec.Struct, kw_only=True):
    """What was validated, and with what. Of what it ``cannot`` do by its own account, two ranks did what is ``stale``."""

    name: str
    device: str
    backend: str
    world_size: int
    torch: str
    python: str
    storage: str
    cannot: list[str] = []
    stale: list[str] = []


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


class Loaded(msgspec.Struct, kw_only=True):
    """What the ranks of a run had loaded. ``packages``: by name of its module the package of the target's ``setup`` and those of its
    storage, each with its version and the sha256 of its files; ``libraries``: the sha256 of the shared libraries that are torch's or these
    packages', by file name."""

    torch: str
    torch_git: str
    python: str
    platform: str
    harness: str
    packages: dict[str, str] = {}
    libraries: dict[str, str] = {}


class Certificate(msgspec.Struct, kw_only=True):
    """What a certified run gives: of the ``cases`` of a frozen list (``sha256`` of its file) how many came to what. ``missing`` are those
    of laws that need what the target declares it cannot do, ``absent`` those that ask for what this torch does not have, ``unsaid``
    those that were not judged for another reason. ``verdicts`` is the sha256 of ``verdicts.txt``."""

    profile: str
    release: str
    sha256: str
    cases: int
    held: int = 0
    expected: int = 0
    refused: int = 0
    missing: int = 0
    absent: int = 0
    unsaid: int = 0
    deviating: int = 0
    verdicts: str = ""
    passed: bool = False
    loaded: Loaded

    def line(self) -> str:
        """In one line."""
        counts = {
            "hold": self.held,
            "are refused": self.refused,
            "deviate as torch is known to": self.expected,
            "need what is declared missing": self.missing,
            "ask for what this torch does not have": self.absent,
            "were not judged": self.unsaid,
            "deviate": self.deviating,
        }
        parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{self.profile}-{self.release}: {'passed' if self.passed else 'not passed'}: of {self.cases} cases {parts}"


class RunReport(msgspec.Struct, kw_only=True):
    """One run. ``chosen``: each law tried its chosen cases alone."""

    schema: int = SCHEMA
    harness: str = __version__
    seed: int = 0
    profile: str = "smoke"
    chosen: bool = False
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
    errors: list[ErrorLine] = []
    expectations: list[ExpectationLine] = []
    warnings: list[str] = []
    features: dict[str, int] = {}
    features_missing: list[str] = []
    totals: Totals
    certificate: Certificate | None = None

    def new(self) -> list[FindingLine]:
        """The findings that nobody expected."""
        return [found for found in self.findings if found.status == "new"]

    def causes(self) -> list[list[FindingLine]]:
        """The new findings by cause: :func:`shardlaw.conformance.report.causes.group_by_cause`."""
        return group_by_cause(self.new(), self.totals.cases, self.features)

    def chapters(self) -> dict[str, Counter[str]]:
        """For each chapter how many laws came to which outcome, and under ``laws`` and ``cases`` how many there were."""
        found: dict[str, Counter[str]] = {}
        for law in self.laws:
            chapter = found.setdefault(law.chapter, Counter())
            chapter.update({law.outcome: 1, "laws": 1, "cases": law.cases})
        return found

    def declared(self) -> dict[str, list[str]]:
        """For each word that the target declares as missing the laws that it leaves untested."""
        return {word: [law.id for law in self.laws if word in law.lacks] for word in self.target.cannot}

    def stale(self) -> list[str]:
        """In a line each, the expectations that are there no longer."""
        return [
            f"{line.where}: {line.kind} of {line.law} is gone" + (f": {line.case} holds" if line.mended else ": it did not happen")
            for line in self.expectations
            if line.stale
        ]

    def used_unseen(self) -> list[str]:
        """The causes, or entries, that account for a finding on a release of torch on which nobody had tried them."""
        return list(dict.fromkeys(line.cause or line.where for line in self.expectations if line.unseen and line.hits))

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
