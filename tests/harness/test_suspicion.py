"""Which of the functions that a deviating case called is likeliest at fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.evidence import Evidence, Step
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.verdict import Answer, Status, Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.run.nearby import trace_controls
from shardlaw.conformance.run.place import find_places
from shardlaw.conformance.run.suspicion import LineCoverage, describe, shared_words, words_of

FILE = "torch/distributed/checkpoint/_some_planner.py"
SOURCE = """
def plan_reads(boxes):
    return boxes

def fold_names(keys):
    # nested dicts of a flattened state
    return keys

TABLE = {"fold": fold_names}
"""
READS, FOLDS, TABLE = f"plan_reads, {FILE}:2", f"fold_names, {FILE}:5", f"tables, {FILE}:5"


@pytest.fixture(autouse=True)
def torch_with_a_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))


def traced(status: Status, visited: dict[str, set[int]]) -> Verdict:
    evidence = Evidence((), {place: frozenset(lines) for place, lines in visited.items()}, {place: frozenset() for place in visited})
    case = Case.parse("roundtrip.files mesh=2 a=2:R state={a:a}")
    return Verdict(case, status, "wrong-value", ranks=(Answer(0, status, evidence=evidence),))


def test_words_are_those_within_names_without_endings() -> None:
    assert words_of("ShardedTensors, _split_DTensor(x) loads") == ["shard", "tensor", "split", "tensor", "load"]


def test_a_function_that_speaks_of_what_the_case_asks_comes_before_one_that_as_few_holding_cases_ran() -> None:
    lines = LineCoverage({READS: frozenset({3}), FOLDS: frozenset({7})}, [{}])
    assert lines.by_suspicion([READS, FOLDS], "boxes are read") == [READS, FOLDS]
    assert lines.by_suspicion([READS, FOLDS], "a nested state is flattened") == [FOLDS, READS]


def test_a_function_of_which_no_holding_case_ran_a_line_comes_before_one_that_all_ran() -> None:
    deviating = traced("deviates", {READS: {3}, FOLDS: {6, 7}})
    near, controls = [traced("held", {READS: {3}, FOLDS: {7}})], [traced("held", {READS: {3}})] * 4
    assert find_places(deviating, near, controls)[0] == FOLDS
    assert find_places(deviating, [], [traced("deviates", {READS: {3}})] * 4) == find_places(deviating, [])


def test_that_other_cases_ran_lines_says_nothing_of_a_table() -> None:
    lines = LineCoverage({READS: frozenset({3}), FOLDS: frozenset({7})}, [{READS: frozenset({3}), FOLDS: frozenset({7})}] * 9)
    assert lines.by_suspicion([READS, TABLE], "") == [TABLE, READS]


def test_where_steps_weigh_more_their_order_holds() -> None:
    lines = LineCoverage({READS: frozenset({3}), FOLDS: frozenset({7})}, [{READS: frozenset({3})}])
    assert lines.by_suspicion([READS, FOLDS], "", 0.9) == [FOLDS, READS]
    assert lines.by_suspicion([READS, FOLDS], "", 2.0) == [READS, FOLDS]


def test_words_count_relative_to_the_function_that_shares_most() -> None:
    assert shared_words([READS, FOLDS], "nested keys") == {READS: 0.0, FOLDS: 1.0}
    assert shared_words([READS, FOLDS], "") == {READS: 0.0, FOLDS: 0.0}


class PoolOfControls:
    """Answers each control at once; that of the third law is a hang."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, law: Law, cases: list[Case], traced: str) -> list[Verdict]:
        self.asked.append(law.id)
        if len(self.asked) == 3:
            return [Verdict(cases[0], "deviates", "hang")]
        step = Step("op", "aten.neg.default")
        return [Verdict(cases[0], "held", ranks=(Answer(0, "held", evidence=Evidence((step,), {READS: frozenset({3})})),))]


def test_controls_of_a_chapter_are_traced_once_until_one_hangs() -> None:
    pool, known = PoolOfControls(), dict[str, list[Verdict]]()
    found = [trace_controls(pool, "roundtrip", Limits(), known) for _ in range(2)]  # type: ignore[arg-type]
    assert len(pool.asked) == 3
    assert found[0] is found[1]
    assert [verdict.ranks[0].evidence for verdict in found[0]] == [Evidence((), {READS: frozenset({3})})] * 2


def test_a_case_is_described_by_law_clause_fields_and_features() -> None:
    verdict = traced("deviates", {})
    text = describe(find("roundtrip.files"), verdict)
    assert all(part in text for part in ("roundtrip.files", "state={a:a}", "nested-state", find("roundtrip.files").clause))
