"""When is a rank that says nothing late? Time counts only while the driver looks, mostly while no rank uses the CPU, and the less the more
others want it: a slow machine is not a hang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import psutil

from shardlaw.conformance.law.target import Target

LOOK_SECONDS = 0.05
LONGEST_STEP = 0.25  # of the clock, however long the driver was away
TICK = 0.011  # of CPU time, in seconds: less is noise


def share() -> float:
    """The part of a CPU, at most 1, that a process which wants one gets on this machine right now."""
    try:
        with open("/proc/loadavg", "rb") as file:
            running = float(file.read().split()[3].split(b"/")[0])
        cpus = len(os.sched_getaffinity(0))
    except (OSError, AttributeError):
        running, cpus = os.getloadavg()[0], os.cpu_count() or 1
    return min(1.0, cpus / max(running, 1.0))


class Activity(NamedTuple):
    """How many seconds of CPU time a rank has used so far, and whether it is running or waiting for a disk right now."""

    rank: int
    seconds: float
    works: bool


def activity(pids: Mapping[int, int]) -> list[Activity]:
    """What the processes ``pids``, by rank, do; those that have ended are left out."""
    found = []
    for rank, pid in pids.items():
        try:
            process = psutil.Process(pid)
            times, status = process.cpu_times(), process.status()
        except psutil.Error:
            continue
        found.append(Activity(rank, times.user + times.system, status in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)))
    return found


class Watched(Protocol):
    """Ranks as a watch sees them: what each has used of the CPU, and the part of one that is to be had."""

    def activity(self) -> Sequence[Activity]: ...

    def share(self) -> float: ...


@dataclass(frozen=True)
class Patience:
    """Limits in seconds. ``grace``: some ranks have answered and no rank uses the CPU. ``quiet``: none has answered and none uses the CPU.
    ``busy``: ranks make no progress and use the CPU."""

    grace: float
    quiet: float
    busy: float


def full(target: Target) -> Patience:
    """What a case gets before a hang is reported."""
    return Patience(min(2.0, target.timeout), target.timeout, target.timeout)


def searching(target: Target, *, storage: bool = False, hung: bool = False) -> Patience:
    """What a case gets while many are tried: enough to tell. ``storage``: the law waits for files; ``hung``: it has been late before."""
    if hung:
        return Patience(min(0.5, target.timeout), min(0.5, target.timeout), target.timeout / 4)
    quiet = max(1.5, 0.15 * target.timeout) * (2 if storage else 1)
    return Patience(min(0.5, target.timeout), min(quiet, target.timeout), target.timeout)


@dataclass
class Watch:
    """The clocks of one world, in seconds since a rank last made progress: ``stuck``, and ``quiet``, which counts since a rank last used
    the CPU, go slower on a busy machine; ``passed`` does not. ``busiest`` is the CPU time of the rank that used most."""

    passed: float = 0.0
    stuck: float = 0.0
    quiet: float = 0.0
    busiest: float = 0.0
    _progress: object = None
    _at: float = 0.0
    _used: dict[int, float] = field(default_factory=dict)
    _first: dict[int, float] = field(default_factory=dict)

    def look(self, now: float, progress: object, ranks: Watched) -> bool:
        """Take note of where the ranks are; ``progress`` differs once one has moved. False where it is too early to tell."""
        if progress != self._progress:
            self._progress, self._at = progress, now
            self.passed = self.stuck = self.quiet = self.busiest = 0.0
            self._used, self._first = {}, {}
            return False
        if now - self._at < LOOK_SECONDS:
            return False
        passed = min(now - self._at, LONGEST_STEP)
        step = passed * ranks.share()
        self._at = now
        self.passed += passed
        self.stuck += step
        self.quiet = 0.0 if self._working(ranks.activity()) else self.quiet + step
        return True

    def is_busy_for(self, limit: float) -> bool:
        """Whether ranks have had ``limit`` seconds to make progress, and a fair part of them the CPU."""
        return self.stuck >= limit or (self.passed >= limit and self.busiest >= limit / 4)

    def _working(self, ranks: Sequence[Activity]) -> bool:
        """Whether a rank has used the CPU since the last look, or works right now."""
        working = False
        for rank, used, works in ranks:
            working |= used - self._used.get(rank, used) >= TICK or works
            self.busiest = max(self.busiest, used - self._first.setdefault(rank, used))
            self._used[rank] = used
        return working
