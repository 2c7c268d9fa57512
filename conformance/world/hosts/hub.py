"""The launcher over many hosts: on each of them agents start ranks, as this tells them, and tell what becomes of these."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import protocol, signals, wire
from shardlaw.conformance.world.launch import Connected, LostError, WorldError, free_port
from shardlaw.conformance.world.progress import IDLE, Place
from shardlaw.conformance.world.watch import Activity

GREETING_SECONDS = 60.0  # beyond the target's own limit: every host loads torch first
SILENCE_SECONDS = 20.0  # of an agent, while the driver listens
LONGEST_SILENCE_STEP = 1.0  # of the clock, however long the driver was away
LOOK_SECONDS = 2.0
GATHER_SECONDS = 0.3  # for all that one loss takes with it
MARK = "mark"


@dataclass(eq=False)
class Agent:
    """The agent of one launched process, once it has connected. ``silent`` is for how many seconds nothing came from it."""

    process: int
    stream: socket.socket
    frames: protocol.Frames = field(default_factory=lambda: protocol.Frames(wire.FromAgent))
    greeting: wire.Greeting | None = None
    silent: float = 0.0
    gone: bool = False

    def send(self, message: wire.ToAgent) -> None:
        """One that is gone shows by its stream's end."""
        with suppress(OSError):
            self.stream.sendall(protocol.frame(message))


class FarObserver:
    """The ranks of a world on many hosts, as their agents have told last; each rank's agent is in ``agents``."""

    def __init__(self, hub: Hub, world: int, agents: Sequence[Agent]) -> None:
        self.agents = agents
        self._hub = hub
        self._world = world
        self.pulses: dict[int, wire.Pulse] = {}
        self.lefts: dict[int, wire.Left] = {}
        self.turns: dict[int, int] = {}

    def place(self, rank: int) -> Place:
        return self.pulses[rank].place if rank in self.pulses else Place(0, 0, IDLE)

    def unsent(self, rank: int) -> bytes:
        return self.lefts[rank].unsent if rank in self.lefts else b""

    def left(self, rank: int) -> tuple[str, str]:
        return (self.lefts[rank].stack, self.lefts[rank].output) if rank in self.lefts else ("", "")

    def activity(self) -> Sequence[Activity]:
        return [pulse.activity for pulse in self.pulses.values() if pulse.activity is not None]

    def share(self) -> float:
        return min((pulse.share for pulse in self.pulses.values()), default=1.0)

    def look(self, dump: Collection[int] = ()) -> None:
        self._hub.look(self._world, dump)

    def close(self) -> None:
        """Nothing of it is here."""


class Hub:
    """Starts ranks through the agents of ``size`` launched processes, which connect to ``host``; those of a small world are spread evenly.

    It listens from the start; :meth:`begin`, the launcher of a pool, tells it what for. ``host`` is what agents and ranks call this
    machine.
    """

    def __init__(self, host: str, size: int, *, loopback: bool) -> None:
        self.size = size
        self.token = secrets.token_bytes(32)
        self._host = host
        self._loopback = loopback
        self._parent = os.getppid()
        wide = not loopback and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if wide or ":" in host else socket.AF_INET
        self._listener = socket.create_server((host if loopback else "", 0), family=family, backlog=2 * size + 128, dualstack_ipv6=wide)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        # what was heard while somebody waited for something else is told through this
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._begin: wire.Begin | None = None
        self._shares: bool | None = None
        self._patience = 0.0
        self._agents: dict[int, Agent] = {}
        self._worlds: dict[int, FarObserver] = {}
        self._events: list[protocol.FromServer | Connected] = []
        self._lost: list[str] = []
        self._turns = 0
        self._listened = time.monotonic()
        self._closed = False

    @property
    def address(self) -> tuple[str, int]:
        """Where agents connect to."""
        port: int = self._listener.getsockname()[1]
        return self._host, port

    def begin(self, target: Target, folder: str) -> Hub:
        """Have the ranks of this target started from now on. ``folder`` is the pool's."""
        mark = f"{MARK}-{secrets.token_hex(8)}"
        with open(f"{folder}/{mark}", "w"):
            pass
        self._begin = wire.Begin(asdict(target), folder, mark)
        self._patience = target.startup_timeout + GREETING_SECONDS
        for agent in self._agents.values():
            agent.send(self._begin)
        return self

    # The launcher's side

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def shares_files(self) -> bool:
        if self._shares is None:
            self._muster()
            self._shares = all(agent.greeting is not None and agent.greeting.shares for agent in self._agents.values())
        return self._shares

    def launch(self, world: int, size: int) -> tuple[FarObserver, dict[int, socket.socket]]:
        if size > self.size:
            raise WorldError(f"a case wants {size} ranks, {self.size} processes were launched")
        self._muster()
        agents = [self._agents[rank * self.size // size] for rank in range(size)]
        observer = self._worlds[world] = FarObserver(self, world, agents)
        # the first rank of every world is on this machine
        port = free_port("localhost" if self._loopback else "")
        for rank, agent in enumerate(agents):
            agent.send(wire.Start(world, size, rank, self._host, port))
        return observer, {}

    def end(self, world: int) -> None:
        for agent in self._worlds.pop(world).agents:
            agent.send(wire.End(world))

    def events(self) -> list[protocol.FromServer | Connected]:
        self._listen(0.0)
        with suppress(BlockingIOError):
            self._woken.recv(4096, socket.MSG_DONTWAIT)
        found, self._events = self._events, []
        return found

    def close(self) -> None:
        """Let every agent go: they end with their ranks."""
        if self._closed:
            return
        self._closed = True
        for event in self._events:
            if isinstance(event, Connected):
                event.stream.close()
        for key in list(self._selector.get_map().values()):
            found = key.data.stream if isinstance(key.data, wire.PendingConnection | Agent) else key.fileobj
            assert isinstance(found, socket.socket)
            found.close()
        self._waker.close()
        self._selector.close()

    def look(self, world: int, dump: Collection[int] = ()) -> None:
        """Have the agents of a world tell what they see of it, and wait for that a moment. Raises :class:`LostError`."""
        observer = self._worlds[world]
        self._turns += 1
        for rank, agent in enumerate(observer.agents):
            agent.send(wire.Look(world, self._turns, rank in dump))
        until = time.monotonic() + LOOK_SECONDS / observer.share()
        waiting = set(range(len(observer.agents)))
        while waiting and time.monotonic() < until:
            self._listen(0.05)
            waiting -= {rank for rank, turn in observer.turns.items() if turn == self._turns}
        if self._events:
            self._waker.send(b"1")

    # What comes in

    def _muster(self) -> None:
        """Wait until every agent has said that it can start ranks. Raises :class:`WorldError`."""
        until = time.monotonic() + self._patience
        while any(rank not in self._agents or self._agents[rank].greeting is None for rank in range(self.size)):
            signals.check()
            self._listen(0.1)
            if time.monotonic() > until:
                late = [rank for rank in range(self.size) if rank not in self._agents or self._agents[rank].greeting is None]
                raise WorldError(f"processes {late} of the {self.size} launched ones were not ready within {self._patience:g} s")

    def _listen(self, wait: float) -> None:
        """Take in what agents say, and who connects. Raises :class:`LostError`, and :class:`WorldError` for an agent that cannot begin."""
        for key, _ in self._selector.select(wait):
            if key.fileobj is self._listener:
                self._open()
            elif isinstance(key.data, wire.PendingConnection):
                self._let_in(key.data)
            elif isinstance(key.data, Agent):
                self._hear(key.data)
        now = time.monotonic()
        passed, self._listened = min(now - self._listened, LONGEST_SILENCE_STEP), now
        for agent in self._agents.values():
            agent.silent += passed
            if agent.silent > SILENCE_SECONDS:
                self._lost.append(f"{self._name(agent)} has been silent for {SILENCE_SECONDS:g} s")
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, wire.PendingConnection):
                key.data.silent += passed
                if key.data.silent > wire.PATIENCE:
                    self._send_away(key.data)
        if os.getppid() != self._parent:
            self._lost.append("the torchrun agent that started this run has ended")
        if self._lost:
            raise LostError("; ".join(dict.fromkeys(self._lost)))

    def _open(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return
        try:
            self._selector.register(stream, selectors.EVENT_READ, wire.PendingConnection(stream, self.token))
        except OSError:
            stream.close()

    def _send_away(self, pending: wire.PendingConnection) -> None:
        self._selector.unregister(pending.stream)
        pending.stream.close()

    def _let_in(self, pending: wire.PendingConnection) -> None:
        try:
            claim = pending.hear()
        except (OSError, protocol.ProtocolError):
            self._send_away(pending)
            return
        if claim is None:
            return
        self._selector.unregister(pending.stream)
        if claim.world in self._worlds:
            agents = self._worlds[claim.world].agents
            rank = next((rank for rank, agent in enumerate(agents) if agent.process == claim.process), None)
            if rank is not None:
                self._events.append(Connected(claim.world, rank, pending.stream))
                return
        elif not claim.world and 0 <= claim.process < self.size and claim.process not in self._agents:
            agent = self._agents[claim.process] = Agent(claim.process, pending.stream)
            self._selector.register(pending.stream, selectors.EVENT_READ, agent)
            if self._begin is not None:
                agent.send(self._begin)
            return
        pending.stream.close()

    def _hear(self, agent: Agent) -> None:
        if agent.gone:
            return
        agent.silent = 0.0
        try:
            data = agent.stream.recv(1 << 18, socket.MSG_DONTWAIT)
            if data:
                for message in agent.frames.feed(data):
                    self._take(agent, message)
                return
            reason = ""
        except BlockingIOError:
            return
        except (OSError, protocol.ProtocolError) as error:
            reason = f": {error}"
        agent.gone = True
        self._selector.unregister(agent.stream)
        agent.stream.close()
        self._lost.append(f"{self._name(agent)} is gone{reason}")
        # what goes with it is named with it
        until = time.monotonic() + GATHER_SECONDS
        while len(self._lost) < len(self._agents) and (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if isinstance(key.data, Agent):
                    self._hear(key.data)

    def _take(self, agent: Agent, message: wire.FromAgent) -> None:
        if isinstance(message, wire.Greeting):
            agent.greeting = message
            if message.problem:
                raise WorldError(f"ranks cannot be started on {message.host}: {message.problem}")
            if all(rank in self._agents and self._agents[rank].greeting is not None for rank in range(self.size)):
                self._events.append(protocol.Hello())
            return
        if isinstance(message, wire.Broken):
            self._lost.append(f"{self._name(agent)} can start no more ranks: {message.reason}")
            return
        observer = self._worlds.get(message.world)
        rank = observer.agents.index(agent) if observer is not None and agent in observer.agents else None
        if observer is None or rank is None:
            return
        if isinstance(message, wire.Pulse):
            observer.pulses[rank] = message
        elif isinstance(message, wire.Left):
            observer.lefts[rank] = message
            observer.turns[rank] = max(message.turn, observer.turns.get(rank, 0))
        elif isinstance(message, wire.Refused):
            self._events.append(protocol.Spawned(message.world, {}, f"{self._name(agent)}: {message.problem}"))
        else:
            self._events.append(protocol.Exited(message.world, rank, message.status))

    def _name(self, agent: Agent) -> str:
        where = f" on {agent.greeting.host}" if agent.greeting else ""
        return f"launched process {agent.process}{where}"
