"""The supervisor in each launched process of a run over many hosts: it starts ranks as the driver tells it, tells what becomes of them,
and outlives neither its driver nor the process that launched it."""

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
from shardlaw.conformance.world.manager import roomy
from shardlaw.conformance.world.observer import LocalObserver
from shardlaw.conformance.world.parent_death import die_with_parent
from shardlaw.conformance.world.progress import IDLE, Place
from shardlaw.conformance.world.server import read_target

PULSE_SECONDS = 0.05
HEARTBEAT_SECONDS = 1.0
CALM_SECONDS = 0.25
FAREWELL_SECONDS = 3.0  # for the driver to end in order, after a signal to all of us
PARENT_SIGNAL = signal.SIGUSR2
# what torchrun puts into the environment: ranks of inner worlds must not take it for theirs
LAUNCHED = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


class Agent:
    """Starts, watches and ends the ranks of one launched process, one in each world that it has a part in."""

    def __init__(self, orders: wire.Orders) -> None:
        self._orders = orders
        self._address = (orders.host, orders.port)
        self._driver = wire.connect(self._address, orders.token, orders.process)
        self._frames = protocol.Frames(wire.ToAgent)
        self._launcher: ForkserverLauncher | None = None
        self._folder = tempfile.mkdtemp(prefix="shardlaw-", dir=roomy())
        self._shares = False
        self._observers: dict[int, LocalObserver] = {}
        self._ranks: dict[int, int] = {}
        self._told: dict[int, object] = {}
        self._spoke = self._pulsed = 0.0
        self._until = float("inf")

    def serve(self) -> NoReturn:
        """Until the driver, or whoever launched this process, is gone."""
        try:
            while time.monotonic() < self._until and os.getppid() == self._orders.parent:
                sources: list[socket.socket | ForkserverLauncher] = [self._driver]
                if self._launcher is not None:
                    sources.append(self._launcher)
                ready = select.select(sources, [], [], PULSE_SECONDS if self._observers else CALM_SECONDS)[0]
                if self._launcher in ready:
                    self._heed()
                if self._driver in ready:
                    data = self._driver.recv(1 << 16)
                    if not data:
                        break
                    for message in self._frames.feed(data):
                        self._do(message)
                self._pulse()
        except OSError:
            pass  # the driver is gone
        self.end()

    def end(self) -> NoReturn:
        """Take the ranks along."""
        with suppress(OSError):
            self._driver.close()
        if self._launcher is not None:
            self._launcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def told(self, number: int, _frame: object) -> None:
        """A signal: the end at once where the parent has gone, else soon."""
        if os.getppid() != self._orders.parent:
            self.end()
        if number != PARENT_SIGNAL:
            self._until = min(self._until, time.monotonic() + FAREWELL_SECONDS)

    # What the driver wants

    def _do(self, message: wire.ToAgent) -> None:
        if isinstance(message, wire.Begin):
            self._shares = os.path.exists(f"{message.folder}/{message.mark}")
            self._launcher = ForkserverLauncher(read_target(message.target), self._folder, apart=not self._orders.loopback)
        elif isinstance(message, wire.Start):
            self._start(message)
        elif isinstance(message, wire.Look):
            self._look(message)
        elif message.world in self._observers:
            self._forget(message.world)

    def _start(self, start: wire.Start) -> None:
        assert self._launcher is not None
        devices = (self._orders.device,)
        try:
            with wire.connect(self._address, self._orders.token, self._orders.process, start.world) as stream:
                observer = self._launcher.spawn(start.world, start.size, {start.rank: stream}, devices, start.host, start.port)
        except (OSError, protocol.ProtocolError) as error:
            self._say(wire.Refused(start.world, f"its rank cannot be started and connected: {error}"))
            return
        self._observers[start.world] = observer
        self._ranks[start.world] = start.rank

    def _look(self, look: wire.Look) -> None:
        observer = self._observers.get(look.world)
        if observer is None:
            self._say(wire.Left(look.world, look.turn, b"", "", ""))
            return
        rank = self._ranks[look.world]
        observer.look([rank] if look.dump else ())
        self._tell(look.world, look.turn)

    def _tell(self, world: int, turn: int) -> None:
        observer, rank = self._observers[world], self._ranks[world]
        # the place first: a message that is sent meanwhile is then found among the unsent ones, or in the stream
        self._say(self._seen(world))
        self._say(wire.Left(world, turn, observer.unsent(rank), *observer.left(rank)))

    def _forget(self, world: int) -> None:
        assert self._launcher is not None
        self._launcher.end(world)
        self._observers.pop(world).close()
        del self._ranks[world]
        self._told.pop(world, None)

    # What becomes of the ranks

    def _heed(self) -> None:
        assert self._launcher is not None
        try:
            events = self._launcher.events()
        except EOFError as error:
            self._say(wire.Broken(f"the process that forks them has ended: {error}"))
            self.end()
        for event in events:
            if isinstance(event, protocol.Hello):
                self._say(wire.Greeting(socket.gethostname(), event.problem, self._shares))
            elif isinstance(event, Connected) or event.world not in self._observers:
                continue
            elif isinstance(event, protocol.Exited):
                self._tell(event.world, 0)
                self._say(wire.Exited(event.world, event.status))
            elif event.problem:
                self._say(wire.Refused(event.world, event.problem))
            else:
                self._observers[event.world].pids = event.pids

    def _seen(self, world: int) -> wire.Pulse:
        observer, rank = self._observers[world], self._ranks[world]
        return wire.Pulse(world, observer.place(rank), next(iter(observer.activity()), None), observer.share())

    def _pulse(self) -> None:
        """Tell what has changed, and at least now and then that there is nothing to tell."""
        now = time.monotonic()
        if self._observers and now - self._pulsed >= PULSE_SECONDS:
            self._pulsed = now
            for world in self._observers:
                pulse = self._seen(world)
                if self._told.get(world) != (news := (pulse.place, pulse.activity)):
                    self._told[world] = news
                    self._say(pulse)
        if now - self._spoke > HEARTBEAT_SECONDS:
            self._say(wire.Pulse(0, Place(0, 0, IDLE), None, watch.share()))

    def _say(self, message: wire.FromAgent) -> None:
        self._driver.sendall(protocol.frame(message))
        self._spoke = time.monotonic()


def main(descriptor: int) -> NoReturn:
    """Serve the driver that the orders at ``descriptor`` name."""
    with open(descriptor, "rb") as file:
        orders = msgspec.json.decode(file.read(), type=wire.Orders)
    for name in filter(LAUNCHED.fullmatch, list(os.environ)):
        del os.environ[name]
    for number in (PARENT_SIGNAL, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None if os.getppid() == orders.parent else os._exit(0))
    die_with_parent(PARENT_SIGNAL)
    if os.getppid() != orders.parent:
        os._exit(0)
    try:
        agent = Agent(orders)
    except (OSError, protocol.ProtocolError) as error:
        print(f"shardlaw: process {orders.process}: no driver at {orders.host}:{orders.port}: {error}", file=sys.stderr)
        os._exit(0)
    for number in (PARENT_SIGNAL, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, agent.told)
    agent.serve()
