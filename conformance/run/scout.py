"""With ``-x`` a run first tries cases of all laws in turn, to begin with a law that deviates: those that show most for their cost
first. What a law's turn tries again has its verdict already."""

from __future__ import annotations

from collections import Counter
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.run.law_run import reuses_plans
from shardlaw.conformance.run.shares import first_waves
from shardlaw.conformance.run.supported import ENOUGH_REFUSED
from shardlaw.conformance.world import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.run.search import Plan
    from shardlaw.conformance.run.state import Listener, RunState
    from shardlaw.conformance.world import Pool

MAX_PENDING = 64  # cases: enough to keep all worlds busy, few to wait for once one deviates
ALONE = 3  # waves before any other case
PARTS = 10  # turns in which the other cases of a law are tried


def interleave_families(plans: Sequence[Plan]) -> list[Plan]:
    """The plans reordered: of each family ``name[...]`` of laws the first, then of each the second, and so on, so that small families do
    not wait for one with hundreds of laws."""
    seen: Counter[str] = Counter()
    turns = []
    for plan in plans:
        family = plan.law.id.partition("[")[0]
        turns.append(seen[family])
        seen[family] += 1
    return [plan for _, plan in sorted(zip(turns, plans, strict=True), key=itemgetter(0))]


def cases_in_turn(plans: Sequence[Plan], waves: Mapping[str, Sequence[Collection[int]]]) -> Iterator[tuple[Law, Case]]:
    """Yield the cases of the first :data:`ALONE` waves; then with each further one a tenth of the listed cases of each plan that are in no
    wave, and the drawn cases of a tenth of the plans, so that ranks do not wait for what is drawn. Without waves these are all. A law
    begins with its control, with the last of the first waves at the latest. Neighbours, which are alike, are in different tenths. A law
    whose cases the installed torch cannot make, or that raises, has no further ones: its turn says why."""
    count = max(map(len, waves.values()), default=0)
    alone = ALONE if count else 0
    others: dict[str, list[Case]] = {}
    begun: set[str] = set()
    for turn in range(max(count, alone + PARTS)):
        for at, plan in enumerate(plans):
            law, of_law, part = plan.law, waves.get(plan.law.id, ()), turn - alone
            cases = _made(plan.listed_at, of_law[turn] if turn < len(of_law) else ())
            if part == 0:
                elsewhere = {*_made(_control, plan), *_made(plan.listed_at, frozenset[int]().union(*of_law))}
                others[law.id] = [case for case in _made(partial(_fed, drawn=False), plan) if case not in elsewhere]
            if part >= 0:
                cases += others[law.id][part::PARTS]
            if at % PARTS == part:
                cases += _made(partial(_fed, drawn=True), plan)
            if (cases or part >= -1) and law.id not in begun:
                begun.add(law.id)
                cases = [*_made(_control, plan), *cases]
            yield from ((law, case) for case in cases)


def _made(make: Callable[[Any], list[Case]], of: Any) -> list[Case]:
    try:
        return make(of)
    except Exception:
        return []


def _control(plan: Plan) -> list[Case]:
    return [Case.parse(plan.law.control)]


def _fed(plan: Plan, *, drawn: bool) -> list[Case]:
    cases: list[Case] = []
    plan.feed(lambda case, is_drawn: cases.append(case) if is_drawn == drawn else None, drawn=drawn)
    return cases


class Scout:
    """Tries cases until one deviates and no expectation covers it, or until a law refuses what it never did."""

    def __init__(self, run: RunState, pool: Pool, listener: Listener) -> None:
        self._run, self._pool, self._listener = run, pool, listener
        self._pending: set[int] = set()
        self._wrong: dict[int, Case] = {}
        self._doubtful: dict[int, Case] = {}  # deviate, and only a trace tells whether an expectation covers them
        self._refused: Counter[str] = Counter()

    def find_deviation(self, plans: Sequence[Plan]) -> Case | None:
        """Try the cases of ``plans`` in turn; returns the first that deviates, not confirmed yet, or ``None``. The verdicts are in
        :attr:`RunState.scouted`."""
        run, tried = self._run, set[Case]()
        waves = first_waves() if run.request.uses_smoke_shares else {}
        for at, (law, case) in enumerate(cases_in_turn(interleave_families(plans), waves)):
            signals.raise_if_stopped()
            if case.world > plans[0].limits.most or case in tried or any(run.expectations.costly_entries(case, features_of(case, law))):
                continue
            tried.add(case)
            self._pending.add(at)
            self._pool.submit(law, case, partial(self._on_verdict, at, law), reuse=reuses_plans(law, run.request.profile))
            self._pool.wait_until(lambda: len(self._pending) < MAX_PENDING)
            if self._wrong:
                break
        # of several that deviate the first that was sent, so that timing has little influence
        self._pool.wait_until(lambda: not self._pending or (bool(self._wrong) and min(self._pending) > min(self._wrong)))
        wrong = self._wrong or self._doubtful
        return wrong[min(wrong)] if wrong else None

    def _on_verdict(self, at: int, law: Law, verdict: Verdict) -> None:
        self._pending.discard(at)
        run = self._run
        run.scouted[verdict.case] = verdict
        self._listener.on_scouted(law.id)
        if verdict.status not in ("deviates", "refused") or run.expectations.match_verdict(law, verdict) is not None:
            return
        if verdict.status == "refused":
            self._refused[law.id] += law.id in run.supported
            if self._refused[law.id] < ENOUGH_REFUSED:
                return
        wrong = self._doubtful if run.expectations.needs_trace(law, verdict) else self._wrong
        wrong[at] = verdict.case
