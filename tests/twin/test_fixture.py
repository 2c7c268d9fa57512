"""The fixture ``twin`` in somebody's own suite: it passes, or fails with what departs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardlaw

TESTS = """
from torch import nn
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardlaw import Twin

def make(fault=""):
    def shard(model, mesh):
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if fault:
            model[2].register_forward_hook(lambda module, args, output: output * 2)
    return Twin(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
        batch=lambda step: torch.randn(2, 4),
        shard=shard,
        mesh={"tp": 2},
    )

def test_same(twin):
    assert not twin(make, values=("float32",)).departs

def test_other(twin):
    twin(make, options={"fault": "yes"}, values=("float32",), shrink=False)
"""


ASKED = ["make", "target", "options", "sizes", "values", "steps", "seed", "shrink", "resume", "dropout"]
SHOWN = """
import inspect

def test_what_the_fixture_takes(twin):
    assert [*inspect.signature(twin).parameters] == ASKED
"""


def test_what_a_twin_takes_is_shown_to_who_asks() -> None:
    known = inspect.signature(shardlaw.twin, eval_str=False).parameters
    assert [*known] == ASKED
    assert all(one.annotation is not inspect.Parameter.empty for one in known.values())
    for wrong in ({"steps": 0}, {"values": ("float",)}):
        with pytest.raises(shardlaw.UsageError):
            shardlaw.twin("no:matter", **wrong)  # type: ignore[arg-type]


@pytest.mark.ranks
def test_a_twin_in_a_suite_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(f"ASKED = {ASKED}\n{TESTS}{SHOWN}")
    command = [sys.executable, "-m", "pytest", "-p", "shardlaw.conformance.plugin", "-p", "no:cacheprovider", "-q", "test_mine.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "departs first: 2" in done.stdout
    assert "2: its output 0 in step 1" in done.stdout
