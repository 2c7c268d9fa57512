"""One world as the driver sees it: streams to its ranks, what they are at, what they have said, and what is still due."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from conformance.case import Case
from conformance.law import Law
from conformance.verdict import Answer, Verdict
from conformance.world import protocol
from conformance.world.progress import RUNNING, Page, Place
from conformance.world.watch import Watch

HISTORY = 400


@dataclass(eq=False)
class Job:
    """A case on its way to a verdict. ``answers`` are those of the stage that it is at; ``folder`` is shared by all stages."""

    law: Law
    case: Case
    done: Callable[[Verdict], None]
    folder: str
    stages: tuple[int, ...]
    stage: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    last: int = 0
    fed: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        """How many ranks its present stage wants."""
        return self.stages[self.stage]


@dataclass(eq=False)
class Flight:
    """A batch that the ranks have been sent, and the ranks that are through with it."""

    serial: int
    jobs: list[Job]
    due: set[int] = field(default_factory=set)
    sent: float = field(default_factory=time.monotonic)
    done: dict[int, dict[str, int]] = field(default_factory=dict)


class World:
    """A live world, from its launch to its end. ``patient`` worlds give every case the full limits."""

    def __init__(self, number: int, size: int, folder: str, queue: deque[Job], *, patient: bool = False) -> None:
        self.number = number
        self.queue = queue
        self.size = size
        self.folder = folder
        self.patient = patient
        os.mkdir(folder)
        self.page = Page(f"{folder}/progress", size, create=True)
        self.streams: list[socket.socket] = []
        self.frames = [protocol.Frames(protocol.FromRank) for _ in range(size)]
        self.pids: tuple[int, ...] = ()
        self.born = time.monotonic()
        self.ready: set[int] = set()
        self.ended: dict[int, str] = {}
        self.silenced: dict[int, float] = {}
        self.flights: deque[Flight] = deque()
        self.parked: dict[int, protocol.Parked] = {}
        self.served: deque[Case] = deque(maxlen=HISTORY)
        self.count = 0
        self.out_of_step = ""
        self.watch = Watch()
        self.went = 0
        self.landed = self.born
        self.idle_since = self.born

    @property
    def started(self) -> bool:
        return len(self.ready) == self.size

    def send(self, message: protocol.ToRank) -> None:
        """The same message to every rank; one that is gone shows by its stream's end."""
        data = protocol.frame(message)
        for stream in self.streams:
            try:
                stream.sendall(data)
            except OSError:
                pass

    def fly(self, jobs: list[Job]) -> None:
        """Send a batch."""
        self.count += 1
        flight = Flight(self.count, jobs, set(range(len(jobs))))
        self.flights.append(flight)
        tasks = tuple(protocol.Task(job.law.id, job.case.text, job.folder, job.stage) for job in jobs)
        self.send(protocol.Batch(flight.serial, tasks))

    def flight(self, serial: int) -> Flight | None:
        """The batch of this number, while the ranks are at it."""
        return next((flight for flight in self.flights if flight.serial == serial), None)

    def places(self) -> tuple[Place, ...]:
        return tuple(self.page.place(rank) for rank in range(self.size))

    def progress(self) -> object:
        """Something that differs once a rank has moved."""
        return self.places(), len(self.ready), self.went, len(self.flights), frozenset(self.ended)

    def answered(self, rank: int, flight: Flight, index: int) -> bool:
        """Whether ``rank`` is through with a case, as far as anybody can tell."""
        if rank in flight.jobs[index].answers:
            return True
        place = self.page.place(rank)
        if place.batch != flight.serial:
            return place.batch > flight.serial
        return place.index > index or self.page.held(rank, index)

    def undecided(self) -> tuple[Flight, int] | None:
        """The first case to which some rank has not answered, and its batch."""
        for flight in self.flights:
            for index in sorted(flight.due):
                if not all(self.answered(rank, flight, index) for rank in range(self.size)):
                    return flight, index
        return None

    def parted(self) -> tuple[Flight, int] | None:
        """The case after which some ranks wait because they raised, while others did not raise and went on; once all have answered it."""
        first = min(self.parked.values(), key=lambda parked: (parked.batch, parked.index), default=None)
        flight = self.flight(first.batch) if first else None
        if first is None or flight is None:
            return None
        others = [rank for rank in range(self.size) if self.parked.get(rank) is None or self.parked[rank].index != first.index]
        if others and all(self.answered(rank, flight, first.index) for rank in others):
            return flight, first.index
        return None

    def at_death(self, rank: int) -> tuple[Flight, int] | None:
        """The case that ``rank`` was running when it ended, if it was."""
        place = self.page.place(rank)
        for flight in self.flights:
            if place.state == RUNNING and flight.serial == place.batch and place.index in flight.due and rank not in flight.jobs[place.index].answers:
                return flight, place.index
        return None

    def in_step(self) -> tuple[str, ...] | None:
        """Whether all ranks wait after the same case, and every group has run as many collectives on each of its ranks: then the groups that
        were used since the case began; ``None`` where that is not so, or cannot be told."""
        said = list(self.parked.values())
        if len({(parked.batch, parked.index) for parked in said}) > 1 or not all(parked.after for parked in said):
            return None
        counts: dict[str, int] = {}
        for parked in said:
            for name, count in parked.after.items():
                if counts.setdefault(name, count) != count:
                    return None
        return tuple(sorted(name for name in counts if any(parked.after.get(name) != parked.before.get(name) for parked in said)))

    def destroy(self) -> None:
        """Close the streams and remove the folder; the ranks are the launcher's to end."""
        for stream in self.streams:
            stream.close()
        self.page.close()
        shutil.rmtree(self.folder, ignore_errors=True)
