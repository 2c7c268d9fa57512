"""Many cases with a fault among them now and then: ``python -m benchmarks.soak [CASES] [EVERY]``.

Every EVERY-th case of CASES makes a rank raise, die, hang, or leave something behind. Each fault must be reported once, for its own
case, and every other case must hold; nothing may be lost, grow or stay behind. Exits 1 otherwise. Faults come from the tests of worlds.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter

os.environ["SHARDLAW_LAWS"] = "tests.faults.laws"

import psutil

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.world import Pool

FAULTS = ("raises_alone", "killed", "raises_alike", "joins_alone", "exits", "destroys_group", "wrong", "raises_differently",
          "raises_while_others_wait", "all_wait", "leaves_thread", "aborts", "closes_stream")  # fmt: skip
GOOD = ("sums", "nothing", "deposits", "sums")
SIZES = (2, 3, 4)


def mixed(count: int, every: int) -> list[tuple[Law, Case]]:
    """Cases of all sizes, a fault at every ``every``-th place."""
    found = []
    for at in range(count):
        bad = at % every == every - 1
        name = FAULTS[at // every % len(FAULTS)] if bad else GOOD[at % len(GOOD)]
        size = SIZES[at // 7 % len(SIZES)]
        fields = {"mesh": size, "x": f"{size}x2:P(sum)"} if name == "deposits" else {"world": size}
        found.append((find(f"fault.rank[{name}]"), Case.of(f"fault.rank[{name}]", **fields, seed=at)))
    return found


def main() -> int:
    count, every = (int(text) for text in [*sys.argv[1:], "20000", "200"][:2])
    verdicts: Counter[Case] = Counter()
    wrong: list[str] = []
    kinds: Counter[str] = Counter()
    heaviest: dict[str, int] = {}
    began = time.monotonic()
    cases = mixed(count, every)
    with Pool(Target(timeout=4)) as pool:

        def take(verdict: Verdict) -> None:
            verdicts[verdict.case] += 1
            good = verdict.case.law.partition("[")[2].rstrip("]") in GOOD
            kinds[verdict.kind or verdict.status] += 1
            if (verdict.status == "held") != good:
                wrong.append(f"{verdict.case.text}: {verdict.message or verdict.status}")

        for law, case in cases:
            pool.submit(law, case, take)
            for usage in pool.usage():
                for name, value in usage.items():
                    heaviest[name] = max(heaviest.get(name, 0), value)
        pool.flush()
        folder = pool.folder
    lost = [case.text for _, case in cases if verdicts[case] != 1]
    left = [child.pid for child in psutil.Process().children(recursive=True)]
    print(f"{count} cases with {count // every} faults in {time.monotonic() - began:.0f} s: {dict(kinds)}")
    print(f"a rank at most: {heaviest}")
    print(f"judged other than once: {lost[:3] or 'none'}; judged wrongly: {wrong[:3] or 'none'}; left behind: {left or 'no process'}")
    return int(bool(lost or wrong or left or os.path.exists(folder)))


if __name__ == "__main__":
    sys.exit(main())
