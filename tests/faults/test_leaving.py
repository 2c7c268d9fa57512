"""However the driver ends, no rank, server, socket or file outlives it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import Pool, WorldError
from tests import forked
from tests.faults.conftest import LAWS, case
from tests.faults.driver import main

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]


@contextmanager
def ended(how: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A driver that ends as an interpreter does, and what it has started."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.driver", how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, json.loads(line) if line else pytest.fail(process.communicate()[1])
    finally:
        process.kill()
        process.communicate()


@contextmanager
def killed(how: str) -> Iterator[tuple[forked.Driver, dict[str, Any]]]:
    """A driver that does not come to its end, and what it has started."""
    with forked.driver(lambda: main(how), ROOT) as process:
        line = process.output.readline()
        yield process, json.loads(line) if line.startswith("{") else pytest.fail(line + process.output.read())


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left(started: dict[str, Any], seconds: float) -> list[str]:
    """Which of the processes and folders that a driver had started are still there."""
    until = time.monotonic() + seconds
    while True:
        alive = [f"process {pid}" for pid in started["pids"] if is_alive(pid)]
        found = alive + [folder for folder in [started["folder"]] if os.path.exists(folder)]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["raises", "forgets"])
def test_driver_that_ends_by_itself(how: str) -> None:
    with ended(how) as (process, started):
        out, error = process.communicate(timeout=30)
        assert process.returncode == (how == "raises"), error
        assert len(started["pids"]) == 6
        assert left(started, 0 if how != "forgets" else 5) == []
        for line in out.splitlines():
            assert left(json.loads(line), 0) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_driver_that_is_killed_while_ranks_work(number: signal.Signals) -> None:
    with killed("works") as (process, started):
        time.sleep(0.2)
        process.send_signal(number)
        process.wait(60)
        assert left(started, 5) == []


def test_driver_that_is_killed_while_the_server_loads() -> None:
    with killed("loading") as (process, started):
        assert len(started["pids"]) == 1
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert left(started, 5) == []


def test_ranks_do_not_outlive_their_server() -> None:
    with killed("works") as (process, started):
        # an interrupt from the keyboard reaches the driver alone
        assert {os.getpgid(pid) for pid in started["pids"]}.isdisjoint({os.getpgid(process.pid)})
        (server,) = [pid for pid in started["pids"] if psutil.Process(pid).ppid() == process.pid]
        process.send_signal(signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        ranks = [pid for pid in started["pids"] if pid != server]
        assert left({"pids": ranks, "folder": ""}, 5) == []
    # with both gone nobody is left to remove it
    shutil.rmtree(started["folder"])


def left_in(folder: str) -> list[psutil.Process]:
    """The processes below this one that were started with a pool's folder."""
    return [child for child in psutil.Process().children(recursive=True) if folder in " ".join(child.cmdline())]


def test_close_waits_for_no_busy_rank_and_leaves_nothing_in_this_process() -> None:
    files = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with Pool(Target()) as pool:
        pool.check(LAWS["sums"], [case("sums", 2)])
        pool.check(LAWS["killed"], [case("killed", 2)])
        pool.check(LAWS["sums"], [case("sums", 2), case("sums", 3)])
        # one world is idle now, and the other has a rank that never ends
        pool.submit(LAWS["spins"], case("spins", 2), lambda verdict: None)
        pool.poll()
        folder = pool.folder
        pool.close()
    assert not os.path.exists(folder)
    assert left_in(folder) == []
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)
    with pytest.raises(WorldError, match="closed"):
        pool.poll()


def test_close_before_the_server_is_ready_leaves_nothing() -> None:
    with Pool(Target()) as pool:
        folder = pool.folder
    assert not os.path.exists(folder)
    assert left_in(folder) == []
