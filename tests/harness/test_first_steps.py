"""What somebody meets first: help, what comes before anything heavy is loaded, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardlaw.conformance.commands import cli

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from shardlaw.conformance.commands.cli import main; "
        "main(['--help']); main(['run', '--bogus']); main(['run', '--help']); "
        "main(['show', '5x6', '--mesh', '2x3', '--place', '_S(0,2),S(1)']); "
        "main(['show', '5x6', '--mesh', '2x3', '--place', '_S(0,2),S(1)', '--svg']); main(['compare', '.', '.']); "
        "heavy = {'torch', 'hypothesis', 'pytest'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "..." not in done.stdout.partition("\nCommands:\n")[2].partition("Usage:")[0], "a sentence is cut"
    for command in ("run", "replay", "repro", "compare", "merge", "laws", "show", "targets", "doctor"):
        assert f"\n  {command} " in done.stdout


def test_a_law_that_is_not_there_is_one_line_once_the_laws_are_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "redistribute.locl"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("shardlaw: no law matches 'redistribute.locl' (nearest: redistribute.local")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_no_arguments_say_where_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Where to begin:\n  shardlaw doctor ")
    assert "Usage: shardlaw" in out


def test_loading_the_laws_loads_no_compiler() -> None:
    code = (
        "import sys; from shardlaw.conformance import compat; from shardlaw.conformance.laws import catalogue; "
        "catalogue(); loaded = {*compat.LAZY_MODULES} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FIRST_LINE = """
import os, sys
from shardlaw.conformance.commands.cli import main
from shardlaw.conformance.world import launch

def start(self, target, folder):
    print("torch" in sys.modules, flush=True)
    os._exit(0)

launch.ForkserverLauncher.__init__ = start
main(["run", "mesh.groups"])
"""


def test_the_first_line_comes_and_the_server_of_the_ranks_starts_before_torch_is_loaded(tmp_path: Path) -> None:
    env = {**os.environ, "SHARDLAW_LAWS": ""}  # laws of one's own may load torch, and are read before
    done = subprocess.run([sys.executable, "-c", FIRST_LINE], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    first, loaded = done.stdout.splitlines()
    assert first.endswith("on gloo: profile smoke, mesh.groups, seed 0; loading torch and starting ranks")
    assert loaded == "False"


def test_shells_can_complete_commands_and_options() -> None:
    env = {**os.environ, "_SHARDLAW_COMPLETE": "complete_bash", "COMP_WORDS": "shardlaw run --cer", "COMP_CWORD": "2"}
    code = "from shardlaw.conformance.commands.cli import app; app(prog_name='shardlaw')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["--certify"], done.stderr
