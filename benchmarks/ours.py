"""Our world on the benchmark's ops: ``python -m benchmarks.ours RANKS``.

Prints one JSON line: the cases and seconds of a first pass, in which every case is distinct (each sharding rule is met cold), and of a
second pass over the same cases (met warm).
"""

from __future__ import annotations

import itertools
import json
import sys
import time

from benchmarks.ops import OPS, SIZE
from conformance.case import Case
from conformance.laws import find
from conformance.target import Target
from conformance.world import Pool

STEPS = {"sum": "sum(a,0)", "mean": "mean(a,1)", "nn.functional.softmax": "nn.functional.softmax(a,1)", "amax": "amax(a,0)"}


def cases(ranks: int) -> list[Case]:
    """Every op with every choice of replicate and shard for each input."""
    found = []
    for name, (_, inputs) in OPS.items():
        letters = "ab"[:inputs]
        for chosen in itertools.product(("R", "S(0)", "S(1)"), repeat=inputs):
            tensors = {letter: f"{SIZE}x{SIZE}:{place}:float32:small" for letter, place in zip(letters, chosen, strict=True)}
            steps = STEPS.get(name, f"{name}({','.join(letters)})")
            found.append(Case.of(f"op.forward[{name}]", mesh=str(ranks), **tensors, steps=steps, seed=1))
    return found


def main() -> int:
    ranks = int(sys.argv[1])
    line: dict[str, float] = {}
    began = time.monotonic()
    with Pool(Target()) as pool:
        all_cases = cases(ranks)
        verdicts = pool.judge(find(all_cases[0].law), all_cases[:1])
        line["first_verdict"] = time.monotonic() - began
        for name in ("distinct", "repeated"):
            began = time.monotonic()
            for case in all_cases:
                pool.feed(find(case.law), case, verdicts.append)
            pool.flush()
            line[name] = time.monotonic() - began
    bad = [verdict.case.text for verdict in verdicts if verdict.status != "held"]
    print(json.dumps({"cases": len(all_cases), "held": len(verdicts) - len(bad), "not_held": bad[:3], **line}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
