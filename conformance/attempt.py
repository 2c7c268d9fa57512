"""One law's part of a run: its cases go to the ranks, its verdicts come in, and what is new among them is shrunk and confirmed."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from conformance import stopping
from conformance.compat import TorchMovedError
from conformance.features import features_of
from conformance.findings import Confirmer, Finding
from conformance.program_names import NoFunctionError
from conformance.search import Enough

if TYPE_CHECKING:
    from conformance.case import Case
    from conformance.engine import Run
    from conformance.expectations import Entry
    from conformance.law import Law
    from conformance.search import Plan
    from conformance.verdict import Verdict

FINDINGS_A_LAW = 6
SHRINK_SECONDS = 10.0


@dataclass
class LawResult:
    """What a run says of one law."""

    law: Law
    outcome: str = "untested"
    cases: int = 0
    checks: int = 0
    rejected: int = 0
    refused: int = 0
    skipped_expected: int = 0
    swept: int = 0
    combinations: int = 0
    seconds: float = 0.0
    reason: str | None = None
    rejection: str = ""
    features: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    def conclude(self, findings: list[Finding]) -> None:
        """Say how the law fared, once every case has been judged, in a run that has these findings."""
        mine = [found for found in findings if found.law == self.law.id]
        if any(found.status == "new" for found in mine):
            self.outcome = "deviates"
        elif not self.cases:
            self.reason = "every case is an expected hang or crash" if self.skipped_expected else "no case was judged"
            self.reason += f": {self.rejection}" if self.rejection else ""
        elif mine:
            self.outcome = "expected"
        else:
            if self.reason is None and self.refused == self.cases:
                self.reason = "unsupported: every case is refused, on every rank alike"
            self.outcome = "held" if self.reason is None else "untested"


@dataclass(frozen=True)
class _Seen:
    """A verdict, and how its case came about: its features, whether it was drawn, and where it stands in the plan."""

    verdict: Verdict
    features: frozenset[str]
    drawn: bool
    number: int


class Attempt:
    """The cases of one law from their plan to the findings, fed within so many ``seconds``. :meth:`feed` may run while another law
    has its turn: the verdicts that come in before :meth:`open` are kept until then."""

    def __init__(self, run: Run, plan: Plan, result: LawResult, seconds: float) -> None:
        self.law = plan.law
        self.result = result
        self._run = run
        self._plan = plan
        self._seconds = seconds
        self._fed = False
        self._owed = 0
        self._early: list[_Seen] | None = []
        self._error: Exception | None = None
        self._stop = False
        self._memory: dict[Case, Verdict] = {}
        # what deviated, by signature or by the entry that accounts for it: of each the case that comes first in the plan, whichever
        # was judged first: no timing changes that
        self._new: dict[str, _Seen] = {}
        self._expected: dict[Entry, _Seen] = {}

    # The cases

    def feed(self) -> None:
        """Hand the cases of the plan to the ranks, for at most its seconds; once. What goes wrong is raised by :meth:`finish`."""
        if self._fed:
            return
        self._fed = True
        run = self._run
        deadline = time.monotonic() + self._seconds

        def take(case: Case, drawn: bool) -> None:
            stopping.check()
            if self._stop or time.monotonic() > deadline:
                raise Enough
            self._hand_over(case, drawn, self._plan.number)

        try:
            run.pool.muster()
            for case in run.known.get(self.law.id, [])[run.request.shard[0] - 1 :: run.request.shard[1]]:
                self._hand_over(case, False, 0)
            self._plan.feed(take)
        except Enough:
            if not self._stop:
                run.stopped_by = run.stopped_by or ("budget" if run.request.budget else None)
        except (TorchMovedError, NoFunctionError) as error:  # an enumerator that asks torch, a control of what another torch has
            self.result.reason = str(error)
        except Exception as error:
            self._error = error
        self.result.swept, self.result.combinations = self._plan.swept, self._plan.combinations

    def _hand_over(self, case: Case, drawn: bool, number: int) -> None:
        features = features_of(case, self.law)
        if self._run.expectations.avoid(self.law.id, features) is not None:
            self.result.skipped_expected += 1
            return

        def done(verdict: Verdict) -> None:
            self._owed -= 1
            self._take_in(_Seen(verdict, features, drawn, number))

        self._owed += 1
        self._run.pool.feed(self.law, case, done)

    # The verdicts

    def open(self) -> None:
        """The law's turn has come: take in what came before it."""
        early, self._early = self._early or [], None
        for seen in early:
            self._take_in(seen)

    def _take_in(self, seen: _Seen) -> None:
        if self._early is not None:
            self._early.append(seen)
            return
        run, result, verdict = self._run, self.result, seen.verdict
        self._memory[verdict.case] = verdict
        run.writer.case(verdict, seen.drawn)
        run.terminal.case()
        if verdict.status == "rejected":
            result.rejected += 1
            result.rejection = verdict.message
            return
        result.cases += 1
        result.checks += self.law.checks(verdict.case) if self.law.checks else 1
        run.judged += 1
        run.drawn += seen.drawn
        run.distinct.add(verdict.case)
        reached = seen.features | set(verdict.features)
        run.features.update(reached)
        result.features.update(reached)
        run.expectations.judged(self.law.id, reached)
        if verdict.status == "refused":
            result.refused += 1
        elif verdict.status == "deviates":
            entry = run.expectations.match(self.law.id, verdict.kind or "", reached, verdict.error)
            if entry is not None:
                if entry not in self._expected or seen.number < self._expected[entry].number:
                    self._expected[entry] = seen
            elif verdict.signature not in self._new or seen.number < self._new[verdict.signature].number:
                self._new[verdict.signature] = seen
                self._stop = self._stop or run.request.exitfirst

    # What they come to

    def finish(self) -> None:
        """Wait for every verdict, note what was expected, shrink and confirm what is new, and say how the law fared."""
        if self._error is not None:
            raise self._error
        self._run.pool.wait(lambda: not self._owed)
        self.note_expected()
        self._confirm()
        self.result.conclude(self._run.findings)

    def note_expected(self) -> None:
        """An expected finding stands once for its entry, with the first case of the first law that met it, unshrunk."""
        noted = {found.entry for found in self._run.findings}
        for entry, seen in sorted(self._expected.items(), key=lambda item: item[1].number):
            if entry.where not in noted:
                found = Finding.of(self.law, seen.verdict, seen.verdict.case, "expected")
                self._run.add(replace(found, id=entry.finding or found.id, note=entry.reason, number=seen.number, entry=entry.where))

    def _is_known(self, verdict: Verdict) -> bool:
        features = features_of(verdict.case, self.law) | set(verdict.features)
        return self._run.expectations.match(self.law.id, verdict.kind or "", features, verdict.error, count=False) is not None

    def _confirm(self) -> None:
        run = self._run
        for seen in sorted(self._new.values(), key=lambda new: new.number)[:FINDINGS_A_LAW]:
            began = time.monotonic()
            run.terminal.shrinking(self.law.id, seen.verdict)
            confirmer = Confirmer(self._plan, run.pool, self._memory, min(SHRINK_SECONDS, run.shrinking), self._is_known)
            found = confirmer.confirm(seen.verdict, seen.drawn)
            run.shrinking = max(0.0, run.shrinking - (time.monotonic() - began))
            if found is None:
                run.unconfirmed.append(seen.verdict)
                continue
            run.add(replace(found, number=seen.number))
            self.result.lines.append(f"{found.kind} {found.id}: {found.case.text}\n    {found.message}")
            if run.request.exitfirst:
                run.stopped_by = "-x"
                break
        left_over = len(self._new) - FINDINGS_A_LAW
        if left_over > 0:
            self.result.lines.append(f"and {left_over} further signatures, not shrunk")
