"""Crashes of ranks that put objects into a store through torch's file systems of fsspec: plain torch code, which
scripts have by its source."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.laws.crash.crashes import RecordedCrash, so_many
from shardlaw.conformance.laws.crash.recorder import gathered, meeting
from shardlaw.reference.crash import Step
from shardlaw.reference.crash_objects import object_states, objects_after


class Store:
    """The objects below a URL, by their names relative to it."""

    def __init__(self, url: str) -> None:
        system = compat.fsspec_files()
        system.init_path(url)
        self.fs, self.root = system.fs, url

    def name(self, path: Any) -> str | None:
        """What an object is called here; ``None`` where it does not lie below."""
        path = self.fs.unstrip_protocol(os.fspath(path))
        return path[len(self.root) + 1 :] if path.startswith(f"{self.root}/") else None

    def objects(self) -> dict[str, bytes]:
        paths = self.fs.find(self.root) if self.fs.exists(self.root) else []
        return {str(self.name(path)): self.fs.cat_file(path) for path in paths}

    def plant(self, objects: Any) -> None:
        """Make the store hold these and no others."""
        if self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)
        for name, data in objects.items():
            self.fs.makedirs(os.path.dirname(f"{self.root}/{name}"), exist_ok=True)
            self.fs.pipe_file(f"{self.root}/{name}", data)


@contextmanager
def watched(store: Store, done: Callable[[str, str], object]) -> Iterator[None]:
    """Calls ``done`` with ``put`` or ``remove`` and a name after each object that this process puts or removes."""
    owner = compat.fsspec_files
    opens, renames, removes = owner.create_stream, owner.rename, owner.rm_file

    def told(kind: str, path: Any) -> None:
        name = store.name(path)
        if name is not None:
            done(kind, name)

    @contextmanager
    def create_stream(fs: Any, path: Any, mode: str) -> Iterator[Any]:
        with opens(fs, path, mode) as stream:
            yield stream
        if "r" not in mode:
            told("put", path)

    def rename(fs: Any, path: Any, new_path: Any) -> None:  # a put, then a removal; which end together here
        renames(fs, path, new_path)
        if fs.exists(new_path):
            told("put", new_path)
        if not fs.exists(path):
            told("remove", path)

    def rm_file(fs: Any, path: Any) -> None:
        removes(fs, path)
        told("remove", path)

    with ExitStack() as stack:
        for name, fake in (("create_stream", create_stream), ("rename", rename), ("rm_file", rm_file)):
            stack.enter_context(mock.patch.object(owner, name, fake))
        yield


class ObjectCrash:
    """What a crash leaves of an object store after each rank has ``done`` so many puts and removals; ``returned``:
    after all of them, which ``done`` need not tell. Each rank may have a store of its own."""

    def __init__(
        self, folder: str, done: Sequence[int] = (), returned: bool = False, scheme: str = "memory://"
    ) -> None:
        self.run, self.rest = f"{scheme}{folder}/run", f"{scheme}{folder}/left"
        self.done, self.returned = done, returned

    def left(self, before: Callable[[], object], go: Callable[[], object]) -> Any:
        """What all ranks do ``before`` is there; then they ``go``, and crash. What is left below ``run`` is put below
        ``rest`` by rank 0. Raises :class:`Meaningless` where the ranks do not take so many steps."""
        before()
        store, steps = Store(self.run), list[tuple[str, bytes | None]]()
        base = merged(store.objects())
        with watched(store, lambda kind, name: steps.append((name, store.objects().get(name)))):
            go()
        logs = gathered(steps)
        done = so_many(self.done, logs, self.returned)
        if dist.get_rank():
            return None
        found = {**base, **{name: data for log, most in zip(logs, done, strict=True) for name, data in log[:most]}}
        Store(self.rest).plant({name: data for name, data in found.items() if data is not None})
        return self

    def __repr__(self) -> str:
        return f"after {self.done or 'all'} steps of the ranks"


class RecordedObjects(RecordedCrash):
    """What a crash leaves of an object store."""

    def record(self, before: Callable[[], object], go: Any) -> None:
        before()
        dist.barrier()
        store = Store(self.run)
        base, steps = merged(store.objects()), list[Step]()

        def note(kind: str, name: str, other: str = "", at: int = 0) -> None:
            data = store.fs.cat_file(f"{store.root}/{name}") if kind == "put" else b""
            steps.append(Step(kind, name, other, at, data, time.monotonic_ns()))

        with meeting(note), watched(store, note):
            go()
        logs = gathered(steps)
        counts = [sum(step.kind != "meet" for step in log) for log in logs]
        after, due = merged(store.objects()), objects_after(base, logs, counts).tree
        # of a store that a rank has for itself, what another has removed or replaced is as it was
        odd = sorted(name for name in {*after} | {*due} if after.get(name) != due.get(name) and name not in base)
        unseen = f"how {odd[0]} is put cannot be seen" if odd else "" if any(counts) else "it puts nothing there"
        self.kept.update(base=base, logs=logs, unseen=unseen)

    def every(self) -> Any:
        return object_states(self.kept["base"], self.kept["logs"], self.returned)

    def named(self) -> Any:
        return objects_after(self.kept["base"], self.kept["logs"], self.done)

    def plant(self, root: str, content: Any) -> None:
        Store(root).plant(content)


def merged(own: dict[str, bytes]) -> dict[str, bytes]:
    """The objects of all ranks, each of which may have a store of its own."""
    return {name: data for one in gathered(own) for name, data in one.items()}
