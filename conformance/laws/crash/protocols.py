"""Laws on how users save so that a crash costs them the last checkpoint at most: protocols, and what each promises."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.laws.checkpoint.fields import NewerState, Reader, SavedState
from shardlaw.conformance.laws.crash.crashes import load, save, seen, wait_for_save
from shardlaw.conformance.laws.crash.fields import (
    Crashing,
    Newest,
    NewestWhole,
    NewWhole,
    SyncingWriter,
    Untorn,
    Whole,
    crash_law,
)

DOCS = "torch.distributed.checkpoint docs"
SOURCE = f"{DOCS}, save and load; docs/crash.md: how to save safely"
TWO = "mesh=2 x=4:S(0) a=3:R"
ONE = "mesh=1 x=4:S(0)"
BOTH = ((f"{TWO} disk=posix", 74), (f"{TWO} disk=kill", 20), (f"{ONE} disk=posix", 36))


def settle(folder: Any) -> None:
    """Make all that a folder holds last: sync its files, its folders, and the folder that holds it."""
    for path, _, files in os.walk(folder, topdown=False):
        for name in [*files, ""]:
            sync(os.path.join(path, name))
    sync(os.path.dirname(os.path.abspath(folder)))


def sync(path: Any) -> None:
    """Make a file, or the names in a folder, last."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def point(root: Any, step: int, lasts: bool) -> None:
    """Let the file ``latest`` name a step: one that is written beside it takes its place. ``lasts``: both are
    synced."""
    with open(f"{root}/latest.new", "w") as stream:
        stream.write(str(step))
        stream.flush()
        if lasts:
            os.fsync(stream.fileno())
    os.replace(f"{root}/latest.new", f"{root}/latest")
    if lasts:
        sync(root)


def pointed(root: Any) -> str:
    """The step that ``latest`` names."""
    with open(f"{root}/latest") as stream:
        return stream.read()


def steps(root: Any) -> list[str]:
    """The folders of a root that are called by a number, the latest one first."""
    return sorted((name for name in os.listdir(root) if name.isdigit()), key=int, reverse=True)


def newest_that_loads(root: Any, whole: Any, reader: Any) -> Any:
    """The latest checkpoint of a root that loads. Raises what the oldest one raises where none does."""
    for step in steps(root):
        try:
            return load(whole, reader(f"{root}/{step}"))
        except (Exception, CheckpointException) as error:
            last: BaseException = error
    raise last


def last_or_before(whole: Whole, saved_last: NewWhole, rank: Rank):
    """What must load after a crash in the second save."""
    return {"resumed": Untorn({"old": whole, "new": saved_last}, rank, refusable=False)}


@crash_law("pointer", source=SOURCE, control=f"{TWO} disk=kill crash=0", scenarios=BOTH, smoke=2)
def pointer(
    state: SavedState,
    newer: NewerState,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    rank: Rank,
    crash: Crashing,
):
    """Each save goes into a folder of its own, then a file names it: what the file names always loads."""

    def save_step(step, given):
        save(given, writer(f"{crash.run}/{step}"))
        if rank == 0:
            point(crash.run, step, True)

    found = crash.left(lambda: save_step(0, state), lambda: save_step(1, newer))
    return {"resumed": seen(found, lambda: load(whole, reader(f"{crash.rest}/{pointed(crash.rest)}")))}


pointer.due(last_or_before)


@crash_law("settled", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=4)
def settled(
    state: SavedState,
    newer: NewerState,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    rank: Rank,
    crash: Crashing,
):
    """Each save goes into a folder of its own, all of which is then synced, then a file names it: what the file names
    always loads."""

    def save_step(step, given):
        save(given, writer(f"{crash.run}/{step}"))
        if rank == 0:
            settle(f"{crash.run}/{step}")
            point(crash.run, step, True)

    found = crash.left(lambda: save_step(0, state), lambda: save_step(1, newer))
    return {"resumed": seen(found, lambda: load(whole, reader(f"{crash.rest}/{pointed(crash.rest)}")))}


settled.due(last_or_before)


@crash_law("newest", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=4)
def newest(state: SavedState, newer: NewerState, whole: Whole, writer: SyncingWriter, reader: Reader, crash: Crashing):
    """Each save goes into a folder of its own: the newest folder that loads holds the last save or the one before."""
    found = crash.left(lambda: save(state, writer(f"{crash.run}/0")), lambda: save(newer, writer(f"{crash.run}/1")))
    return {"resumed": seen(found, lambda: newest_that_loads(crash.rest, whole, reader))}


newest.due(last_or_before)


@crash_law("kept", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=2)
def kept(
    state: SavedState,
    newer: NewerState,
    newest: Newest,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    rank: Rank,
    crash: Crashing,
):
    """Two checkpoints are kept, and the older one is removed once the next is saved: the newest folder that loads holds
    the last save or the one before it."""

    def before():
        save(state, writer(f"{crash.run}/0"))
        save(newer, writer(f"{crash.run}/1"))

    def go():
        save(newest, writer(f"{crash.run}/2"))
        if rank == 0:
            shutil.rmtree(f"{crash.run}/0")

    found = crash.left(before, go)
    return {"resumed": seen(found, lambda: newest_that_loads(crash.rest, whole, reader))}


@kept.due
def _(newer_one: NewWhole, newest_one: NewestWhole, rank: Rank):
    return {"resumed": Untorn({"old": newer_one, "new": newest_one}, rank, refusable=False)}


@crash_law("renamed", source=SOURCE, control=f"{TWO} disk=kill crash=0", scenarios=BOTH, smoke=2)
def renamed(
    state: SavedState,
    newer: NewerState,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    rank: Rank,
    crash: Crashing,
):
    """Each save goes into a folder that is renamed when it is done: the newest folder that bears its name loads."""

    def save_step(step, given):
        save(given, writer(f"{crash.run}/{step}.new"))
        if rank == 0:
            os.rename(f"{crash.run}/{step}.new", f"{crash.run}/{step}")

    found = crash.left(lambda: save_step(0, state), lambda: save_step(1, newer))
    return {"resumed": seen(found, lambda: load(whole, reader(f"{crash.rest}/{steps(crash.rest)[0]}")))}


renamed.due(last_or_before)


@crash_law(
    "waiting",
    source=SOURCE,
    control=f"{TWO} disk=posix crash=0",
    scenarios=((f"{TWO} disk=posix", 171), (f"{TWO} disk=kill", 31), (f"{ONE} disk=posix", 57)),
    smoke=2,
)
def waiting(
    state: SavedState,
    newer: NewerState,
    newest: Newest,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    crash: Crashing,
):
    """Each save in the background waits for the one before it, into folders of their own: the newest folder that loads
    holds one of the last two that were begun, or the last that was done."""

    def go():
        wait_for_save(dcp.async_save(newer, storage_writer=writer(f"{crash.run}/1")))
        wait_for_save(dcp.async_save(newest, storage_writer=writer(f"{crash.run}/2")))

    found = crash.left(lambda: save(state, writer(f"{crash.run}/0")), go)
    return {"resumed": seen(found, lambda: newest_that_loads(crash.rest, whole, reader))}


@waiting.due
def _(whole, newer_one: NewWhole, newest_one: NewestWhole, rank: Rank):
    return {"resumed": Untorn({"old": whole, "new": newer_one, "newest": newest_one}, rank, refusable=False)}
