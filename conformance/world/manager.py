"""Manage worlds: start them, read what they send, and replace those that die, hang or fall out of step."""

from __future__ import annotations

import itertools
import os
import selectors
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer
from shardlaw.conformance.world import protocol, watch
from shardlaw.conformance.world.launch import Connected, ForkserverLauncher, Launcher, WorldError
from shardlaw.conformance.world.missing_answers import describe_exit, dump_stacks, fill_missing_answers
from shardlaw.conformance.world.observer import LocalObserver
from shardlaw.conformance.world.world import Batch, Job, World

VERIFY_SECONDS = 1.0  # without use of the CPU, for ranks that verify their groups
EXIT_SECONDS = 1.0  # between the end of a rank's stream and the report of its exit status
STOP_SECONDS = 0.5
FINAL_MESSAGE_SECONDS = 0.3  # of a rank that has raised
MAX_RANKS = 48  # live ranks, beyond which idle worlds are ended
MAX_STARTS = 3  # of a world or of the server, in a row
MAX_LOSSES = 3  # of worlds that end for no known reason before the same case

Launch = Callable[[Target, str], Launcher]


class WorldManager:
    """Manages the worlds of one target.

    ``on_answered(world, batch, index)`` is called once every rank has answered a case, ``on_batch_done(batch, seconds)`` once every rank
    has run a batch, with the seconds that a case took.
    """

    def __init__(
        self,
        target: Target,
        on_answered: Callable[[World, Batch, int], None],
        on_batch_done: Callable[[Batch, float], None],
        launch: Launch = ForkserverLauncher,
    ) -> None:
        self.worlds: dict[int, World] = {}
        self.folder = tempfile.mkdtemp(prefix="shardlaw-", dir=temporary_root())
        self._target = target
        self._on_answered = on_answered
        self._on_batch_done = on_batch_done
        self._launch = launch
        self._numbers = itertools.count(1)
        self._late_laws: set[str] = set()
        self._failed_starts = self._lost_servers = 0
        self._has_started = False
        self._selector = selectors.DefaultSelector()
        try:
            self._launcher = self._start_launcher()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def run_once(self, wait: float) -> None:
        """Handle what arrives within ``wait`` seconds, then check every world. Raises :class:`WorldError`."""
        for key, _ in self._selector.select(wait):
            if key.data is None:
                self._handle_launcher_events()
            else:
                self._read_rank(*key.data)
        now = time.monotonic()
        for world in list(self.worlds.values()):
            if world.number in self.worlds:
                self._check_world(world, now)

    def start_world(self, size: int, queue: deque[Job], *, full_limits: bool = False) -> None:
        """Start a world, which takes jobs from ``queue`` once its ranks are ready."""
        self._make_room(size)
        number = next(self._numbers)
        observer, streams = self._launcher.launch(number, size)
        world = self.worlds[number] = World(number, size, observer, queue, full_limits=full_limits)
        for rank, stream in streams.items():
            self._connect(world, rank, stream)

    def end_worlds(self, queue: deque[Job]) -> None:
        """End the worlds that take jobs from ``queue``."""
        for world in [world for world in self.worlds.values() if world.queue is queue]:
            self._end_world(world)

    def close(self) -> None:
        """End every process, and remove every file."""
        try:
            self._stop_idle()
        finally:
            self._launcher.close()
            for world in self.worlds.values():
                world.destroy()
            self._selector.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def shares_files(self) -> bool:
        """Whether all ranks see :attr:`folder`. Raises :class:`WorldError`."""
        return self._launcher.shares_files

    def _start_launcher(self) -> Launcher:
        launcher = self._launch(self._target, self.folder)
        self._selector.register(launcher, selectors.EVENT_READ)
        return launcher

    def _connect(self, world: World, rank: int, stream: socket.socket) -> None:
        world.streams[rank] = stream
        self._selector.register(stream, selectors.EVENT_READ, (world, rank))

    def _make_room(self, size: int) -> None:
        """End idle worlds, the longest idle first, while there would be more than :data:`MAX_RANKS` ranks."""
        idle = [world for world in self.worlds.values() if world.is_idle]
        for world in sorted(idle, key=lambda world: world.idle_since):
            if sum(live.size for live in self.worlds.values()) + size > MAX_RANKS:
                self._end_world(world)

    def _end_world(self, world: World) -> None:
        """End a world and put its pending jobs back at the head of its queue. A world with ``full_limits`` is replaced while there are
        jobs: nobody else starts one for its queue."""
        del self.worlds[world.number]
        for rank, stream in world.streams.items():
            if rank not in world.closed_streams:
                self._selector.unregister(stream)
        self._launcher.kill_world(world.number)
        for batch in reversed(world.batches):
            for index in sorted(batch.pending, reverse=True):
                batch.jobs[index].clear_answers()
                world.queue.appendleft(batch.jobs[index])
        world.destroy()
        if world.queue and world.full_limits:
            self.start_world(world.size, world.queue, full_limits=True)

    def _restart_launcher(self, reason: str) -> None:
        """Replace a launcher that has ended, and with it every rank."""
        self._lost_servers += 1
        if not self._has_started or self._lost_servers >= MAX_STARTS:
            raise WorldError(f"the process that starts ranks has ended: {reason}")
        self._selector.unregister(self._launcher)
        self._launcher.close()
        self._launcher = self._start_launcher()
        for world in list(self.worlds.values()):
            if world.number in self.worlds:
                self._end_world(world)

    def _stop_idle(self) -> None:
        """Let idle ranks exit normally, for up to :data:`STOP_SECONDS`."""
        idle = {world.number: world.size for world in self.worlds.values() if world.accepts_work and not world.batches}
        for number in idle:
            self.worlds[number].broadcast(protocol.Stop())
        until = time.monotonic() + STOP_SECONDS
        while any(idle.values()) and time.monotonic() < until:
            try:
                for event in self._launcher.read_events():
                    if isinstance(event, protocol.Exited) and event.world in idle:
                        idle[event.world] -= 1
            except (EOFError, WorldError):
                return
            time.sleep(0.002)

    def _handle_launcher_events(self) -> None:
        try:
            events = self._launcher.read_events()
        except EOFError as error:
            self._restart_launcher(str(error))
            return
        for event in events:
            if isinstance(event, protocol.Hello):
                if event.problem:
                    raise WorldError(f"ranks cannot be started: {event.problem}")
                for waiting in self.worlds.values():
                    waiting.watch = watch.Watch()
                continue
            world = self.worlds.get(event.world)
            if world is None:
                if isinstance(event, Connected):
                    event.stream.close()
            elif isinstance(event, Connected):
                self._connect(world, event.rank, event.stream)
            elif isinstance(event, protocol.Exited):
                if world.started or event.rank not in world.ended:  # a rank that could not start has sent the reason
                    world.ended[event.rank] = describe_exit(event.status)
            elif event.problem:
                raise WorldError(f"ranks cannot be started: {event.problem}")
            elif isinstance(world.observer, LocalObserver):
                world.observer.pids = event.pids

    def _read_rank(self, world: World, rank: int) -> bool:
        """Handle what a rank has sent; false where there is nothing more."""
        if world.number not in self.worlds or rank in world.closed_streams or rank not in world.streams:
            return False
        try:
            messages = world.receive(rank)
        except BlockingIOError:
            return False
        except (EOFError, protocol.ProtocolError) as error:
            self._close_stream(world, rank, error)
            return False
        for message in messages:
            self._handle_message(world, rank, message)
        return True

    def _close_stream(self, world: World, rank: int, error: Exception) -> None:
        """Read no more from a rank whose stream has ended, or that sent what cannot be read."""
        if rank not in world.closed_streams:
            self._selector.unregister(world.streams[rank])
            world.closed_streams[rank] = time.monotonic()
        if str(error):
            world.ended.setdefault(rank, f"it sent what is no message: {error}")

    def _handle_message(self, world: World, rank: int, message: protocol.FromRank) -> None:
        if rank in world.unreadable:
            return
        if isinstance(message, protocol.PackedAnswer):
            batch = world.batch(message.batch)
            if batch is not None and message.index in batch.pending:
                job = batch.jobs[message.index]
                try:
                    job.answers[rank] = protocol.unpack_answer(rank, message)
                except protocol.ProtocolError as error:
                    self._close_stream(world, rank, error)
                    world.unreadable.add(rank)
                    job.answers[rank] = Answer(rank, "crashed", reason=world.ended[rank])
                job.collectives[rank] = message.collectives
                if len(job.answers) == world.size:
                    self._on_answered(world, batch, message.index)
        elif isinstance(message, protocol.SoFar):
            batch = world.batch(message.answer.batch)
            if batch is not None and message.answer.index in batch.pending:
                with suppress(protocol.ProtocolError):
                    batch.jobs[message.answer.index].so_far[rank] = protocol.unpack_answer(rank, message.answer)
        elif isinstance(message, protocol.Parked):
            world.parked[rank] = message
        elif isinstance(message, protocol.Groups):
            world.groups.update(message.ranks)
        elif isinstance(message, protocol.BatchDone):
            world.record_usage(rank, message)
            completed = world.mark_finished(rank, message.batch)
            if completed is not None:
                self._on_batch_done(*completed)
        elif isinstance(message, protocol.Ready):
            world.ready.add(rank)
            if world.started:
                self._has_started = True
                self._failed_starts = 0
        elif world.started:
            world.retire_reason = message.error
        else:
            world.ended[rank] = message.error

    def _check_world(self, world: World, now: float) -> None:
        if not world.started:
            self._check_start(world, now)
        elif world.ended or world.closed_streams:
            if world.ended or now - min(world.closed_streams.values()) > EXIT_SECONDS / world.observer.cpu_share():
                self._retire(world)
        elif world.first_diverged() is not None:
            self._retire(world)
        elif world.retire_reason:
            self._end_world(world)
        elif len(world.parked) == world.size:
            groups = world.groups_to_verify()
            if groups is None:
                self._end_world(world)
            else:
                world.resume(groups)
        elif world.batches and world.watch.update(now, world.progress(), world.observer):
            self._check_progress(world)

    def _check_start(self, world: World, now: float) -> None:
        problem, stack = "", ""
        world.watch.update(now, len(world.ready), world.observer)
        if world.ended:
            rank, reason = min(world.ended.items())
            problem = f"rank {rank} of {world.size} ended while it started: {reason}"
        elif world.watch.stuck > self._target.startup_timeout:
            late = sorted(set(range(world.size)) - world.ready)
            problem = f"ranks {late} of {world.size} were not ready within {self._target.startup_timeout:g} s (startup_timeout)"
            world.observer.refresh(dump=late)
            found = world.observer.stacks_and_output(late[0])[0]  # empty while torch is being loaded
            stack = f"where rank {late[0]} was:\n{found}" if found else ""
        if not problem:
            return
        self._failed_starts += 1
        if not self._has_started or self._failed_starts >= MAX_STARTS:
            error = WorldError(problem)
            error.output = world.observer.stacks_and_output(min(world.ended, default=0))[1] + stack
            raise error
        self._end_world(world)

    def _check_progress(self, world: World) -> None:
        undecided = world.first_undecided()
        if undecided is None:
            limits = watch.search_limits(self._target)
            if world.watch.quiet >= VERIFY_SECONDS or world.watch.is_busy_for(limits.busy, limits.busy_share):
                self._retire(world)
            return
        batch, index = undecided
        law = batch.jobs[index].law
        if world.full_limits:
            limits = watch.full_limits(self._target)
        else:
            limits = watch.search_limits(self._target, storage="checkpoint" in law.needs, hung=law.id in self._late_laws)
        some = any(world.has_answered(rank, batch, index) for rank in range(world.size))
        quiet = max(limits.grace if some else limits.quiet, law.seconds)
        if world.watch.quiet >= quiet or world.watch.is_busy_for(max(limits.busy, law.seconds), limits.busy_share):
            self._late_laws.add(law.id)
            self._retire(world)

    def _retire(self, world: World) -> None:
        """End a world whose rank has ended or is late, or whose ranks have diverged; conclude the case that caused it."""
        world.observer.refresh()
        self._read_remaining(world)
        if not world.retire_reason:
            blamed = world.case_at_death() if world.dead_ranks() else world.first_diverged() or world.first_undecided()
            if blamed is None:
                blamed = self._blame_after_losses(world)
            if blamed is not None and blamed[1] in blamed[0].pending:
                dump_stacks(world, *blamed)
                until = time.monotonic() + FINAL_MESSAGE_SECONDS / world.observer.cpu_share()
                while world.has_unsent_error() and time.monotonic() < until:
                    time.sleep(0.002)
                    world.observer.refresh()
                self._read_remaining(world)
                if blamed[1] in blamed[0].pending:
                    fill_missing_answers(world, *blamed)
                    self._on_answered(world, *blamed)
        self._end_world(world)

    def _read_remaining(self, world: World) -> None:
        """Handle all messages that the ranks have sent or buffered."""
        for rank in range(world.size):
            while self._read_rank(world, rank):
                pass
            for message in world.unsent_messages(rank):
                self._handle_message(world, rank, message)

    def _blame_after_losses(self, world: World) -> tuple[Batch, int] | None:
        """The case to blame for a world that ended between cases: the next one, once :data:`MAX_LOSSES` worlds have ended before it."""
        batch = next((batch for batch in world.batches if batch.pending), None)
        if batch is None:
            return None
        index = min(batch.pending)
        batch.jobs[index].losses += 1
        return (batch, index) if batch.jobs[index].losses >= MAX_LOSSES else None


def temporary_root() -> str | None:
    """The folder for temporary files: ``/dev/shm`` if it has 1 GiB free and ``TMPDIR`` is not set, else ``None``, the system's own."""
    memory = "/dev/shm"
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK):
        return None
    free = os.statvfs(memory)
    return memory if free.f_bavail * free.f_frsize > 1 << 30 else None
