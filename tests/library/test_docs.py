"""docs/library.md: every file on the page is written down and every command on it is run; those that call pytest in one process."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.library.surroundings import ROOT

pytestmark = pytest.mark.ranks

PAGE = (ROOT / "docs" / "library.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# how long an example takes says something of the machine, not of the page
PATIENT = """from hypothesis import HealthCheck, settings
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
"""
PROGRAMS = {"pytest": ["-m", "pytest", "-q", "-p", "no:cacheprovider"], "shardlaw": ["-m", "shardlaw"], "python": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "conftest.py").write_text(PATIENT)
    for _, text in BLOCKS:
        if name := re.match(r"# (\w+\.(py|toml))\n", text):
            (folder / name[1]).write_text(text)
    return folder


def test_every_block_is_a_file_or_commands() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "toml", "sh"}
    assert all(language == "sh" or re.match(r"# \w+\.(py|toml)\n", text) for language, text in BLOCKS)


def commands() -> Iterator[str]:
    """The commands of the page in their order; the first that calls pytest has the files of all of them, which share its ranks."""
    lines = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    tests = [line for line in lines if re.fullmatch(r"pytest \w+\.py", line)]
    yield " ".join(["pytest", *(line.removeprefix("pytest ") for line in tests)])
    yield from (line for line in lines if line not in tests)


def test_every_file_of_tests_is_run() -> None:
    files = {name for _, text in BLOCKS for name in re.findall(r"\A# (test_\w+\.py)\n", text)}
    assert files == {*next(commands()).split()[1:]}
    assert len(files) >= 3


@pytest.mark.parametrize("command", [*commands()])
def test_every_command_ends_well(command: str, folder: Path) -> None:
    words = shlex.split(command)
    given = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *arguments = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SHARDLAW_"))}
    path = str(folder)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *PROGRAMS[program], *arguments],
        cwd=folder, env={**env, **given, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
