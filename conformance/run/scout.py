"""What a run that its first finding ends tries before all else: the control of each law, to begin where something is wrong."""

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

MAX_PENDING = 64  # cases: enough for all worlds, few to wait for once something is wrong


def interleave_families(laws: Sequence[Law]) -> list[Law]:
    """The laws, of each family ``name[...]`` the first, then of each the second, and so on: what is wrong in one of few laws need not wait
    for the hundreds that are alike."""
    seen: Counter[str] = Counter()
    turns = []
    for law in laws:
        family = law.id.partition("[")[0]
        turns.append(seen[family])
        seen[family] += 1
    return [law for _, law in sorted(zip(turns, laws, strict=True), key=itemgetter(0))]


def find_deviating_control(run: RunState, laws: Sequence[Law], pool: Pool, most: int) -> Case | None:
    """The control of one of these ``laws`` that deviates as nothing that is known does: of the first such one, if ranks, ``most`` of
    them, find any. It is no finding yet."""
    wrong: dict[int, Case] = {}
    owed: set[int] = set()

    def tell(at: int, law: Law, verdict: Verdict) -> None:
        owed.discard(at)
        if verdict.status == "deviates" and run.expectations.match_verdict(law, verdict) is None:
            wrong[at] = verdict.case

    for at, law in enumerate(interleave_families(laws)):
        signals.check()
        try:
            control = Case.parse(law.control)
        except (TorchMovedError, NoFunctionError):  # a control of what another torch has
            continue
        if control.world <= most:
            owed.add(at)
            pool.feed(law, control, partial(tell, at, law), reuse=reuses_plans(law, run.request.profile))
            pool.wait(lambda: len(owed) < MAX_PENDING)
        if wrong:
            break
    pool.wait(lambda: not owed)
    return wrong[min(wrong)] if wrong else None
