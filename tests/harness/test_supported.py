"""What a release of torch was seen to support: lists of laws, and runs in which support was lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlaw.conformance.law.law import EarlyRefusal
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run import supported
from shardlaw.conformance.run.expectations import SHIPPED
from shardlaw.conformance.run.supported import FILES, for_installed_torch, has_list_for, parse_list, supported_laws
from shardlaw.conformance.target.config import find_target
from shardlaw.conformance.world import Pool
from tests.harness.shells import Shell, serve_all

LISTS = sorted(SHIPPED.glob(FILES))
PLANTED = """
import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator

true = ShardingPropagator.propagate_op_sharding_non_cached

def lost(self, schema):
    pending = any(placement.is_partial() for spec in schema.args_spec for placement in spec.placements)
    if pending and schema.op is torch.ops.aten.flip.default:
        raise NotImplementedError("flip: pending reductions are not supported")
    if schema.op is torch.ops.aten.roll.default:
        raise NotImplementedError("roll: not supported")
    return true(self, schema)

def plant():
    ShardingPropagator.propagate_op_sharding_non_cached = lost
"""


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_a_list_names_laws_that_may_refuse(file: Path) -> None:
    laws = catalogue()
    named = parse_list(file.read_text().splitlines())
    assert len(named) > 500
    assert [law for law in named if law not in laws or laws[law].refusal == "never"] == []


def test_a_list_speaks_of_its_release_and_of_later_ones() -> None:
    assert supported_laws("2.11.0") == frozenset()
    assert not has_list_for("2.11.0")
    assert has_list_for("2.13.0+cpu")
    assert "op.forward[flip]" in supported_laws("2.13.0+cpu")
    assert supported_laws("99.0.0.dev20300101") >= supported_laws("2.13.0")
    lines = ["op.forward[a]", "op.forward[b] smoke  # refuses a corner"]
    told = {profile: parse_list(lines, profile) for profile in ("smoke", "ci", "nightly")}
    assert told == {"smoke": ["op.forward[a]", "op.forward[b]"], "ci": ["op.forward[a]"], "nightly": []}


@pytest.mark.parametrize(("release", "early"), [("2.11.0", True), ("2.13.0+cpu", False), ("99.0", False)])
def test_on_a_release_that_no_list_speaks_of_a_control_may_be_refused(release: str, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", release)
    for law_id in ("op.forward[linalg.inv]", "op.out[cat]"):
        assert isinstance(for_installed_torch(catalogue()[law_id]).refusal, EarlyRefusal) == early


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Path]]:
    """Ranks on which the support of two ops is lost, and the folder of their config."""
    folder = tmp_path_factory.mktemp("lossy")
    (folder / "planted.py").write_text(PLANTED)
    (folder / "shardlaw.toml").write_text('[target.lossy]\nbackend = "gloo"\nsetup = "planted:plant"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        pool = Pool(find_target("lossy", None, None, 4))
    with pool:
        yield pool, folder


@pytest.fixture
def shardlaw(lossy: tuple[Pool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Commands on a target ``lossy``, whose ranks all come from one server; reports go to the folder of the test."""
    pool, folder = lossy
    serve_all(pool, monkeypatch)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return Shell(tmp_path, capsys)


@pytest.mark.ranks
def test_a_release_before_all_lists_may_refuse_a_control(shardlaw: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "_lists_up_to", lambda release: [])
    supported.has_list_for.cache_clear()
    try:
        done = shardlaw("run", "op.forward[roll.wrapped]", "--target", "lossy", "--report", str(shardlaw.folder))
    finally:
        supported.has_list_for.cache_clear()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(unsupported: every case is refused, on every rank alike)" in done.stdout


@pytest.mark.ranks
def test_what_is_refused_and_was_not_is_a_finding(shardlaw: Shell) -> None:
    done = shardlaw("run", "op.forward[fliplr]", "--target", "lossy", "--profile", "ci", "--report", str(shardlaw.folder))
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = json.loads((shardlaw.folder / "report.json").read_text())["findings"]
    assert (found["kind"], found["script"]) == ("raised", "proven")
    assert "earlier releases refuse no case" in found["message"]
    again = shardlaw("replay", str(shardlaw.folder / "findings" / f"{found['id']}.json"))
    assert again.returncode == 1, again.stdout + again.stderr
    assert "as stored" in again.stdout
