"""The supervisor in each launched process of a run over many hosts. It starts ranks on the driver's request, reports their state, and ends
when its driver or the process that launched it ends."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from typing import NoReturn

import msgspec

from shardlaw.conformance.world import protocol, watch, wire
from shardlaw.conformance.world.launch import Connected, ForkserverLauncher
from shardlaw.conformance.world.manager import temporary_root
from shardlaw.conformance.world.observer import LocalObserver
from shardlaw.conformance.world.parent_death import die_with_parent
from shardlaw.conformance.world.progress import IDLE, Position

STATUS_SECONDS = 0.05
HEARTBEAT_SECONDS = 1.0
IDLE_SECONDS = 0.25
EXIT_SECONDS = 3.0  # for the driver to end normally, after a signal to the whole launch
PARENT_SIGNAL = signal.SIGUSR2
SIGNALS = PARENT_SIGNAL, signal.SIGINT, signal.SIGTERM
# variables that torchrun sets, and that ranks of worlds must not see
TORCHRUN_VARIABLES = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


class Agent:
    """Starts, watches and ends the ranks of one launched process: at most one in each world."""

    def __init__(self, config: wire.AgentConfig) -> None:
        self._config = config
        self._address = (config.host, config.port)
        self._driver = wire.connect(self._address, config.token, config.process)
        self._frames = protocol.FrameDecoder(wire.ToAgent)
        self._launcher: ForkserverLauncher | None = None
        self._folder = tempfile.mkdtemp(prefix="shardlaw-", dir=temporary_root())
        self._shares_folder = False
        self._observers: dict[int, LocalObserver] = {}
        self._ranks: dict[int, int] = {}
        self._last_status: dict[int, object] = {}
        self._last_sent = self._last_check = 0.0
        self._deadline = float("inf")

    def serve(self) -> NoReturn:
        """Handle messages until the driver, or the process that launched this one, has ended."""
        try:
            while time.monotonic() < self._deadline and os.getppid() == self._config.parent:
                sources: list[socket.socket | ForkserverLauncher] = [self._driver]
                if self._launcher is not None:
                    sources.append(self._launcher)
                ready = select.select(sources, [], [], STATUS_SECONDS if self._observers else IDLE_SECONDS)[0]
                if self._launcher in ready:
                    self._handle_launcher_events()
                if self._driver in ready:
                    data = self._driver.recv(1 << 16)
                    if not data:
                        break
                    for message in self._frames.feed(data):
                        self._handle_message(message)
                self._send_statuses()
        except OSError:
            pass  # the driver has ended
        self.shut_down()

    def shut_down(self) -> NoReturn:
        """End all ranks, remove the files, and exit."""
        for number in SIGNALS:  # a handler that comes back here would wait for the launcher a second time, without end
            signal.signal(number, signal.SIG_IGN)
        with suppress(OSError):
            self._driver.close()
        if self._launcher is not None:
            self._launcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def on_signal(self, number: int, _frame: object) -> None:
        """Exit at once if the parent has ended, else (Ctrl-C, SIGTERM) within :data:`EXIT_SECONDS`."""
        if os.getppid() != self._config.parent:
            self.shut_down()
        if number != PARENT_SIGNAL:
            self._deadline = min(self._deadline, time.monotonic() + EXIT_SECONDS)

    def _handle_message(self, message: wire.ToAgent) -> None:
        if isinstance(message, wire.Begin):
            self._shares_folder = os.path.exists(f"{message.folder}/{message.mark}")
            self._launcher = ForkserverLauncher(message.target, self._folder, multi_host=not self._config.loopback)
        elif isinstance(message, wire.StartRank):
            self._start_rank(message)
        elif isinstance(message, wire.RequestReport):
            self._report(message)
        elif message.world in self._observers:
            self._end_rank(message.world)

    def _start_rank(self, start: wire.StartRank) -> None:
        assert self._launcher is not None
        devices = (self._config.device,)
        try:
            with wire.connect(self._address, self._config.token, self._config.process, start.world) as stream:
                observer = self._launcher.spawn(start.world, start.size, {start.rank: stream}, devices, start.host, start.port)
        except (OSError, protocol.ProtocolError) as error:
            self._send(wire.StartFailed(start.world, f"its rank cannot be started and connected: {error}"))
            return
        self._observers[start.world] = observer
        self._ranks[start.world] = start.rank

    def _report(self, request: wire.RequestReport) -> None:
        observer = self._observers.get(request.world)
        if observer is None:
            self._send(wire.RankReport(request.world, request.request, b"", "", ""))
            return
        rank = self._ranks[request.world]
        observer.refresh([rank] if request.dump else ())
        self._send_report(request.world, request.request)

    def _send_report(self, world: int, request: int) -> None:
        observer, rank = self._observers[world], self._ranks[world]
        # the position first: a message that the rank sends meanwhile is then in the report or in the stream
        self._send(self._status(world))
        self._send(wire.RankReport(world, request, observer.unsent(rank), *observer.stacks_and_output(rank)))

    def _end_rank(self, world: int) -> None:
        assert self._launcher is not None
        self._launcher.kill_world(world)
        self._observers.pop(world).close()
        del self._ranks[world]
        self._last_status.pop(world, None)

    def _handle_launcher_events(self) -> None:
        assert self._launcher is not None
        try:
            events = self._launcher.read_events()
        except EOFError as error:
            self._send(wire.AgentFailed(f"the process that forks them has ended: {error}"))
            self.shut_down()
        for event in events:
            if isinstance(event, protocol.Hello):
                self._send(wire.AgentReady(socket.gethostname(), event.problem, self._shares_folder))
            elif isinstance(event, Connected) or event.world not in self._observers:
                continue
            elif isinstance(event, protocol.Exited):
                self._send_report(event.world, 0)
                self._send(wire.Exited(event.world, event.status))
            elif event.problem:
                self._send(wire.StartFailed(event.world, event.problem))
            else:
                self._observers[event.world].pids = event.pids

    def _status(self, world: int) -> wire.RankStatus:
        observer, rank = self._observers[world], self._ranks[world]
        return wire.RankStatus(world, observer.position(rank), next(iter(observer.activity()), None), observer.cpu_share())

    def _send_statuses(self) -> None:
        """Send the status of each rank that has changed, and at least a heartbeat each :data:`HEARTBEAT_SECONDS`."""
        now = time.monotonic()
        if self._observers and now - self._last_check >= STATUS_SECONDS:
            self._last_check = now
            for world in self._observers:
                status = self._status(world)
                if self._last_status.get(world) != (news := (status.position, status.activity)):
                    self._last_status[world] = news
                    self._send(status)
        if now - self._last_sent > HEARTBEAT_SECONDS:
            self._send(wire.RankStatus(0, Position(0, 0, IDLE), None, watch.cpu_share()))

    def _send(self, message: wire.FromAgent) -> None:
        self._driver.sendall(protocol.encode_frame(message))
        self._last_sent = time.monotonic()


def main(descriptor: int) -> NoReturn:
    """Read an :class:`~shardlaw.conformance.world.wire.AgentConfig` from ``descriptor``, and serve its driver."""
    with open(descriptor, "rb") as file:
        config = msgspec.json.decode(file.read(), type=wire.AgentConfig)
    for name in filter(TORCHRUN_VARIABLES.fullmatch, list(os.environ)):
        del os.environ[name]
    for number in SIGNALS:
        signal.signal(number, lambda *_: None if os.getppid() == config.parent else os._exit(0))
    die_with_parent(PARENT_SIGNAL)
    if os.getppid() != config.parent:
        os._exit(0)
    try:
        agent = Agent(config)
    except (OSError, protocol.ProtocolError) as error:
        print(f"shardlaw: process {config.process}: no driver at {config.host}:{config.port}: {error}", file=sys.stderr)
        os._exit(0)
    for number in SIGNALS:
        signal.signal(number, agent.on_signal)
    agent.serve()
