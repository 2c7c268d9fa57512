"""A run that tests of reports fill and write; a shell for tests of commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shardlaw.conformance import laws as catalogue
from shardlaw.conformance import world
from shardlaw.conformance.report.writer import ReportWriter
from shardlaw.conformance.run import proof
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.run.state import LawResult
from shardlaw.conformance.target.config import find_target
from shardlaw.conformance.world import Pool
from tests.harness.runs import CASE, LAWS, FakeRun
from tests.harness.shells import MODULE, Shell, serve_all


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    monkeypatch.setattr(catalogue, "find", LAWS.__getitem__)
    monkeypatch.setattr(proof, "prove", lambda text, stopped: proof.PROVEN)
    run = FakeRun(ReportWriter(tmp_path / "report"), request=RunRequest(seed=7, report=tmp_path / "report"))
    run.results = {one.id: LawResult(one, "held", cases=10, seconds=1.5) for one in LAWS.values()}
    run.results["op.forward[mean]"].outcome = "deviates"
    run.results["mesh.copies"] = LawResult(LAWS["mesh.copies"], reason="needs 8 ranks, the largest world has 4")
    run.features.update({"uneven": 8, "dtype:bool": 2})
    run.judged, run.drawn, run.distinct = 40, 25, {CASE}
    return run


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "laws_for_the_cli.py").write_text(MODULE)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "lib"), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("SHARDLAW_LAWS", "laws_for_the_cli")
    catalogue.catalogue.cache_clear()
    yield Shell(tmp_path / "work", capsys)
    catalogue.catalogue.cache_clear()
    catalogue.laws_of.cache_clear()
    sys.modules.pop("laws_for_the_cli", None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Ranks that know the laws of the shell."""
    folder = tmp_path_factory.mktemp("laws")
    (folder / "laws_for_the_cli.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        pool = Pool(replace(find_target("gloo", None, None, 4), env=(("SHARDLAW_LAWS", "laws_for_the_cli"),)))
    with pool:
        yield pool


@pytest.fixture
def same_ranks(served: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried in fresh worlds of one server, instead of a server for each command."""
    monkeypatch.setattr(world, "Pool", lambda target: nullcontext(served))


@pytest.fixture(scope="session")
def kept() -> Iterator[Pool]:
    """Ranks of gloo for many runs."""
    with Pool(find_target("gloo", None, None, 4)) as pool:
        yield pool


@pytest.fixture
def one_server(kept: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has worlds of its own, from one server, instead of a server for each run."""

    serve_all(kept, monkeypatch)
