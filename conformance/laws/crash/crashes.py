"""Crashes as the acts of laws see them: plain torch code, which scripts have by its source."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardlaw.conformance.laws.crash.recorder import Recorder, plant, tree
from shardlaw.reference.crash import Disk, effects_of, in_notation, in_order, state_at, states
from shardlaw.reference.crash_jobs import overlapped, overlaps


def recorded(root: Any, go: Callable[[], object]) -> list[Any]:
    """The steps that each rank takes below ``root``."""
    dist.barrier()
    with Recorder(root).listening() as recorder:
        go()
    logs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, recorder.steps)
    return logs


def unseen(root: Any, base: Any, logs: Any) -> str:
    """What is in ``root`` after steps that do not account for it; empty where they do."""
    disk, after = Disk(base), tree(root)
    effects_of(disk, sorted((step for log in logs for step in log), key=lambda step: step.when))
    odd = sorted(path for path in {*after} | {*disk.tree()} if after.get(path, 0) != disk.tree().get(path, 0))
    dist.barrier()
    return f"how {odd[0]} is written cannot be seen" if odd else "" if any(logs) else "it writes no files there"


@dataclass
class Crash:
    """A state that a crash leaves: after each rank has ``done`` so many steps, of which some are ``lost`` and of one
    the second ``half`` is, each by its rank and its number there. ``returned``: after all steps alone."""

    done: Sequence[int] = ()
    lost: Sequence[tuple[int, int]] = ()
    half: tuple[int, int] | None = None
    returned: bool = False
    kept: dict[str, Any] = field(default_factory=dict)

    def left(self, root: Any, other: Any, before: Callable[[], object], go: Callable[[], object]) -> Any:
        """What all ranks do ``before`` lasts; then they ``go``, and crash. What is left of ``root`` is put into
        ``other`` by rank 0, which gets the state. Every rank gets a text where there is no such state, or where steps
        cannot be seen."""
        if not self.kept:
            self.record(os.fspath(root), before, go)
        missing = self.kept["unseen"] or self.missing()
        if missing or dist.get_rank():
            return missing or None
        state = self.state()
        plant(other, state.tree)
        return state

    def record(self, root: str, before: Callable[[], object], go: Callable[[], object]) -> None:
        """Keep what ``root`` held before, the steps of all ranks, and what of these cannot be seen."""
        os.makedirs(root, exist_ok=True)
        before()
        dist.barrier()
        base = tree(root)
        logs = recorded(root, go)
        self.kept.update(base=base, logs=logs, unseen=unseen(root, base, logs))

    def missing(self) -> str:
        """Why there is no such state; empty where there is."""
        counts = [sum(step.kind != "meet" for step in log) for log in self.kept["logs"]]
        known = all(number <= self.done[rank] for rank, number in [*self.lost, *filter(None, [self.half])])
        there = [*self.done] == counts if self.returned else all(map(int.__le__, self.done, counts))
        return "" if known and there else f"the ranks take {counts} steps"

    def state(self) -> Any:
        steps = {place: step for place, step in in_order(self.kept["logs"]).items() if place[1] <= self.done[place[0]]}
        return state_at(self.kept["base"], steps, in_notation(self.done, self.lost, self.half), self.lost, self.half)


@dataclass
class CountedCrash(Crash):
    """The state number ``index`` of all that a crash leaves on a ``disk``."""

    disk: str = "posix"
    index: int = 0
    threads: int = 1

    def missing(self) -> str:
        if "states" not in self.kept:
            found = self.kept["base"], self.kept["logs"], self.disk, self.threads
            self.kept["states"] = states(*found, returned=self.returned) if dist.get_rank() == 0 else []
            told = [len(self.kept["states"])]
            dist.broadcast_object_list(told)
            self.kept["count"] = told[0]
        return "" if self.index < self.kept["count"] else f"there are {self.kept['count']} states"

    def state(self) -> Any:
        return self.kept["states"][self.index]


@dataclass
class Overlap:
    """The state that two jobs leave in one folder after ``turns``, or the state number ``index`` of all."""

    turns: tuple[int, int, int] | None = None
    index: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    def left(self, root: Any, other: Any, before: Callable[[], object], jobs: Sequence[Callable[[], object]]) -> Any:
        """What all ranks do ``before`` lasts; then two ``jobs`` take turns. What they leave of ``root`` is put into
        ``other`` by rank 0, which gets the state. Every rank gets a text where there is no such state, or where steps
        cannot be seen."""
        if not self.kept:
            self.record(os.fspath(root), before, jobs)
        base, steps = self.kept["base"], self.kept["logs"]
        if self.turns is None:
            if "states" not in self.kept:
                self.kept["states"] = overlaps(base, steps)
            states = self.kept["states"][self.index :]
        else:
            begun, second, more = self.turns
            possible = begun + more <= len(steps[0]) and second <= len(steps[1])
            states = [overlapped(base, steps, self.turns)] if possible else []
        if self.kept["unseen"] or not states:
            return self.kept["unseen"] or f"the jobs take {[*map(len, steps)]} steps"
        if dist.get_rank():
            return None
        plant(other, states[0].tree)
        return states[0]

    def record(self, root: str, before: Callable[[], object], jobs: Sequence[Callable[[], object]]) -> None:
        """Keep what ``root`` held before, and the steps that each job takes from there, of all ranks as they came."""
        os.makedirs(root, exist_ok=True)
        before()
        dist.barrier()
        base, found, odd = tree(root), [], ""
        for job in jobs:
            logs = recorded(root, job)
            odd = odd or unseen(root, base, logs)
            found.append([*in_order(logs).values()])
            if dist.get_rank() == 0:
                shutil.rmtree(root)
                plant(root, base)
        self.kept.update(base=base, logs=tuple(found), unseen=odd)


def seen(left: Any, load: Callable[[], Any]) -> Any:
    """What rank 0 loads of what a crash left, or the error that it gets, and which state that was. ``None`` on other
    ranks; a text where there is no such state."""
    if left is None or isinstance(left, str):
        return left
    try:
        return load(), left
    except Exception as error:
        return error, left


class FullDisk:
    """What is left once a disk was full: no state that was calculated."""

    kinds: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return "the disk was full"
