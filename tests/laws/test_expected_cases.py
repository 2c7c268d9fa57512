"""Every shipped expectation that names a case: a fresh world shows what it says, and the case has a reproducer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.script import ScriptError
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.report.reproducer import reproducer
from shardlaw.conformance.run.expectation_file import Entry
from shardlaw.conformance.run.expectations import layers, load
from shardlaw.conformance.world import Pool

OTHER = not torch.__version__.startswith("2.13.")
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(OTHER, reason="the entries are those for torch 2.13")]
ENTRIES = load(layers(Target()), list(catalogue().values()), torch.__version__).entries
SHOWN = [entry for entry in ENTRIES if entry.case]
by_entry = pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: f"{entry.file.stem}-{entry.line}-{entry.case.partition(' ')[0]}")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(Target(timeout=3)) as made:
        yield made


@by_entry
def test_the_case_of_an_expectation_does_what_it_says(entry: Entry, pool: Pool) -> None:
    case = Case.parse(entry.case)
    law = find(case.law)
    verdict = pool.fresh(law, case)
    assert verdict.status == "deviates", entry.where
    assert entry.matches(verdict.kind or "", features_of(case, law) | set(verdict.features), verdict.error), (entry.where, verdict.kind)


def test_nearly_every_case_of_an_expectation_has_a_reproducer() -> None:
    without = []
    for entry in SHOWN:
        case = Case.parse(entry.case)
        try:
            assert "dist.init_process_group" in reproducer(find(case.law), case)
        except ScriptError as error:
            without.append(f"{entry.where}: {error}")
    assert len(without) <= len(SHOWN) // 20, without


def test_most_expectations_name_a_case() -> None:
    # a rare one may go without: nobody has seen it often enough to cut it down
    without = [entry.where for entry in ENTRIES if not (entry.case or entry.rare)]
    assert len(without) <= len(ENTRIES) // 10, without
