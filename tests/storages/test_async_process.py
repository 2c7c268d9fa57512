"""Asynchronous saves by a process of their own: what was saved is what there was when the call came, save after save.

No law, since the process takes seconds to start, in which the ranks have nothing to show for themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
RANKS, SAVES = 2, 3
SCRIPT = f"""
import multiprocessing, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

def serve(rank, folder):
    dist.init_process_group("gloo", f"file://{{folder}}/store", rank=rank, world_size={RANKS})
    mesh = DeviceMesh("cpu", torch.arange({RANKS}))
    def state(full, n):
        local = full.chunk({RANKS})[rank].clone()
        return {{"x": DTensor.from_local(local, mesh, [Shard(0)], shape=full.shape, stride=full.stride()), "p": full.clone(), "n": n}}
    for at in range({SAVES}):
        full, path = torch.arange(5.) + at, f"{{folder}}/{{at}}"
        saved, loaded = state(full, [at]), state(full + 77, None)
        how = AsyncCheckpointerType.PROCESS
        pending = dcp.async_save(saved, storage_writer=dcp.FileSystemWriter(path, sync_files=False), async_checkpointer_type=how)
        saved["x"].to_local().zero_(), saved["p"].zero_(), saved["n"].append("late")
        getattr(pending, "upload_completion", pending).result()
        dcp.load(loaded, checkpoint_id=path)
        assert torch.equal(loaded["x"].to_local(), full.chunk({RANKS})[rank]), loaded
        assert torch.equal(loaded["p"], full) and loaded["n"] == [at], loaded

if __name__ == "__main__":
    ranks = [multiprocessing.get_context("fork").Process(target=serve, args=(rank, sys.argv[1])) for rank in range({RANKS})]
    [rank.start() for rank in ranks], [rank.join() for rank in ranks]
    sys.exit(any(rank.exitcode for rank in ranks))
"""


def test_what_changes_after_the_call_does_not_reach_the_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert told.returncode == 0, told.stderr
