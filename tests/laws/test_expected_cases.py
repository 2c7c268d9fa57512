"""Every shipped expectation: its case shows what it says, and has a reproducer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.script import ScriptError
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.report.reproducer import render_reproducer
from shardlaw.conformance.run.entry import Entry
from shardlaw.conformance.run.expectations import expectation_files, load
from shardlaw.conformance.run.law_run import reuses_plans
from shardlaw.conformance.world import Pool

OTHER = not torch.__version__.startswith("2.13.")
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(OTHER, reason="the entries are those for torch 2.13"), pytest.mark.timeout(900)]
KNOWN = load(expectation_files(Target()), list(catalogue().values()), torch.__version__)
PARTS = [KNOWN.entries[at : at + 40] for at in range(0, len(KNOWN.entries), 40)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(Target(timeout=12), worlds=2) as made:
        yield made


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_the_cases_of_expectations_do_what_they_say(part: int, pool: Pool) -> None:
    said: dict[str, Verdict] = {}
    for entry in PARTS[part]:
        case = Case.parse(entry.case)
        law = find(case.law)
        pool.submit(law, case, lambda verdict: said.__setitem__(verdict.case.text, verdict), reuse=reuses_plans(law, "smoke"))
    pool.flush()
    wrong = []
    for entry in PARTS[part]:
        case = Case.parse(entry.case)
        # what only a world without a past shows is asked again in one
        if not shows(entry, said[case.text]) and not shows(entry, verdict := pool.check_fresh(find(case.law), case)):
            wrong.append(f"{entry.where}: {verdict.kind or verdict.status} {verdict.error}")
    assert wrong == []


def shows(entry: Entry, verdict: Verdict) -> bool:
    """Whether a verdict is what an entry says. Memory that is overrun kills a process or does not: then one of the same cause tells,
    and for a process that was killed one that says so of this very case."""
    law = find(verdict.case.law)
    if verdict.status == "deviates" and entry.kind != verdict.kind and "crash" in (entry.kind, verdict.kind):
        found = KNOWN.match_verdict(law, verdict)
        return found is not None and found.cause == entry.cause and (entry.kind == "crash" or found.case == entry.case)
    features = features_of(verdict.case, law) | set(verdict.features)
    return entry.matches(verdict.case, verdict.word, features, verdict.error)


def test_nearly_every_case_of_an_expectation_has_a_reproducer() -> None:
    without = []
    for entry in KNOWN.entries:
        case = Case.parse(entry.case)
        try:
            assert "dist.init_process_group" in render_reproducer(find(case.law), case)
        except ScriptError as error:
            without.append(f"{entry.where}: {error}")
    assert len(without) <= len(KNOWN.entries) // 20, without
