"""The launcher of many hosts: it has the agents of the launched processes start ranks, and collects their reports."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import protocol, signals, wire
from shardlaw.conformance.world.launch import Connected, LostError, WorldError, free_port
from shardlaw.conformance.world.progress import IDLE, Position
from shardlaw.conformance.world.watch import Activity

READY_SECONDS = 60.0  # added to the target's startup_timeout: every host loads torch first
SILENCE_SECONDS = 20.0  # of an agent, while the driver listens
MAX_SILENCE_STEP = 1.0  # seconds that one call adds, however long the driver was away
REPORT_SECONDS = 2.0
GATHER_SECONDS = 0.3  # to notice agents that are lost together
MARK = "mark"


@dataclass(eq=False)
class Agent:
    """The connected agent of one launched process. ``silent`` is for how many seconds it has sent nothing."""

    process: int
    stream: socket.socket
    frames: protocol.FrameDecoder = field(default_factory=lambda: protocol.FrameDecoder(wire.FromAgent))
    ready: wire.AgentReady | None = None
    silent: float = 0.0
    gone: bool = False

    def send(self, message: wire.ToAgent) -> None:
        """Send a message. An agent that has ended is noticed when its stream ends."""
        with suppress(OSError):
            self.stream.sendall(protocol.encode_frame(message))


class RemoteObserver:
    """Observes the ranks of a world on many hosts by the last messages of their agents; ``agents`` has one for each rank."""

    def __init__(self, hub: Hub, world: int, agents: Sequence[Agent]) -> None:
        self.agents = agents
        self._hub = hub
        self._world = world
        self.statuses: dict[int, wire.RankStatus] = {}
        self.reports: dict[int, wire.RankReport] = {}
        self.requests: dict[int, int] = {}

    def position(self, rank: int) -> Position:
        return self.statuses[rank].position if rank in self.statuses else Position(0, 0, IDLE)

    def unsent(self, rank: int) -> bytes:
        return self.reports[rank].unsent if rank in self.reports else b""

    def stacks_and_output(self, rank: int) -> tuple[str, str]:
        return (self.reports[rank].stack, self.reports[rank].output) if rank in self.reports else ("", "")

    def activity(self) -> Sequence[Activity]:
        return [status.activity for status in self.statuses.values() if status.activity is not None]

    def cpu_share(self) -> float:
        return min((status.cpu_share for status in self.statuses.values()), default=1.0)

    def refresh(self, dump: Collection[int] = ()) -> None:
        self._hub.refresh(self._world, dump)

    def close(self) -> None:
        """The files are on the hosts, where the agents remove them."""


class Hub:
    """Starts ranks through the agents of ``size`` launched processes, which connect to ``host``, the name of this machine for agents and
    ranks. The ranks of a small world are spread evenly over the processes.

    It accepts connections from the start; :meth:`begin`, the ``launch`` of a pool, tells the agents which target to start.
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
        # makes the selector readable for events that arrived during another wait
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._begin: wire.Begin | None = None
        self._shares_folder: bool | None = None
        self._ready_timeout = 0.0
        self._agents: dict[int, Agent] = {}
        self._worlds: dict[int, RemoteObserver] = {}
        self._events: list[protocol.FromServer | Connected] = []
        self._losses: list[str] = []
        self._requests = 0
        self._last_listen = time.monotonic()
        self._closed = False

    @property
    def address(self) -> tuple[str, int]:
        """The address for agents to connect to."""
        port: int = self._listener.getsockname()[1]
        return self._host, port

    def begin(self, target: Target, folder: str) -> Hub:
        """Have every agent prepare to start ranks of ``target``; ``folder`` is the pool's. Returns this hub, as a pool's launcher."""
        mark = f"{MARK}-{secrets.token_hex(8)}"
        with open(f"{folder}/{mark}", "w"):
            pass
        self._begin = wire.Begin(target, folder, mark)
        self._ready_timeout = target.startup_timeout + READY_SECONDS
        for agent in self._agents.values():
            agent.send(self._begin)
        return self

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def shares_files(self) -> bool:
        if self._shares_folder is None:
            self._wait_for_agents()
            self._shares_folder = all(agent.ready is not None and agent.ready.shares_folder for agent in self._agents.values())
        return self._shares_folder

    def launch(self, world: int, size: int) -> tuple[RemoteObserver, dict[int, socket.socket]]:
        if size > self.size:
            raise WorldError(f"a case wants {size} ranks, {self.size} processes were launched")
        self._wait_for_agents()
        agents = [self._agents[rank * self.size // size] for rank in range(size)]
        observer = self._worlds[world] = RemoteObserver(self, world, agents)
        # rank 0 of every world is on this machine
        port = free_port("localhost" if self._loopback else "")
        for rank, agent in enumerate(agents):
            agent.send(wire.StartRank(world, size, rank, self._host, port))
        return observer, {}

    def kill_world(self, world: int) -> None:
        for agent in self._worlds.pop(world).agents:
            agent.send(wire.EndRank(world))

    def read_events(self) -> list[protocol.FromServer | Connected]:
        self._listen(0.0)
        with suppress(BlockingIOError):
            self._wake_reader.recv(4096, socket.MSG_DONTWAIT)
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
        self._wake_writer.close()
        self._selector.close()

    def refresh(self, world: int, dump: Collection[int] = ()) -> None:
        """Request a report of every rank of a world, and wait for them for up to :data:`REPORT_SECONDS`. Raises :class:`LostError`."""
        observer = self._worlds[world]
        self._requests += 1
        for rank, agent in enumerate(observer.agents):
            agent.send(wire.RequestReport(world, self._requests, rank in dump))
        until = time.monotonic() + REPORT_SECONDS / observer.cpu_share()
        waiting = set(range(len(observer.agents)))
        while waiting and time.monotonic() < until:
            self._listen(0.05)
            waiting -= {rank for rank, request in observer.requests.items() if request == self._requests}
        if self._events:
            self._wake_writer.send(b"1")

    def _wait_for_agents(self) -> None:
        """Wait until every agent can start ranks. Raises :class:`WorldError`."""
        until = time.monotonic() + self._ready_timeout
        while self._late_processes():
            signals.raise_if_stopped()
            self._listen(0.1)
            if time.monotonic() > until and (late := self._late_processes()):
                raise WorldError(f"processes {late} of the {self.size} launched ones were not ready within {self._ready_timeout:g} s")

    def _late_processes(self) -> list[int]:
        """The launched processes whose agents cannot start ranks yet."""
        return [process for process in range(self.size) if process not in self._agents or self._agents[process].ready is None]

    def _listen(self, wait: float) -> None:
        """Handle messages of agents and new connections. Raises :class:`LostError`, and :class:`WorldError` for an agent that cannot start
        ranks."""
        for key, _ in self._selector.select(wait):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, wire.PendingConnection):
                self._identify(key.data)
            elif isinstance(key.data, Agent):
                self._read_agent(key.data)
        now = time.monotonic()
        passed, self._last_listen = min(now - self._last_listen, MAX_SILENCE_STEP), now
        for agent in self._agents.values():
            agent.silent += passed
            if agent.silent > SILENCE_SECONDS:
                self._losses.append(f"{self._name(agent)} has been silent for {SILENCE_SECONDS:g} s")
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, wire.PendingConnection):
                key.data.silent += passed
                if key.data.silent > wire.CLAIM_SECONDS:
                    self._reject(key.data)
        if os.getppid() != self._parent:
            self._losses.append("the torchrun agent that started this run has ended")
        if self._losses:
            raise LostError("; ".join(dict.fromkeys(self._losses)))

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return
        try:
            self._selector.register(stream, selectors.EVENT_READ, wire.PendingConnection(stream, self.token))
        except OSError:
            stream.close()

    def _reject(self, pending: wire.PendingConnection) -> None:
        self._selector.unregister(pending.stream)
        pending.stream.close()

    def _identify(self, pending: wire.PendingConnection) -> None:
        try:
            claim = pending.read_claim()
        except (OSError, protocol.ProtocolError):
            self._reject(pending)
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

    def _read_agent(self, agent: Agent) -> None:
        if agent.gone:
            return
        agent.silent = 0.0
        try:
            data = agent.stream.recv(1 << 18, socket.MSG_DONTWAIT)
            if data:
                for message in agent.frames.feed(data):
                    self._handle_message(agent, message)
                return
            reason = ""
        except BlockingIOError:
            return
        except (OSError, protocol.ProtocolError) as error:
            reason = f": {error}"
        agent.gone = True
        self._selector.unregister(agent.stream)
        agent.stream.close()
        self._losses.append(f"{self._name(agent)} is gone{reason}")
        # agents that are lost with it are named in the same error
        until = time.monotonic() + GATHER_SECONDS
        while len(self._losses) < len(self._agents) and (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if isinstance(key.data, Agent):
                    self._read_agent(key.data)

    def _handle_message(self, agent: Agent, message: wire.FromAgent) -> None:
        if isinstance(message, wire.AgentReady):
            agent.ready = message
            if message.problem:
                raise WorldError(f"ranks cannot be started on {message.host}: {message.problem}")
            if not self._late_processes():
                self._events.append(protocol.Hello())
            return
        if isinstance(message, wire.AgentFailed):
            self._losses.append(f"{self._name(agent)} can start no more ranks: {message.reason}")
            return
        observer = self._worlds.get(message.world)
        rank = observer.agents.index(agent) if observer is not None and agent in observer.agents else None
        if observer is None or rank is None:
            return
        if isinstance(message, wire.RankStatus):
            observer.statuses[rank] = message
        elif isinstance(message, wire.RankReport):
            observer.reports[rank] = message
            observer.requests[rank] = max(message.request, observer.requests.get(rank, 0))
        elif isinstance(message, wire.StartFailed):
            self._events.append(protocol.Spawned(message.world, {}, f"{self._name(agent)}: {message.problem}"))
        else:
            self._events.append(protocol.Exited(message.world, rank, message.status))

    def _name(self, agent: Agent) -> str:
        where = f" on {agent.ready.host}" if agent.ready else ""
        return f"launched process {agent.process}{where}"
