"""The driver's interface to live ranks: it takes cases and returns their verdicts, whatever happens to the ranks.

A new :class:`Pool` starts its server at once. The driver needs no torch for that, so that both load torch at the same time.
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
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import signals
from shardlaw.conformance.world.launch import ForkserverLauncher, WorldError
from shardlaw.conformance.world.manager import Launch, WorldManager
from shardlaw.conformance.world.progress import MAX_BATCH_CASES
from shardlaw.conformance.world.world import Batch, Job, World

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Tracing, Verdict

BATCH_SECONDS = 0.25
DEFAULT_PACE = 0.01  # seconds a case, before a law has been measured
COALESCE = 8  # cases that are sent at once to idle ranks
COALESCE_SECONDS = 0.005
MAX_BACKLOG = 1000
WAIT_SECONDS = 0.05
MAX_PARALLEL_SIZE = 4  # ranks; of larger worlds there is one of each size
OWN_WORLD = -1  # the lane of cases that must have a world for themselves
LANE_CASES = 64  # of a law that go to the same world in a row: few worlds plan its ops, and many cases are spread


class Pool:
    """Worlds of every size that cases need, up to ``worlds`` of each size. Parallel worlds run different laws, since a rank that has
    planned an op once repeats it quickly. ``launch(target, folder)`` returns the launcher.

    A context manager that ends all processes and removes all files. Every method that waits for ranks or starts them raises
    :class:`WorldError` where they cannot be started.
    """

    def __init__(self, target: Target, *, worlds: int = 1, launch: Launch = ForkserverLauncher) -> None:
        self.target = target
        self.worlds_per_size = worlds
        self._queues: dict[tuple[int, int], deque[Job]] = defaultdict(deque)  # by size of the world, and lane
        self._lanes: dict[str, int] = {}
        self._submitted: Counter[str] = Counter()
        self._finished: deque[tuple[Job, Verdict]] = deque()
        self._outstanding = 0
        self._delivering = False
        self._last_run = 0.0
        self._pace: dict[str, float] = {}
        self._folders = itertools.count(1)
        self._closed = False
        atexit.register(self.close)
        self._manager = WorldManager(target, self._on_answered, self._on_batch_done, launch)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(self, law: Law, case: Case, on_verdict: Callable[[Verdict], None], *, reuse: bool = False) -> None:
        """Queue a case; ``on_verdict`` gets its verdict during this or a later call, and may submit cases, but not wait for them.
        ``reuse``: ranks may reuse results of earlier cases."""
        job = self._new_job(law, case, on_verdict)
        job.reuse, job.lane = reuse, self._lane(law, case)
        self._queue(job).append(job)
        self._outstanding += 1
        if self._delivering:
            return
        if self._outstanding > MAX_BACKLOG:
            while self._outstanding > MAX_BACKLOG // 2:
                self._run_once(WAIT_SECONDS)
        elif time.monotonic() - self._last_run > COALESCE_SECONDS / 2:
            self._run_once(0.0)

    def wait_ready(self) -> None:
        """Wait until every host can start ranks; returns at once for ranks of this machine."""
        _ = self._manager.shares_files

    def poll(self) -> None:
        """Handle answers, send queued cases and call back, without waiting."""
        self._run_once(0.0, eager=True)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Handle answers and call back until ``is_done()``."""
        while not is_done():
            self._run_once(WAIT_SECONDS, eager=True)
            assert self._finished or self._is_all_queued(), "a case was lost"

    def flush(self) -> None:
        """Wait until every submitted case has its verdict."""
        self.wait_until(lambda: not self._outstanding)

    def check(self, law: Law, cases: Sequence[Case], *, traced: Tracing = "") -> list[Verdict]:
        """The verdicts on ``cases``, in their order; cases that were submitted wait for these. ``traced``: when ranks send a trace of the
        act."""
        found: dict[int, Verdict] = {}
        for at, case in reversed([*enumerate(cases)]):
            job = self._new_job(law, case, partial(found.__setitem__, at))
            job.traced, job.lane = traced, self._lane(law, case)
            self._queue(job).appendleft(job)
            self._outstanding += 1
        self.wait_until(lambda: len(found) == len(cases))
        return [found[at] for at in range(len(cases))]

    def check_fresh(self, law: Law, case: Case, *, traced: Tracing = "") -> Verdict:
        """The verdict of new worlds, which run only ``case.after`` and then ``case``, under the full time limits."""
        from shardlaw.conformance.laws import find

        verdicts: list[Verdict] = []
        job = replace(self._new_job(law, case, verdicts.append), traced=traced)
        try:
            for stage, size in enumerate(job.stages):
                queue: deque[Job] = deque()
                for earlier in case.after:
                    before = self._new_job(find(earlier.law), earlier, lambda _: None)
                    # a world has run only those stages of an earlier case that have its size
                    queue.extend(before.for_stage(k) for k, its in enumerate(before.stages) if its == size)
                queue.append(job.for_stage(stage))
                self._outstanding += len(queue)
                self._manager.start_world(size, queue, full_limits=True)
                while len(verdicts) <= stage:
                    self._run_once(WAIT_SECONDS, eager=True)
                self._manager.end_worlds(queue)
                if verdicts[-1].status != "held":
                    break
        finally:
            shutil.rmtree(job.folder, ignore_errors=True)
        return verdicts[-1]

    def end_worlds(self) -> None:
        """End all live worlds: later cases run in new ones."""
        for queue in self._queues.values():
            self._manager.end_worlds(queue)

    @property
    def folder(self) -> str:
        """The folder of the files of worlds and cases; removed when the pool is closed."""
        return self._manager.folder

    def usage(self) -> list[dict[str, int]]:
        """The resources that each live rank used after its last batch: open ``files``, ``threads``, process ``groups``, and the ``growth``
        of its memory since its first batch, in MiB."""
        return [
            {"files": now.files, "threads": now.threads, "groups": now.groups, "growth": (now.memory - first.memory) >> 20}
            for world in self._manager.worlds.values()
            for first, now in world.usage.values()
        ]

    def close(self) -> None:
        """End every process, and remove every file. Cases without a verdict are dropped."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._manager.close()

    def _queue(self, job: Job) -> deque[Job]:
        return self._queues[job.size, job.lane if job.size <= MAX_PARALLEL_SIZE else min(job.lane, 0)]

    def _lane(self, law: Law, case: Case) -> int:
        """Which of the parallel worlds gets the next case of ``law``: laws are assigned in turn, and move on after :data:`LANE_CASES`
        cases; :data:`OWN_WORLD` for a case that none of them gets."""
        if law.needs_own_world(case):
            return OWN_WORLD
        first = self._lanes.setdefault(law.id, len(self._lanes))
        self._submitted[law.id] += 1
        return (first + (self._submitted[law.id] - 1) // LANE_CASES) % self.worlds_per_size

    def _new_job(self, law: Law, case: Case, on_verdict: Callable[[Verdict], None]) -> Job:
        stages = law.worlds(case)
        folder = f"{self._manager.folder}/case-{next(self._folders)}" if self._manager.shares_files else ""
        return Job(law, case, on_verdict, folder, stages, last=len(stages) - 1)

    def _run_once(self, wait: float, *, eager: bool = False) -> None:
        """Send batches, let the manager run once, send batches, call back. ``eager``: send a batch without waiting for more cases."""
        signals.raise_if_stopped()
        if self._closed:
            raise WorldError("this pool is closed")
        if self._delivering:
            return
        self._dispatch(eager)
        self._manager.run_once(0.0 if self._finished else wait)
        self._last_run = time.monotonic()
        self._dispatch(eager)
        self._deliver()

    def _is_all_queued(self) -> bool:
        """Whether every case without a verdict is queued or with a world."""
        worlds = self._manager.worlds.values()
        return not self._outstanding or any(self._queues.values()) or any(world.batches or world.queue for world in worlds)

    def _dispatch(self, eager: bool) -> None:
        now = time.monotonic()
        for (size, _), queue in self._queues.items():
            if queue and not any(world.queue is queue and not world.retire_reason for world in self._manager.worlds.values()):
                self._manager.start_world(size, queue)
        for world in self._manager.worlds.values():
            if not (world.accepts_work and world.queue):
                continue
            if not world.batches and (eager or len(world.queue) >= COALESCE or now - world.queue[0].submitted > COALESCE_SECONDS):
                world.send_batch(self._next_batch(world.queue))
            # a second batch is sent ahead, so that ranks need not wait for the driver
            if len(world.batches) == 1 and len(world.queue) >= 2 * COALESCE and world.queue[0].lane != OWN_WORLD:
                world.send_batch(self._next_batch(world.queue))

    def _next_batch(self, queue: deque[Job]) -> list[Job]:
        jobs: list[Job] = []
        seconds = 0.0
        while queue and len(jobs) < MAX_BATCH_CASES and seconds < BATCH_SECONDS:
            jobs.append(queue.popleft())
            seconds += self._pace.get(jobs[-1].law.id, DEFAULT_PACE)
            if jobs[-1].lane == OWN_WORLD:
                break
        return jobs

    def _on_batch_done(self, batch: Batch, seconds: float) -> None:
        for law in {job.law.id for job in batch.jobs}:
            self._pace[law] = 0.7 * self._pace.get(law, seconds) + 0.3 * seconds

    def _on_answered(self, world: World, batch: Batch, index: int) -> None:
        """Make the verdict on a case to which every rank has an answer."""
        from shardlaw.conformance.law.verdict import Verdict
        from shardlaw.conformance.world.verdicts import combine_answers

        batch.pending.remove(index)
        job = batch.jobs[index]
        answers = tuple(job.answers[rank] for rank in range(world.size))
        try:
            verdict = combine_answers(job.law, job.case, answers, self.target, job.stage)
        except Exception as error:
            text = f"the answers cannot be judged: {type(error).__name__}: {error}"
            verdict = Verdict(job.case, "error", message=text, error=traceback.format_exc(), ranks=answers)
        mismatch = world.collective_mismatch(job)
        if mismatch and verdict.status != "deviates" and "p2p" in job.law.needs:
            world.record_p2p(job)
        elif mismatch:
            world.retire_reason = mismatch
            if verdict.status != "deviates":
                verdict = Verdict(job.case, "deviates", "divergence", "collectives", mismatch, "", answers, verdict.features)
        if job.traced:
            verdict = replace(verdict, ranks=job.with_earlier(verdict.ranks or answers))
            job.earlier.extend(answer.evidence for answer in answers if answer.evidence is not None)
        if verdict.status == "deviates":
            verdict = replace(verdict, history=tuple(world.served))
        if verdict.status != "rejected":  # a rejected case changes nothing in its ranks
            world.served.append(job.case.with_after(()))  # its history has been served, and is listed, already
        if job.lane == OWN_WORLD and not world.retire_reason:
            world.retire_reason = "its only case has been tried"
        job.clear_answers()
        if verdict.status == "held" and job.stage < job.last:
            job.stage += 1
            self._queue(job).appendleft(job)  # ahead of the cases of later laws
        else:
            self._finished.append((job, verdict))

    def _deliver(self) -> None:
        self._delivering = True
        try:
            while self._finished:
                job, verdict = self._finished.popleft()
                self._outstanding -= 1
                if job.last == len(job.stages) - 1 and os.path.exists(job.folder):
                    shutil.rmtree(job.folder, ignore_errors=True)
                job.on_verdict(verdict)
        finally:
            self._delivering = False
