"""One world as the driver sees it: streams to its ranks, what they are at, what they have said, and what is still due."""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.observer import Observer
from shardlaw.conformance.world.progress import RAISED, RUNNING, Place
from shardlaw.conformance.world.watch import Watch

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.verdict import Answer, Verdict

HISTORY = 400
MOST_FILES = 512  # open descriptors of a rank, beyond which its world is replaced
MOST_THREADS = 256  # each process group of gloo has two
MOST_GROWTH = 1 << 30  # bytes


@dataclass(eq=False)
class Job:
    """A case on its way to a verdict. It runs in a world for each of ``stages``, up to ``last``; ``answers`` and ``ran`` (collectives by
    group) are what ranks have said at the present ``stage``. ``lost`` counts worlds that ended while it waited."""

    law: Law
    case: Case
    done: Callable[[Verdict], None]
    folder: str
    stages: tuple[int, ...]
    stage: int = 0
    last: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    ran: dict[int, dict[str, int]] = field(default_factory=dict)
    lost: int = 0
    traced: bool = False
    reuse: bool = False
    lane: int = 0
    fed: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        """How many ranks its present stage wants."""
        return self.stages[self.stage]

    def at(self, stage: int) -> Job:
        """One stage of it, to run alone."""
        return replace(self, stage=stage, last=stage, answers={}, ran={})

    def forget(self) -> None:
        """It will run again."""
        self.answers, self.ran = {}, {}


@dataclass(eq=False)
class Batch:
    """A batch that the ranks have been sent: which of its jobs are still due, and which ranks are through with it."""

    serial: int
    jobs: list[Job]
    due: set[int]
    sent: float
    done: set[int] = field(default_factory=set)


class World:
    """A live world, from its launch to its end. ``queue`` holds the jobs that it works on; a ``patient`` one gives them the full limits.
    ``streams`` lead to its ranks, those that stand already."""

    def __init__(self, number: int, size: int, observer: Observer, queue: deque[Job], *, patient: bool = False) -> None:
        self.number = number
        self.size = size
        self.observer = observer
        self.queue = queue
        self.patient = patient
        self.streams: dict[int, socket.socket] = {}
        self.frames = [protocol.Frames(protocol.FromRank) for _ in range(size)]
        self.born = self.idle_since = time.monotonic()
        self.ready: set[int] = set()
        self.ended: dict[int, str] = {}  # how ranks ended
        self.silenced: dict[int, float] = {}  # when their streams did
        self.batches: deque[Batch] = deque()
        self.parked: dict[int, protocol.Parked] = {}
        self.served: deque[Case] = deque(maxlen=HISTORY)
        self.groups: dict[str, tuple[int, ...]] = {}
        self.messages: Counter[tuple[int, str]] = Counter()  # between two ranks, by rank and group
        self.weight: dict[int, tuple[protocol.Done, protocol.Done]] = {}  # at first, and now
        self.retired = ""
        self.watch = Watch()
        self._serials = 0
        self._heard = 0

    @property
    def started(self) -> bool:
        return len(self.ready) == self.size

    @property
    def takes_work(self) -> bool:
        return self.started and not (self.retired or self.ended or self.silenced)

    @property
    def is_idle(self) -> bool:
        """Whether nobody needs it now."""
        return self.takes_work and not (self.batches or self.queue or self.patient)

    # Speaking and hearing

    def tell(self, message: protocol.ToRank) -> None:
        """The same message to every rank; one that is gone shows by its stream's end."""
        data = protocol.frame(message)
        for stream in self.streams.values():
            with suppress(OSError):
                stream.sendall(data)

    def send(self, jobs: list[Job]) -> None:
        """Send a batch."""
        self._serials += 1
        batch = Batch(self._serials, jobs, set(range(len(jobs))), time.monotonic())
        self.batches.append(batch)
        tasks = tuple(protocol.Task(job.law.id, job.case.text, job.folder, job.stage, job.traced, job.reuse) for job in jobs)
        self.tell(protocol.Batch(batch.serial, tasks))

    def listen(self, rank: int) -> list[protocol.FromRank]:
        """What a rank has sent. Raises ``BlockingIOError`` where there is nothing yet, ``EOFError`` when its stream has ended, and
        ``ProtocolError`` for what is no message."""
        self._heard += 1
        try:
            data = self.streams[rank].recv(1 << 18, socket.MSG_DONTWAIT)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        return list(self.frames[rank].feed(data))

    def unsent(self, rank: int) -> list[protocol.FromRank]:
        """What a rank was going to send, or has sent just now."""
        try:
            return list(protocol.Frames(protocol.FromRank).feed(self.observer.unsent(rank)))
        except protocol.ProtocolError:
            return []

    def resume(self, prove: tuple[str, ...]) -> None:
        """Let the ranks that wait go on."""
        self.parked.clear()
        self._heard += 1
        self.tell(protocol.Go(prove))

    def record_usage(self, rank: int, done: protocol.Done) -> None:
        """Note what a rank weighs; a world that has grown too heavy is retired."""
        first, _ = self.weight.setdefault(rank, (done, done))
        self.weight[rank] = first, done
        if done.files > MOST_FILES or done.threads > MOST_THREADS or done.memory - first.memory > MOST_GROWTH:
            self.retired = f"rank {rank} holds {done.files} files, {done.threads} threads and {done.memory >> 20} MiB"

    def complete(self, rank: int, serial: int) -> tuple[Batch, float] | None:
        """A rank is through with a batch; once all are, the batch and its seconds a case. A rank may say so twice: see :meth:`unsent`."""
        batch = self.batch(serial)
        if batch is None:
            return None
        batch.done.add(rank)
        if len(batch.done) < self.size or batch.due:
            return None
        self.batches.remove(batch)
        began = max(batch.sent, self.idle_since)
        self.idle_since = time.monotonic()
        return batch, (self.idle_since - began) / len(batch.jobs)

    # Where its ranks are

    def batch(self, serial: int) -> Batch | None:
        """The batch of this number, while the ranks are at it."""
        return next((batch for batch in self.batches if batch.serial == serial), None)

    def places(self) -> tuple[Place, ...]:
        return tuple(self.observer.place(rank) for rank in range(self.size))

    def progress(self) -> object:
        """Something that differs once a rank has moved."""
        return self.places(), self._heard, len(self.batches), len(self.ended)

    def answered(self, rank: int, batch: Batch, index: int) -> bool:
        """Whether ``rank`` is through with a case, as far as anybody can tell."""
        if rank in batch.jobs[index].answers:
            return True
        place = self.observer.place(rank)
        if place.batch != batch.serial:
            return place.batch > batch.serial
        return place.index > index

    def undecided(self) -> tuple[Batch, int] | None:
        """The first case to which some rank has not answered, and its batch."""
        for batch in self.batches:
            for index in sorted(batch.due):
                if not all(self.answered(rank, batch, index) for rank in range(self.size)):
                    return batch, index
        return None

    def diverged(self) -> tuple[Batch, int] | None:
        """The case after which some ranks wait because they raised, while all others went on: those that are still at it may yet raise."""
        first = min(self.parked.values(), key=lambda parked: (parked.batch, parked.index), default=None)
        batch = self.batch(first.batch) if first else None
        if first is None or batch is None:
            return None
        here = (first.batch, first.index)
        waiting = {rank for rank, parked in self.parked.items() if (parked.batch, parked.index) == here}
        others = [self.observer.place(rank) for rank in range(self.size) if rank not in waiting]
        if others and all((place.batch, place.index) > here for place in others):
            return batch, first.index
        return None

    def dead(self) -> dict[int, str]:
        """Ranks that have ended, and how."""
        return {**dict.fromkeys(self.silenced, "closed its stream to the driver"), **self.ended}

    def at_death(self) -> tuple[Batch, int] | None:
        """The case that a rank was running when it ended, if one was: the first one, where there are several."""
        found = []
        for rank in self.dead():
            place = self.observer.place(rank)
            batch = self.batch(place.batch)
            if batch and place.state in (RUNNING, RAISED) and place.index in batch.due and rank not in batch.jobs[place.index].answers:
                found.append((batch, place.index))
        return min(found, key=lambda item: (item[0].serial, item[1]), default=None)

    def about_to_speak(self) -> bool:
        """Whether a live rank has raised and has not said so yet."""
        return any(self.observer.place(rank).state == RAISED for rank in range(self.size) if rank not in self.dead())

    def to_prove(self) -> tuple[str, ...] | None:
        """All ranks wait after the same case: which groups must show that they still work before they go on. ``None``: it is known that
        they do not, a group has run more collectives on one of its ranks than on another."""
        said = list(self.parked.values())
        if len({(parked.batch, parked.index) for parked in said}) > 1 or any(parked.spoilt for parked in said):
            return None
        if not all(parked.total for parked in said):
            return (protocol.EVERY_GROUP,)
        total: dict[str, int] = {}
        for rank, parked in self.parked.items():
            for name, count in parked.total.items():
                collectives = count - self.messages[rank, name]
                if total.setdefault(name, collectives) != collectives:
                    return None
        return tuple(sorted({name for parked in said for name in parked.ran}))

    def out_of_step(self, job: Job) -> str:
        """What shows that ranks ran different collectives during a case: one line, or nothing."""
        for name in sorted({name for ran in job.ran.values() for name in ran}):
            counts = {rank: job.ran[rank].get(name, 0) for rank in self.groups.get(name, ()) if rank in job.ran}
            if len(set(counts.values())) > 1:
                each = ", ".join(f"rank {rank} {count}" for rank, count in sorted(counts.items()))
                return f"ranks ran different numbers of collectives on the group of ranks {list(counts)}: {each}"
        return ""

    def allow(self, job: Job) -> None:
        """What its ranks ran during a case were messages between two ranks, of which the others need not know."""
        self.messages.update({(rank, name): count for rank, ran in job.ran.items() for name, count in ran.items()})

    def destroy(self) -> None:
        """Close the streams, and forget what was seen; the ranks are the launcher's to end."""
        for stream in self.streams.values():
            stream.close()
        self.observer.close()
