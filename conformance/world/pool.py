"""The driver's way to live ranks: cases go in, verdicts come out, whatever happens to the ranks in between.

Making a :class:`Pool` starts the server of its ranks at once. The driver needs no torch for that: both load it at the same time.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import signals
from shardlaw.conformance.world.launch import ForkserverLauncher, WorldError
from shardlaw.conformance.world.manager import Launch, WorldManager
from shardlaw.conformance.world.progress import LARGEST_BATCH
from shardlaw.conformance.world.world import Batch, Job, World

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Verdict

BATCH_SECONDS = 0.25
UNKNOWN_PACE = 0.01  # seconds a case, before a law has been seen
COALESCE = 8  # cases worth a message while ranks have nothing to do
COALESCE_SECONDS = 0.005
LARGEST_BACKLOG = 1000
TURN_SECONDS = 0.05
LARGEST_BESIDE = 4  # ranks: a larger world has none of its size beside it
LANE_CASES = 64  # of one law in a row: its ops are planned in few worlds, and many cases are shared out


class Pool:
    """Worlds of every size that cases ask for, up to ``worlds`` of each side by side, started by what ``launch`` makes of the target and
    a folder. A context manager: leaving it leaves nothing behind. Side by side they work on different laws, since a rank that has planned
    an op once is quick with it.

    Every method that waits or looks for ranks raises :class:`WorldError` where they cannot be started.
    """

    def __init__(self, target: Target, *, worlds: int = 1, launch: Launch = ForkserverLauncher) -> None:
        self.target = target
        self.side_by_side = worlds
        self._pending: dict[tuple[int, int], deque[Job]] = defaultdict(deque)  # by size, and which of those side by side
        self._lanes: dict[str, int] = {}
        self._fed: Counter[str] = Counter()
        self._finished: deque[tuple[Job, Verdict]] = deque()
        self._owed = 0
        self._delivering = False
        self._turned = 0.0
        self._pace: dict[str, float] = {}
        self._folders = itertools.count(1)
        self._closed = False
        atexit.register(self.close)
        self._manager = WorldManager(target, self._conclude, self._completed, launch)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What callers ask for

    def feed(self, law: Law, case: Case, done: Callable[[Verdict], None], *, reuse: bool = False, traced: bool = False) -> None:
        """Take in a case; ``done`` gets its verdict during this or a later call. It may feed, but not wait. ``reuse``: whether ranks
        may reuse what was worked out before."""
        job = self._job(law, case, done)
        job.reuse, job.traced, job.lane = reuse, traced, self._lane(law)
        self._queue(job).append(job)
        self._owed += 1
        if self._delivering:
            return
        if self._owed > LARGEST_BACKLOG:
            while self._owed > LARGEST_BACKLOG // 2:
                self._turn(TURN_SECONDS)
        elif time.monotonic() - self._turned > COALESCE_SECONDS / 2:
            self._turn(0.0)

    def wait_ready(self) -> None:
        """Wait until every host can start ranks; on this machine they need not be waited for."""
        _ = self._manager.shares_files

    def poll(self) -> None:
        """Take in what ranks have said, hand out what waits for them, and call back; never waits."""
        self._turn(0.0, eager=True)

    def wait(self, over: Callable[[], bool]) -> None:
        """Take in verdicts, and call back, until it is ``over``."""
        while not over():
            self._turn(TURN_SECONDS, eager=True)
            assert self._finished or self._accounted(), "a case was lost"

    def flush(self) -> None:
        """Until every case that was fed has its verdict."""
        self.wait(lambda: not self._owed)

    def judge(self, law: Law, cases: Sequence[Case], *, traced: bool = False) -> list[Verdict]:
        """The verdicts on ``cases``, in their order."""
        found: dict[int, Verdict] = {}
        for at, case in enumerate(cases):
            self.feed(law, case, lambda verdict, at=at: found.__setitem__(at, verdict), traced=traced)  # type: ignore[misc]
        self.flush()
        return [found[at] for at in range(len(cases))]

    def fresh(self, law: Law, case: Case, *, traced: bool = False) -> Verdict:
        """The verdict of new worlds, which serve ``case.after`` first and nothing else, under the full limits. ``traced``: every rank says
        which functions of torch its act called."""
        from shardlaw.conformance.laws import find

        verdicts: list[Verdict] = []
        job = replace(self._job(law, case, verdicts.append), traced=traced)
        try:
            for stage, size in enumerate(job.stages):
                queue: deque[Job] = deque()
                for earlier in case.after:
                    before = self._job(find(earlier.law), earlier, lambda _: None)
                    # of a case with several worlds, a world has only served the stages of its size
                    queue.extend(before.at(k) for k, its in enumerate(before.stages) if its == size)
                queue.append(job.at(stage))
                self._owed += len(queue)
                self._manager.found(size, queue, patient=True)
                while len(verdicts) <= stage:
                    self._turn(TURN_SECONDS, eager=True)
                self._manager.dismiss_all(queue)
                if verdicts[-1].status != "held":
                    break
        finally:
            shutil.rmtree(job.folder, ignore_errors=True)
        return verdicts[-1]

    def renew(self) -> None:
        """End the worlds that are alive: what is fed from now on meets new ones."""
        for queue in self._pending.values():
            self._manager.dismiss_all(queue)

    @property
    def folder(self) -> str:
        """Where worlds and cases keep their files; gone once the pool is closed."""
        return self._manager.folder

    def weights(self) -> list[dict[str, int]]:
        """What each live rank weighed after its last batch: open ``files``, ``threads``, process ``groups``, and in MiB the ``growth`` of
        its memory since its first."""
        return [
            {"files": now.files, "threads": now.threads, "groups": now.groups, "growth": (now.memory - first.memory) >> 20}
            for world in self._manager.worlds.values()
            for first, now in world.weight.values()
        ]

    def close(self) -> None:
        """End every process, and remove every file. Cases without a verdict are forgotten."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._manager.close()

    # How it is done

    def _queue(self, job: Job) -> deque[Job]:
        return self._pending[job.size, job.lane if job.size <= LARGEST_BESIDE else 0]

    def _lane(self, law: Law) -> int:
        """Which of the worlds side by side gets the next case of ``law``: laws take turns, and one of many cases goes around."""
        first = self._lanes.setdefault(law.id, len(self._lanes))
        self._fed[law.id] += 1
        return (first + (self._fed[law.id] - 1) // LANE_CASES) % self.side_by_side

    def _job(self, law: Law, case: Case, done: Callable[[Verdict], None]) -> Job:
        stages = law.worlds(case)
        folder = f"{self._manager.folder}/case-{next(self._folders)}" if self._manager.shares_files else ""
        return Job(law, case, done, folder, stages, last=len(stages) - 1)

    def _turn(self, wait: float, *, eager: bool = False) -> None:
        """Hand out, listen, watch, hand out, call back. ``eager``: do not wait for more cases before a batch is sent."""
        signals.check()
        if self._closed:
            raise WorldError("this pool is closed")
        if self._delivering:
            return
        self._dispatch(eager)
        self._manager.turn(0.0 if self._finished else wait)
        self._turned = time.monotonic()
        self._dispatch(eager)
        self._deliver()

    def _accounted(self) -> bool:
        """Whether somebody is at work on what is owed."""
        worlds = self._manager.worlds.values()
        return not self._owed or any(self._pending.values()) or any(world.batches or world.queue for world in worlds)

    def _dispatch(self, eager: bool) -> None:
        now = time.monotonic()
        for (size, _), queue in self._pending.items():
            if queue and not any(world.queue is queue and not world.retired for world in self._manager.worlds.values()):
                self._manager.found(size, queue)
        for world in self._manager.worlds.values():
            if not (world.takes_work and world.queue):
                continue
            if not world.batches and (eager or len(world.queue) >= COALESCE or now - world.queue[0].fed > COALESCE_SECONDS):
                world.send(self._take_from(world.queue))
            # a second batch waits with the ranks, so that they need not wait for the driver
            if len(world.batches) == 1 and len(world.queue) >= 2 * COALESCE:
                world.send(self._take_from(world.queue))

    def _take_from(self, queue: deque[Job]) -> list[Job]:
        jobs: list[Job] = []
        seconds = 0.0
        while queue and len(jobs) < LARGEST_BATCH and seconds < BATCH_SECONDS:
            jobs.append(queue.popleft())
            seconds += self._pace.get(jobs[-1].law.id, UNKNOWN_PACE)
        return jobs

    def _completed(self, batch: Batch, seconds: float) -> None:
        for law in {job.law.id for job in batch.jobs}:
            self._pace[law] = 0.7 * self._pace.get(law, seconds) + 0.3 * seconds

    def _conclude(self, world: World, batch: Batch, index: int) -> None:
        """Every rank has answered a case, or it has been said for it."""
        from shardlaw.conformance.law.verdict import Verdict
        from shardlaw.conformance.world.judge import judge

        batch.due.remove(index)
        job = batch.jobs[index]
        answers = tuple(job.answers[rank] for rank in range(world.size))
        try:
            verdict = judge(job.law, job.case, answers, self.target, job.stage)
        except Exception as error:
            text = f"the answers cannot be judged: {type(error).__name__}: {error}"
            verdict = Verdict(job.case, "error", message=text, error=traceback.format_exc(), ranks=answers)
        apart = world.out_of_step(job)
        if apart and verdict.status != "deviates" and "p2p" in job.law.needs:
            world.allow(job)
        elif apart:
            world.retired = apart
            if verdict.status != "deviates":
                verdict = Verdict(job.case, "deviates", "divergence", "collectives", apart, "", answers, verdict.features)
        if job.traced and not verdict.ranks:
            verdict = replace(verdict, ranks=answers)
        if verdict.status == "deviates":
            verdict = replace(verdict, history=tuple(world.served))
        if verdict.status != "rejected":  # of which nothing was done
            world.served.append(job.case.with_after(()))  # what came before it in a new world has been served too
        job.forget()
        if verdict.status == "held" and job.stage < job.last:
            job.stage += 1
            self._queue(job).appendleft(job)  # before the cases of later laws
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
