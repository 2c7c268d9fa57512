"""Whether the reproducers show what they say: ``python -m benchmarks.reproducers [LAW ...]``.

Tries every case that an expectation names, of the laws that are asked for, in a fresh world, writes the script of what deviates there, runs
it as a run does before it hands one out, and prints those that are not proven. The last line counts them; exits 1 where any is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.script import ScriptError
from shardlaw.conformance.law.selection import select
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.report.reproducer import FaultInfo, render_reproducer
from shardlaw.conformance.run import proof
from shardlaw.conformance.run.expectations import expectation_files, load
from shardlaw.conformance.world import Pool


def cases(patterns: list[str]) -> Iterator[str]:
    """The texts of cases of known faults."""
    laws = list(catalogue().values())
    wanted = {law.id for law in select(laws, patterns, ())}
    entries = load(expectation_files(Target()), laws, torch.__version__).entries
    yield from dict.fromkeys(entry.case for entry in entries if entry.case and Case.parse(entry.case).law in wanted)


def main(patterns: list[str]) -> int:
    proven, without, other = 0, 0, 0
    with Pool(Target()) as pool:
        for told in cases(patterns):
            case = Case.parse(told)
            law = find(case.law)
            verdict = pool.check_fresh(law, case)
            if verdict.status != "deviates":
                other += 1
                print(f"{verdict.status}: {told}", flush=True)
                continue
            try:
                text = render_reproducer(law, case, FaultInfo.from_verdict(verdict))
            except ScriptError as error:
                without += 1
                print(f"no script: {told}: {error}", flush=True)
                continue
            said = proof.prove(text)
            proven += said == proof.PROVEN
            other += said != proof.PROVEN
            if said != proof.PROVEN:
                print(f"{said}: {told}", flush=True)
    print(f"{proven} scripts are proven, {other} are not, {without} cases have none")
    return int(other > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
