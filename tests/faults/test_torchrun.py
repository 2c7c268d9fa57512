"""Two agents of torchrun on one machine, two processes each: one driver, one report, and an end for all that is started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.world.hosts import torchrun
from shardlaw.conformance.world.hosts.torchrun import LaunchInfo, is_secondary_process, launch_info, run_launched
from shardlaw.conformance.world.launch import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
LAUNCHED = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@contextmanager
def launched(report: Path, *arguments: str, nodes: int = 2, processes: int = 2) -> Iterator[list["subprocess.Popen[str]"]]:
    """Agents of torchrun, one for each node, that run the same command."""
    port = free_port()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "SHARDLAW_LAWS": ""}
    agents: list[subprocess.Popen[str]] = []
    try:
        for node in range(nodes):
            place = [f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={processes}"]
            command = [sys.executable, "-m", "torch.distributed.run", *place]
            command += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "shardlaw", "run", *arguments, "--report", str(report)]
            agents.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=report.parent, env=env)
            )
        yield agents
    finally:
        for agent in agents:
            for process in below(agent):
                process.kill()
            agent.kill()
            agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()


def below(agent: "subprocess.Popen[str]") -> list[psutil.Process]:
    try:
        return psutil.Process(agent.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def read(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((report / "report.json").read_text())
    return found


def wait_for_cases(report: Path, agents: list["subprocess.Popen[str]"]) -> None:
    until = time.monotonic() + 200
    while not ((report / "cases.txt").exists() and (report / "cases.txt").stat().st_size):
        assert all(agent.poll() is None for agent in agents), [agent.communicate()[0] for agent in agents]
        assert time.monotonic() < until, "no case was judged"
        time.sleep(0.1)


def test_run_over_two_agents_finds_what_a_run_on_one_machine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["redistribute.same", "mesh.local-rank", "collective.barrier", "--no-expect"]
    with launched(tmp_path / "far", *asked) as agents:
        out = [agent.communicate(timeout=200)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [1, 0], out
    assert "exit 1: " in out[0]
    assert "shardlaw" not in out[1]
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *asked, "--world-size", "4", "--report", "near"]) == 1
    far, near = read(tmp_path / "far"), read(tmp_path / "near")
    assert (far["exit"], far["complete"], far["target"]["world_size"]) == (1, True, 4)
    assert [found["law"] for found in far["findings"]] == ["mesh.local-rank"]
    assert [found["id"] for found in far["findings"]] == [found["id"] for found in near["findings"]]
    cases = [sorted((tmp_path / one / "cases.txt").read_text().splitlines()) for one in ("far", "near")]
    assert cases[0] == cases[1]


@pytest.mark.parametrize("code", [0, 1])
def test_driver_ends_with_the_code_of_its_run(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_exit_after_parent", lambda parent: None)  # these tests' own
    place = LaunchInfo(0, 1, 0, 1, "127.0.0.1", free_port(), False, "none/0")
    assert run_launched(place, 1, lambda launch, ranks: code) == code


@pytest.mark.parametrize(("lost", "processes"), [(0, 1), (1, 2)])
def test_run_that_loses_an_agent(tmp_path: Path, lost: int, processes: int) -> None:
    report = tmp_path / "report"
    with launched(report, "redistribute.same", "redistribute.local", "--profile", "nightly", processes=processes) as agents:
        wait_for_cases(report, agents)
        theirs = [process for agent in agents for process in below(agent)]
        # of torchrun's own processes: a driver or supervisor each, an agent beside the driver, a server and a rank each
        assert len(theirs) >= 2 * processes * 3 + 1
        agents[lost].send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(theirs, 30)
        assert [process.cmdline() for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        if lost == 1:
            assert agents[0].wait(30) == 1  # torchrun's own code for whatever its process ended with
    told = read(report)
    assert (told["exit"], told["complete"], told["stopped_by"]) == (3, False, "a lost host")
    assert "the run broke here: " in (report / "report.json").read_text()
    assert (report / "report.md").exists()


def test_request_that_is_refused_is_refused_once(tmp_path: Path) -> None:
    with launched(tmp_path / "report", "redistribute.*", "--world-size", "9", nodes=1) as (agent,):
        out = agent.communicate(timeout=100)[0]
        assert out.count("shardlaw: --world-size 9: torchrun has launched 2 processes") == 1
        assert agent.returncode == 1


def test_place_of_a_launched_process() -> None:
    found = launch_info(LAUNCHED)
    assert found is not None
    assert (found.process, found.size, found.local_rank, found.local_size, found.store_is_hosted, found.loopback) == (
        3,
        4,
        1,
        2,
        True,
        True,
    )
    assert launch_info({**LAUNCHED, "MASTER_ADDR": "10.0.0.1"}).loopback is False  # type: ignore[union-attr]
    assert is_secondary_process(LAUNCHED)
    assert not is_secondary_process({**LAUNCHED, "RANK": "0"})


def test_shell_that_has_a_rank_by_accident_is_no_launch() -> None:
    by_accident = {name: value for name, value in LAUNCHED.items() if name != "TORCHELASTIC_RUN_ID"}
    assert launch_info(by_accident) is None
    assert not is_secondary_process(by_accident)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"RANK": "x"}, "RANK is x"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"RANK": "4"}, "RANK is 4, WORLD_SIZE is 4"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not"),
    ],
)
def test_place_that_makes_no_sense_is_refused(change: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        launch_info({**LAUNCHED, **change})
