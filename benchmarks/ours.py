"""Our worlds on the benchmark's ops: ``python -m benchmarks.ours RANKS ROUNDS``.

Prints one JSON line: wall and CPU seconds (driver, server and ranks) of each pass. ``free drawn``: as many cases that need no
communication, drawn by Hypothesis while they are judged.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

import psutil
from hypothesis import strategies as st

from benchmarks.ops import KINDS, OPS, WARM_UP, Point, passes, points
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.run.law_run import SHARED_PLANS
from shardlaw.conformance.run.search import draw
from shardlaw.conformance.world import Pool

REUSE = os.environ.get(SHARED_PLANS) != "0"  # as a smoke run does


def case(point: Point, ranks: int) -> Case:
    """A point as a case of the law that judges its op."""
    tensors = {
        letter: f"{point.rows}x{point.rows}:{place}:float32:small"
        for letter, place in zip("ab"[: len(point.places)], point.places, strict=True)
    }
    return Case.of(f"op.forward[{point.op}]", mesh=str(ranks), **tensors, steps=OPS[point.op].steps, seed=1)


def burnt() -> float:
    """CPU seconds of this process and all below it so far."""
    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (here, *here.children(recursive=True)))


def timed(pool: Pool, feed: Callable[[Callable[[Case], None]], None], count: int) -> tuple[float, float]:
    """Wall and CPU seconds until every case that ``feed`` gives is judged. Every one must hold."""
    verdicts: list[Verdict] = []
    began, used = time.monotonic(), burnt()
    feed(lambda one: pool.submit(find(one.law), one, verdicts.append, reuse=REUSE))
    pool.flush()
    spent = time.monotonic() - began, burnt() - used
    assert len(verdicts) == count, (len(verdicts), count)
    assert not [verdict.case.text for verdict in verdicts if verdict.status != "held"]
    return spent


def given(cases: Sequence[Case]) -> Callable[[Callable[[Case], None]], None]:
    """Feeds cases that were made beforehand."""
    return lambda take: [take(one) for one in cases].clear()


def drawn(ranks: int, count: int, seed: int) -> Callable[[Callable[[Case], None]], None]:
    """Feeds ``count`` different cases without communication, drawn one by one."""
    choices = points(0, free=True)
    strategy = st.builds(
        lambda at, number: case(Point(choices[at].op, 4 * number + 1 + seed % 3, choices[at].places), ranks),
        st.integers(0, len(choices) - 1),
        st.integers(3, 24),
    )

    def feed(take: Callable[[Case], None]) -> None:
        seen: set[Case] = set()

        def once(found: Case) -> None:
            if found not in seen and len(seen) < count:
                seen.add(found)
                take(found)

        draw(strategy, seed, 3 * count, once)

    return feed


def main() -> int:
    ranks, rounds = map(int, sys.argv[1:3])
    line: dict[str, list[tuple[float, float]]] = {}
    began = time.monotonic()
    with Pool(Target()) as pool:
        warm = [case(point, ranks) for point in points(WARM_UP)]
        pool.check(find(warm[0].law), warm[:1])
        first = time.monotonic() - began
        timed(pool, given(warm), len(warm))
        for kind in KINDS:
            for work in passes(kind, rounds):
                made = [case(point, ranks) for point in work]
                for state in ("distinct", "repeated"):
                    line.setdefault(f"{kind} {state}", []).append(timed(pool, given(made), len(made)))
        count = len(passes("free", 1)[0])
        for at in range(rounds):
            line.setdefault("free drawn", []).append(timed(pool, drawn(ranks, count, at), count))
    print(json.dumps({"cases": {kind: len(passes(kind, 1)[0]) for kind in KINDS}, "passes": line, "first_verdict": first}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
