"""Runs that end with their first finding begin where something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.run.scout import MAX_PENDING, find_deviating_control, interleave_families

LAWS = [find(law) for law in ("redistribute.same", "op.forward[neg]", "op.forward[abs]", "op.backward[neg]", "layout.full")]
PLANTED = """
from torch.distributed.tensor._sharding_prop import ShardingPropagator

true = ShardingPropagator.propagate_op_sharding_non_cached

def wrong(self, schema):
    if "flip" in str(schema.op):
        raise ValueError("planted")
    return true(self, schema)

def plant():
    ShardingPropagator.propagate_op_sharding_non_cached = wrong
"""


class Ranks:
    """A pool whose ranks find these laws wrong, and that answers once it is waited for."""

    def __init__(self, wrong: set[str]) -> None:
        self.wrong = wrong
        self.fed: list[str] = []
        self.waiting: list[Callable[[], None]] = []

    def submit(self, law: Law, case: Case, on_verdict: Callable[[Verdict], None], *, reuse: bool) -> None:
        verdict = Verdict(case, "deviates", "wrong-value", "x") if law.id in self.wrong else Verdict(case, "held")
        self.fed.append(law.id)
        self.waiting.append(lambda: on_verdict(verdict))

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.waiting.pop(0)()


def found(ranks: Ranks, laws: list[Law] = LAWS, known: str = "") -> Case | None:
    expectations = SimpleNamespace(match_verdict=lambda law, verdict: law.id if law.id == known else None)
    run: Any = SimpleNamespace(expectations=expectations, request=SimpleNamespace(profile="smoke"))
    pool: Any = ranks
    return find_deviating_control(run, laws, pool, 4)


def test_each_family_has_its_turn() -> None:
    assert [law.id for law in interleave_families(LAWS)] == [LAWS[at].id for at in (0, 1, 3, 4, 2)]


def test_the_first_control_that_deviates_is_told() -> None:
    assert found(Ranks(set())) is None
    assert found(Ranks({"op.forward[abs]", "layout.full"})) == Case.parse(LAWS[4].control)
    assert found(Ranks({"layout.full"}), known="layout.full") is None


def test_no_more_is_tried_once_something_is_wrong() -> None:
    laws = [replace(LAWS[0], id=f"redistribute.same{at}") for at in range(3 * MAX_PENDING)]
    ranks = Ranks({laws[0].id})
    assert found(ranks, laws) is not None
    assert len(ranks.fed) == MAX_PENDING


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_a_run_that_ends_with_its_first_finding_begins_with_it(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "shardlaw.toml").write_text('[target.faulty]\nbackend = "gloo"\nsetup = "planted:plant"\n')
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    env.pop("SHARDLAW_LAWS", None)  # of other tests
    command = [sys.executable, "-m", "shardlaw", "run", "redistribute.*", "op.forward[fliplr]", "--target", "faulty", "-x"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "shardlaw-report" / "report.json").read_text())
    (finding,) = [one for one in report["findings"] if one["status"] == "new"]
    assert finding["case"]["law"] == "op.forward[fliplr]"
    assert [law["id"] for law in report["laws"] if law["cases"]] == ["op.forward[fliplr]"]
