"""One law in a run: send its cases to the ranks, record the verdicts, then shrink and confirm the new deviations."""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardlaw.conformance.compat import TorchMovedError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.program.fields import ProgramField
from shardlaw.conformance.law.program.names import NoFunctionError
from shardlaw.conformance.law.verdict import error_pattern, finding_id
from shardlaw.conformance.run.confirm import COSTS_A_WORLD, Confirmer, trace_collectives, trace_spots
from shardlaw.conformance.run.search import SHRINK_SECONDS, StopDrawing
from shardlaw.conformance.run.state import Finding, HarnessFault
from shardlaw.conformance.run.supported import ENOUGH_REFUSED
from shardlaw.conformance.world import WorldError, signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.run.entry import Entry
    from shardlaw.conformance.run.search import Plan
    from shardlaw.conformance.run.state import LawResult, Listener, RunState
    from shardlaw.conformance.world import Pool

MAX_FINDINGS = 6
# a certified run tells whether a law holds, not everything that is wrong
MAX_CERTIFIED_FINDINGS = 1
MAX_CERTIFIED_LOST_WORLDS = 1  # after so many the remaining cases of the law are not judged
MAX_CERTIFIED_PENDING = 8  # cases
SHRINK_PARTS = 10  # a finding may take 1 / 10 of the remaining time, so that all are confirmed even if later ones are shrunk less
SHARED_PLANS = "SHARDLAW_SHARED_PLANS"  # environment; 0: every rank plans every op each time


@dataclass(frozen=True)
class _JudgedCase:
    """A verdict, the features of its case, whether the case was drawn, and its number in the plan (0: it is not from the plan)."""

    verdict: Verdict
    features: frozenset[str]
    is_drawn: bool
    plan_number: int


def _earlier(first: _JudgedCase | None, seen: _JudgedCase) -> _JudgedCase:
    """The one of two judged cases that is earlier in the plan."""
    return seen if first is None or seen.plan_number < first.plan_number else first


def reuses_plans(law: Law, profile: str) -> bool:
    """Whether ranks share sharding plans in a law's first pass. Not for laws about torch's caches, nor for those that inspect how torch
    plans."""
    fields = [parameter.type for act in law.acts for parameter in act.all_parameters().values()]
    inspects_planning = not fields or any(isinstance(field, ProgramField) and field.fresh for field in fields)
    return os.environ.get(SHARED_PLANS) != "0" and profile != "nightly" and not inspects_planning


class LawRun:
    """Runs the cases of one law, from its plan to its findings. Cases are sent for at most ``seconds``.

    :meth:`feed` may be called during the turn of an earlier law; verdicts that arrive before :meth:`begin_turn` are stored until then.
    ``add`` adds a finding to the report.
    """

    def __init__(self, run: RunState, pool: Pool, listener: Listener, add: Callable[[Finding], None], plan: Plan, seconds: float) -> None:
        self.law = plan.law
        self.result: LawResult = run.results[plan.law.id]
        self._run = run
        self._pool = pool
        self._listener = listener
        self._add = add
        self._plan = plan
        self._seconds = seconds
        self._reuses_plans = reuses_plans(plan.law, run.request.profile)
        self._fed = False
        self._pending = self._lost_worlds = self._unexpected_refusals = 0
        self._early_verdicts: list[_JudgedCase] | None = []
        self._error: Exception | None = None
        self._stop = False
        self._first_refused: _JudgedCase | None = None
        self._memory: dict[Case, Verdict] = {}
        # deviations by signature, or by the entry that accounts for them: of each the case that is first in the plan, not the one that was
        # judged first, so that timing has no influence
        self._new_by_signature: dict[str, _JudgedCase] = {}
        self._counts: Counter[str] = Counter()
        self._expected_by_entry: dict[Entry, _JudgedCase] = {}

    def feed(self) -> None:
        """Send the cases of the plan to the ranks; a second call does nothing. Errors are raised by :meth:`finish`."""
        if self._fed:
            return
        self._fed = True
        run = self._run
        deadline = time.monotonic() + self._seconds

        def take(case: Case, is_drawn: bool) -> None:
            nonlocal deadline
            signals.raise_if_stopped()
            starting = run.request.budget is not None and run.budget_start is None
            if self._stop or (not starting and time.monotonic() > deadline):
                raise StopDrawing
            self._submit(case, is_drawn, self._plan.number)
            if run.certified is not None:
                self._pool.wait_until(lambda: self._pending < MAX_CERTIFIED_PENDING)
                if self._lost_worlds >= MAX_CERTIFIED_LOST_WORLDS:
                    raise StopDrawing
            if starting:  # the budget does not include the start of the ranks: it begins with their first answer
                self._pool.wait_until(lambda: not self._pending)
                run.budget_start = time.monotonic()
                deadline = run.budget_start + self._seconds

        try:
            self._pool.wait_ready()
            expected = run.expectations.known_cases(self.law.id, one_each=run.request.uses_smoke_shares) if run.certified is None else ()
            known = [*run.stored_cases.get(self.law.id, []), *expected]
            for case in known[run.request.shard[0] - 1 :: run.request.shard[1]]:
                if case.world <= self._plan.limits.most:
                    self._submit(case, False, 0)
            self._plan.feed(take)
        except StopDrawing:
            if not self._stop:
                run.stopped_by = run.stopped_by or ("budget" if run.request.budget else None)
        except (TorchMovedError, NoFunctionError) as error:  # the installed torch lacks what the enumerator or the control uses
            self.result.reason = str(error)
        except Exception as error:
            self._error = error
        self.result.swept, self.result.combinations = self._plan.swept, self._plan.combinations

    def _submit(self, case: Case, is_drawn: bool, number: int) -> None:
        features = features_of(case, self.law)
        if self._run.certified is None and self._run.expectations.skip_entry(case, features) is not None:
            self.result.skipped_expected += 1
            return

        def on_verdict(verdict: Verdict) -> None:
            self._pending -= 1
            self._lost_worlds += verdict.kind in COSTS_A_WORLD
            self._record(_JudgedCase(verdict, features, is_drawn, number))

        self._pending += 1
        if (scouted := self._run.scouted.get(case)) is not None:
            on_verdict(scouted)
            return
        self._pool.submit(self.law, case, on_verdict, reuse=self._reuses_plans)

    def begin_turn(self) -> None:
        """Begin the law's turn: record the verdicts that arrived before it."""
        early, self._early_verdicts = self._early_verdicts or [], None
        for seen in early:
            self._record(seen)

    def _record(self, seen: _JudgedCase) -> None:
        if self._early_verdicts is not None:
            self._early_verdicts.append(seen)
            return
        run, result, verdict = self._run, self.result, seen.verdict
        self._memory[verdict.case] = verdict
        self._listener.on_case(verdict, seen.is_drawn)
        if run.certified is not None and verdict.status != "error":
            run.verdict_words[verdict.case.text] = verdict.word
        if verdict.status == "error":
            self._note_error(verdict.message, f"{verdict.case.text}\n{verdict.message}\n{verdict.error}")
            return
        if verdict.status == "rejected":
            result.rejected += 1
            result.rejection = verdict.message
            return
        result.cases += 1
        result.checks += self.law.checks(verdict.case) if self.law.checks else 1
        run.judged += 1
        run.drawn += seen.is_drawn
        run.distinct.add(verdict.case)
        reached = seen.features | set(verdict.features)
        run.features.update(reached)
        result.features.update(reached)
        run.expectations.count_case(verdict.case, reached)
        run.expectations.note_own_case(verdict)
        if verdict.status == "refused":
            result.refused += 1
            result.refusals[error_pattern(verdict.error)] += 1
            if not self._match_expectation(seen, reached):
                self._unexpected_refusals += 1
                self._first_refused = _earlier(self._first_refused, seen)
        elif verdict.status == "deviates":
            result.wrong += 1
            result.deviating.update(reached)
            if self._match_expectation(seen, reached):
                return
            self._counts[verdict.signature] += 1
            self._new_by_signature[verdict.signature] = _earlier(self._new_by_signature.get(verdict.signature), seen)
            if run.request.exitfirst and not run.expectations.needs_trace(self.law, verdict):
                self._stop = True

    def _match_expectation(self, seen: _JudgedCase, reached: AbstractSet[str], at: AbstractSet[str] = frozenset(), count: int = 1) -> bool:
        """Whether an expectation accounts for a deviation or a refusal, which is then counted ``count`` times. ``at`` are the places that a
        trace gave."""
        run, result, verdict = self._run, self.result, seen.verdict
        entry = run.expectations.match(verdict.case, verdict.word, reached, verdict.error, at)
        if entry is None:
            return False
        result.expected += count
        if run.certified is not None and verdict.kind:
            run.verdict_words[verdict.case.text] = f"expected {entry.cause.id if entry.cause else '-'} {verdict.kind}"
        if entry.reason not in result.reasons:
            result.reasons.append(entry.reason)
        self._expected_by_entry[entry] = _earlier(self._expected_by_entry.get(entry), seen)
        return True

    def finish(self) -> None:
        """Wait for all verdicts, shrink and confirm the new deviations, and set the law's outcome."""
        if isinstance(self._error, WorldError):
            raise self._error
        if self._error is not None:
            text = "".join(traceback.format_exception(self._error))
            self._note_error(f"its cases cannot be made: {type(self._error).__name__}: {self._error}", text)
        self._pool.wait_until(lambda: not self._pending)
        run = self._run
        if self.result.cases and self.result.refused == self.result.cases:
            self._try_control()
        elif self._unexpected_refusals >= ENOUGH_REFUSED and self.law.id in run.supported:
            self._try_lost_support()
        self._confirm()
        self.add_expected_findings()
        self.result.conclude(any(found.law == self.law.id and found.status == "new" for found in self._run.findings))

    def _try_control(self) -> None:
        """Run the control of a law whose cases were all refused: if it is refused too, torch lost support."""
        control = Case.parse(self.law.control)
        (verdict,) = self._pool.check(self.law, [control])
        self._record(_JudgedCase(verdict, features_of(control, self.law), False, self._plan.number + 1))

    def _try_lost_support(self) -> None:
        """Run the first refused case again, of a law that earlier releases fully support. From here on its refusals are deviations."""
        assert self._first_refused is not None
        self.law = self._plan.law = self.law.with_no_refusal_allowed()
        (verdict,) = self._pool.check(self.law, [self._first_refused.verdict.case])
        self._record(replace(self._first_refused, verdict=verdict))

    def _note_error(self, message: str, text: str) -> None:
        """Record an error of the harness; only the first of a law is kept."""
        if not any(error.law == self.law.id for error in self._run.errors):
            self._run.errors.append(HarnessFault(self.law.id, message, text))
        self.result.reason = f"an error of the harness: {message}"

    def add_expected_findings(self) -> None:
        """Add one expected finding for each entry that matched, with the first case of the first law that it matched, not shrunk."""
        noted = {found.entry for found in self._run.findings}
        for entry, seen in sorted(self._expected_by_entry.items(), key=lambda item: item[1].plan_number):
            if entry.where not in noted:
                found = Finding.from_verdict(self.law, seen.verdict, seen.verdict.case, "expected")
                named = entry.finding or finding_id(found.signature, (*found.features, found.case.text))  # never the id of a new finding
                self._add(replace(found, id=named, note=entry.reason, number=seen.plan_number, entry=entry.where))

    def _is_known(self, verdict: Verdict) -> bool:
        return self._run.expectations.match_verdict(self.law, verdict) is not None

    def _confirm(self) -> None:
        run = self._run
        limit = MAX_FINDINGS if run.certified is None else MAX_CERTIFIED_FINDINGS
        confirmer = Confirmer(self._plan, self._pool, self._memory, self._is_known, self._reuses_plans, controls=run.controls)
        if run.certified is None:  # in a certificate each finding is confirmed by itself
            confirmer.wrong_collectives, confirmer.frequent_causes = run.wrong_collectives(), run.frequent_causes()
        in_plan_order = sorted(self._new_by_signature.values(), key=lambda new: new.plan_number)
        unexpected = [seen for seen in in_plan_order if not self._is_expected_after_trace(seen)]
        for seen in unexpected[:limit]:
            began = time.monotonic()
            self._listener.on_shrink(self.law.id, seen.verdict)
            found = confirmer.confirm(seen.verdict, seen.is_drawn, min(SHRINK_SECONDS, run.shrink_seconds_left / SHRINK_PARTS))
            run.shrink_seconds_left = max(0.0, run.shrink_seconds_left - (time.monotonic() - began))
            if found is None:
                run.unconfirmed.append(seen.verdict)
                continue
            if self._is_expected_at(seen, found.spots):
                continue
            self._add(replace(found, number=seen.plan_number, note=self._note(found, seen.verdict)))
            self.result.lines.append(f"{found.kind} {found.id}: {found.case.text}\n    {found.message}")
            if run.request.exitfirst:
                run.stopped_by = "-x"
                break
        if run.certified is not None and self._new_by_signature and not any(found.law == self.law.id for found in run.findings):
            self._confirm_any_deviation()
        left_over = len(unexpected) - limit
        if left_over > 0:
            self.result.lines.append(f"and {left_over} further signatures, not shrunk")

    def _is_expected_after_trace(self, seen: _JudgedCase) -> bool:
        """Whether an entry with ``at`` accounts for a signature; traces its first case if there is such an entry."""
        if not self._run.expectations.needs_trace(self.law, seen.verdict):
            return False
        traces = (trace_collectives, trace_spots)  # the cheaper one first
        return any(self._is_expected_at(seen, trace(self._pool, self.law, seen.verdict)) for trace in traces)

    def _is_expected_at(self, seen: _JudgedCase, at: AbstractSet[str]) -> bool:
        """Whether an entry with ``at`` accounts for a signature that was traced to these places."""
        reached = seen.features | set(seen.verdict.features)
        return self._match_expectation(seen, reached, at, self._counts[seen.verdict.signature])

    def _note(self, found: Finding, seen: Verdict) -> str:
        """The note of a finding; in a certified run also that the backend is known to have it."""
        entry = self._run.backend_expectations.match_verdict(self.law, seen) if self._run.backend_expectations else None
        cause = f" ({entry.cause.id})" if entry and entry.cause else ""
        known = f"known of {self._run.target.name}{cause}, which excuses nothing in a certified run" if entry else ""
        return "; ".join(filter(None, (found.note, known)))

    def _confirm_any_deviation(self) -> None:
        """In a certified run, retry the deviating cases of a law without a finding in fresh worlds until one deviates: every deviation in
        the certificate must reproduce."""
        run = self._run
        deviating = [verdict for verdict in self._memory.values() if verdict.status == "deviates"]
        for case in [verdict.case for verdict in deviating if run.verdict_words.get(verdict.case.text) == verdict.kind]:
            again = self._pool.check_fresh(self.law, case)
            run.verdict_words[case.text] = again.word
            if again.status == "deviates" and not self._is_known(again):
                self._add(replace(Finding.from_verdict(self.law, again, case), confirmed=(1, 1), note="not shrunk"))
                return
