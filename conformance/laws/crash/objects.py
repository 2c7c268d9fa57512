"""Crashes of ranks that put objects into a store through torch's fsspec storage: plain torch code, which scripts copy
as source."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.laws.crash.crashes import RecordedCrash, check_step_counts
from shardlaw.conformance.laws.crash.recorder import all_gather_objects, watch_collectives
from shardlaw.reference.crash import Step
from shardlaw.reference.crash_objects import object_states, objects_after


class Store:
    """The objects below a URL, by their names relative to it."""

    def __init__(self, url: str) -> None:
        system = compat.fsspec_files()
        system.init_path(url)
        self.fs, self.root = system.fs, url

    def name(self, path: Any) -> str | None:
        """The name of an object relative to the URL; ``None`` for one that is not below it."""
        path = self.fs.unstrip_protocol(os.fspath(path))
        return path[len(self.root) + 1 :] if path.startswith(f"{self.root}/") else None

    def objects(self) -> dict[str, bytes]:
        paths = self.fs.find(self.root) if self.fs.exists(self.root) else []
        return {str(self.name(path)): self.fs.cat_file(path) for path in paths}

    def write(self, objects: Any) -> None:
        """Replace all objects by these."""
        if self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)
        for name, data in objects.items():
            self.fs.makedirs(os.path.dirname(f"{self.root}/{name}"), exist_ok=True)
            self.fs.pipe_file(f"{self.root}/{name}", data)


@contextmanager
def watch_objects(store: Store, note: Callable[[str, str], object]) -> Iterator[None]:
    """Call ``note`` with ``put`` or ``remove`` and a name after each object that this process puts or removes."""
    files = compat.fsspec_files
    original_create, original_rename, original_remove = files.create_stream, files.rename, files.rm_file

    def note_path(kind: str, path: Any) -> None:
        name = store.name(path)
        if name is not None:
            note(kind, name)

    @contextmanager
    def create_stream(fs: Any, path: Any, mode: str) -> Iterator[Any]:
        with original_create(fs, path, mode) as stream:
            yield stream
        if "r" not in mode:
            note_path("put", path)

    def rename(fs: Any, path: Any, new_path: Any) -> None:  # a put, then a removal
        original_rename(fs, path, new_path)
        if fs.exists(new_path):
            note_path("put", new_path)
        if not fs.exists(path):
            note_path("remove", path)

    def rm_file(fs: Any, path: Any) -> None:
        original_remove(fs, path)
        note_path("remove", path)

    with ExitStack() as stack:
        for patch in (create_stream, rename, rm_file):
            stack.enter_context(mock.patch.object(files, patch.__name__, patch))
        yield


class ObjectCrash:
    """A crash of ranks that save in an object store, after so many puts and removals of each rank (``done``), or after
    all, when the save has ``returned``. The store may be local to each rank."""

    def __init__(
        self, folder: str, done: Sequence[int] = (), returned: bool = False, scheme: str = "memory://"
    ) -> None:
        self.folder, self.remains = f"{scheme}{folder}/run", f"{scheme}{folder}/left"
        self.done, self.returned = done, returned

    def simulate(self, before: Callable[[], object], save: Callable[[], object]) -> Any:
        """Run ``before`` and ``save``. Rank 0 puts what a crash leaves below ``remains`` and returns the state. Raises
        :class:`Meaningless` where the ranks take fewer steps."""
        before()
        store, steps = Store(self.folder), list[tuple[str, bytes | None]]()
        base = merge_objects(store.objects())
        with watch_objects(store, lambda kind, name: steps.append((name, store.objects().get(name)))):
            save()
        logs = all_gather_objects(steps)
        done = check_step_counts(self.done, logs, self.returned)
        if dist.get_rank():
            return None
        objects = {**base, **{name: data for log, count in zip(logs, done, strict=True) for name, data in log[:count]}}
        Store(self.remains).write({name: data for name, data in objects.items() if data is not None})
        return self

    def __repr__(self) -> str:
        return f"after {self.done or 'all'} steps of the ranks"


class RecordedObjectCrash(RecordedCrash):
    """A crash of ranks that save in an object store, selected like :class:`ObjectCrash` or by its index."""

    def record(self, before: Callable[[], object], save: Any) -> None:
        before()
        dist.barrier()
        store = Store(self.folder)
        base, steps = merge_objects(store.objects()), list[Step]()

        def note(kind: str, name: str, other: str = "", at: int = 0) -> None:
            data = store.fs.cat_file(f"{store.root}/{name}") if kind == "put" else b""
            steps.append(Step(kind, name, other, at, data, time.monotonic_ns()))

        with watch_collectives(note), watch_objects(store, note):
            save()
        logs = all_gather_objects(steps)
        counts = [sum(step.kind != "meet" for step in log) for log in logs]
        after, due = merge_objects(store.objects()), objects_after(base, logs, counts).tree
        # where stores are local to ranks, an object that another rank removed or replaced is unchanged
        odd = sorted(name for name in {*after} | {*due} if after.get(name) != due.get(name) and name not in base)
        unseen = f"how {odd[0]} is put cannot be seen" if odd else "" if any(counts) else "it puts nothing there"
        self.recording.update(base=base, logs=logs, unseen=unseen)

    def all_states(self) -> Any:
        return object_states(self.recording["base"], self.recording["logs"], self.returned)

    def state_by_steps(self) -> Any:
        return objects_after(self.recording["base"], self.recording["logs"], self.done)

    def write(self, root: str, content: Any) -> None:
        Store(root).write(content)


def merge_objects(local: dict[str, bytes]) -> dict[str, bytes]:
    """The objects of all ranks, whose stores may be local."""
    return {name: data for objects in all_gather_objects(local) for name, data in objects.items()}
