"""Laws on protocols by which users save, so that a crash costs them at most the last checkpoint."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.laws.checkpoint.fields import Newer, Reader, Saved
from shardlaw.conformance.laws.crash.crashes import load, save, try_load, wait_for_save
from shardlaw.conformance.laws.crash.fields import (
    FullDestination,
    NewerFullState,
    Newest,
    NewestFullState,
    OneOfStates,
    SaveCrash,
    SyncingWriter,
    crash_law,
)

DOCS = "torch.distributed.checkpoint docs"
SOURCE = f"{DOCS}, save and load; docs/crash.md: how to save safely"
TWO = "mesh=2 x=4:S(0) a=3:R"
ONE = "mesh=1 x=4:S(0)"
BOTH = ((f"{TWO} disk=posix", 74), (f"{TWO} disk=kill", 20), (f"{ONE} disk=posix", 36))


def settle(folder: Any) -> None:
    """Sync all files and folders below a folder, the folder, and its parent."""
    for path, _, files in os.walk(folder, topdown=False):
        for name in [*files, ""]:
            sync(os.path.join(path, name))
    sync(os.path.dirname(os.path.abspath(folder)))


def sync(path: Any) -> None:
    """Sync a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_pointer(root: Any, step: int) -> None:
    """Replace the file ``latest`` by one that names this step, and sync it and the folder."""
    with open(f"{root}/latest.new", "w") as stream:
        stream.write(str(step))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(f"{root}/latest.new", f"{root}/latest")
    sync(root)


def save_and_point(state: Any, writer: Any, root: Any, step: int, *, settled: bool = False) -> None:
    """Save into a new folder, and let rank 0 write its name into ``latest``, with ``settled`` after a sync of the
    folder."""
    save(state, writer(f"{root}/{step}"))
    if dist.get_rank() == 0:
        if settled:
            settle(f"{root}/{step}")
        write_pointer(root, step)


def load_pointed(root: Any, destination: Any, reader: Any) -> Any:
    """Load the checkpoint that ``latest`` names."""
    with open(f"{root}/latest") as stream:
        return load(destination, reader(f"{root}/{stream.read()}"))


def list_steps(root: Any) -> list[str]:
    """The folders that are named by a number, the highest first."""
    return sorted((name for name in os.listdir(root) if name.isdigit()), key=int, reverse=True)


def load_newest(root: Any, destination: Any, reader: Any) -> Any:
    """Load the newest checkpoint that loads. Where none does, raises the error of the oldest."""
    for step in list_steps(root):
        try:
            return load(destination, reader(f"{root}/{step}"))
        except (Exception, CheckpointException) as error:
            last: BaseException = error
    raise last


def due_old_or_new(old: FullDestination, new: NewerFullState, rank: Rank):
    """The due function of a crash during the second save."""
    return {"resumed": OneOfStates({"old": old, "new": new}, rank, may_refuse=False)}


@crash_law("pointer", source=SOURCE, control=f"{TWO} disk=kill crash=0", scenarios=BOTH, smoke=2)
def pointer(
    state: Saved, newer: Newer, destination: FullDestination, writer: SyncingWriter, reader: Reader, crash: SaveCrash
):
    """If each save goes into a new folder that a file then names, the named folder loads after a crash."""
    after = crash.simulate(
        lambda: save_and_point(state, writer, crash.folder, 0),
        lambda: save_and_point(newer, writer, crash.folder, 1),
    )
    return {"resumed": try_load(after, lambda: load_pointed(crash.remains, destination, reader))}


pointer.due(due_old_or_new)


@crash_law("settled", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=4)
def settled(
    state: Saved, newer: Newer, destination: FullDestination, writer: SyncingWriter, reader: Reader, crash: SaveCrash
):
    """If each save goes into a new folder that is then synced, and named by a file, the named folder loads after a
    crash."""
    after = crash.simulate(
        lambda: save_and_point(state, writer, crash.folder, 0, settled=True),
        lambda: save_and_point(newer, writer, crash.folder, 1, settled=True),
    )
    return {"resumed": try_load(after, lambda: load_pointed(crash.remains, destination, reader))}


settled.due(due_old_or_new)


@crash_law("newest", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=4)
def newest(
    state: Saved, newer: Newer, destination: FullDestination, writer: SyncingWriter, reader: Reader, crash: SaveCrash
):
    """If each save goes into a new folder, the newest folder that loads after a crash has the last save or the one
    before."""
    after = crash.simulate(
        lambda: save(state, writer(f"{crash.folder}/0")), lambda: save(newer, writer(f"{crash.folder}/1"))
    )
    return {"resumed": try_load(after, lambda: load_newest(crash.remains, destination, reader))}


newest.due(due_old_or_new)


@crash_law("kept", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=2)
def remove_older(
    state: Saved,
    newer: Newer,
    newest: Newest,
    destination: FullDestination,
    writer: SyncingWriter,
    reader: Reader,
    rank: Rank,
    crash: SaveCrash,
):
    """If the older of two checkpoints is removed after the next save, the newest folder that loads after a crash has
    the last save or the one before."""

    def save_two():
        save(state, writer(f"{crash.folder}/0"))
        save(newer, writer(f"{crash.folder}/1"))

    def save_and_remove():
        save(newest, writer(f"{crash.folder}/2"))
        if rank == 0:
            shutil.rmtree(f"{crash.folder}/0")

    after = crash.simulate(save_two, save_and_remove)
    return {"resumed": try_load(after, lambda: load_newest(crash.remains, destination, reader))}


@remove_older.due
def _(old: NewerFullState, new: NewestFullState, rank: Rank):
    return {"resumed": OneOfStates({"old": old, "new": new}, rank, may_refuse=False)}


@crash_law("renamed", source=SOURCE, control=f"{TWO} disk=kill crash=0", scenarios=BOTH, smoke=2)
def renamed(
    state: Saved,
    newer: Newer,
    destination: FullDestination,
    writer: SyncingWriter,
    reader: Reader,
    rank: Rank,
    crash: SaveCrash,
):
    """If each save goes into a folder that is renamed after it, the newest renamed folder loads after a crash."""

    def save_step(step, state):
        save(state, writer(f"{crash.folder}/{step}.new"))
        if rank == 0:
            os.rename(f"{crash.folder}/{step}.new", f"{crash.folder}/{step}")

    after = crash.simulate(lambda: save_step(0, state), lambda: save_step(1, newer))
    return {
        "resumed": try_load(after, lambda: load(destination, reader(f"{crash.remains}/{list_steps(crash.remains)[0]}")))
    }


renamed.due(due_old_or_new)


@crash_law(
    "waiting",
    source=SOURCE,
    control=f"{TWO} disk=posix crash=0",
    scenarios=((f"{TWO} disk=posix", 171), (f"{TWO} disk=kill", 31), (f"{ONE} disk=posix", 57)),
    smoke=2,
)
def waiting(
    state: Saved,
    newer: Newer,
    newest: Newest,
    destination: FullDestination,
    writer: SyncingWriter,
    reader: Reader,
    crash: SaveCrash,
):
    """If each asynchronous save goes into a new folder and waits for the one before, the newest folder that loads after
    a crash has one of the two last saves, or the last that had ended."""

    def save_twice():
        wait_for_save(dcp.async_save(newer, storage_writer=writer(f"{crash.folder}/1")))
        wait_for_save(dcp.async_save(newest, storage_writer=writer(f"{crash.folder}/2")))

    after = crash.simulate(lambda: save(state, writer(f"{crash.folder}/0")), save_twice)
    return {"resumed": try_load(after, lambda: load_newest(crash.remains, destination, reader))}


@waiting.due
def _(old: FullDestination, first: NewerFullState, second: NewestFullState, rank: Rank):
    return {"resumed": OneOfStates({"old": old, "new": first, "newest": second}, rank, may_refuse=False)}
