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
from shardlaw.conformance.law.verdict import place_names
from shardlaw.conformance.report.causes import group_by_cause
from shardlaw.conformance.report.suspects import strip_request, weigh_places

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
    """One law.

    ``cases`` were judged, and stand for ``checks`` questions; ``refused`` of them were refused on every rank alike, counted in ``refusals``
    by text. ``rejected`` cases were invalid and not judged. ``swept`` cases came from the enumerator, which has ``combinations`` (0:
    unknown). ``wrong`` cases deviate, ``expected`` of them as expectations with these ``reasons`` say. ``features`` counts the cases with
    each feature, ``deviating`` those of them that deviate. ``lacks`` are the capabilities that the law needs and the target declares
    missing.
    """

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
    """One finding.

    ``reproducer`` is the path, relative to the report's folder, of a script that was run and showed the fault; ``script`` is then
    ``proven``, and otherwise says why there is none. ``where`` is the place in torch to look at first, ``places`` the likeliest,
    ``ran`` those of any new finding that deviating ranks ran, each with the number of similar cases that ran it too, out of the
    ``similar`` ones that hold; ``calls`` the collectives that the first deviating rank called. Findings with equal ``cause`` have the
    same place and kind. ``number`` is the number, in the law's plan, of the first case that showed it (0: a stored case), ``entry`` the
    file and line of an expected finding's entry, ``waits`` where silent ranks of a new finding wait."""

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
    ran: dict[str, int] = {}
    similar: int = 0
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
        """Whether the place to look at is a backend that is not torch's."""
        return self.where.startswith(BACK_END)

    @property
    def next_places(self) -> list[str]:
        """The two places to look at after ``where``."""
        return [] if self.in_back_end else [place for place in self.places if strip_request(place) != strip_request(self.where)][:2]

    @property
    def spots(self) -> frozenset[str]:
        """The values of ``at`` with which an expectation matches this finding."""
        return place_names(self.where, self.calls)


class UnconfirmedLine(msgspec.Struct, kw_only=True):
    """A deviation that no fresh world reproduced."""

    law: str
    kind: str
    message: str
    text: str
    case: dict[str, Any]
    ranks: list[dict[str, Any]] = []


class ErrorLine(msgspec.Struct, kw_only=True):
    """An error of the harness or in a law, which is no finding. ``text`` is its traceback."""

    law: str
    message: str
    text: str


class ExpectationLine(msgspec.Struct, kw_only=True):
    """The counts of one expectation.

    ``matched`` counts by law the cases that it covers, ``deviated`` those of them that deviate as it says, ``masked`` is the largest share
    of a law's cases that it covers. ``happened``: something matched, even if a later layer's entry got the hit. ``mended``: its own
    ``case`` was judged and holds. ``unseen``: its ``cause`` was never tried on this release of torch.
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
    """The validated target. ``cannot`` are the capabilities that it declares missing, ``stale`` those of them that worked on two ranks."""

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
    """Sums over all laws. ``drawn`` of the ``cases`` came from a strategy, the others from enumerators or stored findings."""

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
    """What the ranks of a run had loaded. ``packages``: version and sha256 of the files of the packages of the target's ``setup`` and
    storage, by module name; ``libraries``: sha256 of the shared libraries of torch and these packages, by file name."""

    torch: str
    torch_git: str
    python: str
    platform: str
    harness: str
    packages: dict[str, str] = {}
    libraries: dict[str, str] = {}


class Certificate(msgspec.Struct, kw_only=True):
    """The result of a certified run: counts of the verdicts of the profile's ``cases`` (``sha256`` of its file). ``missing`` cases need a
    capability that the target declares missing, ``absent`` ones something that this torch lacks, ``unsaid`` ones were not judged for
    another reason. ``verdicts`` is the sha256 of ``verdicts.txt``."""

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
        """The result in one line."""
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
    """One run. ``chosen``: it tried the cases of ``smoke.txt``. ``ahead``: the cases that were tried, with ``-x``, before a turn of their
    law that never came; no law's line counts them."""

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
    ahead: int = 0
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

    @property
    def ended_early(self) -> str:
        """What ended the run before all laws had their turn, to follow its counts; else empty."""
        ahead = f" after {self.ahead} cases of all laws in turn" if self.ahead else ""
        return f", stopped by {self.stopped_by}{ahead}" if self.stopped_by else ""

    def new(self) -> list[FindingLine]:
        """The findings that no expectation accounts for."""
        return [found for found in self.findings if found.status == "new"]

    def causes(self) -> list[list[FindingLine]]:
        """The new findings by cause: :func:`shardlaw.conformance.report.causes.group_by_cause`."""
        return group_by_cause(weigh_places(self.new(), self.laws), self.totals.cases, self.features)

    def chapters(self) -> dict[str, Counter[str]]:
        """By chapter: the number of laws with each outcome, of ``laws`` and of ``cases``."""
        found: dict[str, Counter[str]] = {}
        for law in self.laws:
            chapter = found.setdefault(law.chapter, Counter())
            chapter.update({law.outcome: 1, "laws": 1, "cases": law.cases})
        return found

    def declared(self) -> dict[str, list[str]]:
        """By capability that the target declares missing: the laws that need it."""
        return {word: [law.id for law in self.laws if word in law.lacks] for word in self.target.cannot}

    def stale(self) -> list[str]:
        """A line for each stale expectation."""
        return [
            f"{line.where}: {line.kind} of {line.law} is gone" + (f": {line.case} holds" if line.mended else ": it did not happen")
            for line in self.expectations
            if line.stale
        ]

    def used_unseen(self) -> list[str]:
        """The causes, or entries, that were hit on a release of torch on which they were never tried."""
        return list(dict.fromkeys(line.cause or line.where for line in self.expectations if line.unseen and line.hits))

    def untested(self) -> dict[str, list[str]]:
        """The untested laws, by reason."""
        found: dict[str, list[str]] = {}
        for law in self.laws:
            if law.outcome == "untested":
                found.setdefault(law.reason or "not reached yet", []).append(law.id)
        return found


def report_folder(path: Path) -> Path:
    """The folder of a report that is given by its folder or its file."""
    return path if os.path.isdir(path) else path.parent


def read_case_lines(folder: Path) -> list[str] | None:
    """The lines of a report's ``cases.txt`` (verdict, ``drawn`` or ``swept``, case); ``None`` if it cannot be read."""
    try:
        return (folder / "cases.txt").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None


def read_report(path: Path) -> RunReport:
    """Read a report from its file or its folder. Raises :class:`UsageError`."""
    path = path / "report.json" if os.path.isdir(path) else path
    try:
        report = msgspec.json.decode(path.read_bytes(), type=RunReport)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}: want the folder of a report") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: no report of shardlaw: {error}") from None
    if report.schema != SCHEMA:
        raise UsageError(f"{path}: report schema {report.schema}, this version reads {SCHEMA}")
    return report
