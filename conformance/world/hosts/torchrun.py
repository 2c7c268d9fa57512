"""A run that torchrun has started over many hosts: the process of rank 0 becomes the driver, every other one the supervisor of its ranks.

They meet at the store of torchrun, through which the driver gives its address and the token of the launch. Nothing else uses that
store, and no process group of the launch itself is ever made: worlds meet at ports of their own.
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
    from shardlaw.conformance.world.wire import Orders

SIGN = "TORCHELASTIC_RUN_ID"  # who starts processes for torchrun sets this; no shell has it by accident
BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from shardlaw.conformance.world.hosts.agent import main; main({descriptor})"
STORE_SECONDS = 300.0
HOSTED_SECONDS = 30.0  # where torchrun hosts the store, it is there before this process is; if it has gone, so has the driver
LAST_ORDERS_SECONDS = 20.0  # for a driver without a parent to write its report
UNNAMED = -1


@dataclass(frozen=True)
class LaunchInfo:
    """The place of this process in a launch of ``size``: its number, its number on this host, how many are on this host, where the store
    is, whether torchrun hosts that, and what tells this launch from others that use the store."""

    process: int
    size: int
    device: int
    beside: int
    host: str
    port: int
    hosted: bool
    launch: str

    @property
    def loopback(self) -> bool:
        """Whether all is on this machine: no other host could use such an address."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def launch_info(environ: Mapping[str, str] = os.environ) -> LaunchInfo | None:
    """The place that torchrun has given to this process, if it has started it. Raises :class:`UsageError` for one that makes no sense."""
    if SIGN not in environ:
        return None

    def number(name: str, *, least: int = 0) -> int:
        text = environ.get(name, "")
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise UsageError(f"{SIGN} is set, but {name} is {text or 'not'}: want what torchrun sets, or {SIGN} unset")
        return int(text)

    found = LaunchInfo(
        number("RANK"),
        number("WORLD_SIZE", least=1),
        number("LOCAL_RANK"),
        number("LOCAL_WORLD_SIZE", least=1),
        environ.get("MASTER_ADDR", ""),
        number("MASTER_PORT", least=1),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        f"{environ[SIGN]}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )
    if not found.host:
        raise UsageError(f"{SIGN} is set, but MASTER_ADDR is not: want what torchrun sets, or {SIGN} unset")
    if found.process >= found.size:
        raise UsageError(f"RANK is {found.process}, WORLD_SIZE is {found.size}: want a rank below it")
    return found


def follows(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is one of torchrun's processes that have nothing to say to a person: rank 0 says it."""
    return SIGN in environ and environ.get("RANK", "0") != "0"


def run(place: LaunchInfo, world_size: int, run_laws: Callable[[Launch, int], int]) -> int:
    """Drive the run, or supervise ranks for it, which does not return; returns the driver's exit code. ``run_laws`` gets what starts ranks,
    and how many of the largest world are on this machine. Raises :class:`UsageError`, for what every process can see of itself before any
    looks for another, which may be gone by then."""
    if world_size > place.size:
        raise UsageError(f"--world-size {world_size}: torchrun has launched {place.size} processes")
    if place.process:
        supervise(place)
    return drive(place, world_size, run_laws)


def supervise(place: LaunchInfo) -> NoReturn:
    """Find the driver, and become the agent of this process's ranks. Another program takes over: torch, which the store needs, is shed."""
    parent = os.getppid()
    die_with_parent(signal.SIGKILL)
    import msgspec

    from shardlaw.conformance.world.wire import Orders

    try:
        orders = msgspec.json.decode(_store(place).get(_key(place)), type=Orders)
    except (RuntimeError, msgspec.MsgspecError) as error:
        text = " ".join(str(error).split("\n")[0].split())
        print(f"shardlaw: process {place.process}: no word of the driver at {place.host}:{place.port}: {text}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    command, descriptor = agent_command(msgspec.structs.replace(orders, process=place.process, device=place.device, parent=parent))
    os.set_inheritable(descriptor, True)
    os.execv(sys.executable, command)


def drive(place: LaunchInfo, world_size: int, run_laws: Callable[[Launch, int], int]) -> int:
    """Run the laws on ranks of every launched process. Raises :class:`UsageError`."""
    import msgspec

    from shardlaw.conformance.world.hosts.hub import Hub
    from shardlaw.conformance.world.wire import Orders

    hub = Hub(place.host, place.size, loopback=place.loopback)
    try:
        orders = Orders(*hub.address, hub.token, UNNAMED, UNNAMED, os.getpid(), place.loopback)
        store = _store(place)
        store.set(_key(place), msgspec.json.encode(orders))
        _fear_for(os.getppid())
        with _agent(msgspec.structs.replace(orders, process=0, device=place.device), hub):
            return run_laws(hub.begin, min(place.beside, world_size))
    finally:
        hub.close()


@contextmanager
def _agent(orders: Orders, hub: Hub) -> Iterator[None]:
    """The agent of the driver's own process, in a process beside it; it ends once the hub is closed."""
    command, descriptor = agent_command(orders)
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


def agent_command(orders: Orders) -> tuple[list[str], int]:
    """The command of an agent with these orders, and a descriptor that it must inherit: nobody else sees the token."""
    import msgspec

    reading, writing = os.pipe()
    os.write(writing, msgspec.json.encode(orders))
    os.close(writing)
    path = [entry or os.getcwd() for entry in sys.path]
    return [sys.executable, "-c", BOOTSTRAP.format(path=path, descriptor=reading)], reading


def _store(place: LaunchInfo) -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    leads = place.process == 0 and not place.hosted
    limit, patience = timedelta(seconds=STORE_SECONDS), timedelta(seconds=HOSTED_SECONDS if place.hosted else STORE_SECONDS)
    store = dist.TCPStore(place.host, place.port, None, leads, timeout=patience, wait_for_workers=False)
    store.set_timeout(limit)
    return store


def _key(place: LaunchInfo) -> str:
    return f"shardlaw/{place.launch}/driver"


def _fear_for(parent: int) -> None:
    """See to it that this process does not outlive its parent by much: the hub notices, this makes sure."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(LAST_ORDERS_SECONDS)
        os._exit(3)

    threading.Thread(target=watch, name="parent", daemon=True).start()
