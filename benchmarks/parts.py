"""How many parts a profile has to be run in: ``python -m benchmarks.parts PROFILE CASES_A_SECOND [LAW ...]``.

Counts the cases that laws have under a profile, without trying any: those that enumerators give and those that are drawn, before what was
drawn twice is left out. Prints one JSON line, with the least N for which every part ``--shard I/N`` takes at most 25 minutes at that pace.
"""

from __future__ import annotations

import json
import math
import sys
import warnings

from shardlaw.conformance.compat import TorchMovedError
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.selection import select
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.search import Plan
from shardlaw.conformance.run.shares import SCALE

LONGEST = 25 * 60


def counted(law: Law, profile: str) -> int:
    """How many cases a law has; 0 where its samples cannot be read."""
    limits = Limits()
    plan = Plan.for_law(law, limits, 0, profile)
    try:
        swept = min(plan.share.sweeps, len(law.sweep(limits))) if law.sweep is not None else 0
    except TorchMovedError:
        swept = 0
    return swept + (plan.share.draws if law.draw is not None else 0)


def main(profile: str, pace: float, patterns: list[str]) -> None:
    warnings.simplefilter("ignore")
    order = list(SCALE)
    laws = [law for law in select(list(catalogue().values()), patterns, ()) if order.index(law.profile) <= order.index(profile)]
    cases = sum(counted(law, profile) for law in laws)
    parts = max(1, math.ceil(cases / pace / LONGEST))
    minutes = round(cases / pace / parts / 60, 1)
    print(json.dumps({"profile": profile, "laws": len(laws), "cases": cases, "parts": parts, "minutes": minutes}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
