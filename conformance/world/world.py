"""The driver's record of one world: the streams to its ranks, their positions, their answers, and the pending cases."""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.observer import Observer
from shardlaw.conformance.world.progress import RAISED, RUNNING, Position
from shardlaw.conformance.world.watch import Watch

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.evidence import Evidence
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Answer, Tracing, Verdict

HISTORY = 400
MAX_FILES = 512  # open descriptors of a rank, beyond which its world is replaced
MAX_THREADS = 256  # each process group of gloo has two
MAX_GROWTH = 1 << 30  # bytes


@dataclass(eq=False)
class Job:
    """A case that awaits its verdict. ``stages`` are the sizes of the worlds that run it one after the other, up to stage ``last``.

    ``answers``, ``collectives`` (counts by group) and ``so_far`` (answers that were not final) are what ranks have sent in the current
    ``stage``. ``losses`` counts worlds that ended before it. ``lane`` is which of the parallel worlds runs it. ``earlier`` is what ranks
    recorded in the stages before, where the case is traced; copies for one stage share it.
    """

    law: Law
    case: Case
    on_verdict: Callable[[Verdict], None]
    folder: str
    stages: tuple[int, ...]
    stage: int = 0
    last: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    collectives: dict[int, dict[str, int]] = field(default_factory=dict)
    losses: int = 0
    so_far: dict[int, Answer] = field(default_factory=dict)
    traced: Tracing = ""
    earlier: list[Evidence] = field(default_factory=list)
    reuse: bool = False
    lane: int = 0
    submitted: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        """How many ranks the current stage needs."""
        return self.stages[self.stage]

    def for_stage(self, stage: int) -> Job:
        """A copy that runs one stage alone."""
        return replace(self, stage=stage, last=stage, answers={}, collectives={}, so_far={})

    def with_earlier(self, answers: Iterable[Answer]) -> tuple[Answer, ...]:
        """Answers of the current stage with what ranks recorded in the stages before."""
        return tuple(replace(answer, evidence=answer.evidence and answer.evidence.after(self.earlier)) for answer in answers)

    def clear_answers(self) -> None:
        """Drop what ranks have sent: the case will run again."""
        self.answers, self.collectives, self.so_far = {}, {}, {}


@dataclass(eq=False)
class Batch:
    """A batch that was sent to the ranks. ``pending`` are the indices of jobs without a verdict, ``finished`` the ranks that have run
    it."""

    serial: int
    jobs: list[Job]
    pending: set[int]
    sent: float
    finished: set[int] = field(default_factory=set)


class World:
    """A live world, from its launch to its end. It takes jobs from ``queue``; ``full_limits``: they get the full time limits. ``streams``
    has the streams of the ranks that are connected."""

    def __init__(self, number: int, size: int, observer: Observer, queue: deque[Job], *, full_limits: bool = False) -> None:
        self.number = number
        self.size = size
        self.observer = observer
        self.queue = queue
        self.full_limits = full_limits
        self.streams: dict[int, socket.socket] = {}
        self.frames = [protocol.FrameDecoder(protocol.FromRank) for _ in range(size)]
        self.idle_since = time.monotonic()
        self.ready: set[int] = set()
        self.ended: dict[int, str] = {}  # how a rank ended
        self.closed_streams: dict[int, float] = {}  # when a rank's stream ended
        self.unreadable: set[int] = set()  # ranks that sent an answer which cannot be read
        self.batches: deque[Batch] = deque()
        self.parked: dict[int, protocol.Parked] = {}
        self.served: deque[Case] = deque(maxlen=HISTORY)
        self.groups: dict[str, tuple[int, ...]] = {}
        self.p2p_counts: Counter[tuple[int, str]] = Counter()  # point-to-point operations, by rank and group
        self.usage: dict[int, tuple[protocol.BatchDone, protocol.BatchDone]] = {}  # after the first batch, and after the last
        self.retire_reason = ""
        self.watch = Watch()
        self._serials = 0
        self._received = 0

    @property
    def started(self) -> bool:
        return len(self.ready) == self.size

    @property
    def accepts_work(self) -> bool:
        return self.started and not (self.retire_reason or self.ended or self.closed_streams)

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do and nobody waits for it."""
        return self.accepts_work and not (self.batches or self.queue or self.full_limits)

    def broadcast(self, message: protocol.ToRank) -> None:
        """Send a message to every rank. A rank that has ended is noticed when its stream ends."""
        data = protocol.encode_frame(message)
        for stream in self.streams.values():
            with suppress(OSError):
                stream.sendall(data)

    def send_batch(self, jobs: list[Job]) -> None:
        """Send a batch of jobs to all ranks."""
        self._serials += 1
        batch = Batch(self._serials, jobs, set(range(len(jobs))), time.monotonic())
        self.batches.append(batch)
        tasks = tuple(protocol.Task(job.law.id, job.case.text, job.folder, job.stage, job.traced, job.reuse) for job in jobs)
        self.broadcast(protocol.Batch(batch.serial, tasks))

    def receive(self, rank: int) -> list[protocol.FromRank]:
        """The messages that a rank has sent. Raises ``BlockingIOError`` where there are none yet, ``EOFError`` when its stream has ended,
        and ``ProtocolError`` for bytes that are no message."""
        self._received += 1
        try:
            data = self.streams[rank].recv(1 << 18, socket.MSG_DONTWAIT)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        return list(self.frames[rank].feed(data))

    def unsent_messages(self, rank: int) -> list[protocol.FromRank]:
        """The messages that a rank has buffered, some of which it may have sent meanwhile."""
        try:
            return list(protocol.FrameDecoder(protocol.FromRank).feed(self.observer.unsent(rank)))
        except protocol.ProtocolError:
            return []

    def resume(self, verify: tuple[str, ...]) -> None:
        """Let parked ranks go on."""
        self.parked.clear()
        self._received += 1
        self.broadcast(protocol.Resume(verify))

    def record_usage(self, rank: int, done: protocol.BatchDone) -> None:
        """Record the resource usage of a rank; retire the world if it is too high."""
        first, _ = self.usage.setdefault(rank, (done, done))
        self.usage[rank] = first, done
        if done.files > MAX_FILES or done.threads > MAX_THREADS or done.memory - first.memory > MAX_GROWTH:
            self.retire_reason = f"rank {rank} holds {done.files} files, {done.threads} threads and {done.memory >> 20} MiB"

    def mark_finished(self, rank: int, serial: int) -> tuple[Batch, float] | None:
        """Record that a rank has run a batch. Returns the batch and its seconds a case once all ranks have, else ``None``. A rank may
        report it twice: see :meth:`unsent_messages`."""
        batch = self.batch(serial)
        if batch is None:
            return None
        batch.finished.add(rank)
        if len(batch.finished) < self.size or batch.pending:
            return None
        self.batches.remove(batch)
        began = max(batch.sent, self.idle_since)
        self.idle_since = time.monotonic()
        return batch, (self.idle_since - began) / len(batch.jobs)

    def batch(self, serial: int) -> Batch | None:
        """The batch of this number, if it is in progress."""
        return next((batch for batch in self.batches if batch.serial == serial), None)

    def positions(self) -> tuple[Position, ...]:
        return tuple(self.observer.position(rank) for rank in range(self.size))

    def progress(self) -> object:
        """A value that differs once a rank has made progress."""
        return self.positions(), self._received, len(self.batches), len(self.ended)

    def has_answered(self, rank: int, batch: Batch, index: int) -> bool:
        """Whether ``rank`` has answered a case, or is past it."""
        if rank in batch.jobs[index].answers:
            return True
        position = self.observer.position(rank)
        if position.batch != batch.serial:
            return position.batch > batch.serial
        return position.index > index

    def first_undecided(self) -> tuple[Batch, int] | None:
        """The first case that some rank has not answered, and its batch."""
        for batch in self.batches:
            for index in sorted(batch.pending):
                if not all(self.has_answered(rank, batch, index) for rank in range(self.size)):
                    return batch, index
        return None

    def first_diverged(self) -> tuple[Batch, int] | None:
        """The case at which some ranks raised and are parked, while all others are past it. ``None`` while a rank still runs it and may yet
        raise."""
        first = min(self.parked.values(), key=lambda parked: (parked.batch, parked.index), default=None)
        batch = self.batch(first.batch) if first else None
        if first is None or batch is None:
            return None
        where = (first.batch, first.index)
        waiting = {rank for rank, parked in self.parked.items() if (parked.batch, parked.index) == where}
        others = [self.observer.position(rank) for rank in range(self.size) if rank not in waiting]
        if others and all((position.batch, position.index) > where for position in others):
            return batch, first.index
        return None

    def dead_ranks(self) -> dict[int, str]:
        """The ranks that have ended, and how."""
        return {**dict.fromkeys(self.closed_streams, "closed its stream to the driver"), **self.ended}

    def case_at_death(self) -> tuple[Batch, int] | None:
        """The first case that a rank was running when it ended, and its batch."""
        found = []
        for rank in self.dead_ranks():
            position = self.observer.position(rank)
            batch = self.batch(position.batch)
            if (
                batch
                and position.state in (RUNNING, RAISED)
                and position.index in batch.pending
                and rank not in batch.jobs[position.index].answers
            ):
                found.append((batch, position.index))
        return min(found, key=lambda item: (item[0].serial, item[1]), default=None)

    def has_unsent_error(self) -> bool:
        """Whether a live rank has raised and not sent its answer yet."""
        return any(self.observer.position(rank).state == RAISED for rank in range(self.size) if rank not in self.dead_ranks())

    def groups_to_verify(self) -> tuple[str, ...] | None:
        """The groups that parked ranks must verify before they go on: those used in the case, or all where the backend does not count.

        ``None`` where the world cannot go on: ranks are parked at different cases, one is unusable, a group has run more collectives on
        one rank than on another, or a message of the case may still be on its way.
        """
        waiting = list(self.parked.values())
        if len({(parked.batch, parked.index) for parked in waiting}) > 1 or any(parked.unusable for parked in waiting):
            return None
        batch = self.batch(waiting[0].batch)
        if batch is not None and "p2p" in batch.jobs[waiting[0].index].law.needs:
            return None
        if not all(parked.total for parked in waiting):
            return (protocol.EVERY_GROUP,)
        total: dict[str, int] = {}
        for rank, parked in self.parked.items():
            for name, count in parked.total.items():
                collectives = count - self.p2p_counts[rank, name]
                if total.setdefault(name, collectives) != collectives:
                    return None
        return tuple(sorted({name for parked in waiting for name in parked.collectives}))

    def collective_mismatch(self, job: Job) -> str:
        """One line that says where ranks ran different numbers of collectives in a case, or an empty text."""
        for name in sorted({name for counts in job.collectives.values() for name in counts}):
            counts = {rank: job.collectives[rank].get(name, 0) for rank in self.groups.get(name, ()) if rank in job.collectives}
            if len(set(counts.values())) > 1:
                each = ", ".join(f"rank {rank} {count}" for rank, count in sorted(counts.items()))
                return f"ranks ran different numbers of collectives on the group of ranks {list(counts)}: {each}"
        return ""

    def record_p2p(self, job: Job) -> None:
        """Count what ranks ran in a case as point-to-point operations, whose numbers may differ between ranks."""
        self.p2p_counts.update({(rank, name): count for rank, counts in job.collectives.items() for name, count in counts.items()})

    def destroy(self) -> None:
        """Close the streams and the observer; the launcher ends the ranks."""
        for stream in self.streams.values():
            stream.close()
        self.observer.close()
