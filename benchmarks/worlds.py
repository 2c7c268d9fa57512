"""Worlds that are lost: ``python -m benchmarks.worlds ROUNDS``. Prints one JSON line.

``first_verdict``: seconds from the start of this process to a verdict, everything imported and started. ``replace``: seconds that a case
takes longer because the world before it lost a rank to SIGKILL. Faults come from the tests of worlds.
"""

from __future__ import annotations

import json
import os
import sys
import time

RANKS = 4


def main() -> int:
    import psutil

    began = psutil.Process().create_time()
    os.environ["SHARDLAW_LAWS"] = "tests.faults.laws"
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.laws import find
    from shardlaw.conformance.world import Pool

    def sums(seed: int) -> Case:
        return Case.of("fault.rank[sums]", world=RANKS, seed=seed)

    with Pool(Target()) as pool:
        law = find("fault.rank[sums]")
        assert pool.check(law, [sums(0)])[0].status == "held"
        first = time.time() - began
        replaced = []
        for seed in range(1, int(sys.argv[1]) + 1):
            at = time.monotonic()
            pool.check(law, [sums(seed)])
            usual = time.monotonic() - at
            at = time.monotonic()
            lost = pool.check(find("fault.rank[killed]"), [Case.of("fault.rank[killed]", world=RANKS, seed=seed)])
            assert lost[0].kind == "crash"
            pool.check(law, [sums(-seed)])
            replaced.append(time.monotonic() - at - usual)
    print(json.dumps({"first_verdict": first, "replace": replaced}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
