"""Laws on what loads after a crash during a save: the old checkpoint, the new one, or nothing."""

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
from shardlaw.conformance.laws.checkpoint.fields import Newer, Reader, Saved
from shardlaw.conformance.laws.crash.crashes import load, save, try_load, wait_for_save
from shardlaw.conformance.laws.crash.fields import (
    FullDestination,
    LaterCrash,
    NewerFullState,
    Newest,
    NewestFullState,
    OneOfStates,
    SaveCrash,
    SyncingWriter,
    TwoJobs,
    crash_law,
)
from shardlaw.conformance.laws.crash.recorder import all_gather_objects, watch_steps
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


def due_new_or_nothing(new: NewerFullState, rank: Rank):
    """The due function of a crash during a save into a new folder."""
    return {"left": OneOfStates({"new": new}, rank)}


def due_old_new_or_nothing(old: FullDestination, new: NewerFullState, rank: Rank):
    """The due function of a crash during a save over a checkpoint."""
    return {"left": OneOfStates({"old": old, "new": new}, rank)}


def due_old_or_new(old: FullDestination, new: NewerFullState, rank: Rank):
    """The due function of a crash during a save over a checkpoint, after which one of the two must load."""
    return {"left": OneOfStates({"old": old, "new": new}, rank, may_refuse=False)}


def due_new(new: NewerFullState, rank: Rank):
    """The due function of a crash after a save."""
    return {"left": OneOfStates({"new": new}, rank, may_refuse=False)}


def save_over(
    state: Saved, newer: Newer, destination: FullDestination, writer: SyncingWriter, reader: Reader, crash: SaveCrash
):
    """After a crash during a save over a checkpoint the old one loads, or the new one, or nothing."""
    after = crash.simulate(lambda: save(state, writer(crash.folder)), lambda: save(newer, writer(crash.folder)))
    return {"left": try_load(after, lambda: load(destination, reader(crash.remains)))}


def save_into_new(newer: Newer, destination: FullDestination, writer: SyncingWriter, reader: Reader, crash: SaveCrash):
    """After a crash during a save into a new folder the saved state loads, or nothing."""
    after = crash.simulate(lambda: None, lambda: save(newer, writer(f"{crash.folder}/new")))
    return {"left": try_load(after, lambda: load(destination, reader(f"{crash.remains}/new")))}


@crash_law("fresh", **OF_SAVES, smoke=12)
def fresh(
    state: Saved,
    newer: Newer,
    destination: FullDestination,
    other: FullDestination,
    writer: SyncingWriter,
    reader: Reader,
    crash: SaveCrash,
):
    """After a crash during a save into a new folder the saved state loads, or nothing; the checkpoint in another folder
    loads."""
    after = crash.simulate(
        lambda: save(state, writer(f"{crash.folder}/old")), lambda: save(newer, writer(f"{crash.folder}/new"))
    )
    return {
        "beside": try_load(after, lambda: load(other, reader(f"{crash.remains}/old"))),
        "left": try_load(after, lambda: load(destination, reader(f"{crash.remains}/new"))),
    }


@fresh.due
def _(old: FullDestination, new: NewerFullState, rank: Rank):
    return {"beside": OneOfStates({"old": old}, rank, may_refuse=False), **due_new_or_nothing(new, rank)}


overwrite = crash_law("overwrite", **OF_SAVES, smoke=16)(save_over)
overwrite.due(due_old_new_or_nothing)

replaced = crash_law(
    "replaced",
    clause="After a crash during a save over a checkpoint the old one or the new one loads.",
    source="issue trackers of trainers: the last checkpoint must outlive the save of the next; no document promises it",
    control=f"{TWO} disk=kill crash=0",
    scenarios=((f"{TWO} disk=posix", 38), (f"{TWO} files=item disk=kill", 19), (f"{THREE} disk=kill", 60)),
    smoke=2,
    tier="advisory",
)(save_over)
replaced.due(due_old_or_new)

returned = crash_law(
    "returned",
    clause="After a save has returned on every rank, it loads after a crash.",
    source=SYNC,
    control=f"{TWO} disk=kill crash=0",
    scenarios=(
        (f"{TWO} disk=posix", 7),
        (f"{TWO} disk=kill", 1),
        (f"{TWO} files=item disk=posix", 7),
        (f"{THREE} disk=posix", 7),
    ),
    smoke=4,
    annotations={"crash": LaterCrash},
)(save_over)
returned.due(due_new)


@crash_law("async", source=ASYNC, control=f"{TWO} disk=posix crash=0", scenarios=SAVES[:3], smoke=4)
def async_save(
    state: Saved, newer: Newer, destination: FullDestination, writer: SyncingWriter, reader: Reader, crash: SaveCrash
):
    """After a crash during an asynchronous save over a checkpoint the old one loads, or the new one, or nothing."""
    after = crash.simulate(
        lambda: save(state, writer(crash.folder)),
        lambda: wait_for_save(dcp.async_save(newer, storage_writer=writer(crash.folder))),
    )
    return {"left": try_load(after, lambda: load(destination, reader(crash.remains)))}


async_save.due(due_old_new_or_nothing)


@crash_law(
    "overlap",
    source=FINISH,
    control=f"{TWO} turns=0,0,0",
    scenarios=((TWO, 66), (f"{TWO} files=item", 77), (ONE, 42)),
    smoke=16,
)
def overlap(
    state: Saved,
    newer: Newer,
    newest: Newest,
    destination: FullDestination,
    writer: SyncingWriter,
    reader: Reader,
    jobs: TwoJobs,
):
    """After a crash of two jobs that save over one checkpoint at the same time the old one loads, that of either job,
    or nothing."""
    both = [lambda: save(newer, writer(jobs.folder)), lambda: save(newest, writer(jobs.folder))]
    after = jobs.simulate(lambda: save(state, writer(jobs.folder)), both)
    return {"left": try_load(after, lambda: load(destination, reader(jobs.remains)))}


@overlap.due
def _(old: FullDestination, first: NewerFullState, second: NewestFullState, rank: Rank):
    return {"left": OneOfStates({"old": old, "new": first, "newest": second}, rank)}


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
    state: Saved,
    newer: Newer,
    destination: FullDestination,
    writer: SyncingWriter,
    reader: Reader,
    folder: Folder,
    rank: Rank,
    ranks: Word,
    at: Annotated[int, Between(1, 99)],
):
    """After a save over a checkpoint during which the disk fills up the old one loads, or the new one, or nothing."""
    run, count = f"{folder}/run", 0
    save(state, writer(run))

    def fail_on_full_disk(kind, path, other):
        nonlocal count
        count += 1
        if str(rank) in ranks.split(",") and count >= at and kind != "remove":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with suppress(CheckpointException), watch_steps(run, lambda *step: None, fail_on_full_disk):
        save(newer, writer(run))
    counts = all_gather_objects(count)
    if any(counts[int(failing)] < at for failing in ranks.split(",")):
        raise Meaningless(f"the ranks take {counts} steps")
    return {"left": None if rank else try_load(OSError("the disk was full"), lambda: load(destination, reader(run)))}


full.due(due_old_new_or_nothing)
