"""Laws on crashes in storages of torch that keep files in their own ways: safetensors of Hugging Face, and fsspec."""

from __future__ import annotations

from typing import Annotated, Any

from shardlaw.conformance import compat
from shardlaw.conformance.law.fields import Folder, Rank, Word
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.fields import WriterOptionsField
from shardlaw.conformance.laws.crash.crashes import seen
from shardlaw.conformance.laws.crash.fields import (
    Crashing,
    CrashingObjects,
    CrashingObjectsLater,
    Newer,
    NewWhole,
    Saved,
    Untorn,
    Whole,
    crash_law,
)
from shardlaw.conformance.laws.roundtrip.options import need

DOCS = "torch.distributed.checkpoint docs"
TWO = "mesh=2 x=4x2:S(0) a=3:R"
HF_SAVES = (
    (f"{TWO} hf=shards disk=posix", 20),
    (f"{TWO} hf=consolidated disk=posix", 80),
    ("mesh=1 x=4:- a=3:- hf=whole disk=posix", 20),
    ("mesh=3 x=6:S(0) hf=shards disk=kill", 30),
    ("mesh=2 x=4x2:S(0) a=3:S(0) hf=consolidated index=two disk=kill", 40),
)
LOCAL = (
    (f"{TWO} disk=posix", 45),
    ("mesh=2 x=4:S(0) files=item threads=2 disk=kill", 20),
    ("mesh=3 x=6:S(0) disk=kill", 35),
)


def hf_options(how: str, index: str, names: Any) -> dict[str, Any]:
    """The options of a writer of safetensors."""
    options: dict[str, Any] = {"save_distributed": how != "whole", "enable_consolidation": how == "consolidated"}
    if index:
        options["fqn_to_index_mapping"] = {name: 1 + at % 2 for at, name in enumerate(sorted(names))}
    return options


@crash_law(
    "hugging-face[fresh]",
    source=f"{DOCS}, HuggingFaceStorageWriter",
    control=f"{TWO} hf=shards disk=posix crash=0",
    scenarios=HF_SAVES,
    smoke=4,
)
def hf_fresh(newer: Newer, whole: Whole, folder: Folder, crash: Crashing, hf: Word, index: Word = ""):
    """Whatever a crash leaves of a save of safetensors into a new folder loads as what was saved, or not at all."""
    run, left = f"{folder}/run", f"{folder}/left"

    def go():
        save(newer, compat.HuggingFaceStorageWriter(f"{run}/new", **hf_options(hf, index, newer)))

    found = crash.left(run, left, lambda: None, go)
    reader = compat.HuggingFaceStorageReader(f"{left}/new")
    return {"left": seen(found, lambda: load(whole, reader, no_dist=True))}


@hf_fresh.due
def _(newest: NewWhole, rank: Rank):
    need("safetensors")
    return {"left": Untorn({"new": newest}, rank)}


@crash_law(
    "hugging-face[overwrite]",
    source=f"{DOCS}, HuggingFaceStorageWriter",
    control=f"{TWO} hf=shards disk=posix crash=0",
    scenarios=HF_SAVES,
    smoke=4,
)
def hf_overwritten(
    state: Saved, newer: Newer, whole: Whole, folder: Folder, crash: Crashing, hf: Word, index: Word = ""
):
    """Whatever a crash leaves of a save of safetensors over others loads as the old ones, as the new ones, or not at
    all."""
    run, left = f"{folder}/run", f"{folder}/left"

    def save_hf(given):
        save(given, compat.HuggingFaceStorageWriter(run, **hf_options(hf, index, given)))

    found = crash.left(run, left, lambda: save_hf(state), lambda: save_hf(newer))
    reader = compat.HuggingFaceStorageReader(left)
    return {"left": seen(found, lambda: load(whole, reader, no_dist=True))}


@hf_overwritten.due
def _(whole, newest: NewWhole, rank: Rank):
    need("safetensors")
    return {"left": Untorn({"old": whole, "new": newest}, rank)}


Options = Annotated[dict[str, Any], WriterOptionsField()]


@crash_law(
    "fsspec[fresh]",
    source=f"{DOCS}, FsspecWriter",
    control=f"{TWO} disk=posix crash=0",
    scenarios=LOCAL,
    smoke=2,
)
def fsspec_fresh(newer: Newer, whole: Whole, folder: Folder, crash: Crashing, options: Options):
    """Whatever a crash leaves of a save through fsspec into a new folder loads as what was saved, or not at all."""
    run, left = f"{folder}/run", f"{folder}/left"
    found = crash.left(
        run, left, lambda: None, lambda: save(newer, compat.fsspec_writer(f"file://{run}/new", **options))
    )
    return {"left": seen(found, lambda: load(whole, compat.fsspec_reader(f"file://{left}/new"), no_dist=True))}


@fsspec_fresh.due
def _(newest: NewWhole, rank: Rank):
    need("fsspec")
    return {"left": Untorn({"new": newest}, rank)}


@crash_law(
    "fsspec[overwrite]",
    source=f"{DOCS}, FsspecWriter",
    control=f"{TWO} disk=posix crash=0",
    scenarios=LOCAL,
    smoke=2,
)
def fsspec_overwritten(state: Saved, newer: Newer, whole: Whole, folder: Folder, crash: Crashing, options: Options):
    """Whatever a crash leaves of a save through fsspec over a checkpoint loads as the old one, as the new one, or not
    at all."""
    run, left = f"{folder}/run", f"{folder}/left"

    def save_through(given):
        save(given, compat.fsspec_writer(f"file://{run}", **options))

    found = crash.left(run, left, lambda: save_through(state), lambda: save_through(newer))
    return {"left": seen(found, lambda: load(whole, compat.fsspec_reader(f"file://{left}"), no_dist=True))}


@fsspec_overwritten.due
def _(whole, newest: NewWhole, rank: Rank):
    need("fsspec")
    return {"left": Untorn({"old": whole, "new": newest}, rank)}


OBJECTS = (
    (TWO, 8),
    (f"{TWO} files=item", 10),
    ("mesh=3 x=6:S(0)", 12),
    ("mesh=1 x=4:- a=3:-", 6),
    ("mesh=2x2 x=4x4:S(0),S(1) a=3:R,R", 20),
)
UNTORN = f"{DOCS}, FsspecWriter; StorageWriter.finish: writes the metadata and marks the checkpoint as successful"


@crash_law(
    "object[fresh]",
    source=UNTORN,
    control=f"{TWO} crash=0",
    scenarios=OBJECTS,
    smoke=2,
    features=lambda case: {"disk:object"},
)
def object_fresh(newer: Newer, whole: Whole, folder: Folder, crash: CrashingObjects, options: Options):
    """Whatever a crash leaves of a save into an object store, under a new name, loads as what was saved, or not at
    all."""
    run, left = f"memory://{folder}/run", f"memory://{folder}/left"
    found = crash.left(run, left, lambda: None, lambda: save(newer, compat.fsspec_writer(f"{run}/new", **options)))
    return {"left": seen(found, lambda: load(whole, compat.fsspec_reader(f"{left}/new"), no_dist=True))}


@object_fresh.due
def _(newest: NewWhole, rank: Rank):
    need("fsspec")
    return {"left": Untorn({"new": newest}, rank)}


@crash_law(
    "object[overwrite]",
    source=UNTORN,
    control=f"{TWO} crash=0",
    scenarios=OBJECTS,
    smoke=2,
    features=lambda case: {"disk:object"},
)
def object_overwritten(
    state: Saved, newer: Newer, whole: Whole, folder: Folder, crash: CrashingObjects, options: Options
):
    """Whatever a crash leaves of a save over a checkpoint in an object store loads as the old one, as the new one, or
    not at all."""
    run, left = f"memory://{folder}/run", f"memory://{folder}/left"

    def save_through(given):
        save(given, compat.fsspec_writer(f"{run}/it", **options))

    found = crash.left(run, left, lambda: save_through(state), lambda: save_through(newer))
    return {"left": seen(found, lambda: load(whole, compat.fsspec_reader(f"{left}/it"), no_dist=True))}


@object_overwritten.due
def _(whole, newest: NewWhole, rank: Rank):
    need("fsspec")
    return {"left": Untorn({"old": whole, "new": newest}, rank)}


@crash_law(
    "object[returned]",
    source=UNTORN,
    control=f"{TWO} crash=0",
    scenarios=tuple((scenario, 1) for scenario, _ in OBJECTS),
    smoke=1,
    features=lambda case: {"disk:object"},
)
def object_returned(
    state: Saved, newer: Newer, whole: Whole, folder: Folder, crash: CrashingObjectsLater, options: Options
):
    """A save into an object store that has returned on every rank loads after a crash."""
    run, left = f"memory://{folder}/run", f"memory://{folder}/left"

    def save_through(given):
        save(given, compat.fsspec_writer(f"{run}/it", **options))

    found = crash.left(run, left, lambda: save_through(state), lambda: save_through(newer))
    return {"left": seen(found, lambda: load(whole, compat.fsspec_reader(f"{left}/it"), no_dist=True))}


@object_returned.due
def _(newest: NewWhole, rank: Rank):
    need("fsspec")
    return {"left": Untorn({"new": newest}, rank, refusable=False)}
