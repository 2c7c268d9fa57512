"""Crashes as the acts of laws see them: plain torch code, which scripts have by its source."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardlaw.conformance.laws.crash.recorder import Recorder, plant, tree
from shardlaw.reference.crash import Disk, effects_of, states


class Crash:
    """The durable state number ``index`` that a crash leaves on a ``disk``, of what ``keep`` remembers or :meth:`left` records."""

    def __init__(self, keep: dict[str, Any], disk: str, index: int, threads: int = 1, returned: bool = False) -> None:
        self.keep, self.disk, self.index, self.threads, self.returned = keep, disk, index, threads, returned

    def left(self, root: Any, other: Any, before: Callable[[], object], go: Callable[[], object]) -> Any:
        """What all ranks do ``before`` lasts; then they ``go``, and crash. What is left of ``root`` is put into ``other``, by rank 0, which
        gets the state. Every rank gets a text where there is none: fewer states than asked for, or steps that cannot be seen."""
        if "count" not in self.keep:
            self.record(os.fspath(root), before, go)
        count = self.keep["count"]
        if isinstance(count, str) or self.index >= count:
            return count if isinstance(count, str) else f"there are {count} states"
        if dist.get_rank():
            return None
        state = self.keep["states"][self.index]
        plant(other, state.tree)
        return state

    def record(self, root: str, before: Callable[[], object], go: Callable[[], object]) -> None:
        os.makedirs(root, exist_ok=True)
        before()
        dist.barrier()
        base = tree(root)
        dist.barrier()
        with Recorder(root).listening() as recorder:
            go()
        logs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(logs, recorder.steps)
        told = [self.found(base, logs, tree(root)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told)
        self.keep["count"] = told[0]

    def found(self, base: Any, logs: Any, after: Any) -> Any:
        """How many states there are, or why there are none."""
        disk = Disk(base)
        effects_of(disk, sorted((step for log in logs for step in log), key=lambda step: step.when))
        unseen = sorted(path for path in {*after} | {*disk.tree()} if after.get(path) != disk.tree().get(path))
        if unseen or after == base:
            return f"how {unseen[0]} is written cannot be seen" if unseen else "it writes no files there"
        self.keep["states"] = states(base, logs, self.disk, self.threads, returned=self.returned)
        return len(self.keep["states"])


def seen(left: Any, load: Callable[[], Any]) -> Any:
    """What rank 0 loads of what a crash left, or the error that it gets, and the state in words. ``None`` on other ranks; a text where there
    is no such state."""
    if left is None or isinstance(left, str):
        return left
    try:
        return load(), str(left)
    except Exception as error:
        return error, str(left)
