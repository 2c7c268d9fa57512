"""torch-checkpointing through its adapter: run where it is installed (``pip install 'shardlaw[engine]'``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "torch_checkpointing"


def test_the_adapter_is_small() -> None:
    assert len((FOLDER / "adapter.py").read_text("utf-8").splitlines()) <= 150


@pytest.mark.ranks
def test_a_trip_through_the_engine_holds_and_a_value_left_behind_is_found(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    # the storage of a config file is that of a run: replay takes the target's
    config = (FOLDER / "shardlaw.toml").read_text("utf-8") + '\n[target.gloo]\nstorage = "engine"\n'
    (tmp_path / "shardlaw.toml").write_text(config, "utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))}

    def replayed(case: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shardlaw", "replay", case]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    whole = replayed("roundtrip.dtensor mesh=2 mesh.load=3 x=5x3:S(0) to.x=S(1)")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    left = replayed("roundtrip.stateful mesh=2 mesh.load=3 x=2:S(0) state={app:stateful({w:x,n:3})}")
    assert left.returncode == 1, left.stdout + left.stderr
    assert "loaded.app.n is not what was saved" in left.stdout
