"""Is what many seeds draw known? ``python -m benchmarks.seeds FIRST LAST [LAW ...]``.

Judges the cases that smoke runs of the seeds from FIRST to LAST draw, and none of those that are the same in every run. Prints the
first case of each kind of deviation of a law that no expectation accounts for, and of each error of the harness; exits 1 if there are
any. Such a case is tried as in the first pass of a run: ``shardlaw replay`` says whether a fresh world
shows it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.selection import select
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.expectations import expectation_files, load
from shardlaw.conformance.run.law_run import reuses_plans
from shardlaw.conformance.run.request import DEFAULT_WORLD, LARGER_WORLD
from shardlaw.conformance.run.search import Plan
from shardlaw.conformance.run.shares import full_share, smoke_shares
from shardlaw.conformance.world import Pool

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Verdict


def main(first: int, last: int, patterns: list[str]) -> int:
    target, every = Target(), [*catalogue().values()]
    known = load(expectation_files(target), every, torch.__version__)
    judged: set[Case] = set()
    found: set[str] = set()

    def done(law: Law, verdict: Verdict) -> None:
        new = verdict.status == "deviates" and known.match_verdict(law, verdict) is None
        if (new or verdict.status == "error") and verdict.signature not in found:
            found.add(verdict.signature)
            print(f"{verdict.word} {verdict.case.text}: {verdict.message}", flush=True)

    with Pool(target, worlds=2) as pool:
        for law in select(every, patterns):
            if law.profile != "smoke" or law.draw is None:
                continue
            share = replace(smoke_shares().get(law.id, full_share(law, "smoke")), sweeps=0, indices=None, cases=())

            def take(case: Case, drawn: bool, law: Law = law) -> None:
                if case not in judged:
                    judged.add(case)
                    pool.submit(law, case, lambda verdict: done(law, verdict), reuse=reuses_plans(law, "smoke"))

            for seed in range(first, last + 1):
                plan = Plan.for_law(law, Limits(DEFAULT_WORLD, larger=LARGER_WORLD), seed, "smoke", share=share)
                plan.is_covered = lambda case, law=law: known.covers(case, features_of(case, law))  # type: ignore[misc]
                plan.feed(take)
        pool.flush()
    print(f"{len(judged)} cases of seeds {first} to {last}, torch {torch.__version__}: {len(found)} kinds of deviation that are not known")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
