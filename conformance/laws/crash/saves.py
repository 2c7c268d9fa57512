"""Laws on what loads after a crash in the middle of a save: the old checkpoint, the new one, or nothing."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Annotated, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.due import Meaningless
from shardlaw.conformance.law.fields import Between, Folder, Rank, Word
from shardlaw.conformance.laws.checkpoint.fields import NewerState, Reader, SavedState
from shardlaw.conformance.laws.crash.crashes import load, save, seen, wait_for_save
from shardlaw.conformance.laws.crash.fields import (
    Crashing,
    CrashingLater,
    Newest,
    NewestWhole,
    NewWhole,
    Overlapping,
    SyncingWriter,
    Untorn,
    Whole,
    crash_law,
)
from shardlaw.conformance.laws.crash.recorder import gathered, listening
from shardlaw.conformance.laws.roundtrip.cases import NEEDS, narrow

DOCS = "torch.distributed.checkpoint docs"
FINISH = f"{DOCS}, StorageWriter.finish: writes the metadata and marks the current checkpoint as successful"
ASYNC = f"{DOCS}, async_save: a future that completes when the checkpoint was written"
SYNC = f"{DOCS}, FileSystemWriter: sync_files forces files to be synced to permanent storage"
TWO = "mesh=2 x=4:S(0) a=3:R"
MANY = 'mesh=2 x=4:S(0) a=3:R b=2:- state={x:x,a:a,b:b,n:1,s:"text"}'
THREE = "mesh=3 x=7:S(0) a=4:S(0)"
FOUR = "mesh=2x2 x=4x4:S(0),S(1) a=3:R,R"
ONE = "mesh=1 x=4:S(0) a=3:-"
SAVES = (
    (f"{TWO} disk=posix", 41),
    (f"{TWO} disk=kill", 16),
    (f"{MANY} disk=posix", 128),
    (f"{THREE} disk=posix", 216),
    (f"{TWO} files=item disk=posix", 48),
    (f"{TWO} threads=2 disk=posix", 119),
    (f"{TWO} files=item threads=2 disk=kill", 32),
    (f"{TWO} sync=0 disk=kill", 16),
    (f"{TWO} ahead=0 disk=kill", 16),
    ("mesh=2 x=3000:S(0) disk=posix", 61),
    (f"{ONE} disk=posix", 18),
    (f"{FOUR} disk=kill", 96),
)
OF_SAVES: dict[str, Any] = {"source": FINISH, "control": f"{TWO} disk=posix crash=0", "scenarios": SAVES}


def new_or_nothing(newest: NewWhole, rank: Rank):
    """What may load after a crash in a save into a new folder."""
    return {"left": Untorn({"new": newest}, rank)}


def old_new_or_nothing(whole: Whole, newest: NewWhole, rank: Rank):
    """What may load after a crash in a save over a checkpoint."""
    return {"left": Untorn({"old": whole, "new": newest}, rank)}


def new(newest: NewWhole, rank: Rank):
    """What must load after a crash once a save has returned."""
    return {"left": Untorn({"new": newest}, rank, refusable=False)}


def over(state: SavedState, newer: NewerState, whole: Whole, writer: SyncingWriter, reader: Reader, crash: Crashing):
    """Whatever a crash leaves of a save over a checkpoint loads as the old one, as the new one, or not at all."""
    found = crash.left(lambda: save(state, writer(crash.run)), lambda: save(newer, writer(crash.run)))
    return {"left": seen(found, lambda: load(whole, reader(crash.rest)))}


def into_new(newer: NewerState, whole: Whole, writer: SyncingWriter, reader: Reader, crash: Crashing):
    """Whatever a crash leaves of a save into a new folder loads as what was saved, or not at all."""
    found = crash.left(lambda: None, lambda: save(newer, writer(f"{crash.run}/new")))
    return {"left": seen(found, lambda: load(whole, reader(f"{crash.rest}/new")))}


@crash_law("fresh", **OF_SAVES, smoke=12)
def fresh(
    state: SavedState,
    newer: NewerState,
    whole: Whole,
    beside: Whole,
    writer: SyncingWriter,
    reader: Reader,
    crash: Crashing,
):
    """Whatever a crash leaves of a save into a new folder loads as what was saved, or not at all; the checkpoint beside
    it is whole."""
    found = crash.left(lambda: save(state, writer(f"{crash.run}/old")), lambda: save(newer, writer(f"{crash.run}/new")))
    return {
        "beside": seen(found, lambda: load(beside, reader(f"{crash.rest}/old"))),
        "left": seen(found, lambda: load(whole, reader(f"{crash.rest}/new"))),
    }


@fresh.due
def _(whole, newest: NewWhole, rank: Rank):
    return {"beside": Untorn({"old": whole}, rank, refusable=False), **new_or_nothing(newest, rank)}


overwritten = crash_law("overwrite", source=FINISH, control=f"{TWO} disk=posix crash=0", scenarios=SAVES, smoke=16)(
    over
)
overwritten.due(old_new_or_nothing)

replaced = crash_law(
    "replaced",
    clause="Whatever a crash leaves of a save over a checkpoint loads, as the old one or as the new one.",
    source="issue trackers of trainers: the last checkpoint must outlive the save of the next; no document promises it",
    control=f"{TWO} disk=kill crash=0",
    scenarios=((f"{TWO} disk=posix", 38), (f"{TWO} files=item disk=kill", 19), (f"{THREE} disk=kill", 60)),
    smoke=2,
    tier="advisory",
)(over)


@replaced.due
def _(whole, newest: NewWhole, rank: Rank):
    return {"left": Untorn({"old": whole, "new": newest}, rank, refusable=False)}


returned = crash_law(
    "returned",
    clause="A save that has returned on every rank loads after a crash.",
    source=SYNC,
    control=f"{TWO} disk=kill crash=0",
    scenarios=(
        (f"{TWO} disk=posix", 7),
        (f"{TWO} disk=kill", 1),
        (f"{TWO} files=item disk=posix", 7),
        (f"{THREE} disk=posix", 7),
    ),
    smoke=4,
    takes={"crash": CrashingLater},
)(over)
returned.due(new)


@crash_law("async", source=ASYNC, control=f"{TWO} disk=posix crash=0", scenarios=SAVES[:3], smoke=4)
def in_background(
    state: SavedState, newer: NewerState, whole: Whole, writer: SyncingWriter, reader: Reader, crash: Crashing
):
    """Whatever a crash leaves of a save in the background, over a checkpoint, loads as the old checkpoint, as the new
    one, or not at all."""
    found = crash.left(
        lambda: save(state, writer(crash.run)),
        lambda: wait_for_save(dcp.async_save(newer, storage_writer=writer(crash.run))),
    )
    return {"left": seen(found, lambda: load(whole, reader(crash.rest)))}


in_background.due(old_new_or_nothing)


@crash_law(
    "overlap",
    source=FINISH,
    control=f"{TWO} turns=0,0,0",
    scenarios=((TWO, 66), (f"{TWO} files=item", 77), (ONE, 42)),
    smoke=16,
)
def overlap(
    state: SavedState,
    newer: NewerState,
    newest: Newest,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    jobs: Overlapping,
):
    """Whatever two jobs leave that save over one checkpoint at once loads as the old one, as that of either job, or not
    at all."""
    saves = [lambda: save(newer, writer(jobs.run)), lambda: save(newest, writer(jobs.run))]
    found = jobs.left(lambda: save(state, writer(jobs.run)), saves)
    return {"left": seen(found, lambda: load(whole, reader(jobs.rest)))}


@overlap.due
def _(whole, first: NewWhole, second: NewestWhole, rank: Rank):
    return {"left": Untorn({"old": whole, "new": first, "newest": second}, rank)}


FULL = tuple(
    f"{scenario} at={at} ranks={ranks}"
    for at in (3, 4, 7, 2, 5, 6, 8, 1)
    for scenario in (TWO, f"{TWO} files=item", THREE)
    for ranks in ("1", "0")
)


@law(
    "crash.full",
    source=f"{DOCS}, CheckpointException; StorageWriter.finish: marks as successful",
    control=f"{TWO} at=3 ranks=1",
    sweep=texts(*FULL),
    sweeps=4,
    alone=len(FULL),
    narrow=narrow,
    needs=NEEDS,
    smallest=1,
    features=lambda case: {"disk:full"},
)
def full(
    state: SavedState,
    newer: NewerState,
    whole: Whole,
    writer: SyncingWriter,
    reader: Reader,
    folder: Folder,
    rank: Rank,
    ranks: Word,
    at: Annotated[int, Between(1, 99)],
):
    """When the disk is full from some step of a rank on, a save over a checkpoint leaves the old one, the new one, or
    nothing that loads."""
    run, taken = f"{folder}/run", 0
    save(state, writer(run))

    def needs_space(kind, path, other):
        nonlocal taken
        taken += 1
        if str(rank) in ranks.split(",") and taken >= at and kind != "remove":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with suppress(CheckpointException), listening(run, lambda *step: None, needs_space):
        save(newer, writer(run))
    counts = gathered(taken)
    if any(counts[int(one)] < at for one in ranks.split(",")):
        raise Meaningless(f"the ranks take {counts} steps")
    return {"left": None if rank else seen(OSError("the disk was full"), lambda: load(whole, reader(run)))}


full.due(old_new_or_nothing)
