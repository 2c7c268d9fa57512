"""Keeps worlds alive: has them started, listens to them, and replaces those that die, hang or fall out of step."""

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

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import protocol, watch
from shardlaw.conformance.world.launch import Connected, ForkserverLauncher, Launcher, WorldError
from shardlaw.conformance.world.missing_answers import ask_for_stacks, how, speak_for
from shardlaw.conformance.world.observer import LocalObserver
from shardlaw.conformance.world.world import Batch, Job, World

PROOF_SECONDS = 1.0
EXIT_SECONDS = 1.0  # between the end of a rank's stream and the word of how it ended
STOP_SECONDS = 0.5
LAST_WORD_SECONDS = 0.3  # of a rank that has raised
MAX_RANKS = 48  # ranks alive, beyond which idle worlds go
STARTS = 3  # of a world or of the server, one after the other
LOSSES = 3  # of a case's worlds that ended for no known reason

Launch = Callable[[Target, str], Launcher]


class WorldManager:
    """The worlds of one target. ``conclude`` is called when every rank has answered a case, ``completed`` when a batch is over, with its
    seconds a case."""

    def __init__(
        self,
        target: Target,
        conclude: Callable[[World, Batch, int], None],
        completed: Callable[[Batch, float], None],
        launch: Launch = ForkserverLauncher,
    ) -> None:
        self.worlds: dict[int, World] = {}
        self.folder = tempfile.mkdtemp(prefix="shardlaw-", dir=roomy())
        self._target = target
        self._conclude = conclude
        self._completed = completed
        self._launch = launch
        self._numbers = itertools.count(1)
        self._late: set[str] = set()
        self._failed_starts = self._lost_servers = 0
        self._proven = False
        self._selector = selectors.DefaultSelector()
        try:
            self._launcher = self._start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def turn(self, wait: float) -> None:
        """Listen for up to ``wait`` seconds, then see to every world once. Raises :class:`WorldError`."""
        for key, _ in self._selector.select(wait):
            if key.data is None:
                self._heed()
            else:
                self._hear(*key.data)
        now = time.monotonic()
        for world in list(self.worlds.values()):
            if world.number in self.worlds:
                self._look_after(world, now)

    def found(self, size: int, queue: deque[Job], *, patient: bool = False) -> None:
        """Start a world; it takes work from ``queue`` once its ranks are ready."""
        self._make_room(size)
        number = next(self._numbers)
        observer, streams = self._launcher.launch(number, size)
        world = self.worlds[number] = World(number, size, observer, queue, patient=patient)
        for rank, stream in streams.items():
            self._connect(world, rank, stream)

    def dismiss_all(self, queue: deque[Job]) -> None:
        """End the worlds that work on ``queue``."""
        for world in [world for world in self.worlds.values() if world.queue is queue]:
            self._dismiss(world)

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

    # Worlds come and go

    def _start(self) -> Launcher:
        launcher = self._launch(self._target, self.folder)
        self._selector.register(launcher, selectors.EVENT_READ)
        return launcher

    def _connect(self, world: World, rank: int, stream: socket.socket) -> None:
        world.streams[rank] = stream
        self._selector.register(stream, selectors.EVENT_READ, (world, rank))

    def _make_room(self, size: int) -> None:
        """Dismiss worlds that nobody needs when there are very many ranks."""
        idle = [world for world in self.worlds.values() if world.is_idle]
        for world in sorted(idle, key=lambda world: world.idle_since):
            if sum(live.size for live in self.worlds.values()) + size > MAX_RANKS:
                self._dismiss(world)

    def _dismiss(self, world: World) -> None:
        """End a world; cases that are still due go back to the head of its queue. A patient one has a successor while there are any."""
        del self.worlds[world.number]
        for rank, stream in world.streams.items():
            if rank not in world.silenced:
                self._selector.unregister(stream)
        self._launcher.end(world.number)
        for batch in reversed(world.batches):
            for index in sorted(batch.due, reverse=True):
                batch.jobs[index].forget()
                world.queue.appendleft(batch.jobs[index])
        world.destroy()
        if world.queue and world.patient:
            self.found(world.size, world.queue, patient=True)

    def _start_over(self, reason: str) -> None:
        """The launcher has gone, and every rank with it."""
        self._lost_servers += 1
        if not self._proven or self._lost_servers >= STARTS:
            raise WorldError(f"the process that starts ranks has ended: {reason}")
        self._selector.unregister(self._launcher)
        self._launcher.close()
        self._launcher = self._start()
        for world in list(self.worlds.values()):
            if world.number in self.worlds:
                self._dismiss(world)

    def _stop_idle(self) -> None:
        """Let ranks that have nothing to do end in good order."""
        idle = {world.number: world.size for world in self.worlds.values() if world.takes_work and not world.batches}
        for number in idle:
            self.worlds[number].tell(protocol.Stop())
        until = time.monotonic() + STOP_SECONDS
        while any(idle.values()) and time.monotonic() < until:
            try:
                for event in self._launcher.events():
                    if isinstance(event, protocol.Exited) and event.world in idle:
                        idle[event.world] -= 1
            except (EOFError, WorldError):
                return
            time.sleep(0.002)

    # What the launcher and the ranks say

    def _heed(self) -> None:
        """Take in what the launcher has to tell."""
        try:
            events = self._launcher.events()
        except EOFError as error:
            self._start_over(str(error))
            return
        for event in events:
            if isinstance(event, protocol.Hello):
                if event.problem:
                    raise WorldError(f"ranks cannot be started: {event.problem}")
                for waiting in self.worlds.values():
                    waiting.born = time.monotonic()
                continue
            world = self.worlds.get(event.world)
            if world is None:
                if isinstance(event, Connected):
                    event.stream.close()
            elif isinstance(event, Connected):
                self._connect(world, event.rank, event.stream)
            elif isinstance(event, protocol.Exited):
                if world.started or event.rank not in world.ended:  # a rank that could not start has said why
                    world.ended[event.rank] = how(event.status)
            elif event.problem:
                raise WorldError(f"ranks cannot be started: {event.problem}")
            elif isinstance(world.observer, LocalObserver):
                world.observer.pids = event.pids

    def _hear(self, world: World, rank: int) -> bool:
        """Take in what a rank has to tell; false where there is nothing."""
        if world.number not in self.worlds or rank in world.silenced or rank not in world.streams:
            return False
        try:
            messages = world.listen(rank)
        except BlockingIOError:
            return False
        except (EOFError, protocol.ProtocolError) as error:
            self._selector.unregister(world.streams[rank])
            world.silenced[rank] = time.monotonic()
            if str(error):
                world.ended.setdefault(rank, f"it sent what is no message: {error}")
            return False
        for message in messages:
            self._take(world, rank, message)
        return True

    def _take(self, world: World, rank: int, message: protocol.FromRank) -> None:
        if isinstance(message, protocol.Said):
            batch = world.batch(message.batch)
            if batch is not None and message.index in batch.due:
                job = batch.jobs[message.index]
                job.answers[rank] = protocol.unpack_answer(rank, message)
                job.ran[rank] = message.ran
                if len(job.answers) == world.size:
                    self._conclude(world, batch, message.index)
        elif isinstance(message, protocol.Parked):
            world.parked[rank] = message
        elif isinstance(message, protocol.Groups):
            world.groups.update(message.ranks)
        elif isinstance(message, protocol.Done):
            world.record_usage(rank, message)
            completed = world.complete(rank, message.batch)
            if completed is not None:
                self._completed(*completed)
        elif isinstance(message, protocol.Ready):
            world.ready.add(rank)
            if world.started:
                self._proven = True
                self._failed_starts = 0
        elif world.started:
            world.retired = message.error
        else:
            world.ended[rank] = message.error

    # What becomes of a world that does not answer

    def _look_after(self, world: World, now: float) -> None:
        if not world.started:
            self._look_after_start(world, now)
        elif world.ended or world.silenced:
            if world.ended or now - min(world.silenced.values()) > EXIT_SECONDS / world.observer.share():
                self._retire(world)
        elif world.diverged() is not None:
            self._retire(world)
        elif world.retired:
            self._dismiss(world)
        elif len(world.parked) == world.size:
            groups = world.to_prove()
            if groups is None:
                self._dismiss(world)
            else:
                world.resume(groups)
        elif world.batches and world.watch.look(now, world.progress(), world.observer):
            self._look_at_clocks(world)

    def _look_after_start(self, world: World, now: float) -> None:
        problem, stack = "", ""
        if world.ended:
            rank, reason = min(world.ended.items())
            problem = f"rank {rank} of {world.size} ended while it started: {reason}"
        elif now - world.born > self._target.startup_timeout:
            late = sorted(set(range(world.size)) - world.ready)
            problem = f"ranks {late} of {world.size} were not ready within {self._target.startup_timeout:g} s (startup_timeout)"
            world.observer.look(dump=late)
            found = world.observer.left(late[0])[0]  # nothing where torch was still being loaded
            stack = f"where rank {late[0]} was:\n{found}" if found else ""
        if not problem:
            return
        self._failed_starts += 1
        if not self._proven or self._failed_starts >= STARTS:
            error = WorldError(problem)
            error.output = world.observer.left(min(world.ended, default=0))[1] + stack
            raise error
        self._dismiss(world)

    def _look_at_clocks(self, world: World) -> None:
        undecided = world.undecided()
        if undecided is None:
            if world.watch.quiet >= PROOF_SECONDS or world.watch.is_busy_for(self._target.timeout):
                self._retire(world)
            return
        batch, index = undecided
        law = batch.jobs[index].law
        if world.patient:
            patience = watch.full(self._target)
        else:
            patience = watch.searching(self._target, storage="checkpoint" in law.needs, hung=law.id in self._late)
        some = any(world.answered(rank, batch, index) for rank in range(world.size))
        quiet = max(patience.grace if some else patience.quiet, law.seconds)
        if world.watch.quiet >= quiet or world.watch.is_busy_for(max(patience.busy, law.seconds)):
            self._late.add(law.id)
            self._retire(world)

    def _retire(self, world: World) -> None:
        """A rank has ended or is late, or ranks have parted: say so of the case that did it. The others go to another world."""
        world.observer.look()
        self._hear_all(world)
        if not world.retired:
            blamed = world.at_death() if world.dead() else world.diverged() or world.undecided()
            if blamed is None:
                blamed = self._blame_after_losses(world)
            if blamed is not None and blamed[1] in blamed[0].due:
                ask_for_stacks(world, *blamed)
                until = time.monotonic() + LAST_WORD_SECONDS / world.observer.share()
                while world.about_to_speak() and time.monotonic() < until:
                    time.sleep(0.002)
                    world.observer.look()
                self._hear_all(world)
                if blamed[1] in blamed[0].due:
                    speak_for(world, *blamed)
                    self._conclude(world, *blamed)
        self._dismiss(world)

    def _hear_all(self, world: World) -> None:
        """Take in all that its ranks have said and were going to say."""
        for rank in range(world.size):
            while self._hear(world, rank):
                pass
            for message in world.unsent(rank):
                self._take(world, rank, message)

    def _blame_after_losses(self, world: World) -> tuple[Batch, int] | None:
        """A world ended between cases: nobody's fault until it keeps happening before the same case."""
        batch = next((batch for batch in world.batches if batch.due), None)
        if batch is None:
            return None
        index = min(batch.due)
        batch.jobs[index].lost += 1
        return (batch, index) if batch.jobs[index].lost >= LOSSES else None


def roomy() -> str | None:
    """Where worlds and the files of cases live: in memory where there is enough of it, unless ``TMPDIR`` says otherwise."""
    memory = "/dev/shm"
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK):
        return None
    free = os.statvfs(memory)
    return memory if free.f_bavail * free.f_frsize > 1 << 30 else None
