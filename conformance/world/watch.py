"""Decide when a rank that does not answer is late.

Time counts only while the driver runs, and, for most limits, only while no rank uses the CPU. It counts less on a busy machine: a slow
machine is not a hang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import psutil

from shardlaw.conformance.law.target import Target

UPDATE_SECONDS = 0.05
MAX_STEP = 0.25  # seconds that an update adds, however long the driver was away
TICK = 0.011  # seconds of CPU time; less is noise


def cpu_share() -> float:
    """The share of a CPU, at most 1, that a busy process gets on this machine at the moment."""
    try:
        with open("/proc/loadavg", "rb") as file:
            running = float(file.read().split()[3].split(b"/")[0])
        cpus = len(os.sched_getaffinity(0))
    except (OSError, AttributeError):
        running, cpus = os.getloadavg()[0], os.cpu_count() or 1
    return min(1.0, cpus / max(running, 1.0))


class Activity(NamedTuple):
    """The CPU time that a rank has used, in seconds, and whether it runs or waits for a disk at the moment."""

    rank: int
    cpu_seconds: float
    is_running: bool


def read_activity(pids: Mapping[int, int]) -> list[Activity]:
    """The activity of the processes ``pids``, given by rank; processes that have ended are left out."""
    found = []
    for rank, pid in pids.items():
        try:
            process = psutil.Process(pid)
            times, status = process.cpu_times(), process.status()
        except psutil.Error:
            continue
        found.append(Activity(rank, times.user + times.system, status in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)))
    return found


class ActivitySource(Protocol):
    """Where a watch reads the CPU use of ranks, and the share of a CPU that one gets."""

    def activity(self) -> Sequence[Activity]: ...

    def cpu_share(self) -> float: ...


@dataclass(frozen=True)
class TimeLimits:
    """How long a case may take, in seconds. ``grace``: some ranks have answered, and no rank uses the CPU. ``quiet``: no rank has answered,
    and none uses the CPU. ``busy``: ranks use the CPU without progress, one of them for ``busy_share`` of that time."""

    grace: float
    quiet: float
    busy: float
    busy_share: float = 0.25


def full_limits(target: Target) -> TimeLimits:
    """The limits under which a hang is confirmed: torch may plan an op for seconds, which takes a minute on a busy machine."""
    return TimeLimits(min(2.0, target.timeout), target.timeout, target.timeout, busy_share=1.0)


def search_limits(target: Target, *, storage: bool = False, hung: bool = False) -> TimeLimits:
    """The shorter limits of a search over many cases. ``storage``: the law waits for files; ``hung``: it has been late before."""
    if hung:
        return TimeLimits(min(0.5, target.timeout), min(0.5, target.timeout), target.timeout / 4)
    quiet = max(1.5, 0.15 * target.timeout) * (2 if storage else 1)
    return TimeLimits(min(0.5, target.timeout), min(quiet, target.timeout), target.timeout)


@dataclass
class Watch:
    """The clocks of one world, in seconds since a rank last made progress.

    ``passed`` is wall time. ``stuck`` is wall time scaled by the share of a CPU that ranks get; ``quiet`` is the same, since a rank last
    used the CPU. ``busiest`` is the CPU time of the rank that used most.
    """

    passed: float = 0.0
    stuck: float = 0.0
    quiet: float = 0.0
    busiest: float = 0.0
    _progress: object = None
    _at: float = 0.0
    _used: dict[int, float] = field(default_factory=dict)
    _first: dict[int, float] = field(default_factory=dict)

    def update(self, now: float, progress: object, ranks: ActivitySource) -> bool:
        """Advance the clocks; a ``progress`` that differs from the last one resets them. False where it did, or where the last update was
        less than :data:`UPDATE_SECONDS` ago."""
        if progress != self._progress:
            self._progress, self._at = progress, now
            self.passed = self.stuck = self.quiet = self.busiest = 0.0
            self._used, self._first = {}, {}
            return False
        if now - self._at < UPDATE_SECONDS:
            return False
        passed = min(now - self._at, MAX_STEP)
        step = passed * ranks.cpu_share()
        self._at = now
        self.passed += passed
        self.stuck += step
        self.quiet = 0.0 if self._uses_cpu(ranks.activity()) else self.quiet + step
        return True

    def is_busy_for(self, limit: float, share: float) -> bool:
        """Whether ranks have had ``limit`` seconds without progress, and one of them ``share`` of that time on the CPU."""
        return self.stuck >= limit or (self.passed >= limit and self.busiest >= limit * share)

    def _uses_cpu(self, ranks: Sequence[Activity]) -> bool:
        """Whether a rank has used the CPU since the last update, or runs at the moment."""
        uses_cpu = False
        for rank, used, is_running in ranks:
            uses_cpu |= used - self._used.get(rank, used) >= TICK or is_running
            self.busiest = max(self.busiest, used - self._first.setdefault(rank, used))
            self._used[rank] = used
        return uses_cpu
