"""A run that is ended from outside: what it had found stands, its report can be read, and nothing of it stays behind."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.report.reporter import Reporter
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.run.start import start_run
from shardlaw.conformance.target.config import find_target
from tests.forked import Driver, driver

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]
SECONDS = 5  # within which everything is gone


def read(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((report / "report.json").read_text())
    return found


@contextmanager
def running(report: Path, *laws: str) -> Iterator[Driver]:
    """A run that has judged some cases and has many more to judge."""
    arguments = ["run", *laws, "--profile", "nightly", "--report", str(report)]
    with driver(lambda: cli.main(arguments), report.parent) as process:
        until = time.monotonic() + 90
        while not ((report / "cases.txt").exists() and (report / "cases.txt").stat().st_size):
            assert process.poll() is None, process.output.read()
            assert time.monotonic() < until, "no case was judged"
            time.sleep(0.05)
        yield process


def alive(processes: list[psutil.Process]) -> list[int]:
    """Those that are still there when the time is up."""
    _, left = psutil.wait_procs(processes, SECONDS)
    return [process.pid for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def command(process: psutil.Process) -> str:
    """What a process was started with; nothing of one that has ended: worlds come and go."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_run_that_is_ended(tmp_path: Path, number: signal.Signals, code: int) -> None:
    report = tmp_path / "report"
    with running(report, "redistribute.same", "redistribute.local") as process:
        theirs = psutil.Process(process.pid).children(recursive=True)
        assert len(theirs) > 2, "no ranks to outlive the run"
        folders = {part for one in theirs for part in command(one).split("'") if part.startswith("/") and "shardlaw-" in part}
        process.send_signal(number)
        assert process.wait(30) == code
        assert alive(theirs) == []
        assert [folder for folder in folders if os.path.exists(folder)] == []
    told = read(report)
    assert (told["complete"], told["stopped_by"]) == (False, {130: "interrupt", 143: "SIGTERM"}.get(code))
    assert " redistribute." in (report / "cases.txt").read_text()
    assert (report / "report.md").exists() == (code != -9)
    ElementTree.parse(report / "junit.xml")


def test_run_whose_driver_breaks(tmp_path: Path) -> None:
    # the folder for findings is taken away: writing the next one fails inside the driver
    report = tmp_path / "report"
    with running(report, "redistribute.same", "mesh.group-order", "--no-expect") as process:
        theirs = psutil.Process(process.pid).children(recursive=True)
        shutil.rmtree(report / "findings")
        (report / "findings").write_text("in the way")
        assert process.wait(90) in (1, 3), process.output.read()
        assert alive(theirs) == []
    assert read(report)["laws"]


def test_the_law_after_a_break_has_no_turn_although_it_was_fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = RunRequest(laws=("mesh.group-order", "mesh.copies"), no_expect=True, report=tmp_path / "report")
    run = start_run(request, find_target("gloo", None, None, 4), Reporter(request.report))
    try:
        first, second = sorted(run.laws, key=lambda law: law.id == "mesh.copies")

        def unwritable(*_: object) -> None:
            raise OSError("no room")

        monkeypatch.setattr(run.listener, "on_finding", unwritable)
        run.try_law(first, [second])
        run.try_law(second)
    finally:
        run.close()
    assert str(run.failure) == "no room"
    assert run.results["mesh.group-order"].reason == "the run broke here"
    after = run.results["mesh.copies"]
    assert (after.outcome, after.cases, after.reason) == ("untested", 0, "the run was ended before it, by an error of the harness")
