"""The documents' program on checkpoints as an example: it runs with one command and prints what is right."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.laws.planting import ROOT


def printed(path: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_each_layout_computes_the_same_and_loads_what_each_other_saved() -> None:
    lines = printed("checkpoint_example/checkpoint_example.py")
    assert len(lines) == 12
    assert not [line for line in lines if not line.endswith(("of the dense model", "equal"))]
