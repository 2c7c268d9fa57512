"""With ``-x`` a run first tries the control case of each law, to begin with a law that deviates."""

from __future__ import annotations

from collections import Counter
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from shardlaw.conformance.compat import TorchMovedError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.program.names import NoFunctionError
from shardlaw.conformance.run.law_run import reuses_plans
from shardlaw.conformance.world import signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.run.state import RunState
    from shardlaw.conformance.world import Pool

MAX_PENDING = 64  # cases: enough to keep all worlds busy, few to wait for once one deviates


def interleave_families(laws: Sequence[Law]) -> list[Law]:
    """The laws reordered: the first of each family ``name[...]``, then the second of each, and so on, so that small families do not wait
    for one with hundreds of laws."""
    seen: Counter[str] = Counter()
    turns = []
    for law in laws:
        family = law.id.partition("[")[0]
        turns.append(seen[family])
        seen[family] += 1
    return [law for _, law in sorted(zip(turns, laws, strict=True), key=itemgetter(0))]


def find_deviating_control(run: RunState, laws: Sequence[Law], pool: Pool, max_ranks: int) -> Case | None:
    """Run the controls of ``laws`` that need at most ``max_ranks`` ranks, until one deviates without an expectation that covers it. Returns
    the first such case in order, or ``None``; it is not confirmed yet."""
    wrong: dict[int, Case] = {}
    pending: set[int] = set()

    def on_verdict(at: int, law: Law, verdict: Verdict) -> None:
        pending.discard(at)
        if verdict.status == "deviates" and run.expectations.match_verdict(law, verdict) is None:
            wrong[at] = verdict.case

    for at, law in enumerate(interleave_families(laws)):
        signals.raise_if_stopped()
        try:
            control = Case.parse(law.control)
        except (TorchMovedError, NoFunctionError):  # a control of what another torch has
            continue
        if control.world <= max_ranks:
            pending.add(at)
            pool.submit(law, control, partial(on_verdict, at, law), reuse=reuses_plans(law, run.request.profile))
            pool.wait_until(lambda: len(pending) < MAX_PENDING)
        if wrong:
            break
    pool.wait_until(lambda: not pending)
    return wrong[min(wrong)] if wrong else None
