"""How fast the laws that one process serves are tried: ``python -m benchmarks.plans [SECONDS | --scale [RANKS ...]]``.

Drives a pool as a run does: cases are drawn while they are judged. Prints one JSON line: cases of the plan laws a second, drawing
included, and layouts checked a second (a layout is one combination of placements at one place of a mesh), of which one case of
``layout.math[offsets]`` stands for many. ``--scale`` judges the cases of ``plan.scale[...]`` instead, of all numbers of ranks or those
that are given, each in a process of its own, and prints its verdict, its CPU-seconds and its peak memory.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from shardlaw.conformance.api import Worlds
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import compare
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find, laws_of
from shardlaw.conformance.laws.layout.arithmetic import checks
from shardlaw.conformance.laws.plan.scale import SECONDS
from shardlaw.conformance.run.search import Plan, StopDrawing
from shardlaw.conformance.world import Pool

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

SEED = 7
BACKLOG = 128  # cases that may wait: what is under way when the time is up counts too


def tried(pool: Pool, laws: list[Law], seconds: float, count: Callable[[Case], int]) -> tuple[int, int, float]:
    """Cases judged, what they count, and the seconds that it took, drawing included."""
    verdicts: list[Verdict] = []
    began, fed = time.monotonic(), 0
    for at, law in enumerate(laws):

        def take(case: Case, drawn: bool, law: Law = law, until: float = began + seconds * (at + 1) / len(laws)) -> None:
            nonlocal fed
            pool.submit(law, case, verdicts.append)
            fed += 1
            if fed - len(verdicts) > BACKLOG:
                pool.flush()
            if time.monotonic() > until:
                raise StopDrawing

        with suppress(StopDrawing):
            Plan.for_law(law, Limits(), SEED, "nightly").feed(take)
    pool.flush()
    return len(verdicts), sum(count(verdict.case) for verdict in verdicts), time.monotonic() - began


def measured(here: RankContext, law_id: str, text: str) -> tuple[float, float, int]:
    """The CPU-seconds of a case, those of its act among them, and the peak of this process's memory in bytes."""
    law = find(law_id)
    (act,), case, began = law.acts, Case.parse(text), time.process_time()
    got = act.function(**act.arguments(case, here))
    acted = time.process_time() - began
    for key, due in act.due_on(case, 0, 1).items():
        compare(here, key, got[key], due)
    return time.process_time() - began, acted, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def scale(ranks: list[int]) -> None:
    """A line for each case of the laws of scale."""
    print("| law | ranks | verdict | CPU-s | of which the act | peak memory |\n| --- | ---: | --- | ---: | ---: | ---: |")
    for law in laws_of("shardlaw.conformance.laws.plan.scale"):
        assert law.sweep is not None
        for case in law.sweep(Limits()):
            count = math.prod(case.shape("ranks"))
            if ranks and count not in ranks:
                continue
            with Worlds(ranks=1, timeout=SECONDS) as world:
                outcome = world.judge("benchmarks.plans:measured", law.id, case.text)
            took, acted, memory = outcome.returned[0]
            said = outcome.verdict.kind or outcome.verdict.status
            print(f"| `{law.id}` | {count:,} | {said} | {took:.1f} | {acted:.1f} | {memory / 2**30:.2f} GiB |", flush=True)


def main() -> int:
    if sys.argv[1:2] == ["--scale"]:
        scale([*map(int, sys.argv[2:])])
        return 0
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    rooms = ("save", "tensors", "load", "state")
    plans = [law for room in rooms for law in laws_of(f"shardlaw.conformance.laws.plan.{room}")]
    layouts = [law for law in laws_of("shardlaw.conformance.laws.layout.arithmetic") if law.id == "layout.math[offsets]"]
    with Pool(Target()) as pool:
        pool.check(plans[0], [Case.parse(plans[0].control)])
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
