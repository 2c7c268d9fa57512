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
from conformance.verdict import Answer, Verdict
from conformance.world import protocol
from conformance.world.launch import ForkserverLauncher, Launcher, WorldError
from conformance.world.output import tail, whole
from conformance.world.progress import LARGEST_BATCH
from conformance.world.server import DUMP_SIGNAL
from conformance.world.world import Flight, Job, World

GRACE_SECONDS = 0.5  # some ranks have answered, the others wait
QUIET_SECONDS = 1.5  # all wait
PATIENT_GRACE_SECONDS = 2.0
PROOF_SECONDS = 1.0
STACK_SECONDS = 0.3
EXIT_SECONDS = 1.0  # between the end of a rank's stream and the word of how it ended
BATCH_SECONDS = 0.25
COALESCE = 8
COALESCE_SECONDS = 0.005
LARGEST_BACKLOG = 1000
LARGEST_HOUSE = 32
STARTS = 3


class Pool:
    """Worlds of every size that cases ask for, up to ``worlds`` of each side by side. A context manager: leaving it leaves nothing behind."""

    def __init__(self, target: Target, *, worlds: int = 1) -> None:
        self.target = target
        self._side_by_side = worlds
        self.folder = tempfile.mkdtemp(prefix="shardlaw-", dir=roomy())
        self._closed = False
        atexit.register(self.close)
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count(1)
        self._folders = itertools.count(1)
        self._worlds: dict[int, World] = {}
        self._pending: dict[int, deque[Job]] = defaultdict(deque)
        self._finished: deque[tuple[Job, Verdict]] = deque()
        self._delivering = False
        self._owed = 0
        self._pace: dict[str, float] = {}
        self._failed_starts = 0
        self._polled = 0.0
        self._launcher: Launcher = self._launch()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What callers ask for

    def feed(self, law: Law, case: Case, done: Callable[[Verdict], None]) -> None:
        """Take in a case; ``done`` gets its verdict during a later call. Raises :class:`WorldError` when ranks cannot be started."""
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
                    queue.extend(replace(before, stage=k, last=k) for k, its in enumerate(before.stages) if its == size)
                queue.append(replace(job, stage=stage, last=stage, answers={}))
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
            for world in self._worlds.values():
                if not world.flights and world.started:
                    world.send(protocol.Stop())
            until = time.monotonic() + 0.5
            while any(len(w.ended) < w.size for w in self._worlds.values() if not w.flights and w.started) and time.monotonic() < until:
                for event in self._launcher.events():
                    if isinstance(event, protocol.Exited) and event.world in self._worlds:
                        self._worlds[event.world].ended[event.rank] = ""
                time.sleep(0.002)
        except (EOFError, OSError):
            pass
        finally:
            if hasattr(self, "_launcher"):
                self._launcher.close()
            for world in self._worlds.values():
                world.destroy()
            self._selector.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    # How it is done

    def _launch(self) -> Launcher:
        launcher = ForkserverLauncher(self.target, self.folder)
        self._selector.register(launcher, selectors.EVENT_READ)
        return launcher

    def _job(self, law: Law, case: Case, done: Callable[[Verdict], None]) -> Job:
        stages = law.stages(case) if law.stages else (max(case.world, law.smallest),)
        return Job(law, case, done, f"{self.folder}/case-{next(self._folders)}", stages, last=len(stages) - 1)

    def _turn(self, wait: float, *, eager: bool = False) -> None:
        """Once around: hand out, listen, watch, hand out, call back."""
        if self._closed:
            raise WorldError("this pool is closed")
        if self._delivering:
            return
        self._dispatch(eager)
        ready = self._selector.select(0 if self._finished else wait)
        for key, _ in ready:
            if isinstance(key.data, tuple):
                self._hear(*key.data)
            else:
                self._heed()
        now = self._polled = time.monotonic()
        for world in list(self._worlds.values()):
            self._look_after(world, now)
        self._dispatch(eager)
        self._deliver()

    def _dispatch(self, eager: bool) -> None:
        now = time.monotonic()
        for size, queue in self._pending.items():
            if queue and not eager and len(queue) < COALESCE and now - queue[0].fed < COALESCE_SECONDS:
                continue
            if queue:
                self._settle(size, queue)
        for world in list(self._worlds.values()):
            if world.started and not world.out_of_step and not world.ended:
                if len(world.flights) == 0 and world.queue and (eager or world.patient or len(world.queue) >= COALESCE or now - world.queue[0].fed > COALESCE_SECONDS):
                    world.fly(self._batch(world.queue))
                if len(world.flights) == 1 and len(world.queue) >= 2 * COALESCE:
                    world.fly(self._batch(world.queue))

    def _settle(self, size: int, queue: deque[Job]) -> None:
        """See to it that there are worlds of ``size`` to work on ``queue``."""
        mine = [world for world in self._worlds.values() if world.queue is queue and not world.out_of_step]
        if not mine or len(mine) < self._side_by_side and all(world.flights for world in mine) and len(queue) > 2 * COALESCE:
            self._make_room(size)
            self._found(size, queue)

    def _make_room(self, size: int) -> None:
        """Dismiss worlds that nobody needs when there are very many ranks."""
        idle = [world for world in self._worlds.values() if not world.flights and not world.queue and world.started and not world.patient]
        for world in sorted(idle, key=lambda world: world.idle_since):
            if sum(live.size for live in self._worlds.values()) + size > max(LARGEST_HOUSE, 2 * size):
                self._dismiss(world)

    def _batch(self, queue: deque[Job]) -> list[Job]:
        jobs: list[Job] = []
        seconds = 0.0
        while queue and len(jobs) < LARGEST_BATCH and seconds < BATCH_SECONDS:
            jobs.append(queue.popleft())
            seconds += self._pace.get(jobs[-1].law.id, 0.01)
        return jobs

    def _found(self, size: int, queue: deque[Job], *, patient: bool = False) -> World:
        """Start a world; it works on ``queue`` once its ranks are ready."""
        number = next(self._numbers)
        world = World(number, size, f"{self.folder}/world-{number}", queue, patient=patient)
        self._worlds[number] = world
        world.streams = self._launcher.launch(number, size, world.folder)
        for rank, stream in enumerate(world.streams):
            self._selector.register(stream, selectors.EVENT_READ, (world, rank))
        return world

    def _dismiss(self, world: World) -> None:
        """End a world of which nothing is due; what it had not begun goes back to its queue."""
        del self._worlds[world.number]
        for stream in world.streams:
            if stream.fileno() >= 0 and stream in self._selector.get_map():
                self._selector.unregister(stream)
        self._launcher.signal(world.number, signal.SIGKILL)
        for flight in reversed(world.flights):
            for index in sorted(flight.due, reverse=True):
                flight.jobs[index].answers = {}
                world.queue.appendleft(flight.jobs[index])
        world.destroy()

    # What ranks and launcher say

    def _heed(self) -> None:
        try:
            events = self._launcher.events()
        except EOFError as error:
            raise WorldError(f"the server of the ranks has gone: {error}") from None
        for event in events:
            if isinstance(event, protocol.Hello):
                if event.problem:
                    raise WorldError(f"ranks cannot be started: {event.problem}")
                for world in self._worlds.values():
                    world.born = time.monotonic()
                continue
            world = self._worlds.get(event.world)
            if world is None:
                continue
            if isinstance(event, protocol.Spawned):
                if event.problem:
                    raise WorldError(f"ranks cannot be started: {event.problem}")
                world.pids = event.pids
            elif isinstance(event, protocol.Exited):
                world.ended[event.rank] = how(event.status)

    def _hear(self, world: World, rank: int) -> None:
        if world.number not in self._worlds:
            return
        try:
            data = world.streams[rank].recv(1 << 18)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(world.streams[rank])
            world.silenced[rank] = time.monotonic()
            return
        world.went += 1
        try:
            for message in world.frames[rank].feed(data):
                self._take(world, rank, message)
        except protocol.ProtocolError as error:
            world.ended.setdefault(rank, f"sent what is no message: {error}")

    def _take(self, world: World, rank: int, message: protocol.FromRank) -> None:
        if isinstance(message, protocol.Answers):
            for said in message.said:
                flight = world.flight(said.batch)
                if flight is not None and said.index in flight.due:
                    job = flight.jobs[said.index]
                    job.answers[rank] = protocol.unpack_answer(rank, said)
                    if len(job.answers) == world.size:
                        flight.due.remove(said.index)
                        self._conclude(world, job)
        elif isinstance(message, protocol.Parked):
            world.parked[rank] = message
        elif isinstance(message, protocol.Done):
            self._landed(world, rank, message)
        elif isinstance(message, protocol.Ready):
            world.ready.add(rank)
            if world.started:
                self._failed_starts = 0
        elif isinstance(message, protocol.Failed):
            raise WorldError(f"rank {rank} of {world.size} cannot start: {message.error}")

    def _landed(self, world: World, rank: int, message: protocol.Done) -> None:
        flight = world.flights[0]
        flight.done[rank] = message.counts
        if len(flight.done) < world.size:
            return
        world.flights.popleft()
        world.idle_since = time.monotonic()
        spent = (world.idle_since - max(flight.sent, world.landed)) / len(flight.jobs)
        world.landed = world.idle_since
        for law in {job.law.id for job in flight.jobs}:
            self._pace[law] = 0.7 * self._pace.get(law, spent) + 0.3 * spent
        counts: dict[str, int] = {}
        for done in flight.done.values():
            for name, count in done.items():
                if counts.setdefault(name, count) != count:
                    world.out_of_step = f"group {name} has not run as many collectives on every rank"

    def _conclude(self, world: World, job: Job) -> None:
        """All ranks have answered, or it has been said for them."""
        answers = [job.answers[rank] for rank in range(world.size)]
        try:
            verdict = judge(job.law, job.case, answers, self.target)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            verdict = Verdict(job.case, "deviates", "raised", "judge", f"the answers cannot be judged: {text}", text, tuple(answers))
        if verdict.status == "deviates":
            verdict = replace(verdict, history=tuple(world.served))
        world.served.append(job.case)
        if verdict.status == "held" and job.stage < job.last:
            job.stage, job.answers = job.stage + 1, {}
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

    # What becomes of a world that does not answer

    def _look_after(self, world: World, now: float) -> None:
        if not world.started:
            self._look_after_start(world, now)
        elif world.ended or world.silenced and now - min(world.silenced.values()) > EXIT_SECONDS:
            self._bury(world)
        elif world.silenced:
            return
        elif (parted := world.parted()) is not None:
            self._bury(world, parted)
        elif world.out_of_step:
            if not world.flights or world.watch.quiet > GRACE_SECONDS:
                self._dismiss(world)
            else:
                world.watch.look(now, world.progress(), world.pids)
        elif len(world.parked) == world.size:
            groups = world.in_step()
            world.parked.clear()
            if groups is None:
                self._dismiss(world)
            else:
                world.went += 1
                world.send(protocol.Go(groups))
        elif world.flights and world.watch.look(now, world.progress(), world.pids) and self._is_late(world):
            self._bury(world)

    def _look_after_start(self, world: World, now: float) -> None:
        problem = ""
        if world.ended:
            rank, reason = min(world.ended.items())
            problem = f"rank {rank} of {world.size} ended while starting: {reason}"
        elif now - world.born > self.target.startup_timeout:
            late = sorted(set(range(world.size)) - world.ready)
            problem = f"ranks {late} of {world.size} were not ready within {self.target.startup_timeout:g} s"
        if not problem:
            return
        self._failed_starts += 1
        if self._failed_starts >= STARTS:
            raise WorldError(problem)
        self._dismiss(world)
        if world.patient:
            self._found(world.size, world.queue, patient=True)

    def _is_late(self, world: World) -> bool:
        limit = self.target.timeout
        if world.watch.stuck >= limit and (world.watch.busiest >= limit / 2 or world.watch.stuck >= 3 * limit):
            return True
        undecided = world.undecided()
        if undecided is None:
            return world.watch.quiet >= PROOF_SECONDS
        flight, index = undecided
        if any(world.answered(rank, flight, index) for rank in range(world.size)):
            return world.watch.quiet >= (PATIENT_GRACE_SECONDS if world.patient else GRACE_SECONDS)
        return world.watch.quiet >= (limit if world.patient else min(limit, QUIET_SECONDS))

    def _bury(self, world: World, blamed: tuple[Flight, int] | None = None) -> None:
        """A rank has ended or is late, or ranks have parted: say so of the case that did it, and give the other cases to another world."""
        dead = {rank: reason for rank, reason in world.ended.items()}
        for rank in world.silenced:
            dead.setdefault(rank, "closed its stream to the driver")
        places = [place for rank in dead if (place := world.at_death(rank)) is not None]
        blamed = blamed or min(places, key=lambda place: (place[0].serial, place[1]), default=None) or world.undecided()
        if blamed is not None and blamed[1] in blamed[0].due:
            flight, index = blamed
            flight.due.remove(index)
            job = flight.jobs[index]
            self._speak_for(world, flight, index, job, dead)
            self._conclude(world, job)
        self._dismiss(world)
        if world.queue and world.patient:
            self._found(world.size, world.queue, patient=True)

    def _speak_for(self, world: World, flight: Flight, index: int, job: Job, dead: dict[int, str]) -> None:
        """Fill in the answers of ranks that have not given one."""
        missing = [rank for rank in range(world.size) if rank not in job.answers]
        if any(not world.answered(rank, flight, index) for rank in missing):
            self._ask_for_stacks(world, [rank for rank in range(world.size) if rank not in dead])
        for rank in missing:
            stack, output = whole(f"{world.folder}/rank-{rank}.stack"), tail(f"{world.folder}/rank-{rank}.out")
            if rank in dead:
                job.answers[rank] = Answer(rank, "crashed", stack=stack, output=output, reason=dead[rank])
            elif world.page.place(rank).batch == flight.serial and world.page.held(rank, index):
                job.answers[rank] = Answer(rank, "held", stack=stack, output=output)
            else:
                job.answers[rank] = Answer(rank, "silent", stack=stack, output=output)

    def _ask_for_stacks(self, world: World, ranks: Sequence[int]) -> None:
        paths = [f"{world.folder}/rank-{rank}.stack" for rank in ranks]
        self._launcher.signal(world.number, DUMP_SIGNAL)
        until = time.monotonic() + STACK_SECONDS
        while time.monotonic() < until and not all(os.path.exists(path) and os.path.getsize(path) for path in paths):
            time.sleep(0.002)
        time.sleep(0.005)


def how(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def roomy() -> str | None:
    """Where worlds and the files of cases live: in memory where there is enough of it, unless ``TMPDIR`` says otherwise."""
    memory = "/dev/shm"
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK):
        return None
    free = os.statvfs(memory)
    return memory if free.f_bavail * free.f_frsize > 1 << 30 else None
