"""Upstream's own test runtimes on the benchmark's ops: ``python -m benchmarks.upstream spawn|persistent|threads|local ROUNDS``.

The loop is the one that upstream's converter makes: every choice of replicate and even shards, op run plain and sharded, the gathered
result compared. ``spawn`` runs a test for each op, as its users write them; the others time passes inside one test, cold and warm.
Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh
from torch.testing._internal.distributed._tensor import common_dtensor as upstream

from benchmarks.ops import OPS, Point, passes

RANKS = 4
TOLD = "BENCHMARK_TOLD"  # the file that ranks write to
ROUNDS = "BENCHMARK_ROUNDS"


def sizes(work: list[Point]) -> list[int]:
    return sorted({point.rows for point in work})


def sweep(mesh: DeviceMesh, name: str, rows: int) -> int:
    """Every choice of placements for one op, as upstream's ``_test_op`` goes through them; returns how many there were."""
    arguments = Point(name, rows, ("R",) * OPS[name].inputs).inputs()
    want, count = OPS[name].run(*arguments), 0
    converter = upstream.DTensorConverter(mesh, tuple(arguments), {})
    for chosen, _ in converter:
        assert converter.successful()
        torch.testing.assert_close(OPS[name].run(*chosen).full_tensor(), want)
        count += 1
    return count


def timed(work: list[Point], mesh: DeviceMesh, clock: Callable[[], float]) -> tuple[float, float]:
    """Wall and CPU seconds of one pass; ``clock`` gives the CPU seconds of all ranks."""
    began, used = time.monotonic(), clock()
    count = sum(sweep(mesh, name, rows) for rows in sizes(work) for name in OPS)
    assert count == len(work), (count, len(work))
    return time.monotonic() - began, clock() - used


def process_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def all_ranks_seconds() -> float:
    total = torch.tensor(process_seconds(), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def several(mesh: DeviceMesh, clock: Callable[[], float]) -> dict[str, list[tuple[float, float]]]:
    """Some passes, each cold and then warm."""
    told: dict[str, list[tuple[float, float]]] = {}
    for work in passes("all", int(os.environ[ROUNDS])):
        for state in ("distinct", "repeated"):
            told.setdefault(f"all {state}", []).append(timed(work, mesh, clock))
    return told


def tell(told: object) -> None:
    Path(os.environ[TOLD]).write_text(json.dumps(told))


class Spawn(upstream.DTensorTestBase):
    """A fresh interpreter for each rank of each test; a test for each op."""

    @property
    def world_size(self) -> int:
        return RANKS


def spawned(name: str) -> Callable[[Any], None]:
    @upstream.with_comms
    def test(self: Spawn) -> None:
        sweep(self.build_device_mesh(), name, 8)

    return test


for op in OPS:
    setattr(Spawn, f"test_{op.replace('.', '_')}", spawned(op))


class Persistent(upstream.DTensorContinuousTestBase):
    """Ranks that live as long as the test class."""

    world_size = RANKS

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def test_passes(self) -> None:
        told = several(self.build_device_mesh(), all_ranks_seconds)
        if self.rank == 0:
            tell(told)


class Threads(upstream.DTensorOpTestBase):
    """Ranks that are threads of one process, with collectives that are copies."""

    @property
    def world_size(self) -> int:
        return RANKS

    def test_passes(self) -> None:
        told = several(self.build_device_mesh(), process_seconds)
        if threading.current_thread().name and dist.get_rank() == 0:
            tell(told)


def local() -> int:
    """One process that plays all ranks."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with LocalTensorMode(RANKS):
        tell(several(DeviceMesh("cpu", torch.arange(RANKS)), process_seconds))
    return 0


def run(suite: type[unittest.TestCase]) -> int:
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(suite)
    result = unittest.TextTestRunner(stream=sys.stderr).run(tests)
    return int(not result.wasSuccessful() or bool(result.skipped))


def main() -> int:
    runtime, os.environ[ROUNDS] = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        os.environ[TOLD] = f"{folder}/told"
        contenders = {"spawn": Spawn, "persistent": Persistent, "threads": Threads}
        failed = local() if runtime == "local" else run(contenders[runtime])
        told = json.loads(Path(os.environ[TOLD]).read_text()) if runtime != "spawn" else {}
    count = sum(3**op.inputs for op in OPS.values()) if runtime == "spawn" else len(passes("all", 1)[0])
    print(json.dumps({"cases": {"all": count}, "tests": len(OPS) if runtime == "spawn" else 1, "passes": told}))
    return failed


if __name__ == "__main__":
    sys.exit(main())
