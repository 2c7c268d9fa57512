"""A shell in which commands are called in this process, beside a module of laws, and findings as files for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardlaw.conformance import world
from shardlaw.conformance.commands import cli
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.run import start
from shardlaw.conformance.run.finding_file import SCHEMA
from shardlaw.conformance.world import Pool

MODULE = """
import os, time
import torch
import torch.distributed as dist
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.script import Script, Stage


def holds(case, here):
    here.require(True, "wrong-value", "sum", "fine")

def deviates(case, here):
    here.require(here.rank != 1, "wrong-value", "sum", "the sum is wrong", 1, 2)

def meaningless(case, here):
    case.placements("to")

def rejects(case, here):
    here.reject("nobody can tell")

def counts(case, here):
    torch.served = getattr(torch, "served", 0) + 1
    here.require(torch.served == 1, "wrong-value", "count", "served before")

SCRIPT = Script((Stage(2, ("return 1, 1 + (rank == 1)",)),))
def law(name, check):
    return Law(f"module.{name}", f"It {name}.", "here", f"module.{name} world=2", check, script=lambda case: SCRIPT)

LAWS = [law(name, check) for name, check in
        {"holds": holds, "deviates": deviates, "meaningless": meaningless, "rejects": rejects, "counts": counts}.items()]
"""


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


class Shell:
    """Calls commands in this process, from an empty folder beside a module of laws."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Done:
        code = cli.main(list(arguments))
        return Done(code, *self._capsys.readouterr())


def serve_all(pool: Pool, patch: pytest.MonkeyPatch) -> None:
    """Have runs and replays on the target of ``pool`` take their ranks from it: each has worlds of its own, all have one server."""

    def opened(target: Target, *, worlds: int = 1, launch: object = None) -> Pool:
        assert replace(target, expect=()) == replace(pool.target, expect=())  # what is expected is nothing to ranks
        pool.worlds_per_size = worlds
        return pool

    patch.setattr(pool, "close", pool.end_worlds)
    patch.setattr(start, "Pool", opened)
    patch.setattr(world, "Pool", opened)


def refused(done: Done) -> str:
    """The one line that says what is wrong."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("shardlaw: ")
    assert len(lines[0]) < 400
    return lines[0].removeprefix("shardlaw: ")


def stored(folder: Path, text: str, **more: object) -> Path:
    case = Case.parse(text)
    data = {
        "schema": SCHEMA,
        "id": "0badcafe",
        "law": case.law,
        "case": case.to_json(),
        "target": {"name": "gloo", "torch": "2.13.0"},
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "0badcafe.json"
    path.write_text(json.dumps(data))
    return path
