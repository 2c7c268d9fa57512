"""From a deviating verdict to a finding: confirmed in a fresh world, shrunk, with the history that it needs.

A fault that a fresh world shows from its case alone is shrunk and confirmed again. One that it does not show gets the cases
that its world had served before, cut down to those that matter. What does not repeat either way is unconfirmed: listed,
never reported as a finding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardlaw.conformance.law.target import BACK_END
from shardlaw.conformance.law.verdict import Verdict, spots
from shardlaw.conformance.run.place import add_decision, collectives_called, find_places, find_storage_frame, first_deviating_answer
from shardlaw.conformance.run.search import Plan, Shrinker, reduce_history
from shardlaw.conformance.run.state import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.world import Pool

HISTORY_SECONDS = 10.0
MAX_TRACES = 3  # tries to trace a case
NOT_MINIMAL = "not minimal: no smaller case was found within the time for shrinking"
NOT_SHRUNK = "a case of the law's own list, not shrunk"
CERTIFIED_CASE = "a case of the certified list, not shrunk"


@dataclass
class Confirmer:
    """Turns the first verdict of a new signature into a finding, or into nothing when it does not repeat. ``shared``: it is of ranks that
    took each other's plans."""

    plan: Plan
    pool: Pool
    memory: dict[Case, Verdict]
    is_known: Callable[[Verdict], bool]
    shares_plans: bool = False

    def confirm(self, first: Verdict, drawn: bool, seconds: float) -> Finding | None:
        """The finding behind ``first``, or ``None`` when no fresh world shows it again, with or without its history. ``seconds``: how long
        its case may be shrunk, or its history; cases near it are traced for at most as long."""
        law = self.plan.law
        again = self.pool.fresh(law, first.case)
        if (
            self.shares_plans and again.status == "deviates" and not self.is_known(again)
        ):  # it counts how ranks depart that plan for themselves
            first = self.memory[first.case] = replace(again, history=first.history)
        if again.signature != first.signature:
            return self._confirm_with_history(first, seconds)
        shrinker = Shrinker(self.plan, self.pool, self.memory, seconds, self.is_known)
        shrunk = shrinker.shrink(first, drawn)
        plainer = law.plainer(shrunk.verdict) if law.plainer is not None else None
        if plainer is not None and self.pool.fresh(law, plainer).signature == first.signature:
            shrunk = replace(shrunk, case=plainer)
        last = self.pool.fresh(law, shrunk.case) if shrunk.case != first.case else again
        if last.signature != first.signature:
            last, shrunk = again, replace(shrunk, case=first.case, minimal=False)
        seen = 2 if last is not again else 1
        found = Finding.from_verdict(law, last, first.case)
        listed = NOT_SHRUNK if not drawn and law.narrow is None else NOT_MINIMAL
        note = "" if shrunk.minimal else CERTIFIED_CASE if self.plan.certified_cases is not None else listed
        found = self._locate(found, last, seconds)
        note = "; ".join(filter(None, (note, found.note)))
        return replace(found, minimal=shrunk.minimal, shrink_calls=shrinker.calls, confirmed=(seen, seen), note=note)

    def _locate(self, found: Finding, shown: Verdict, seconds: float) -> Finding:
        """The finding with where in torch it happens, by a trace of its case in a fresh world, or by the stacks of the ranks that hung;
        nothing of one that the tracer ends, or hides."""
        from shardlaw.conformance.run.nearby import SECONDS, trace_nearby

        if found.kind in ("hang", "crash"):
            return replace(found, where=next(iter(try_find_places(shown, [])[0]), ""), calls=collectives_called(shown))
        verdict = _trace_case(self.pool, self.plan.law, found.case, found.signature)
        first = first_deviating_answer(verdict) if verdict is not None else None
        if verdict is None or first is None:
            return found
        found = replace(found, calls=collectives_called(verdict))
        if self.plan.law.chapter == "collective" and self.pool.target.foreign:  # what torch adds is the same on each back end
            return replace(found, where=f"{BACK_END}{self.pool.target.backend}", trace=first.trace)
        if place := find_storage_frame(verdict, self.pool.target):
            return replace(found, where=place, places=(place,), trace=first.trace)
        near = trace_nearby(self.pool, self.plan.law, found.case, self.plan.limits, min(SECONDS, seconds))
        places, note = try_find_places(verdict, near)
        where = add_decision(places[0], first.trace) if places else ""
        return replace(found, where=where, places=tuple(places), trace=first.trace, note=note)

    def _confirm_with_history(self, first: Verdict, seconds: float) -> Finding | None:
        law, tries = self.plan.law, 0

        def verdict_after(history: tuple[Case, ...]) -> Verdict:
            nonlocal tries
            tries += 1
            return self.pool.fresh(law, first.case.with_after(history))

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
    """The function of torch to look at first for a deviation, and the collectives that it calls, by a trace of its case as it is;
    nothing where the tracer hides it."""
    again = verdict if verdict.kind in ("hang", "crash") else _trace_case(pool, law, verdict.case, verdict.signature)
    if again is None:
        return frozenset()
    places, _ = try_find_places(again, [])
    return spots(find_storage_frame(again, pool.target) or next(iter(places), ""), collectives_called(again))


def try_find_places(verdict: Verdict, near: Sequence[Verdict]) -> tuple[list[str], str]:
    """The places in torch that a traced verdict points to, and why it points to none: in a torch that is at fault a step may give anything,
    and a finding stands without its place too."""
    try:
        return find_places(verdict, near), ""
    except Exception as error:
        return [], f"where it happens is not known, its trace cannot be read: {type(error).__name__}: {error}"


def _trace_case(pool: Pool, law: Law, case: Case, signature: str) -> Verdict | None:
    """A traced verdict with this signature. What a case shows at times, such as memory that nobody wrote to, is tried again."""
    for _ in range(MAX_TRACES):
        verdict = pool.fresh(law, case, traced=True)
        if verdict.status != "held":
            return verdict if verdict.signature == signature else None
    return None
