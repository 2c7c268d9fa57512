"""A run that torchrun has started over many hosts: the process of rank 0 becomes the driver, every other one an agent.

Through torchrun's store, the driver sends its address and the token of the launch. Nothing else uses the store, and no process group of
the launch itself is created: each world has a rendezvous of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.world.parent_death import die_with_parent

if TYPE_CHECKING:
    from shardlaw.conformance.world.hosts.hub import Hub
    from shardlaw.conformance.world.manager import Launch
    from shardlaw.conformance.world.wire import AgentConfig

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"  # set by torchrun in the processes that it starts, and by nothing else
BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from shardlaw.conformance.world.hosts.agent import main; main({descriptor})"
STORE_SECONDS = 300.0
HOSTED_STORE_SECONDS = 30.0  # torchrun starts its store before this process; if the store is gone, so is the driver
REPORT_SECONDS = 20.0  # for a driver to write its report after its parent has ended
UNSET = -1


@dataclass(frozen=True)
class LaunchInfo:
    """One process of a launch of ``size``: its number, its number on its host (``local_rank``), how many are on its host (``local_size``),
    the address of the store, whether torchrun hosts the store, and an id that separates this launch from others that use the store."""

    process: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    store_is_hosted: bool
    launch_id: str

    @property
    def loopback(self) -> bool:
        """Whether all processes are on this machine: no other host could use such an address."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def launch_info(environ: Mapping[str, str] = os.environ) -> LaunchInfo | None:
    """What torchrun's variables say of this process; ``None`` where torchrun has not started it. Raises :class:`UsageError` for values that
    make no sense."""
    if TORCHRUN_VARIABLE not in environ:
        return None

    def number(name: str, *, least: int = 0) -> int:
        text = environ.get(name, "")
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise UsageError(
                f"{TORCHRUN_VARIABLE} is set, but {name} is {text or 'not'}: want what torchrun sets, or {TORCHRUN_VARIABLE} unset"
            )
        return int(text)

    found = LaunchInfo(
        number("RANK"),
        number("WORLD_SIZE", least=1),
        number("LOCAL_RANK"),
        number("LOCAL_WORLD_SIZE", least=1),
        environ.get("MASTER_ADDR", ""),
        number("MASTER_PORT", least=1),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        f"{environ[TORCHRUN_VARIABLE]}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )
    if not found.host:
        raise UsageError(f"{TORCHRUN_VARIABLE} is set, but MASTER_ADDR is not: want what torchrun sets, or {TORCHRUN_VARIABLE} unset")
    if found.process >= found.size:
        raise UsageError(f"RANK is {found.process}, WORLD_SIZE is {found.size}: want a rank below it")
    return found


def is_secondary_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process, with another rank than 0: rank 0 alone prints messages."""
    return TORCHRUN_VARIABLE in environ and environ.get("RANK", "0") != "0"


def run_launched(info: LaunchInfo, world_size: int, run_laws: Callable[[Launch, int], int]) -> int:
    """In rank 0, drive the run and return its exit code; in other ranks, become an agent and never return.

    ``run_laws(launch, ranks)`` gets the launcher, and how many ranks of the largest world are on this machine. Raises :class:`UsageError`
    in every process alike, before any connects to another.
    """
    if world_size > info.size:
        raise UsageError(f"--world-size {world_size}: torchrun has launched {info.size} processes")
    if info.process:
        supervise(info)
    return drive(info, world_size, run_laws)


def supervise(info: LaunchInfo) -> NoReturn:
    """Wait for the driver's address, and replace this process by an agent, which has not loaded torch as this one has for the store."""
    parent = os.getppid()
    die_with_parent(signal.SIGKILL)
    import msgspec

    from shardlaw.conformance.world.wire import AgentConfig

    try:
        config = msgspec.json.decode(_store(info).get(_key(info)), type=AgentConfig)
    except (RuntimeError, msgspec.MsgspecError) as error:
        text = " ".join(str(error).split("\n")[0].split())
        print(f"shardlaw: process {info.process}: no word of the driver at {info.host}:{info.port}: {text}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    command, descriptor = agent_command(msgspec.structs.replace(config, process=info.process, device=info.local_rank, parent=parent))
    os.set_inheritable(descriptor, True)
    os.execv(sys.executable, command)


def drive(info: LaunchInfo, world_size: int, run_laws: Callable[[Launch, int], int]) -> int:
    """Run the laws on ranks of every launched process. Raises :class:`UsageError`."""
    import msgspec

    from shardlaw.conformance.world.hosts.hub import Hub
    from shardlaw.conformance.world.wire import AgentConfig

    hub = Hub(info.host, info.size, loopback=info.loopback)
    try:
        config = AgentConfig(*hub.address, hub.token, UNSET, UNSET, os.getpid(), info.loopback)
        store = _store(info)
        store.set(_key(info), msgspec.json.encode(config))
        _exit_after_parent(os.getppid())
        with _agent(msgspec.structs.replace(config, process=0, device=info.local_rank), hub):
            return run_laws(hub.begin, min(info.local_size, world_size))
    finally:
        hub.close()


@contextmanager
def _agent(config: AgentConfig, hub: Hub) -> Iterator[None]:
    """Run the agent of the driver's own rank in a child process; it ends once the hub is closed."""
    command, descriptor = agent_command(config)
    agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], process_group=0)
    os.close(descriptor)
    try:
        yield
    finally:
        hub.close()
        try:
            agent.wait(5)
        except subprocess.TimeoutExpired:
            agent.kill()  # its ranks go with it
            agent.wait()


def agent_command(config: AgentConfig) -> tuple[list[str], int]:
    """The command of an agent, and the descriptor that it must inherit: it carries ``config``, so that no other process sees the token."""
    import msgspec

    reading, writing = os.pipe()
    os.write(writing, msgspec.json.encode(config))
    os.close(writing)
    path = [entry or os.getcwd() for entry in sys.path]
    return [sys.executable, "-c", BOOTSTRAP.format(path=path, descriptor=reading)], reading


def _store(info: LaunchInfo) -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    leads = info.process == 0 and not info.store_is_hosted
    limit, patience = timedelta(seconds=STORE_SECONDS), timedelta(seconds=HOSTED_STORE_SECONDS if info.store_is_hosted else STORE_SECONDS)
    store = dist.TCPStore(info.host, info.port, None, leads, timeout=patience, wait_for_workers=False)
    store.set_timeout(limit)
    return store


def _key(info: LaunchInfo) -> str:
    return f"shardlaw/{info.launch_id}/driver"


def _exit_after_parent(parent: int) -> None:
    """Exit :data:`REPORT_SECONDS` after the parent has ended, if the hub has not ended the run by then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(REPORT_SECONDS)
        os._exit(3)

    threading.Thread(target=watch, name="parent", daemon=True).start()
