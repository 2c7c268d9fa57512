"""Turn a deviating verdict into a finding: confirm it in a fresh world, shrink it, and add the history that it needs.

If a fresh world reproduces the deviation from the case alone, the case is shrunk and confirmed again. If not, the cases that the first
world had served before are added as history and reduced to those that matter. A deviation that neither reproduces is listed as
unconfirmed and is no finding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardlaw.conformance.law.target import BACK_END
from shardlaw.conformance.law.verdict import Answer, Verdict, place_names
from shardlaw.conformance.run.place import add_decision, collectives_called, find_places, find_storage_frame, first_deviating_answer
from shardlaw.conformance.run.search import Plan, Shrinker, reduce_history
from shardlaw.conformance.run.state import Finding
from shardlaw.conformance.run.suspicion import LineCoverage, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.world import Pool

    _Others = tuple[Sequence[Verdict], Sequence[Verdict]]

HISTORY_SECONDS = 10.0
COSTS_A_WORLD = ("hang", "crash", "divergence")
MAX_TRACES = 3  # tries to trace a case
LIKELY = 3  # places of a finding, of which one is that of a cause that many findings have
NOT_MINIMAL = "not minimal: no smaller case was found within the time for shrinking"
NOT_SHRUNK = "a case of the law's own list, not shrunk"
LIKE_MANY = "not shrunk: many findings of this run are at the same place"
CERTIFIED_CASE = "a case of the certified list, not shrunk"


@dataclass
class Confirmer:
    """Confirms the first verdict of each new signature. ``memory`` holds the verdicts of the first pass, ``is_known`` says whether an
    expectation covers a verdict, ``shares_plans`` whether ranks shared sharding plans in the first pass. ``wrong_collectives`` are those
    that the backend was found to do wrong, ``frequent_causes`` the causes with many findings, and whether one is minimal. ``controls``
    keeps the traced controls of each chapter for the laws to come."""

    plan: Plan
    pool: Pool
    memory: dict[Case, Verdict]
    is_known: Callable[[Verdict], bool]
    shares_plans: bool = False
    wrong_collectives: frozenset[str] = frozenset()
    frequent_causes: Mapping[tuple[str, ...], bool] = field(default_factory=dict)
    controls: dict[str, list[Verdict]] = field(default_factory=dict)

    def confirm(self, first: Verdict, is_drawn: bool, seconds: float) -> Finding | None:
        """The finding for ``first``, or ``None`` if no fresh world reproduces it, with or without history.

        ``seconds`` limits the shrinking of the case or of its history, and again the tracing of similar cases.
        """
        law = self.plan.law
        if (explained := self._explain_by_collective(first) or self._explain_by_cause(first, is_drawn)) is not None:
            return explained
        again = self.pool.check_fresh(law, first.case)
        # only what ranks with plans of their own show counts
        if self.shares_plans and again.status == "deviates" and not self.is_known(again):
            first = self.memory[first.case] = replace(again, history=first.history)
        if again.signature != first.signature:
            return self._confirm_with_history(first, seconds)
        shrinker = Shrinker(self.plan, self.pool, self.memory, seconds, self.is_known)
        shrunk = shrinker.shrink(first, is_drawn)
        plainer = law.plainer(shrunk.verdict) if law.plainer is not None else None
        if plainer is not None and self.pool.check_fresh(law, plainer).signature == first.signature:
            shrunk = replace(shrunk, case=plainer)
        last = self.pool.check_fresh(law, shrunk.case) if shrunk.case != first.case else again
        if last.signature != first.signature:
            last, shrunk = again, replace(shrunk, case=first.case, minimal=False)
        seen = 2 if last is not again else 1
        found = Finding.from_verdict(law, last, first.case)
        listed = NOT_SHRUNK if not is_drawn and law.narrow is None else NOT_MINIMAL
        note = "" if shrunk.minimal else CERTIFIED_CASE if self.plan.certified_cases is not None else listed
        found = self._locate(found, last, seconds)
        note = "; ".join(filter(None, (note, found.note)))
        return replace(found, minimal=shrunk.minimal, shrink_calls=shrinker.calls, confirmed=(seen, seen), note=note)

    def _explain_by_collective(self, first: Verdict) -> Finding | None:
        """The finding, if the deviation occurs again under the tracer and its case calls a collective that the backend does wrong. The case
        is not shrunk: the law of the collective has a smaller one."""
        law = self.plan.law
        if not self.wrong_collectives or law.chapter == "collective" or first.kind in ("hang", "crash"):
            return None
        used = _trace_in_used_world(self.pool, law, first)
        verdict = used or _trace_case(self.pool, law, first)
        answer = first_deviating_answer(verdict) if verdict is not None else None
        if verdict is None or answer is None or not (wrong := self.wrong_collectives.intersection(collectives_called(verdict))):
            return None
        found = Finding.from_verdict(law, verdict, first.case)
        note = f"not shrunk: it calls {', '.join(sorted(wrong))}, which the back end does wrong"
        return replace(self._blame_back_end(found, verdict, answer), confirmed=(0, 0) if used else (1, 1), note=note)

    def _explain_by_cause(self, first: Verdict, is_drawn: bool) -> Finding | None:
        """The finding, if a fresh world shows the deviation under the tracer where many findings of this run are, in the same way. The case
        is not shrunk, and no similar ones are tried: those findings have smaller cases. A drawn case must not be the first to be shrunk."""
        causes = [cause for cause, has_minimal in self.frequent_causes.items() if has_minimal or not is_drawn]
        _, *way = Finding.from_verdict(self.plan.law, first, first.case).cause
        if way not in ([*cause[1:]] for cause in causes):
            return None
        verdict = _trace_case(self.pool, self.plan.law, first)
        answer = first_deviating_answer(verdict) if verdict is not None else None
        if verdict is None or answer is None:
            return None
        found = self._add_places(Finding.from_verdict(self.plan.law, verdict, first.case), verdict, answer, lambda: ([], []))
        note = "; ".join(filter(None, (LIKE_MANY, found.note)))
        found = replace(found, confirmed=(1, 1), note=note)
        likely = (
            replace(found, where=add_decision(place, answer.trace), places=tuple(dict.fromkeys((place, *found.places))))
            for place in found.places[:LIKELY]
        )
        return next((each for each in likely if each.cause in causes), None)

    def _blame_back_end(self, found: Finding, verdict: Verdict, first: Answer) -> Finding:
        return replace(found, where=f"{BACK_END}{self.pool.target.backend}", calls=collectives_called(verdict), trace=first.trace)

    def _locate(self, found: Finding, shown: Verdict, seconds: float) -> Finding:
        """Add the place in torch to a finding: from a trace of its case in a fresh world, or from the stacks of ranks that hung. Returns
        the finding unchanged if the deviation does not occur under the tracer."""
        from shardlaw.conformance.run.nearby import SECONDS, trace_controls, trace_nearby

        if found.kind == "hang":
            return replace(found, where=next(iter(try_find_places(shown)[0]), ""), calls=collectives_called(shown))
        verdict = _trace_case(self.pool, self.plan.law, found)
        first = first_deviating_answer(verdict) if verdict is not None else None
        if verdict is None or first is None:
            return found
        law, limits, most = self.plan.law, self.plan.limits, min(SECONDS, seconds)

        def others() -> _Others:
            near = trace_nearby(self.pool, law, found.case, limits, most)
            return near, trace_controls(self.pool, law.chapter, limits, self.controls)

        return self._add_places(found, verdict, first, others)

    def _add_places(self, found: Finding, verdict: Verdict, first: Answer, others: Callable[[], _Others]) -> Finding:
        """Add the places in torch, or in the target's own storage, to which a traced verdict points; ``others`` makes the verdicts of
        similar cases, and of controls."""
        if self.plan.law.chapter == "collective" and self.pool.target.foreign:  # torch's own part is the same for every backend
            return self._blame_back_end(found, verdict, first)
        storage = find_storage_frame(verdict, self.pool.target)
        near, controls = ([], []) if storage else others()
        about = describe(self.plan.law, verdict)
        places, note = ([storage], "") if storage else try_find_places(verdict, near, controls, about)
        where = add_decision(places[0], first.trace) if places else ""
        lines, calls = LineCoverage.from_verdicts(verdict, near), collectives_called(verdict)
        found = replace(found, ran=lines.holding_cases_by_place(), similar=lines.holding_count, trace=first.trace)
        return replace(found, where=where, places=tuple(places), calls=calls, note=note)

    def _confirm_with_history(self, first: Verdict, seconds: float) -> Finding | None:
        law, tries = self.plan.law, 0

        def verdict_after(history: tuple[Case, ...]) -> Verdict:
            nonlocal tries
            tries += 1
            return self.pool.check_fresh(law, first.case.with_after(history))

        if not first.history:
            return None
        shown = verdict_after(first.history)
        if shown.signature != first.signature:
            return None

        def shows(history: tuple[Case, ...]) -> bool:
            nonlocal shown
            verdict = verdict_after(history)
            if verdict.signature != first.signature:
                return False
            shown = verdict
            return True

        deadline = time.monotonic() + min(HISTORY_SECONDS, max(seconds, 1.0))
        reduce_history(first.history, shows, deadline)
        found = Finding.from_verdict(law, shown, first.case)
        note = f"needs a history of {len(shown.case.after)} cases in one world; a fresh world does not show it"
        found = self._locate(found, shown, seconds)
        note = "; ".join(filter(None, (note, found.note)))
        return replace(found, shrink_calls=tries, confirmed=(1, 1), note=note)


def trace_spots(pool: Pool, law: Law, verdict: Verdict) -> frozenset[str]:
    """Trace the case of a deviation and return the function of torch to look at first and the collectives called; empty if the deviation
    does not occur under the tracer."""
    again = verdict if verdict.kind == "hang" else _trace_case(pool, law, verdict)
    if again is None:
        return frozenset()
    places, _ = try_find_places(again)
    return place_names(find_storage_frame(again, pool.target) or next(iter(places), ""), collectives_called(again))


def trace_collectives(pool: Pool, law: Law, verdict: Verdict) -> frozenset[str]:
    """Trace the case of a deviation in a world that has served other cases, and return the collectives called; empty if the deviation does
    not occur there, or costs a world."""
    again = _trace_in_used_world(pool, law, verdict)
    return frozenset(collectives_called(again)) if again is not None else frozenset()


def try_find_places(
    verdict: Verdict, near: Sequence[Verdict] = (), controls: Sequence[Verdict] = (), about: str = ""
) -> tuple[list[str], str]:
    """The places in torch that a traced verdict points to, and a note if its trace cannot be read: a faulty torch may return anything from
    a step, and that must not cost the finding."""
    try:
        return find_places(verdict, near, controls, about), ""
    except Exception as error:
        return [], f"where it happens is not known, its trace cannot be read: {type(error).__name__}: {error}"


def _trace_in_used_world(pool: Pool, law: Law, verdict: Verdict) -> Verdict | None:
    """Trace the case of a deviation in a world that has served other cases; ``None`` if the deviation does not occur there, or costs a
    world."""
    if verdict.kind in COSTS_A_WORLD:
        return None
    (again,) = pool.check(law, [verdict.case], traced="at end")
    return again if again.signature == verdict.signature else None


def _trace_case(pool: Pool, law: Law, found: Verdict | Finding) -> Verdict | None:
    """Run a case traced; ``None`` unless the verdict has the same signature again. A case that holds is tried again, up to ``MAX_TRACES``
    times: a deviation may be intermittent, such as a read of uninitialized memory."""
    for _ in range(MAX_TRACES):
        verdict = pool.check_fresh(law, found.case, traced="each step" if found.kind == "crash" else "at end")
        if verdict.status != "held":
            return verdict if verdict.signature == found.signature else None
    return None
