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

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import laws_of
from conformance.laws.layout.math import checks
from conformance.search import Enough, Plan
from conformance.target import Target
from conformance.verdict import Verdict
from conformance.world import Pool

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
    plans = list(laws_of("conformance.laws.plan.save"))
    layouts = [law for law in laws_of("conformance.laws.layout.math") if law.id == "layout.math[offsets]"]
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
