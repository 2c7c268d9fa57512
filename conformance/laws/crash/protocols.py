"""Laws on how users save so that a crash costs them the last checkpoint at most: protocols, and what each promises."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp

from shardlaw.conformance.law.fields import Folder, Rank
from shardlaw.conformance.laws.checkpoint.calls import finish, load, save
from shardlaw.conformance.laws.checkpoint.fields import Place, Reader
from shardlaw.conformance.laws.crash.crashes import seen
from shardlaw.conformance.laws.crash.fields import (
    Crashing,
    Newer,
    Newest,
    NewestWhole,
    NewWhole,
    Saved,
    SyncingWriter,
    Untorn,
    Whole,
    crash_law,
)

DOCS = "torch.distributed.checkpoint docs"
SOURCE = f"{DOCS}, save and load; docs/crash.md: how to save safely"
TWO = "mesh=2 x=4:S(0) a=3:R"
ONE = "mesh=1 x=4:S(0)"
BOTH = ((f"{TWO} disk=posix", 100), (f"{TWO} disk=kill", 40), (f"{ONE} disk=posix", 60))


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


def newest_that_loads(root: Any, load_step: Callable[[str], Any]) -> Any:
    """The latest checkpoint of a root that loads. Raises what the oldest one raises where none does."""
    for step in steps(root):
        try:
            return load_step(step)
        except Exception as error:
            last: Exception = error
    raise last


def resumed(found: Any, left: Any, whole: Any, reader: Any, place: Any) -> dict[str, Any]:
    """What a job resumes from that takes the newest folder that loads, of what a crash ``left``."""

    def resume():
        return newest_that_loads(place(left), lambda step: load(whole, reader(f"{left}/{step}"), no_dist=True))

    return {"resumed": seen(found, resume)}


def last_or_before(whole: Whole, saved_last: NewWhole, rank: Rank):
    """What must load after a crash in the second save."""
    return {"resumed": Untorn({"old": whole, "new": saved_last}, rank, refusable=False)}


@crash_law("pointer", source=SOURCE, control=f"{TWO} disk=kill crash=0", scenarios=BOTH, smoke=2)
def pointer(
    state: Saved,
    newer: Newer,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    place: Place,
    folder: Folder,
    rank: Rank,
    crash: Crashing,
):
    """Each save goes into a folder of its own, then a file names it: what the file names always loads."""
    run, left = f"{folder}/run", f"{folder}/left"

    def save_step(step: int, given: dict[str, Any]) -> None:
        save(given, writer(f"{run}/{step}"))
        if rank == 0:
            point(place(run), step, True)

    found = crash.left(place(run), place(left), lambda: save_step(0, state), lambda: save_step(1, newer))
    return {"resumed": seen(found, lambda: load(whole, reader(f"{left}/{pointed(place(left))}"), no_dist=True))}


pointer.due(last_or_before)


@crash_law("settled", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=4)
def settled(
    state: Saved,
    newer: Newer,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    place: Place,
    folder: Folder,
    rank: Rank,
    crash: Crashing,
):
    """Each save goes into a folder of its own, all of which is then synced, then a file names it: what the file names
    always loads."""
    run, left = f"{folder}/run", f"{folder}/left"

    def save_step(step: int, given: dict[str, Any]) -> None:
        save(given, writer(f"{run}/{step}"))
        if rank == 0:
            settle(place(f"{run}/{step}"))
            point(place(run), step, True)

    found = crash.left(place(run), place(left), lambda: save_step(0, state), lambda: save_step(1, newer))
    return {"resumed": seen(found, lambda: load(whole, reader(f"{left}/{pointed(place(left))}"), no_dist=True))}


settled.due(last_or_before)


@crash_law("newest", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=4)
def newest(
    state: Saved,
    newer: Newer,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    place: Place,
    folder: Folder,
    crash: Crashing,
):
    """Each save goes into a folder of its own: the newest folder that loads holds the last save or the one before."""
    run, left = f"{folder}/run", f"{folder}/left"
    found = crash.left(
        place(run), place(left), lambda: save(state, writer(f"{run}/0")), lambda: save(newer, writer(f"{run}/1"))
    )
    return resumed(found, left, whole, reader, place)


newest.due(last_or_before)


@crash_law("kept", source=SOURCE, control=f"{TWO} disk=posix crash=0", scenarios=BOTH, smoke=2)
def kept(
    state: Saved,
    newer: Newer,
    newest: Newest,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    place: Place,
    folder: Folder,
    rank: Rank,
    crash: Crashing,
):
    """Two checkpoints are kept, and the older one is removed once the next is saved: the newest folder that loads holds
    the last save or the one before it."""
    run, left = f"{folder}/run", f"{folder}/left"

    def before():
        save(state, writer(f"{run}/0"))
        save(newer, writer(f"{run}/1"))

    def go():
        save(newest, writer(f"{run}/2"))
        if rank == 0:
            shutil.rmtree(place(f"{run}/0"))

    found = crash.left(place(run), place(left), before, go)
    return resumed(found, left, whole, reader, place)


@kept.due
def _(newer_one: NewWhole, newest_one: NewestWhole, rank: Rank):
    return {"resumed": Untorn({"old": newer_one, "new": newest_one}, rank, refusable=False)}


@crash_law("renamed", source=SOURCE, control=f"{TWO} disk=kill crash=0", scenarios=BOTH, smoke=2)
def renamed(
    state: Saved,
    newer: Newer,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    place: Place,
    folder: Folder,
    rank: Rank,
    crash: Crashing,
):
    """Each save goes into a folder that is renamed when it is done: the newest folder that bears its name loads."""
    run, left = f"{folder}/run", f"{folder}/left"

    def save_step(step: int, given: dict[str, Any]) -> None:
        save(given, writer(f"{run}/{step}.new"))
        if rank == 0:
            os.rename(place(f"{run}/{step}.new"), place(f"{run}/{step}"))

    found = crash.left(place(run), place(left), lambda: save_step(0, state), lambda: save_step(1, newer))
    return {"resumed": seen(found, lambda: load(whole, reader(f"{left}/{steps(place(left))[0]}"), no_dist=True))}


renamed.due(last_or_before)


@crash_law(
    "waiting",
    source=SOURCE,
    control=f"{TWO} disk=posix crash=0",
    scenarios=((f"{TWO} disk=posix", 250), *BOTH[1:]),
    smoke=2,
)
def waiting(
    state: Saved,
    newer: Newer,
    newest: Newest,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    place: Place,
    folder: Folder,
    crash: Crashing,
):
    """Each save in the background waits for the one before it, into folders of their own: the newest folder that loads
    holds one of the last two that were begun, or the last that was done."""
    run, left = f"{folder}/run", f"{folder}/left"

    def go():
        first = dcp.async_save(newer, storage_writer=writer(f"{run}/1"))
        finish(first)
        finish(dcp.async_save(newest, storage_writer=writer(f"{run}/2")))

    found = crash.left(place(run), place(left), lambda: save(state, writer(f"{run}/0")), go)
    return resumed(found, left, whole, reader, place)


@waiting.due
def _(whole, newer_one: NewWhole, newest_one: NewestWhole, rank: Rank):
    return {"resumed": Untorn({"old": whole, "new": newer_one, "newest": newest_one}, rank, refusable=False)}
