"""A run that tests of reports fill and write."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlaw.conformance import laws as catalogue
from shardlaw.conformance.report.writer import ReportWriter
from shardlaw.conformance.run import proof
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.run.state import LawResult
from tests.harness.runs import CASE, LAWS, FakeRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    monkeypatch.setattr(catalogue, "find", LAWS.__getitem__)
    monkeypatch.setattr(proof, "prove", lambda text: proof.PROVEN)
    run = FakeRun(ReportWriter(tmp_path / "report"), request=RunRequest(seed=7, report=tmp_path / "report"))
    run.results = {one.id: LawResult(one, "held", cases=10, seconds=1.5) for one in LAWS.values()}
    run.results["op.forward[mean]"].outcome = "deviates"
    run.results["mesh.copies"] = LawResult(LAWS["mesh.copies"], reason="needs 8 ranks, the largest world has 4")
    run.features.update({"uneven": 8, "dtype:bool": 2})
    run.judged, run.drawn, run.distinct = 40, 25, {CASE}
    return run
