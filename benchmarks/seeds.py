"""Is what many seeds draw known? ``python -m benchmarks.seeds FIRST LAST [LAW ...]``.

Judges the cases that smoke runs of the seeds from FIRST to LAST draw, and none of those that are the same in every run; a seed costs a
tenth of a run. Prints the first case of each kind of deviation of a law that no expectation accounts for, and each error of the
harness; exits 1 if there are any. Such a case is tried as in the first pass of a run: ``shardlaw replay`` says whether a fresh world
shows it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.chosen import chosen, whole_of
from shardlaw.conformance.run.expectations import layers, load
from shardlaw.conformance.run.law_run import reuses
from shardlaw.conformance.run.request import DEFAULT_WORLD, LARGER_WORLD
from shardlaw.conformance.run.search import Plan
from shardlaw.conformance.world import Pool

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Verdict


def main(first: int, last: int, patterns: list[str]) -> int:
    target, found = Target(), dict[tuple[str, ...], str]()
    judged: set[Case] = set()
    laws = [law for law in catalogue().values() if law.profile == "smoke" and law.draw is not None]
    known = load(layers(target), [*catalogue().values()], torch.__version__)

    def done(law: Law, verdict: Verdict) -> None:
        if verdict.status == "error":
            found[law.id, "error"] = f"{verdict.case.text}: {verdict.message}"
        elif verdict.status == "deviates" and known.match_verdict(law, verdict) is None:
            told = f"{verdict.kind} {verdict.case.text}: {verdict.error or verdict.message}"
            if found.setdefault((law.id, verdict.kind or "", verdict.error), told) is told:
                print(told, flush=True)

    with Pool(target, worlds=2) as pool:
        for law in laws:
            if patterns and not any(fnmatchcase(law.id, pattern) for pattern in patterns):
                continue
            share = replace(chosen().get(law.id, whole_of(law, "smoke")), sweeps=0, places=None, cases=())

            def take(case: Case, drawn: bool, law: Law = law) -> None:
                if case not in judged:
                    judged.add(case)
                    pool.feed(law, case, lambda verdict: done(law, verdict), reuse=reuses(law, "smoke"))

            for seed in range(first, last + 1):
                plan = Plan.of(law, Limits(DEFAULT_WORLD, larger=LARGER_WORLD), seed, "smoke", share=share)
                plan.covered = lambda case, law=law: known.covers(case, features_of(case, law))  # type: ignore[misc]
                plan.feed(take)
        pool.flush()
    print(f"{len(judged)} cases of seeds {first} to {last}, torch {torch.__version__}: {len(found)} kinds of deviation that are not known")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
