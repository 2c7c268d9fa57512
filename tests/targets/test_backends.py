"""Back ends that somebody else wrote, run by configuration alone: the example package, torch's group that does nothing, one with gaps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.laws import find
from shardlaw.conformance.run.certified_profile import read_profile
from shardlaw.conformance.target.config import find_target
from shardlaw.conformance.world import Pool
from tests.harness.shells import Shell, serve_all

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pypost"

GAPPY = """
import torch.distributed as dist
from pypost.group import PostGroup


class Gappy(PostGroup):
    def alltoall(self, *arguments):
        raise NotImplementedError("gappy: no all_to_all")

    all_to_all_single = alltoall_base = alltoall

def register():
    dist.Backend.register_backend("gappy", lambda options, more: Gappy(options), extended_api=True, devices=["cpu"])
"""
GAPPY_CONFIG = """
[target.silent]
backend = "gappy"
setup = "gappy:register"

[target.frank]
backend = "gappy"
setup = "gappy:register"
cannot = ["all_to_all", "gather", "object_collectives"]
"""
PLANTING = """
import os
from pathlib import Path

import pypost


def register():
    os.environ["PYPOST_FAULT"] = Path(__file__).with_name("fault").read_text()
    pypost.register()
"""
FAKE_CONFIG = """
[target.fake]
backend = "fake"
setup = "torch.testing._internal.distributed.fake_pg:FakeStore"
"""


class User(Shell):
    """Somebody with ``lib`` on the path who calls commands in this process, from ``folder``."""

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "shardlaw-report" / "report.json").read_text())
        return found

    def outcomes(self) -> dict[str, str]:
        return {law["id"]: law["outcome"] for law in self.report()["laws"]}


@dataclass
class Planted:
    """Ranks of the example, of one server, with one fault after another: a rank reads when it starts which that is."""

    pool: Pool
    file: Path

    def plant(self, fault: str) -> None:
        self.file.write_text(fault)
        self.pool.end_worlds()


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``pypost`` is installed: by pip, or as it lies where there is no pip."""
    made = tmp_path_factory.mktemp("installed")
    source = made / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    done = subprocess.run([*pip, str(made / "lib"), str(source)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        shutil.copytree(source / "pypost", made / "lib" / "pypost")
    (made / "lib" / "gappy.py").write_text(GAPPY)
    (made / "lib" / "planting.py").write_text(PLANTING)
    return made / "lib"


@pytest.fixture
def user(lib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> User:
    for name in ("shardlaw.toml", "expect.toml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(lib)
    return User(tmp_path, capfd)


@pytest.fixture(scope="module")
def planted(lib: Path) -> Iterator[Planted]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(EXAMPLE)
        patch.syspath_prepend(lib)
        pool = Pool(replace(find_target("pypost", None, None, 4), setup="planting:register"), worlds=2)
    with pool:
        yield Planted(pool, lib / "fault")


@pytest.fixture
def plant(planted: Planted, user: User, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Plants a fault in the ranks of the runs that follow: runs of this user have ranks of one server, instead of a server each."""
    config = user.folder / "shardlaw.toml"
    config.write_text(config.read_text().replace('"pypost:register"', '"planting:register"'))
    serve_all(planted.pool, monkeypatch)
    return planted.plant


def test_the_config_of_the_example_is_short() -> None:
    assert len((EXAMPLE / "shardlaw.toml").read_text().strip().splitlines()) <= 6


def test_the_example_holds(user: User, lib: Path) -> None:
    """In a process of its own, as somebody would run it who has installed the example."""
    laws = "collective.all-reduce", "collective.all-gather", "collective.reduce-scatter", "collective.new-group", "redistribute.local"
    path = os.pathsep.join(filter(None, [str(lib), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "shardlaw", "run", "--target", "pypost", *laws],
        cwd=user.folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(user.outcomes().values()) <= {"held", "expected"}


FAULTS = [
    ("wrong-reduction", "collective.all-reduce", "collective.all-gather"),
    ("swapped-ranks", "collective.all-gather", "collective.all-reduce"),
    ("dropped-last", "collective.reduce-scatter", "collective.all-reduce"),
    ("lost-wait", "collective.async", "collective.new-group"),
    ("group-order", "collective.new-group", "collective.all-reduce"),
]


def test_the_example_is_certified(user: User) -> None:
    done = user("run", "--certify", "collectives-2026.1", "--target", "pypost")
    assert done.returncode == 0, done.stdout + done.stderr
    told = user.report()["certificate"]
    assert (told["passed"], told["held"], told["missing"]) == (True, told["cases"], 0)
    assert "sha256" in told["loaded"]["packages"]["pypost"]
    assert user("verify", "shardlaw-report").returncode == 0


def test_a_run_with_a_planted_fault_is_not_certified(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPOST_FAULT", "dropped-last")
    done = user("run", "--certify", "collectives-2026.1", "--target", "pypost")
    assert done.returncode == 1, done.stdout + done.stderr
    assert not user.report()["certificate"]["passed"]
    assert user.outcomes()["collective.reduce-scatter"] == "deviates"
    done = user("verify", "shardlaw-report")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("fault", "finds", "holds"), FAULTS)
def test_a_certified_list_has_cases_that_show_a_planted_fault(fault: str, finds: str, holds: str, planted: Planted) -> None:
    """A run of the whole list would find the same, but confirm and shrink it in every law: the cases of two laws tell, the second as a
    run without the fault would."""
    planted.plant(fault)
    listed = read_profile("collectives-2026.1").laws
    assert "deviates" in {verdict.status for verdict in planted.pool.check(find(finds), listed[finds])}
    assert {verdict.status for verdict in planted.pool.check(find(holds), listed[holds])} == {"held"}


@pytest.mark.parametrize(("fault", "finds", "holds"), FAULTS)
def test_a_planted_fault_is_found_and_named(fault: str, finds: str, holds: str, user: User, plant: Callable[[str], None]) -> None:
    plant(fault)
    done = user("run", "--target", "pypost", finds, holds, "--budget", "60s")
    assert done.returncode == 1, done.stdout + done.stderr
    assert user.outcomes() == {finds: "deviates", holds: "held"}
    found = user.report()["findings"]
    assert {one["where"] for one in found if one["kind"] not in ("hang", "crash")} <= {"the back end pypost"}, found


def test_a_fault_that_is_not_known_is_not_planted(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPOST_FAULT", "lost-waits")
    done = user("run", "--target", "pypost", "collective.all-reduce")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "PYPOST_FAULT=lost-waits: unknown fault (known: wrong-reduction, swapped-ranks," in done.stderr


def test_a_known_fault_of_a_collective_is_one_entry(user: User, plant: Callable[[str], None]) -> None:
    plant("swapped-ranks")
    run = "run", "--target", "pypost", "collective.all-gather", "layout.full", "redistribute.large", "--budget", "60s"
    assert user(*run).returncode == 1
    new = [found for found in user.report()["findings"] if found["status"] == "new"]
    assert {found["law"] for found in new} == {"collective.all-gather", "layout.full", "redistribute.large"}
    assert {found["where"] for found in new} == {"the back end pypost"}
    notes = {found["note"] for found in new if not found["law"].startswith("collective.")}
    assert notes == {"not shrunk: it calls all_gather, which the back end does wrong"}
    done = user("expect", "update", "shardlaw-report", "-o", "mine.toml")
    assert "1 entry written to mine.toml" in done.stdout, done.stdout + done.stderr
    mine = user.folder / "mine.toml"
    mine.write_text(mine.read_text().replace('reason = "..."', 'reason = "all_gather swaps what the last two members gave"'))
    done = user(*run, "--seed", "1", "--expect", "mine.toml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_group_that_does_nothing_is_told_to_do_nothing(user: User) -> None:
    (user.folder / "shardlaw.toml").write_text(FAKE_CONFIG)
    laws = "collective.all-reduce", "collective.broadcast", "redistribute.local", "mesh.coordinates"
    done = user("run", "--target", "fake", *laws, "--budget", "60s")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    found = user.outcomes()
    assert [found[law] for law in laws] == ["deviates", "deviates", "deviates", "held"]


def test_a_gap_that_is_not_declared_is_a_finding(user: User) -> None:
    (user.folder / "shardlaw.toml").write_text(GAPPY_CONFIG)
    done = user("run", "--target", "silent", "collective.all-to-all", "collective.gather", "--budget", "60s")
    assert done.returncode == 1, done.stdout + done.stderr
    assert user.outcomes() == {"collective.all-to-all": "deviates", "collective.gather": "held"}
    assert {found["kind"] for found in user.report()["findings"]} <= {"raised", "divergence"}
    assert "gappy: no all_to_all" in done.stdout


def test_what_is_declared_is_counted_and_what_works_all_the_same_is_stale(user: User) -> None:
    (user.folder / "shardlaw.toml").write_text(GAPPY_CONFIG)
    laws = "collective.all-to-all", "collective.functional[permute_tensor]", "collective.gather", "collective.broadcast"
    done = user("run", "--target", "frank", *laws)
    assert done.returncode == 0, done.stdout + done.stderr
    report = user.report()
    outcomes = [(law["id"], law["outcome"], law["reason"]) for law in report["laws"]]
    assert sorted(outcomes) == [
        ("collective.all-to-all", "untested", "the target declares that it cannot do all_to_all"),
        ("collective.broadcast", "held", None),
        ("collective.functional[permute_tensor]", "untested", "the target declares that it cannot do all_to_all"),
        ("collective.gather", "untested", "the target declares that it cannot do gather"),
    ]
    assert report["target"]["stale"] == ["gather", "object_collectives"]
    for line in (
        "cannot all_to_all: 2 laws untested: collective.all-to-all, collective.functional[permute_tensor]",
        "cannot gather: 1 law untested: collective.gather; stale: it works on two ranks",
        "cannot object_collectives: no law of this run needs it; stale: it works on two ranks",
    ):
        assert f"  {line}\n" in done.stdout
    assert "cannot all\\_to\\_all: 2 laws untested" in (user.folder / "shardlaw-report" / "report.md").read_text()


def test_probing_tells_gaps_and_what_is_stale(user: User) -> None:
    (user.folder / "shardlaw.toml").write_text(GAPPY_CONFIG)
    done = user("targets", "--probe")
    assert done.returncode == 0, done.stdout + done.stderr
    silent, frank = done.stdout.split("silent: ")[1].split("frank: ")
    assert "all_to_all          undeclared: raised: every rank raised NotImplementedError: gappy: no all_to_all" in silent
    assert 'cannot = ["all_to_all", "p2p_any_source"]' in silent
    assert "all_to_all          declared missing\n" in frank
    assert "gather              stale: declared missing, but it works" in frank
    assert "reduce              works" in frank


@pytest.mark.parametrize(
    ("body", "limit", "message"),
    [
        ("raise RuntimeError('no card')", 90, "ended while it started: RuntimeError: no card"),
        ("import not_there", 90, "ended while it started: ModuleNotFoundError: No module named 'not_there'"),
        ("os._exit(7)", 90, "ended while it started: exit code 7"),
        ("time.sleep(60)", 3, "of 2 were not ready within 3 s (startup_timeout)"),
    ],
)
def test_a_back_end_that_cannot_start_ends_a_run_with_one_line(
    body: str, limit: int, message: str, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(user.folder)
    (user.folder / "mine.py").write_text(f"import os, time\n\n\ndef register():\n    {body}\n")
    (user.folder / "shardlaw.toml").write_text(f'[target.mine]\nbackend = "gloo"\nsetup = "mine:register"\nstartup_timeout = {limit}\n')
    done = user("run", "--target", "mine", "collective.all-reduce")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("shardlaw: target mine cannot start: rank")
    assert line.endswith(message)
    assert user.report()["exit"] == 2
