"""With ``-x`` a run first tries cases of all laws in turn, to begin with a law that deviates: the control of each law, then every tenth of
its cases, then the next of each ten. What a law's turn tries again has its verdict already."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from shardlaw.conformance.compat import TorchMovedError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.program.names import NoFunctionError
from shardlaw.conformance.run.law_run import reuses_plans
from shardlaw.conformance.run.supported import ENOUGH_REFUSED
from shardlaw.conformance.world import signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.run.search import Plan
    from shardlaw.conformance.run.state import Listener, RunState
    from shardlaw.conformance.world import Pool

MAX_PENDING = 64  # cases: enough to keep all worlds busy, few to wait for once one deviates
PARTS = 10  # rounds in which the cases of a law are tried


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


def cases_in_turn(plans: Sequence[Plan]) -> Iterator[tuple[Law, Case]]:
    """Yield the control of each plan's law, then a tenth of the cases of each plan, then the next tenth; neighbours, which are alike, in
    different tenths. A law whose cases the installed torch cannot make, or that raises, has no further ones: its turn says why."""
    for plan in plans:
        try:
            yield plan.law, Case.parse(plan.law.control)
        except (TorchMovedError, NoFunctionError):  # a control of what another torch has
            continue
    planned: list[tuple[Law, list[Case]]] = []
    for plan in plans:
        cases = _cases(plan)
        planned.append((plan.law, cases))
        yield from ((plan.law, case) for case in cases[::PARTS])
    for part in range(1, PARTS):
        yield from ((law, case) for law, cases in planned for case in cases[part::PARTS])


def _cases(plan: Plan) -> list[Case]:
    cases: list[Case] = []
    with suppress(Exception):
        plan.feed(lambda case, is_drawn: cases.append(case))
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
        for at, (law, case) in enumerate(cases_in_turn(interleave_families(plans))):
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
