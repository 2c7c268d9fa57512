"""What real ranks leave when one of them is killed is among the states that the model of crashes gives."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardlaw.conformance.laws.crash.recorder import read_tree, watch_collectives, watch_steps, write_tree
from shardlaw.reference.crash import Step, cuts
from shardlaw.reference.crash import surviving_tree as what_is_left

pytestmark = pytest.mark.ranks

KILLS = 50
SECONDS = 20
# how many ranks save, into what, and with which options of the writer
SCENARIOS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "over": (2, True, {}),
    "items": (2, True, {"single_file_per_rank": False}),
    "new": (2, False, {"sync_files": False}),
    "three": (3, True, {}),
}
fork = multiprocessing.get_context("fork")


@dataclass
class Recorded:
    """A scenario as it went: where, what was there before, and the steps of every rank."""

    root: Path
    base: dict[str, bytes | None]
    logs: list[list[Step]]

    def kills(self) -> list[tuple[int, int]]:
        """Each rank with each number of a step before which it may be killed."""
        return [(rank, number) for rank, log in enumerate(self.logs) for number in range(1, 1 + sum(s.kind != "meet" for s in log))]


@contextmanager
def end_at_once() -> Iterator[None]:
    """A rank that lost another one raises: it ends without taking torch down."""
    try:
        yield
    except BaseException:
        os._exit(1)


def serve(rank: int, world: int, root: Path, value: float, options: dict[str, Any], kill: tuple[int, int], log: Path | None) -> None:
    """One rank: saves ``value`` everywhere, and ends itself before step ``kill``."""
    os.setpgid(0, 0)
    warnings.simplefilter("ignore")
    taken = 0

    def before(*step: str) -> None:
        nonlocal taken
        taken += 1
        if (rank, taken) == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    ids = iter(uuid.UUID(int=number) for number in range(1000))
    dist.init_process_group("gloo", f"file://{root}.rendezvous", rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", list(range(world)))
    state = {
        "x": DTensor.from_local(torch.full((2,), value + rank), mesh, [Shard(0)]),
        "a": DTensor.from_local(torch.full((3,), value), mesh, [Replicate()]),
    }
    steps: list[Step] = []

    def note(kind: str, path: str, other: str = "", at: int = 0, data: bytes = b"") -> None:
        steps.append(Step(kind, path, other, at, data, time.monotonic_ns()))

    with end_at_once(), watch_steps(root, note, before), watch_collectives(note), mock.patch.object(uuid, "uuid4", side_effect=ids):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(root, **options))
    if log is not None:
        log.with_name(f"{log.name}.{rank}").write_bytes(pickle.dumps(steps))
    dist.barrier()
    os._exit(0)


def run(
    world: int, root: Path, value: float, options: dict[str, Any], kill: tuple[int, int] = (-1, 0), log: Path | None = None
) -> list[int]:
    """Let ranks save until they have ended, or wait for one that was killed. Returns their exit codes."""
    Path(f"{root}.rendezvous").unlink(missing_ok=True)
    ranks = [fork.Process(target=serve, args=(rank, world, root, value, options, kill, log)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(SECONDS)
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode or 0 for rank in ranks]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recorded]:
    folder = tmp_path_factory.mktemp("kills")
    # what a first save imports is imported here, once for all ranks
    dcp.save({"x": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(folder / "first"), no_dist=True)

    def record(name: str) -> Recorded:
        world, over, options = SCENARIOS[name]
        root, log = folder / name, folder / f"{name}.log"
        root.mkdir()
        if over:
            assert run(world, root, 1.0, options) == [0] * world
        base = read_tree(root)
        assert run(world, root, 5.0, options, log=log) == [0] * world
        return Recorded(root, base, [pickle.loads(Path(f"{log}.{rank}").read_bytes()) for rank in range(world)])

    kept: dict[str, Recorded] = {}

    def once(name: str) -> Recorded:
        if name not in kept:
            kept[name] = record(name)
        return kept[name]

    return once


def test_a_killed_rank_leaves_what_the_model_says(recorded: Callable[[str], Recorded]) -> None:
    """Of all steps before which a rank of some scenarios may be killed, 50 are tried."""
    every = [(name, kill) for name in SCENARIOS for kill in recorded(name).kills()]
    chosen = random.Random(0).sample(every, KILLS)
    left = set()
    for name, kill in chosen:
        scenario, (world, _, options) = recorded(name), SCENARIOS[name]
        for path in sorted(scenario.root.rglob("*"), reverse=True):
            path.unlink()
        write_tree(scenario.root, scenario.base)
        codes = run(world, scenario.root, 5.0, options, kill)
        assert codes[kill[0]] == -signal.SIGKILL
        found = read_tree(scenario.root)
        rank, number = kill
        moments = [done for done in cuts(scenario.logs) if len(done[rank]) == number - 1]
        steps = (sorted((step for own in done for step in own), key=lambda step: step.when) for done in moments)
        possible = [what_is_left(scenario.base, taken) for taken in steps]
        assert found in possible, f"{name}, rank {rank} killed before its step {number}"
        left.add((name, tuple(sorted(found.items()))))
    assert len(left) > KILLS // 2
