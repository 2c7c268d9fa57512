"""How fast the laws that one process serves are tried: ``python -m benchmarks.plans [SECONDS]``.

Drives a pool as a run does: cases are drawn while they are judged. Prints one JSON line: cases of the plan laws a second, drawing
included, and layouts checked a second (a layout is one combination of placements at one place of a mesh), of which one case of
``layout.math[offsets]`` stands for many.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import laws_of
from shardlaw.conformance.laws.layout.arithmetic import checks
from shardlaw.conformance.run.search import Enough, Plan
from shardlaw.conformance.world import Pool

SEED = 7
BACKLOG = 128  # cases that may wait: what is under way when the time is up counts too


def tried(pool: Pool, laws: list[Law], seconds: float, count: Callable[[Case], int]) -> tuple[int, int, float]:
    """Cases judged, what they count, and the seconds that it took, drawing included."""
    verdicts: list[Verdict] = []
    began, fed = time.monotonic(), 0
    for at, law in enumerate(laws):

        def take(case: Case, drawn: bool, law: Law = law, until: float = began + seconds * (at + 1) / len(laws)) -> None:
            nonlocal fed
            pool.feed(law, case, verdicts.append)
            fed += 1
            if fed - len(verdicts) > BACKLOG:
                pool.flush()
            if time.monotonic() > until:
                raise Enough

        with suppress(Enough):
            Plan.of(law, Limits(), SEED, "nightly").feed(take)
    pool.flush()
    return len(verdicts), sum(count(verdict.case) for verdict in verdicts), time.monotonic() - began


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    rooms = ("save", "tensors", "load", "state")
    plans = [law for room in rooms for law in laws_of(f"shardlaw.conformance.laws.plan.{room}")]
    layouts = [law for law in laws_of("shardlaw.conformance.laws.layout.arithmetic") if law.id == "layout.math[offsets]"]
    with Pool(Target()) as pool:
        pool.judge(plans[0], [Case.parse(plans[0].control)])
        cases, _, took = tried(pool, plans, seconds, lambda case: 1)
        asked, layouts_checked, spent = tried(pool, layouts, seconds, checks)
    print(
        json.dumps(
            {
                "plan_cases": cases,
                "plan_cases_a_second": round(cases / took, 1),
                "layout_cases": asked,
                "layouts": layouts_checked,
                "layouts_a_second": round(layouts_checked / spent, 1),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
