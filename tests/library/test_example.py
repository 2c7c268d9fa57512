"""The example of a library that ships laws of its own: installed, run by its command and by plain pytest, its faults found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlaw.conformance.laws import catalogue, laws_of, offered
from shardlaw.conformance.plugin import has_foreign_laws
from tests.harness.shells import Shell
from tests.library.surroundings import ROOT

pytestmark = pytest.mark.ranks

EXAMPLE = ROOT / "examples" / "tensor_parallel_laws"


def installed(folder: Path) -> Path:
    """The example as an installer leaves it: its package, and beside it what its project file says."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    shutil.copytree(EXAMPLE / "tplib", folder / "tplib", ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in some.items()) for group, some in groups)
    )
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("site"))


def python(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    for name in ("SHARDLAW_LAWS", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        env.pop(name, None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240
    )


def outcomes(folder: Path) -> dict[str, str]:
    report = json.loads((folder / "report" / "report.json").read_text())
    return {law["id"]: law["outcome"] for law in report["laws"]}


def test_its_laws_hold_but_for_what_is_known(site: Path, tmp_path: Path) -> None:
    done = python(site, tmp_path, "-m", "shardlaw", "run", "tplib.*", "--report", "report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(tmp_path) == {"tplib.embedding": "held", "tplib.column-linear": "expected"}


@pytest.fixture
def shell(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    """Calls commands in this process, which then knows the example's laws too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delenv("SHARDLAW_LAWS", raising=False)
    caches = offered, laws_of, catalogue, has_foreign_laws
    for cache in caches:
        cache.cache_clear()
    yield Shell(tmp_path, capsys)
    for cache in caches:
        cache.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tplib"]:
        del sys.modules[name]


def test_a_planted_fault_is_a_finding(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "shardlaw.toml").write_text('[target.broken]\nbackend = "gloo"\nsetup = "tplib.faults:last_row_is_nobodys"\n')
    done = shell("run", "tplib.*", "--target", "broken", "--report", "report")
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcomes(tmp_path) == {"tplib.embedding": "deviates", "tplib.column-linear": "expected"}


def test_its_own_tests_pass_under_plain_pytest(site: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    done = python(site, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
