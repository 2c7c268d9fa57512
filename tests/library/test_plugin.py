"""What the plugin says before any rank is started: no such target, markers that mean nothing, tests that a target cannot serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

CONFIG = """
[target.mine]
backend = "gloo"
cannot = ["all_to_all"]
"""
TESTS = """
import sys
import pytest

@pytest.mark.shardlaw(needs=["all_to_all"])
def test_needs(world): raise AssertionError
@pytest.mark.shardlaw(needs=["all_to_al"])
def test_unknown_need(world): pass
@pytest.mark.shardlaw(worlds=4)
def test_unknown_word(world): pass
@pytest.mark.shardlaw(world=0)
def test_no_ranks(world): pass
@pytest.mark.shardlaw(world=3)
def test_size(world): assert (world.ranks, world.target.name) == (3, "mine")
def test_default(world): assert world.ranks == 2
"""


def pytest_in(folder: Path, *arguments: str, tests: str = TESTS, laws: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    (folder / "shardlaw.toml").write_text(CONFIG)
    (folder / "test_it.py").write_text(tests)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SHARDLAW_"))}
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    env |= {"PYTHONPATH": path, "SHARDLAW_LAWS": laws, **more}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_markers_and_the_target_of_the_ini_are_read_and_mistakes_of_markers_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nshardlaw_target = mine\n")
    done = pytest_in(tmp_path, "-rs")
    assert "shardlaw: target mine" in done.stdout
    assert "target mine declares that it cannot do all_to_all" in done.stdout
    assert "@pytest.mark.shardlaw: needs: unknown 'all_to_al' (nearest: all_to_all" in done.stdout
    assert "@pytest.mark.shardlaw: unknown 'worlds' (nearest: world)" in done.stdout
    assert "@pytest.mark.shardlaw: a world of 0 ranks: want a whole number from 1 to 64" in done.stdout
    assert "2 passed, 1 skipped, 3 errors" in done.stdout


def test_a_target_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--shardlaw-target", "mien")
    assert (done.returncode, done.stderr.strip()) == (4, "ERROR: shardlaw: no target is called 'mien' (nearest: mine)")


def test_a_session_without_ranks_loads_the_plugin_alone(tmp_path: Path) -> None:
    ours = {"shardlaw", "shardlaw.conformance", "shardlaw.conformance.plugin"}
    tests = f"""
import sys
def test_it():
    assert {{name for name in sys.modules if name.split(".")[0] in ("shardlaw", "hypothesis", "torch")}} == {ours}
"""
    done = pytest_in(tmp_path, "-p", "shardlaw.conformance.plugin", tests=tests, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 passed" in done.stdout, done.stdout


def test_a_project_may_have_folders_that_are_named_like_ours(tmp_path: Path) -> None:
    for name in ("conformance/__init__.py", "reference/__init__.py", "tests/strategies.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("MINE = True\n")
    (tmp_path / "tests" / "test_mine.py").write_text("""
import conformance, reference, strategies
from shardlaw.reference.layout import Layout
from shardlaw.strategies import layouts
def test_mine(): assert conformance.MINE and reference.MINE and strategies.MINE
def test_theirs(world): assert world.target.name == "mine" and layouts and Layout and world.check("redistribute.local").status == "held"
""")
    done = pytest_in(tmp_path, "tests", "--shardlaw-target", "mine")
    assert "shardlaw: target mine" in done.stdout
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_broken_module_of_laws_keeps_nobody_from_their_own_tests(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("LAWS = 3\n")
    plain = "def test_it(): pass\n"
    for laws in ("broken", "nowhere.broken"):
        alone = pytest_in(tmp_path, "test_it.py", tests=plain, laws=laws)
        assert (alone.returncode, "1 passed" in alone.stdout) == (0, True), alone.stdout
    asked = pytest_in(tmp_path, "test_it.py", "broken.py", "--continue-on-collection-errors", tests=plain, laws="broken")
    assert "1 passed, 1 error" in asked.stdout, asked.stdout
    assert "shardlaw: SHARDLAW_LAWS: broken has LAWS = 3: want a list of Law" in asked.stdout
    assert "Traceback" not in asked.stdout + asked.stderr


def test_anybody_tries_laws_beside_their_own_tests(tmp_path: Path) -> None:
    arguments = "--shardlaw", "smoke", "-k", "zebra or mesh.local-rank or mesh.coordinates", "-rx"
    done = pytest_in(tmp_path, *arguments, tests="def test_zebra(): pass\n")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert "1 xfailed" in done.stdout
    assert "On a mesh whose ranks do not ascend" in done.stdout
    assert "shardlaw: " in done.stdout
    report = json.loads((tmp_path / "shardlaw-report" / "report.json").read_text())
    assert [(law["id"], law["outcome"]) for law in report["laws"]] == [("mesh.coordinates", "held"), ("mesh.local-rank", "expected")]
    assert (report["exit"], report["complete"]) == (0, True)


def test_laws_beside_tests_are_of_a_profile_that_is_known(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--shardlaw", "smok")
    assert done.returncode == 4
    assert "smoke" in done.stderr


def test_the_marker_is_registered(tmp_path: Path) -> None:
    assert "@pytest.mark.shardlaw(world=N, needs=[...]): of the ranks" in pytest_in(tmp_path, "--markers").stdout
