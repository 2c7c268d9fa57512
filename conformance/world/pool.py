"""The driver's way to live ranks: cases go in, verdicts come out, whatever happens to the ranks in between."""

from __future__ import annotations

import atexit
import itertools
import os
import selectors
import shutil
import signal
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from conformance.case import Case
from conformance.judge import judge
from conformance.law import Law
from conformance.target import Target
from conformance.verdict import Verdict
from conformance.world import protocol, watch
from conformance.world.launch import ForkserverLauncher, Launcher, WorldError
from conformance.world.obituary import how, speak_for
from conformance.world.progress import LARGEST_BATCH
from conformance.world.world import Flight, Job, World

PROOF_SECONDS = 1.0
EXIT_SECONDS = 1.0  # between the end of a rank's stream and the word of how it ended
STOP_SECONDS = 0.5
BATCH_SECONDS = 0.25
UNKNOWN_PACE = 0.01  # seconds a case, before a law has been seen
COALESCE = 8
COALESCE_SECONDS = 0.005
LARGEST_BACKLOG = 1000
LARGEST_HOUSE = 32  # ranks alive, beyond which idle worlds go
STARTS = 3  # of a world or of the server, one after the other
LOSSES = 3  # of a case's worlds that ended for no known reason


class Pool:
    """Worlds of every size that cases ask for, up to ``worlds`` of each side by side. A context manager: leaving it leaves nothing behind.

    Every method that waits or looks for ranks raises :class:`WorldError` where they cannot be started.
    """

    def __init__(self, target: Target, *, worlds: int = 1) -> None:
        self.target = target
        self._side_by_side = worlds
        self._worlds: dict[int, World] = {}
        self._pending: dict[int, deque[Job]] = defaultdict(deque)
        self._finished: deque[tuple[Job, Verdict]] = deque()
        self._owed = 0
        self._delivering = False
        self._polled = 0.0
        self._pace: dict[str, float] = {}
        self._late: set[str] = set()
        self._failed_starts = self._lost_servers = 0
        self._proven = False
        self._numbers = itertools.count(1)
        self._folders = itertools.count(1)
        self._folder = tempfile.mkdtemp(prefix="shardlaw-", dir=roomy())
        self._closed = False
        atexit.register(self.close)
        self._selector = selectors.DefaultSelector()
        self._launcher: Launcher | None = None
        try:
            self._launch()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What callers ask for

    def feed(self, law: Law, case: Case, done: Callable[[Verdict], None]) -> None:
        """Take in a case; ``done`` gets its verdict during this or a later call. It may feed, but not wait."""
        job = self._job(law, case, done)
        self._pending[job.size].append(job)
        self._owed += 1
        if self._delivering:
            return
        if self._owed > LARGEST_BACKLOG:
            while self._owed > LARGEST_BACKLOG // 2:
                self._turn(0.05)
        elif time.monotonic() - self._polled > COALESCE_SECONDS / 2:
            self._turn(0.0)

    def poll(self) -> None:
        """Take in what ranks have said, hand out what waits for them, and call back; never waits."""
        self._turn(0.0, eager=True)

    def flush(self) -> None:
        """Until every case that was fed has its verdict."""
        while self._owed:
            self._turn(0.05, eager=True)

    def judge(self, law: Law, cases: Sequence[Case]) -> list[Verdict]:
        """The verdicts on ``cases``, in their order."""
        found: dict[int, Verdict] = {}
        for at, case in enumerate(cases):
            self.feed(law, case, lambda verdict, at=at: found.__setitem__(at, verdict))  # type: ignore[misc]
        self.flush()
        return [found[at] for at in range(len(cases))]

    def fresh(self, law: Law, case: Case) -> Verdict:
        """The verdict of new worlds, which serve ``case.after`` first and nothing else, under the full limits."""
        from conformance.laws import find

        verdicts: list[Verdict] = []
        job = self._job(law, case, verdicts.append)
        try:
            for stage, size in enumerate(job.stages):
                queue: deque[Job] = deque()
                for earlier in case.after:
                    before = self._job(find(earlier.law), earlier, lambda _: None)
                    # of a case with several worlds, a world has only served the stages of its size
                    queue.extend(replace(before, stage=k, last=k, answers={}, ran={}) for k, its in enumerate(before.stages) if its == size)
                queue.append(replace(job, stage=stage, last=stage, answers={}, ran={}))
                self._owed += len(queue)
                self._found(size, queue, patient=True)
                while len(verdicts) <= stage:
                    self._turn(0.05, eager=True)
                for live in [live for live in self._worlds.values() if live.queue is queue]:
                    self._dismiss(live)
                if verdicts[-1].status != "held":
                    break
        finally:
            shutil.rmtree(job.folder, ignore_errors=True)
        return verdicts[-1]

    def close(self) -> None:
        """End every process, and remove every file. Cases without a verdict are forgotten."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            if self._launcher is not None:
                self._stop_idle(self._launcher)
        finally:
            if self._launcher is not None:
                self._launcher.close()
            for world in self._worlds.values():
                world.destroy()
            self._selector.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_idle(self, launcher: Launcher) -> None:
        """Let ranks that have nothing to do end in good order."""
        idle = {world.number: world.size for world in self._worlds.values() if world.takes_work and not world.flights}
        for number in idle:
            self._worlds[number].send(protocol.Stop())
        until = time.monotonic() + STOP_SECONDS
        while any(idle.values()) and time.monotonic() < until:
            try:
                for event in launcher.events():
                    if isinstance(event, protocol.Exited) and event.world in idle:
                        idle[event.world] -= 1
            except EOFError:
                return
            time.sleep(0.002)

    # Once around

    def _turn(self, wait: float, *, eager: bool = False) -> None:
        """Hand out, listen, watch, hand out, call back. ``eager``: do not wait for more cases before a batch is sent."""
        if self._closed:
            raise WorldError("this pool is closed")
        if self._delivering:
            return
        self._dispatch(eager)
        for key, _ in self._selector.select(0 if self._finished else wait):
            if key.data is None:
                self._heed()
            else:
                self._hear(*key.data)
        now = self._polled = time.monotonic()
        for world in list(self._worlds.values()):
            if world.number in self._worlds:
                self._look_after(world, now)
        self._dispatch(eager)
        self._deliver()

    def _job(self, law: Law, case: Case, done: Callable[[Verdict], None]) -> Job:
        stages = law.stages(case) if law.stages else (max(case.world, law.smallest),)
        return Job(law, case, done, f"{self._folder}/case-{next(self._folders)}", stages, last=len(stages) - 1)

    def _dispatch(self, eager: bool) -> None:
        now = time.monotonic()
        for size, queue in self._pending.items():
            if queue:
                self._settle(size, queue)
        for world in self._worlds.values():
            if not (world.takes_work and world.queue):
                continue
            if not world.flights and (eager or len(world.queue) >= COALESCE or now - world.queue[0].fed > COALESCE_SECONDS):
                world.fly(self._batch(world.queue))
            if len(world.flights) == 1 and len(world.queue) >= 2 * COALESCE:
                world.fly(self._batch(world.queue))

    def _settle(self, size: int, queue: deque[Job]) -> None:
        """See to it that there are worlds of ``size`` to work on ``queue``."""
        mine = [world for world in self._worlds.values() if world.queue is queue and not world.retired]
        if not mine or len(mine) < self._side_by_side and all(world.flights for world in mine) and len(queue) > 2 * COALESCE:
            self._make_room(size)
            self._found(size, queue)

    def _make_room(self, size: int) -> None:
        """Dismiss worlds that nobody needs when there are very many ranks."""
        idle = [world for world in self._worlds.values() if world.takes_work and not (world.flights or world.queue or world.patient)]
        for world in sorted(idle, key=lambda world: world.idle_since):
            if sum(live.size for live in self._worlds.values()) + size > LARGEST_HOUSE:
                self._dismiss(world)

    def _batch(self, queue: deque[Job]) -> list[Job]:
        jobs: list[Job] = []
        seconds = 0.0
        while queue and len(jobs) < LARGEST_BATCH and seconds < BATCH_SECONDS:
            jobs.append(queue.popleft())
            seconds += self._pace.get(jobs[-1].law.id, UNKNOWN_PACE)
        return jobs

    def _conclude(self, world: World, flight: Flight, index: int) -> None:
        """Every rank has answered a case, or it has been said for it."""
        flight.due.remove(index)
        job = flight.jobs[index]
        answers = tuple(job.answers[rank] for rank in range(world.size))
        try:
            verdict = judge(job.law, job.case, answers, self.target)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            verdict = Verdict(job.case, "deviates", "raised", "judge", f"the answers cannot be judged: {text}", text, answers)
        apart = world.out_of_step(job)
        if apart:
            world.retired = apart
            if verdict.status != "deviates" and "p2p" not in job.law.needs:
                verdict = Verdict(job.case, "deviates", "divergence", "collectives", apart, "", answers, verdict.features)
        if verdict.status == "deviates":
            verdict = replace(verdict, history=tuple(world.served))
        world.served.append(job.case)
        job.forget()
        if verdict.status == "held" and job.stage < job.last:
            job.stage += 1
            self._pending[job.size].append(job)
        else:
            self._finished.append((job, verdict))

    def _deliver(self) -> None:
        self._delivering = True
        try:
            while self._finished:
                job, verdict = self._finished.popleft()
                self._owed -= 1
                if job.last == len(job.stages) - 1 and os.path.exists(job.folder):
                    shutil.rmtree(job.folder, ignore_errors=True)
                job.done(verdict)
        finally:
            self._delivering = False

    # Worlds come and go

    def _launch(self) -> None:
        self._launcher = ForkserverLauncher(self.target, self._folder)
        self._selector.register(self._launcher, selectors.EVENT_READ)

    def _found(self, size: int, queue: deque[Job], *, patient: bool = False) -> None:
        """Start a world; it works on ``queue`` once its ranks are ready."""
        assert self._launcher is not None
        number = next(self._numbers)
        world = World(number, size, f"{self._folder}/world-{number}", queue, patient=patient)
        self._worlds[number] = world
        world.streams = self._launcher.launch(number, size, world.folder)
        for rank, stream in enumerate(world.streams):
            self._selector.register(stream, selectors.EVENT_READ, (world, rank))

    def _dismiss(self, world: World) -> None:
        """End a world; cases that are still due go back to the head of its queue. A patient one is followed by another while work is left."""
        assert self._launcher is not None
        del self._worlds[world.number]
        for rank, stream in enumerate(world.streams):
            if rank not in world.silenced:
                self._selector.unregister(stream)
        self._launcher.signal(world.number, signal.SIGKILL)
        for flight in reversed(world.flights):
            for index in sorted(flight.due, reverse=True):
                flight.jobs[index].forget()
                world.queue.appendleft(flight.jobs[index])
        world.destroy()
        if world.queue and world.patient:
            self._found(world.size, world.queue, patient=True)

    def _heed(self) -> None:
        """What the launcher has to tell."""
        assert self._launcher is not None
        try:
            events = self._launcher.events()
        except EOFError as error:
            self._start_over(str(error))
            return
        for event in events:
            if isinstance(event, protocol.Hello):
                if event.problem:
                    raise WorldError(f"ranks cannot be started: {event.problem}")
                for waiting in self._worlds.values():
                    waiting.born = time.monotonic()
                continue
            world = self._worlds.get(event.world)
            if world is None:
                continue
            if isinstance(event, protocol.Exited):
                world.ended[event.rank] = how(event.status)
            elif event.problem:
                raise WorldError(f"ranks cannot be started: {event.problem}")
            else:
                world.pids = event.pids

    def _start_over(self, reason: str) -> None:
        """The launcher has gone, and every rank with it."""
        assert self._launcher is not None
        self._lost_servers += 1
        if not self._proven or self._lost_servers >= STARTS:
            raise WorldError(f"the process that starts ranks has ended: {reason}")
        self._selector.unregister(self._launcher)
        self._launcher.close()
        self._launch()
        for world in list(self._worlds.values()):
            self._dismiss(world)

    def _hear(self, world: World, rank: int) -> bool:
        """Take in what a rank has to tell; false where there is nothing."""
        if world.number not in self._worlds or rank in world.silenced:
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
            flight = world.flight(message.batch)
            if flight is not None and message.index in flight.due:
                job = flight.jobs[message.index]
                job.answers[rank] = protocol.unpack_answer(rank, message)
                job.ran[rank] = message.ran
                if len(job.answers) == world.size:
                    self._conclude(world, flight, message.index)
        elif isinstance(message, protocol.Parked):
            world.parked[rank] = message
        elif isinstance(message, protocol.Groups):
            world.groups.update(message.ranks)
        elif isinstance(message, protocol.Done):
            self._land(world, rank, message)
        elif isinstance(message, protocol.Ready):
            world.ready.add(rank)
            if world.started:
                self._proven = True
                self._failed_starts = 0
        elif world.started:
            world.retired = message.error
        else:
            world.ended.setdefault(rank, message.error)

    def _land(self, world: World, rank: int, done: protocol.Done) -> None:
        """A rank is through with a batch."""
        world.bear(rank, done)
        flight = world.flight(done.batch)
        if flight is None:
            return
        flight.done += 1
        if flight.done < world.size:
            return
        world.flights.remove(flight)
        world.idle_since = time.monotonic()
        spent = (world.idle_since - max(flight.sent, world.landed)) / len(flight.jobs)
        world.landed = world.idle_since
        for law in {job.law.id for job in flight.jobs}:
            self._pace[law] = 0.7 * self._pace.get(law, spent) + 0.3 * spent

    # What becomes of a world that does not answer

    def _look_after(self, world: World, now: float) -> None:
        if not world.started:
            self._look_after_start(world, now)
        elif world.ended or world.silenced:
            if world.ended or now - min(world.silenced.values()) > EXIT_SECONDS:
                self._bury(world)
        elif world.parted() is not None:
            self._bury(world)
        elif world.retired:
            self._dismiss(world)
        elif len(world.parked) == world.size:
            groups = world.to_prove()
            if groups is None:
                self._dismiss(world)
            else:
                world.resume(groups)
        elif world.flights and world.watch.look(now, world.progress(), world.pids):
            self._look_at_clocks(world)

    def _look_after_start(self, world: World, now: float) -> None:
        problem = ""
        if world.ended:
            rank, reason = min(world.ended.items())
            problem = f"rank {rank} of {world.size} ended while it started: {reason}"
        elif now - world.born > self.target.startup_timeout:
            late = sorted(set(range(world.size)) - world.ready)
            problem = f"ranks {late} of {world.size} were not ready within {self.target.startup_timeout:g} s"
        if not problem:
            return
        self._failed_starts += 1
        if not self._proven or self._failed_starts >= STARTS:
            raise WorldError(problem)
        self._dismiss(world)

    def _look_at_clocks(self, world: World) -> None:
        undecided = world.undecided()
        if undecided is None:
            if world.watch.quiet >= PROOF_SECONDS or world.watch.is_busy_for(self.target.timeout):
                self._bury(world)
            return
        flight, index = undecided
        law = flight.jobs[index].law
        hung = law.id in self._late
        patience = watch.full(self.target) if world.patient else watch.searching(self.target, storage="checkpoint" in law.needs, hung=hung)
        some = any(world.answered(rank, flight, index) for rank in range(world.size))
        if world.watch.quiet >= (patience.grace if some else patience.quiet) or world.watch.is_busy_for(patience.busy):
            self._late.add(law.id)
            self._bury(world)

    def _bury(self, world: World) -> None:
        """A rank has ended or is late, or ranks have parted: say so of the case that did it. The others go to another world."""
        assert self._launcher is not None
        for rank in range(world.size):
            while self._hear(world, rank):
                pass
            for message in world.unsent(rank):
                self._take(world, rank, message)
        if not world.retired:
            blamed = world.at_death() if world.dead() else world.parted() or world.undecided()
            if blamed is None:
                blamed = self._blame_after_losses(world)
            if blamed is not None and blamed[1] in blamed[0].due:
                speak_for(world, *blamed, self._launcher)
                self._conclude(world, *blamed)
        self._dismiss(world)

    def _blame_after_losses(self, world: World) -> tuple[Flight, int] | None:
        """A world ended between cases: nobody's fault until it keeps happening before the same case."""
        flight = next((flight for flight in world.flights if flight.due), None)
        if flight is None:
            return None
        index = min(flight.due)
        flight.jobs[index].lost += 1
        return (flight, index) if flight.jobs[index].lost >= LOSSES else None


def roomy() -> str | None:
    """Where worlds and the files of cases live: in memory where there is enough of it, unless ``TMPDIR`` says otherwise."""
    memory = "/dev/shm"
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK):
        return None
    free = os.statvfs(memory)
    return memory if free.f_bavail * free.f_frsize > 1 << 30 else None
