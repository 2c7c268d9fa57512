"""The state of a run: plain data that the engine fills and reports read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.target import BACK_END, Target
from shardlaw.conformance.law.verdict import Verdict, collectives_in, error_pattern, finding_id, place_names
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.run.shares import law_share

if TYPE_CHECKING:
    from shardlaw.conformance.run.certified_profile import CertifiedProfile
    from shardlaw.conformance.run.expectations import Expectations, TooWideEntry

FREQUENT = 5  # findings at one place: further ones there are not shrunk


@dataclass(frozen=True)
class Finding:
    """A deviation that reproduces.

    ``case`` is the smallest case found, ``raw_case`` the first; ``confirmed`` is (k, n): k of n fresh worlds showed it; (0, 0) where
    worlds that had served other cases showed it twice, as they do what a collective of the backend makes wrong. ``number`` is the
    number of the first case in the law's plan, ``entry`` the file and line of the entry of an expected finding. ``where`` is the place in
    torch to look at first, ``trace`` the calls that led there, ``places`` the likeliest places, ``ran`` all functions of torch
    that deviating ranks ran, each with the number of similar cases that ran it too, out of the ``similar`` ones that hold; ``calls`` the
    collectives called.
    """

    id: str
    law: str
    kind: str
    check: str
    signature: str
    status: Literal["new", "expected"]
    message: str
    case: Case
    raw_case: Case
    features: tuple[str, ...]
    verdict: Verdict
    minimal: bool = False
    shrink_calls: int = 0
    confirmed: tuple[int, int] = (0, 0)
    note: str = ""
    number: int = 0
    entry: str = ""
    where: str = ""
    places: tuple[str, ...] = ()
    ran: Mapping[str, int] = field(default_factory=dict)
    similar: int = 0
    calls: tuple[str, ...] = ()
    trace: tuple[str, ...] = ()

    @property
    def spots(self) -> frozenset[str]:
        """The values of ``at`` with which an entry matches this finding."""
        return place_names(self.where, self.calls)

    @property
    def collectives(self) -> list[str]:
        """The collectives that the case names."""
        return collectives_in(self.features)

    @property
    def cause(self) -> tuple[str, ...]:
        """A key that findings of one cause share: the place in torch (without what a rule was asked), or else the law; and the kind.

        ``wrong-value``, ``wrong-layout`` and ``wrong-metadata`` count as one kind, and so does an error on some ranks and on all. In a
        backend that is not torch's no place is known: the collectives called take its part.
        """
        place = ",".join(self.where.split(",")[:2])
        if place.startswith(BACK_END):
            named = [f"collective:{name}" for name in self.collectives] or [self.law.partition("[")[0]]
            return (place, *named, self.kind, error_pattern(self.verdict.error))
        kind = "wrong" if self.kind in ("wrong-value", "wrong-layout", "wrong-metadata") else self.kind
        kind = "raised" if kind == "divergence" and self.verdict.error else kind
        return (place or self.law.partition("[")[0], kind, error_pattern(self.verdict.error) if kind == "raised" else "")

    @classmethod
    def from_verdict(cls, law: Law, verdict: Verdict, raw_case: Case, status: Literal["new", "expected"] = "new") -> Finding:
        """The finding for a deviating (or refused) verdict."""
        features = tuple(sorted(features_of(verdict.case, law) | set(verdict.features)))
        return cls(
            id=finding_id(verdict.signature, features),
            law=law.id,
            kind=verdict.word,
            check=verdict.check,
            signature=verdict.signature,
            status=status,
            message=verdict.message,
            case=verdict.case,
            raw_case=raw_case,
            features=features,
            verdict=verdict,
        )


@dataclass(frozen=True)
class HarnessFault:
    """An error of the harness or in a law itself, which is no finding. ``text`` is its traceback."""

    law: str
    message: str
    text: str


@dataclass
class LawResult:
    """The result of one law in a run.

    ``refusals`` counts the refused cases by the text of the refusal, without numbers and names; ``expected`` the deviating cases that
    expectations account for, whose reasons are ``reasons``. ``wrong`` is the number of deviating cases, expected or not, and ``deviating``
    counts their features.
    """

    law: Law
    outcome: str = "untested"
    cases: int = 0
    checks: int = 0
    rejected: int = 0
    refused: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    expected: int = 0
    skipped_expected: int = 0
    swept: int = 0
    combinations: int = 0
    seconds: float = 0.0
    reason: str | None = None
    rejection: str = ""
    features: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    deviating: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def conclude(self, new: bool) -> None:
        """Set the outcome, once every case has been judged. ``new``: whether the law has a new finding."""
        if new:
            self.outcome = "deviates"
        elif self.reason is not None:
            self.outcome = "untested"
        elif not self.cases:
            self.reason = "every case is an expected hang or crash" if self.skipped_expected else "no case was judged"
            if self.law.draw is None and self.law.sweep is None:
                self.reason = "it has neither draw nor sweep, so only shardlaw replay tries it"
            self.reason += f": {self.rejection}" if self.rejection else ""
        elif self.expected:
            self.outcome = "expected"
        elif self.refused == self.cases:
            self.reason = "unsupported: every case is refused, on every rank alike"
        else:
            self.outcome = "held"


@dataclass(eq=False)
class RunState:
    """The request of a run and its results so far.

    ``stored_cases`` are the cases of stored findings, by law; ``supported`` the ids of laws of which this torch must refuse no case;
    ``scouted`` the verdicts on cases that were tried before the turn of their law, ``controls`` those of traced controls, by chapter.
    ``budget_start`` is when ranks had answered the first case of a run with a budget (monotonic clock). In a certified run ``certified``
    is the profile, ``verdict_words`` the word for each of its cases by text, ``loaded`` the versions that its ranks have loaded, and
    ``backend_expectations`` the known faults of its backend, which it does not accept.
    """

    request: RunRequest
    target: Target
    laws: list[Law]
    expectations: Expectations
    stored_cases: dict[str, list[Case]]
    shrink_seconds_left: float
    supported: frozenset[str] = frozenset()
    results: dict[str, LawResult] = field(init=False)
    findings: list[Finding] = field(default_factory=list)
    unconfirmed: list[Verdict] = field(default_factory=list)
    errors: list[HarnessFault] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    features: Counter[str] = field(default_factory=Counter)
    judged: int = 0
    drawn: int = 0
    distinct: set[Case] = field(default_factory=set)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: float = field(default_factory=time.monotonic)
    budget_start: float | None = None
    stopped_by: str | None = None
    failure: Exception | None = None
    certified: CertifiedProfile | None = None
    verdict_words: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    backend_expectations: Expectations | None = None
    scouted: dict[Case, Verdict] = field(default_factory=dict)
    controls: dict[str, list[Verdict]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = {law.id: LawResult(law) for law in self.laws}

    def planned(self) -> int:
        """The largest number of cases that the run may have, without those of known findings."""
        if self.certified is not None:
            return len(self.certified.cases)
        return max(1, sum(law_share(law, self.request).count for law in self.laws) // self.request.shard[1])

    def wrong_collectives(self) -> frozenset[str]:
        """The collectives of a backend that is not torch's which give wrong values, by the new findings so far."""
        wrong = (found for found in self.findings if found.status == "new" and found.where.startswith(BACK_END))
        return frozenset(name for found in wrong if found.kind == "wrong-value" for name in found.collectives)

    def frequent_causes(self) -> dict[tuple[str, ...], bool]:
        """The causes of which many new findings so far are traced to a place in torch; of each, whether one of these is minimal."""
        placed = [found for found in self.findings if found.status == "new" and found.places]
        minimal = {found.cause for found in placed if found.minimal}
        return {cause: cause in minimal for cause, count in Counter(found.cause for found in placed).items() if count >= FREQUENT}

    def too_wide(self) -> list[TooWideEntry]:
        """The entries to refuse. Empty for one shard of a run: its few cases are no fair sample; ``shardlaw merge`` decides."""
        return self.expectations.too_wide() if self.request.shard == (1, 1) else []


class Listener(Protocol):
    """What the engine notifies: it writes the report and shows the progress."""

    def on_run_begin(self, run: RunState) -> None:
        """The laws are selected; no case has been sent."""

    def on_scouted(self, law_id: str) -> None:
        """A case was tried before the turn of its law."""

    def on_law_begin(self, law_id: str) -> None:
        """A law's turn begins."""

    def on_case(self, verdict: Verdict, is_drawn: bool) -> None:
        """A case was judged."""

    def on_shrink(self, law_id: str, verdict: Verdict) -> None:
        """A deviation is being shrunk and confirmed."""

    def on_finding(self, found: Finding, run: RunState) -> None:
        """A finding was added to the run."""

    def on_law_end(self, result: LawResult) -> None:
        """A law is finished."""

    def wait_for_scripts(self) -> None:
        """All cases were judged: wait until the scripts of all findings have been run."""

    def write_report(self, run: RunState, exit_code: int | None = None) -> object:
        """Write the state of the run so far; with an exit code it is final. Raises ``OSError``."""

    def on_run_end(self, run: RunState, exit_code: int) -> None:
        """The run has ended, and its report is written."""
