"""Crashes in acts of laws: plain torch code, which scripts copy as source.

Ranks save in ``folder``; ``remains`` is the folder with what the crash leaves of it. Laws record one save, from which
the reference enumerates states (:class:`RecordedCrash`, :class:`RecordedOverlap`). A script repeats the save and stops
at the steps of one state (:class:`Crash`, :class:`LossyCrash`, :class:`Overlap`).
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
from shardlaw.conformance.laws.crash.recorder import (
    all_gather_objects,
    read_tree,
    record_steps,
    watch_steps,
    write_tree,
)
from shardlaw.reference.crash import Disk, Step, StepId, apply_steps, format_moment, order_steps, state_at, states
from shardlaw.reference.crash_jobs import overlapped_state, overlapped_states


def prepare_folder(root: str, before: Callable[[], object]) -> dict[str, bytes | None]:
    """Let all ranks run ``before``, which no crash undoes; return the contents of ``root``."""
    os.makedirs(root, exist_ok=True)
    before()
    dist.barrier()
    return read_tree(root)


def repeat_step(root: str, step: Step) -> None:
    """Repeat a recorded step below ``root``."""
    path, other = f"{root}/{step.path}", f"{root}/{step.other}"
    with suppress(FileNotFoundError):  # its file was lost
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


def check_step_counts(done: Sequence[int], logs: Sequence[Sequence[Any]], returned: bool) -> Sequence[int]:
    """The number of steps before the crash, by rank: ``done``, by default all in ``logs``. Raises :class:`Meaningless`
    where a rank takes fewer, or has ``returned`` and takes more."""
    counts = [*map(len, logs)]
    done = [*done] or counts
    if any(map(int.__gt__, done, counts)) or (returned and done != counts):
        raise Meaningless(f"the ranks take {counts} steps")
    return done


class Crash:
    """A crash after so many steps of each rank (``done``), or after all, when the save has ``returned``.

    Later steps have no effect: what remains is in ``folder`` itself.
    """

    def __init__(self, folder: str, done: Sequence[int] = (), returned: bool = False) -> None:
        self.folder = self.remains = f"{folder}/run"
        self.done, self.returned = done, returned
        self.steps: list[Any] = []

    def completed_share(self, *step: str) -> float | None:
        """The share of a step that takes effect; ``None``: all."""
        self.steps.append(step)
        return 0 if self.done and len(self.steps) > self.done[dist.get_rank()] else None

    def simulate(self, before: Callable[[], object], save: Callable[[], object]) -> Any:
        """Run ``before``, which no crash undoes, then ``save``, and crash. Returns the state on rank 0, ``None`` on
        others; a text on all where lost steps would last. Raises :class:`Meaningless` where the ranks take fewer
        steps."""
        os.makedirs(self.folder, exist_ok=True)
        before()
        dist.barrier()
        with suppress(OSError, CheckpointException), watch_steps(self.folder, lambda *step: None, self.completed_share):
            save()
        logs = all_gather_objects(self.steps)
        self.done = check_step_counts(self.done, logs, self.returned)
        return self.remove_lost(logs)

    def remove_lost(self, logs: list[Any]) -> Any:
        """Undo what is lost of the logged steps; returns the result of :meth:`simulate`."""
        return None if dist.get_rank() else self.done


class LossyCrash(Crash):
    """A crash that also loses the steps ``lost``, and the second half of what the step ``half`` writes."""

    def __init__(
        self,
        folder: str,
        done: Sequence[int] = (),
        returned: bool = False,
        lost: Sequence[StepId] = (),
        half: StepId | None = None,
    ) -> None:
        super().__init__(folder, done, returned)
        self.lost, self.half = lost, half

    def completed_share(self, kind: str, path: str, other: str) -> float | None:  # type: ignore[override]
        step_id = dist.get_rank(), len(self.steps) + 1
        exists = kind != "open" or os.path.exists(f"{self.folder}/{path}")
        done = super().completed_share(kind, path, other)
        self.steps[-1] = (time.monotonic_ns(), step_id, kind, path, other, exists)
        if step_id in self.lost and kind != "make":  # a lost folder is removed at the end
            return 0
        return 0.5 if step_id == self.half else done

    def remove_lost(self, logs: list[Any]) -> Any:
        steps = sorted(step for log in logs for step in log if step[1][1] <= self.done[step[1][0]])
        lost = [at for at, step in enumerate(steps) if step[1] in self.lost]
        if any(self.is_synced_later(steps[at:]) for at in lost):
            return "what must be lost lasts"
        for at in lost if dist.get_rank() == 0 else ():
            if steps[at][2] == "make":
                shutil.rmtree(f"{self.folder}/{steps[at][3]}", ignore_errors=True)  # it may have been renamed
        return super().remove_lost(logs)

    def is_synced_later(self, steps: Sequence[Any]) -> bool:
        """Whether the file that the first of these steps wrote or emptied, or the folder whose names it changed, is
        synced by a later one."""
        kind, path, other, exists = steps[0][2:]
        changes_file = kind in ("write", "cut") or (kind == "open" and exists)
        changed = path if changes_file else os.path.dirname(other or path)
        for *_, kind, path, other, _ in steps:
            if kind == "sync" and (path == changed or other == "all"):
                return True
            if kind == "move" and f"{changed}/".startswith(f"{path}/"):
                changed = other + changed[len(path) :]
        return False


class Overlap:
    """A crash of two jobs that save in one folder, after ``turns``."""

    def __init__(self, folder: str, turns: tuple[int, int, int]) -> None:
        self.folder, self.remains, self.turns = f"{folder}/run", f"{folder}/left", turns

    def simulate(self, before: Callable[[], object], jobs: Sequence[Callable[[], object]]) -> Any:
        """Run ``before``, then two ``jobs`` in turns. Rank 0 writes ``remains`` and returns the state. Raises
        :class:`Meaningless` where a job takes fewer steps."""
        base, logs = record_jobs(self.folder, before, jobs)
        steps = interleave(logs, self.turns)
        if dist.get_rank():
            return None
        write_tree(self.remains, base)
        for step in steps:
            repeat_step(self.remains, step)
        return self

    def __repr__(self) -> str:
        return f"after turns of {self.turns} steps"


def interleave(jobs: Sequence[Sequence[Step]], turns: tuple[int, int, int]) -> list[Step]:
    """The steps of two jobs after three ``turns``: of the first, the second, and the first. Raises
    :class:`Meaningless` where a job takes fewer."""
    (first, second), (start, other, more) = jobs, turns
    if start + more > len(first) or other > len(second):
        raise Meaningless(f"the jobs take {len(first)} and {len(second)} steps")
    return [*first[:start], *second[:other], *first[start : start + more]]


def record_jobs(
    root: str,
    before: Callable[[], object],
    jobs: Sequence[Callable[[], object]],
    check: Callable[[Any, Any], object] = lambda base, logs: None,
) -> tuple[Any, list[Any]]:
    """The contents of ``root`` after ``before``, and the steps of all ranks, in order, that each job takes from
    there. ``check`` is called with the contents and the logs after each job."""
    base, steps = prepare_folder(root, before), []
    for job in jobs:
        logs = record_steps(root, job)
        check(base, logs)
        dist.barrier()
        steps.append([*order_steps(logs).values()])
        if dist.get_rank() == 0:
            shutil.rmtree(root)
            write_tree(root, base)
    return base, steps


def save(state: dict[str, Any], writer: Any) -> None:
    dcp.save(state, storage_writer=writer)


def load(state: dict[str, Any], reader: Any) -> dict[str, Any]:
    """Load into ``state`` on this rank alone, and return it."""
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def wait_for_save(pending: Any) -> None:
    """Wait for an asynchronous save."""
    (pending if isinstance(pending, Future) else pending.upload_completion).result()


def try_load(state: Any, load: Callable[[], Any]) -> Any:
    """A pair of what ``load`` returns or raises and the ``state`` after the crash. A state that is ``None`` (on ranks
    other than 0) or a text is returned itself."""
    if state is None or isinstance(state, str):
        return state
    try:
        return load(), state
    except (Exception, CheckpointException) as error:
        return error, state


class RecordedStates:
    """One of the states of a scenario, selected by its ``index`` or by other attributes.

    ``recording``: a dict that all states of the scenario share. The first records the steps, and under ``unseen`` why
    they are incomplete.
    """

    index = 0

    def __init__(self, folder: str, recording: dict[str, Any], scheme: str = "", **selection: Any) -> None:
        self.folder, self.remains, self.recording = f"{scheme}{folder}/run", f"{scheme}{folder}/left", recording
        vars(self).update(selection)

    def simulate(self, before: Callable[[], object], save: Any) -> Any:
        """The state after ``before`` and a part of ``save``, which rank 0 writes to ``remains`` and returns. Raises
        :class:`Meaningless` where there is no such state, or where the steps are incomplete."""
        if not self.recording:
            self.record(before, save)
        if self.recording["unseen"]:
            raise Meaningless(self.recording["unseen"])
        state = self.state()
        if state is not None:
            self.write(self.remains, state.tree)
        return state

    def state_by_index(self, enumerate_states: Callable[[], Sequence[Any]]) -> Any:
        """The state at ``index``, on rank 0, which enumerates them once."""
        if "states" not in self.recording:
            self.recording["states"] = enumerate_states() if dist.get_rank() == 0 else []
            count = [len(self.recording["states"])]
            dist.broadcast_object_list(count)
            self.recording["count"] = count[0]
        if self.index >= self.recording["count"]:
            raise Meaningless(f"there are {self.recording['count']} states")
        return None if dist.get_rank() else self.recording["states"][self.index]

    def unrecorded_change(self, base: Any, logs: Any) -> str:
        """Why ``logs`` do not account for the contents of ``folder``; empty where they do."""
        disk, after = Disk(base), read_tree(self.folder)
        apply_steps(disk, sorted((step for log in logs for step in log), key=lambda step: step.when))
        odd = sorted(path for path in {*after} | {*disk.tree()} if after.get(path, 0) != disk.tree().get(path, 0))
        dist.barrier()
        return f"how {odd[0]} is written cannot be seen" if odd else "" if any(logs) else "it writes no files there"

    def write(self, root: str, content: Any) -> None:
        write_tree(root, content)

    def record(self, before: Callable[[], object], save: Any) -> None:
        """Run ``before`` and ``save`` and fill ``recording``."""
        raise NotImplementedError

    def state(self) -> Any:
        """The selected state, on rank 0. Raises :class:`Meaningless` where there is none."""
        raise NotImplementedError


class RecordedCrash(RecordedStates):
    """A crash on a ``disk``, selected like :class:`LossyCrash` or by its index."""

    done: Sequence[int] = ()
    lost: Sequence[StepId] = ()
    half: StepId | None = None
    returned, disk, threads = False, "posix", 1

    def record(self, before: Callable[[], object], save: Any) -> None:
        base = prepare_folder(self.folder, before)
        logs = record_steps(self.folder, save)
        self.recording.update(base=base, logs=logs, unseen=self.unrecorded_change(base, logs))

    def state(self) -> Any:
        if not self.done:
            return self.state_by_index(self.all_states)
        check_step_counts(
            self.done, [[step for step in log if step.kind != "meet"] for log in self.recording["logs"]], self.returned
        )
        return None if dist.get_rank() else self.state_by_steps()

    def all_states(self) -> Sequence[Any]:
        """All states, by index."""
        return states(self.recording["base"], self.recording["logs"], self.disk, self.threads, returned=self.returned)

    def state_by_steps(self) -> Any:
        """The state after ``done`` steps."""
        steps = {at: step for at, step in order_steps(self.recording["logs"]).items() if at[1] <= self.done[at[0]]}
        moment = format_moment(self.done, self.lost, self.half)
        return state_at(self.recording["base"], steps, moment, self.lost, self.half)


class RecordedOverlap(RecordedStates):
    """A crash of two jobs that save in one folder, selected by ``turns`` or by its index."""

    turns: tuple[int, int, int] | None = None

    def record(self, before: Callable[[], object], jobs: Any) -> None:
        unseen: list[str] = []
        base, steps = record_jobs(
            self.folder, before, jobs, lambda base, logs: unseen.append(self.unrecorded_change(base, logs))
        )
        self.recording.update(base=base, jobs=tuple(steps), unseen=unseen[0] or unseen[1])

    def state(self) -> Any:
        base, jobs = self.recording["base"], self.recording["jobs"]
        if self.turns is None:
            return self.state_by_index(lambda: overlapped_states(base, jobs))
        interleave(jobs, self.turns)
        return None if dist.get_rank() else overlapped_state(base, jobs, self.turns)
