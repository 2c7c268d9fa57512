"""What a release of torch was seen to support: lists of laws, and runs in which support was lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardlaw.conformance.law.law import EarlyRefusal
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.expectations import SHIPPED
from shardlaw.conformance.run.supported import FILES, for_installed_torch, has_list_for, parse_list, supported_laws

ROOT = Path(__file__).parents[2]
LISTS = sorted(SHIPPED.glob(FILES))
PLANTED = """
import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator

true = ShardingPropagator.propagate_op_sharding_non_cached

def lost(self, schema):
    pending = any(placement.is_partial() for spec in schema.args_spec for placement in spec.placements)
    if pending and schema.op is torch.ops.aten.flip.default:
        raise NotImplementedError("flip: pending reductions are not supported")
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


EARLIER = """
import sys
from shardlaw.conformance.commands.cli import main
from shardlaw.conformance.run import supported

supported._lists_up_to = lambda release: []
sys.exit(main(sys.argv[1:]))
"""


def shardlaw(folder: Path, planted: str, *arguments: str, by: Sequence[str] = ("-m", "shardlaw")) -> subprocess.CompletedProcess[str]:
    """A command on a target ``lossy``, on whose ranks the support of an op is lost."""
    (folder / "planted.py").write_text(planted)
    (folder / "shardlaw.toml").write_text('[target.lossy]\nbackend = "gloo"\nsetup = "planted:plant"\n')
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}
    env.pop("SHARDLAW_LAWS", None)  # of other tests
    command = [sys.executable, *by, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.ranks
def test_a_release_before_all_lists_may_refuse_a_control(tmp_path: Path) -> None:
    planted = PLANTED.replace("pending and", "").replace("flip", "roll")
    done = shardlaw(tmp_path, planted, "run", "op.forward[roll.wrapped]", "--target", "lossy", by=("-c", EARLIER))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(unsupported: every case is refused, on every rank alike)" in done.stdout


@pytest.mark.ranks
def test_what_is_refused_and_was_not_is_a_finding(tmp_path: Path) -> None:
    done = shardlaw(tmp_path, PLANTED, "run", "op.forward[fliplr]", "--target", "lossy", "--profile", "ci")
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "shardlaw-report" / "report.json").read_text())["findings"]
    assert (found["kind"], found["script"]) == ("raised", "proven")
    assert "earlier releases refuse no case" in found["message"]
    again = shardlaw(tmp_path, PLANTED, "replay", f"shardlaw-report/findings/{found['id']}.json")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "as stored" in again.stdout
