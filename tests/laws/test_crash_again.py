"""What the scripts of findings leave, which take a save again and lose what the case says, is what the model of crashes says."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import traceback
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.laws import find
from shardlaw.conformance.laws.crash.crashes import LossyCrash, prepare_folder
from shardlaw.conformance.laws.crash.fields import parse_step_id
from shardlaw.conformance.laws.crash.protocols import settle
from shardlaw.conformance.laws.crash.recorder import read_tree, record_steps
from shardlaw.conformance.report.reproducer import FaultInfo, render_reproducer
from shardlaw.conformance.run import proof
from shardlaw.reference.crash import states

pytestmark = pytest.mark.ranks

SECONDS = 120
MOST = 40  # states of each way to save


def save(value: float, folder: str, **options: Any) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    ids = iter(uuid.UUID(int=number) for number in range(1000))
    with mock.patch.object(uuid, "uuid4", side_effect=ids):
        shard = DTensor.from_local(torch.full((2,), value + dist.get_rank()), mesh, [Shard(0)])
        dcp.save({"x": shard}, storage_writer=dcp.FileSystemWriter(folder, **options))


def over(run: str, value: float) -> None:
    save(value, run)


def unsynced(run: str, value: float) -> None:
    save(value, run, sync_files=False)


def pointed(run: str, value: float) -> None:
    save(value, f"{run}/{value:.0f}")
    if dist.get_rank() == 0:
        settle(f"{run}/{value:.0f}")
        Path(f"{run}/latest.new").write_text(f"{value:.0f}")
        os.replace(f"{run}/latest.new", f"{run}/latest")


def renamed(run: str, value: float) -> None:
    save(value, f"{run}/new")
    if dist.get_rank() == 0:
        os.rename(f"{run}/new", f"{run}/{value:.0f}")


def compared(folder: Path, go: Callable[[str, float], None]) -> list[str]:
    """The states that a crash leaves other than the model says, and at the end how many were tried."""
    run = f"{folder}/run"
    base = prepare_folder(run, lambda: go(run, 1.0))
    logs = record_steps(run, lambda: go(run, 5.0))
    found, wrong = states(base, logs), []
    step = max(1, len(found) // MOST)
    for state in found[::step]:
        case = Case.parse(f"- mesh=2 {state.description.partition(';')[0]}")
        done = [int(count) for count in case.get("done").split(",")]
        lost = [parse_step_id(text) for text in case.get("lost", "").split(",") if text]
        half = parse_step_id(case.get("half")) if "half" in case else None
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(run)
        dist.barrier()
        left = LossyCrash(str(folder), done, lost=lost, half=half).simulate(lambda: go(run, 1.0), lambda: go(run, 5.0))
        held = {path: data for path, data in read_tree(run).items() if not path.endswith(".lost")}
        if isinstance(left, str) or held != state.tree:
            odd = sorted(path for path in {*held} | {*state.tree} if held.get(path, 0) != state.tree.get(path, 0))
            wrong.append(f"{state.description}: {left if isinstance(left, str) else odd}")
        dist.barrier()
    return [*wrong, str(len(found[::step]))]


def serve(rank: int, folder: Path, go: Callable[[str, float], None]) -> None:
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
        found = compared(folder, go)
    except BaseException:
        found = [traceback.format_exc(), "0"]
    if rank == 0:
        (folder / "wrong").write_text("\n".join(found))
    os._exit(0)


@pytest.mark.parametrize("go", [over, unsynced, pointed, renamed])
def test_a_script_leaves_what_the_model_says(go: Callable[[str, float], None], tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=serve, args=(rank, tmp_path, go)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(SECONDS)
        rank.kill()
        rank.join()
    *wrong, tried = (tmp_path / "wrong").read_text().splitlines()
    assert not wrong, "\n".join(wrong)
    assert int(tried) >= 15


@pytest.mark.parametrize(
    "text",
    [
        "crash.overwrite mesh=2 x=2:S(0) disk=posix done=1,99",
        "crash.overwrite mesh=2 x=2:S(0) disk=posix done=1,99 lost=0.1",
        "crash.overwrite mesh=2 x=2:S(0) disk=posix crash=99999",
        "crash.object[overwrite] mesh=2 x=2:S(0) done=1,99",
        "crash.overlap mesh=2 x=2:S(0) turns=0,99,0",
        "crash.full mesh=2 x=2:S(0) at=99 ranks=1",
    ],
)
@pytest.mark.parametrize("kind", ["wrong-value", ""])
def test_a_script_says_neither_where_the_ranks_take_fewer_steps(text: str, kind: str) -> None:
    case = Case.parse(text)
    ran = proof.run_script(render_reproducer(find(case.law), case, FaultInfo(kind, key="left" if kind else "")))
    assert ran.code == 2, ran.output
    assert "raised Meaningless: the" in ran.output
