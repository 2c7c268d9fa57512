"""What is installed: a wheel has all that a run reads, and nothing of the tests."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ_BY_A_RUN = ("*.toml", "*.txt", "*.j2", "*.ini", "py.typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    copied = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not copied:
        pytest.skip("no checkout")
    for name in copied:
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(folder / "tree"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip("setuptools is not installed")
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return zipfile.ZipFile(made)


@pytest.mark.ranks
def test_a_wheel_has_what_a_run_reads(wheel: zipfile.ZipFile) -> None:
    homes = {
        "conformance": "shardlaw/conformance",
        "strategies": "shardlaw/strategies",
        "reference": "shardlaw/reference",
        "public": "shardlaw",
    }
    wanted = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in homes.items()
        for pattern in ("*.py", *READ_BY_A_RUN)
        for path in (ROOT / folder).rglob(pattern)
        if path.name != "ruff.toml"
    }
    assert wanted - {*wheel.namelist()} == set()
    assert "shardlaw/conformance/profiles/2026.1/collectives.txt" in wanted


@pytest.mark.ranks
def test_a_wheel_has_nothing_else_and_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    (about,) = tops - {"shardlaw"}
    said = Parser().parsestr(wheel.read(f"{about}/METADATA").decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (said["Name"], said["Summary"]) == (project["name"], project["description"])
    assert said["Description-Content-Type"] == "text/markdown"
    assert str(said.get_payload()).startswith("# Shardlaw")
    assert "shardlaw = shardlaw.conformance.commands.cli:main" in wheel.read(f"{about}/entry_points.txt").decode()
