"""What it saves that ranks share plans: ``python -m benchmarks.shared_plans ROUNDS``.

The ops of the other benchmarks on meshes of 4 ranks, all shapes new: by turns with sharing and without, in one pool, so that both meet the
same load. Prints one JSON line: CPU seconds (driver, server and ranks) of each pass.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

from benchmarks.ops import OPS, points
from benchmarks.ours import burnt
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.world import Pool

MESHES = {"4": "{}", "2x2": "{},S(0)"}


def cases(mesh: str, rows: int) -> list[Case]:
    """Every op with every choice of placements, on a mesh."""
    made = []
    for point in points(rows):
        tensors = {
            letter: f"{rows}x{rows}:{MESHES[mesh].format(place)}:float32:small" for letter, place in zip("ab", point.places, strict=False)
        }
        made.append(Case.of(f"op.forward[{point.op}]", mesh=mesh, **tensors, steps=OPS[point.op].steps, seed=1))
    return made


def main() -> int:
    told: dict[str, list[float]] = defaultdict(list)
    with Pool(Target()) as pool:
        rows = 4
        for at in range(int(sys.argv[1]) + 1):
            for mesh in MESHES:
                for sharing in (True, False):
                    rows += 4
                    verdicts: list[Verdict] = []
                    used = burnt()
                    for one in cases(mesh, rows):
                        pool.submit(find(one.law), one, verdicts.append, reuse=sharing)
                    pool.flush()
                    if at:  # the first round warms up
                        told[f"{mesh} {'shared' if sharing else 'alone'}"].append(round(burnt() - used, 2))
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
