"""Upstream's own runtimes on the benchmark's ops: ``python -m benchmarks.upstream spawn|persistent``.

Prints one JSON line: how many cases ran, and the seconds from the first case's start to the last one's end where the runtime
lets one see that.
"""

from __future__ import annotations

import json
import sys
import time
import unittest

import torch
from torch.distributed.tensor import DeviceMesh
from torch.testing._internal.distributed._tensor import common_dtensor as upstream

from benchmarks.ops import OPS, SIZE

RANKS = 4


def sweep(test: unittest.TestCase, mesh: DeviceMesh) -> int:
    """Every op with every choice of placements that upstream's converter makes; returns how many there were."""
    cases = 0
    for op, inputs in OPS.values():
        arguments = [torch.arange(SIZE * SIZE, dtype=torch.float32).reshape(SIZE, SIZE) + i for i in range(inputs)]
        test._test_op(mesh, op, *arguments)
        cases += 3**inputs
    return cases


class Spawn(upstream.DTensorTestBase):
    """A fresh interpreter for each rank of each test."""

    @property
    def world_size(self) -> int:
        return RANKS

    @upstream.with_comms
    def test_ops(self) -> None:
        sweep(self, self.build_device_mesh())


class Persistent(upstream.DTensorContinuousTestBase):
    """Ranks that live as long as the test class."""

    world_size = RANKS

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def test_ops(self) -> None:
        sweep(self, self.build_device_mesh())

    def test_warm(self) -> None:
        sweep(self, self.build_device_mesh())


def main() -> int:
    runtime = {"spawn": Spawn, "persistent": Persistent}[sys.argv[1]]
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(runtime)
    tests = suite.countTestCases()
    began = time.monotonic()
    result = unittest.TextTestRunner(stream=sys.stderr).run(suite)
    cases = sum(3**inputs for _, inputs in OPS.values()) * tests
    print(json.dumps({"cases": cases, "seconds": time.monotonic() - began, "ok": result.wasSuccessful() and not result.skipped}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
