"""Crashes as the acts of laws see them: plain torch code, which scripts have by its source.

Each has a folder ``run``, in which ranks save, and a folder ``rest``, into which what a crash leaves of it is put.
Laws try states that the reference counts (:class:`RecordedCrash`, :class:`RecordedOverlap`); a script takes the steps
of one state again (:class:`Crash`, :class:`LossyCrash`, :class:`Overlap`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardlaw.conformance.law.due import Meaningless
from shardlaw.conformance.laws.crash.recorder import gathered, listening, plant, recorded, tree
from shardlaw.reference.crash import Disk, Step, apply_steps, format_moment, order_steps, state_at, states
from shardlaw.reference.crash_jobs import overlapped_state, overlapped_states

Place = tuple[int, int]


def begin(root: str, before: Callable[[], object]) -> dict[str, bytes | None]:
    """What all ranks do ``before`` a crash; returns what ``root`` holds then."""
    os.makedirs(root, exist_ok=True)
    before()
    dist.barrier()
    return tree(root)


def again(root: str, step: Step) -> None:
    """Take a step again, below another root."""
    path, other = f"{root}/{step.path}", f"{root}/{step.other}"
    with suppress(FileNotFoundError):  # what it was taken on is lost
        if step.kind == "make":
            os.makedirs(path, exist_ok=True)
        elif step.kind == "open":
            open(path, "wb" if step.at else "ab").close()
        elif step.kind == "write":
            with open(path, "r+b") as stream:
                stream.seek(step.at)
                stream.write(step.data)
        elif step.kind == "cut":
            os.truncate(path, step.at)
        elif step.kind in ("move", "link"):
            (os.replace if step.kind == "move" else os.link)(path, other)
        elif step.kind == "remove":
            (os.rmdir if os.path.isdir(path) else os.remove)(path)


def so_many(done: Sequence[int], logs: Sequence[Sequence[Any]], returned: bool) -> Sequence[int]:
    """How many steps each rank has ``done`` of those that it takes: all of them where that is not told. Raises
    :class:`Meaningless` where they do not take so many, or were to have ``returned`` and take more."""
    counts = [*map(len, logs)]
    done = [*done] or counts
    if any(map(int.__gt__, done, counts)) or (returned and done != counts):
        raise Meaningless(f"the ranks take {counts} steps")
    return done


class Crash:
    """What a crash leaves after each rank has ``done`` so many steps; ``returned``: after all, which need not be told.

    It happens in ``run`` itself: what a rank does afterwards is not done.
    """

    def __init__(self, folder: str, done: Sequence[int] = (), returned: bool = False) -> None:
        self.run = self.rest = f"{folder}/run"
        self.done, self.returned = done, returned
        self.taken: list[Any] = []

    def share(self, *step: str) -> float | None:
        """How much of a step is done; ``None``: all."""
        self.taken.append(step)
        return 0 if self.done and len(self.taken) > self.done[dist.get_rank()] else None

    def left(self, before: Callable[[], object], go: Callable[[], object]) -> Any:
        """What all ranks do ``before`` lasts; then they ``go``, and crash. Rank 0 gets which state it is; every rank a
        text where what is to be lost lasts. Raises :class:`Meaningless` where they do not take so many steps."""
        os.makedirs(self.run, exist_ok=True)
        before()
        dist.barrier()
        with suppress(OSError, CheckpointException), listening(self.run, lambda *step: None, self.share):
            go()
        logs = gathered(self.taken)
        self.done = so_many(self.done, logs, self.returned)
        return self.without(logs)

    def without(self, logs: list[Any]) -> Any:
        """What :meth:`left` returns of the steps that each rank has taken."""
        return None if dist.get_rank() else self.done


class LossyCrash(Crash):
    """The same, where some steps are ``lost`` and of one the second ``half`` is, each by its rank and its number
    there."""

    def __init__(
        self, folder: str, done: Sequence[int] = (), returned: bool = False, lost: Any = (), half: Any = None
    ) -> None:
        super().__init__(folder, done, returned)
        self.lost, self.half = lost, half

    def share(self, kind: str, path: str, other: str) -> float | None:  # type: ignore[override]
        place = dist.get_rank(), len(self.taken) + 1
        there = kind != "open" or os.path.exists(f"{self.run}/{path}")
        done = super().share(kind, path, other)
        self.taken[-1] = (time.monotonic_ns(), place, kind, path, other, there)
        if place in self.lost and kind != "make":  # a folder goes at the end
            return 0
        return 0.5 if place == self.half else done

    def without(self, logs: list[Any]) -> Any:
        steps = sorted(step for log in logs for step in log if step[1][1] <= self.done[step[1][0]])
        lost = [at for at, step in enumerate(steps) if step[1] in self.lost]
        if any(self.lasts(steps[at:]) for at in lost):
            return "what must be lost lasts"
        for at in lost if dist.get_rank() == 0 else ():
            if steps[at][2] == "make":
                shutil.rmtree(f"{self.run}/{steps[at][3]}", ignore_errors=True)  # it may have got another name
        return super().without(logs)

    def lasts(self, steps: Sequence[Any]) -> bool:
        """Whether what the first of some steps did was synced later: the file that was written or emptied, or the
        folder of a name."""
        kind, path, other, there = steps[0][2:]
        of_file = kind in ("write", "cut") or (kind == "open" and there)
        synced = path if of_file else os.path.dirname(other or path)
        for *_, does, to, into, _ in steps:
            if does == "sync" and (to == synced or into == "all"):
                return True
            if does == "move" and f"{synced}/".startswith(f"{to}/"):
                synced = into + synced[len(to) :]
        return False


class Overlap:
    """What two jobs leave in one folder after ``turns``."""

    def __init__(self, folder: str, turns: tuple[int, int, int]) -> None:
        self.run, self.rest, self.turns = f"{folder}/run", f"{folder}/left", turns

    def left(self, before: Callable[[], object], jobs: Sequence[Callable[[], object]]) -> Any:
        """What all ranks do ``before`` lasts; then two ``jobs`` take turns. What they leave is put into ``rest`` by
        rank 0. Raises :class:`Meaningless` where they do not take so many steps."""
        base, logs = two_jobs(self.run, before, jobs)
        taken = in_turns(logs, self.turns)
        if dist.get_rank():
            return None
        plant(self.rest, base)
        for step in taken:
            again(self.rest, step)
        return self

    def __repr__(self) -> str:
        return f"after turns of {self.turns} steps"


def in_turns(jobs: Sequence[Sequence[Step]], turns: tuple[int, int, int]) -> list[Step]:
    """The steps of two jobs: so many of the first, then of the second, then of the first again. Raises
    :class:`Meaningless` where they do not take so many."""
    (first, second), (begun, other, more) = jobs, turns
    if begun + more > len(first) or other > len(second):
        raise Meaningless(f"the jobs take {len(first)} and {len(second)} steps")
    return [*first[:begun], *second[:other], *first[begun : begun + more]]


def two_jobs(
    root: str,
    before: Callable[[], object],
    jobs: Sequence[Callable[[], object]],
    check: Callable[[Any, Any], object] = lambda base, logs: None,
) -> tuple[Any, list[Any]]:
    """What ``root`` held before, and the steps that each of two jobs takes from there, of all ranks as they came."""
    base, found = begin(root, before), []
    for job in jobs:
        logs = recorded(root, job)
        check(base, logs)
        dist.barrier()
        found.append([*order_steps(logs).values()])
        if dist.get_rank() == 0:
            shutil.rmtree(root)
            plant(root, base)
    return base, found


def save(state: dict[str, Any], writer: Any) -> None:
    dcp.save(state, storage_writer=writer)


def load(state: dict[str, Any], reader: Any) -> dict[str, Any]:
    """A state, once one rank alone has loaded into it."""
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def wait_for_save(pending: Any) -> None:
    """Wait for a save in the background."""
    (pending if isinstance(pending, Future) else pending.upload_completion).result()


def seen(left: Any, load: Callable[[], Any]) -> Any:
    """What rank 0 loads of what a crash ``left``, or the error that it gets, and which state that was. ``None`` on
    other ranks; a text where there is nothing to load."""
    if left is None or isinstance(left, str):
        return left
    try:
        return load(), left
    except (Exception, CheckpointException) as error:
        return error, left


class Recorded:
    """The states of a scenario, which is recorded once: ``kept`` holds what was, and what of it cannot be seen. One of
    them is asked for: by its number ``index``, or otherwise."""

    index = 0

    def __init__(self, folder: str, kept: dict[str, Any], scheme: str = "", **asked: Any) -> None:
        self.run, self.rest, self.kept = f"{scheme}{folder}/run", f"{scheme}{folder}/left", kept
        vars(self).update(asked)

    def left(self, before: Callable[[], object], go: Any) -> Any:
        """What is left after ``before``, which lasts, and ``go`` is put into ``rest`` by rank 0, which gets the state.
        Raises :class:`Meaningless` where there is no such state, or where steps cannot be seen."""
        if not self.kept:
            self.record(before, go)
        if self.kept["unseen"]:
            raise Meaningless(self.kept["unseen"])
        state = self.state()
        if state is not None:
            self.plant(self.rest, state.tree)
        return state

    def numbered(self, every: Callable[[], Sequence[Any]]) -> Any:
        """The state of that number among ``every``, which rank 0 counts once."""
        if "states" not in self.kept:
            self.kept["states"] = every() if dist.get_rank() == 0 else []
            told = [len(self.kept["states"])]
            dist.broadcast_object_list(told)
            self.kept["count"] = told[0]
        if self.index >= self.kept["count"]:
            raise Meaningless(f"there are {self.kept['count']} states")
        return None if dist.get_rank() else self.kept["states"][self.index]

    def unseen(self, base: Any, logs: Any) -> str:
        """What is in ``run`` after steps that do not account for it; empty where they do."""
        disk, after = Disk(base), tree(self.run)
        apply_steps(disk, sorted((step for log in logs for step in log), key=lambda step: step.when))
        odd = sorted(path for path in {*after} | {*disk.tree()} if after.get(path, 0) != disk.tree().get(path, 0))
        dist.barrier()
        return f"how {odd[0]} is written cannot be seen" if odd else "" if any(logs) else "it writes no files there"

    def plant(self, root: str, content: Any) -> None:
        plant(root, content)

    def record(self, before: Callable[[], object], go: Any) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        """The state that is asked for, on rank 0. Raises :class:`Meaningless` where there is none."""
        raise NotImplementedError


class RecordedCrash(Recorded):
    """What a crash leaves on a ``disk``; it is asked for as :class:`Crash` is, or by its number."""

    done: Sequence[int] = ()
    lost: Sequence[Place] = ()
    half: Place | None = None
    returned, disk, threads = False, "posix", 1

    def record(self, before: Callable[[], object], go: Any) -> None:
        base = begin(self.run, before)
        logs = recorded(self.run, go)
        self.kept.update(base=base, logs=logs, unseen=self.unseen(base, logs))

    def state(self) -> Any:
        if not self.done:
            return self.numbered(self.every)
        so_many(self.done, [[step for step in log if step.kind != "meet"] for log in self.kept["logs"]], self.returned)
        return None if dist.get_rank() else self.named()

    def every(self) -> Sequence[Any]:
        """All states, by number."""
        return states(self.kept["base"], self.kept["logs"], self.disk, self.threads, returned=self.returned)

    def named(self) -> Any:
        """The state after the steps that were done."""
        steps = {at: step for at, step in order_steps(self.kept["logs"]).items() if at[1] <= self.done[at[0]]}
        told = format_moment(self.done, self.lost, self.half)
        return state_at(self.kept["base"], steps, told, self.lost, self.half)


class RecordedOverlap(Recorded):
    """What two jobs leave in one folder after ``turns``."""

    turns: tuple[int, int, int] | None = None

    def record(self, before: Callable[[], object], go: Any) -> None:
        odd: list[str] = []
        base, jobs = two_jobs(self.run, before, go, lambda base, logs: odd.append(self.unseen(base, logs)))
        self.kept.update(base=base, jobs=tuple(jobs), unseen=odd[0] or odd[1])

    def state(self) -> Any:
        base, jobs = self.kept["base"], self.kept["jobs"]
        if self.turns is None:
            return self.numbered(lambda: overlapped_states(base, jobs))
        in_turns(jobs, self.turns)
        return None if dist.get_rank() else overlapped_state(base, jobs, self.turns)
