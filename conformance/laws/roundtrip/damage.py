"""Laws on checkpoints whose files are damaged or missing: every rank is told, and nothing is loaded by halves in silence."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip.cases import IN_FILES, law_of
from conformance.report.reproducer import Script
from conformance.target import storage
from conformance.trip_script import load_lines, save_lines, script
from reference.checkpoint.state_dict import Slot, flatten, slots, spoiled

DOCS = "torch.distributed.checkpoint docs"
METADATA = ".metadata"


def check_damaged(case: Case, here: Here) -> None:
    """A load of a damaged checkpoint is refused by all ranks alike; what lies beside a checkpoint does not disturb it."""
    trip = t.read_trip(case)
    if all(isinstance(leaf, Slot) and 0 in trip.save.specs[leaf.name].shape for _, leaf in flatten(trip.save.state).values()):
        here.reject("a checkpoint without anything in it")
    whole = os.path.join(here.folder(), "whole")
    if here.stage == 0:
        t.save(trip, here)
        if here.rank == 0:
            damage(here, case.get("file", "data"), case.get("damage"))
        t.save(trip, here, folder=whole)
        return
    state = t.destination(trip, here)
    if case.get("damage") == "stray":
        t.judge(trip, here, t.load(here, state))
        return
    message = f"a load of a checkpoint whose {case.get('file', 'data')} file is damaged"
    here.refused(lambda: t.load(here, state), "damaged", message, errors=(t.CheckpointFailed,))
    if case.get("file", "data") == "metadata":
        t.judge(trip, here, state, check="kept", want=spoiled(trip.load.state), kept=slots(trip.load.state))
    t.judge(trip, here, t.load(here, t.destination(trip, here), folder=whole), check="afterwards")


def damage(here: Here, file: str, how: str) -> None:
    """Damage the metadata of the checkpoint in the case's folder, or a file of data, so that an item with elements is hit."""
    folder = here.folder()
    path, last = os.path.join(folder, METADATA), 0
    if file == "data":
        metadata = storage.reader(here.target, folder).read_metadata()
        # chunks without elements are stored too, and nobody reads them
        idle = {(name, tuple(chunk.offsets)) for name, entry in metadata.state_dict_metadata.items()
                for chunk in getattr(entry, "chunks", ()) if 0 in chunk.sizes}  # fmt: skip
        read = {index: info for index, info in (metadata.storage_data or {}).items() if (index.fqn, index.offset) not in idle}
        extents = storage.extents(here.target, folder, replace(metadata, storage_data=read)) or []
        extent = max(extents, key=lambda one: (one.file, one.end))
        path, last = os.path.join(folder, extent.file), (extent.start + extent.end) // 2
    if how == "stray":
        with open(os.path.join(folder, "__9_9.distcp"), "wb") as stray:
            stray.write(b"no part of this checkpoint")
    elif how == "gone":
        os.remove(path)
    elif how == "other":
        with open(path, "wb") as stream:
            pickle.dump({}, stream)
    else:
        os.truncate(path, 0 if how == "empty" else last or os.path.getsize(path) // 2)


def damaged_script(case: Case) -> Script:
    trip = t.read_trip(case)
    name = '".metadata"' if case.get("file", "data") == "metadata" else "sorted(f for f in os.listdir(folder) if f[-6:] == 'distcp')[-1]"
    done = {
        "gone": "os.remove(path)",
        "other": 'open(path, "wb").write(pickle.dumps({}))',
        "empty": "os.truncate(path, 0)",
        "cut": "os.truncate(path, os.path.getsize(path) // 2)",
        "stray": 'open(f"{folder}/__9_9.distcp", "wb").write(b"no part of this checkpoint")',
    }[case.get("damage")]
    saving = [*save_lines(trip), "dist.barrier()", "if rank == 0:", f"    path = os.path.join(folder, {name})", f"    {done}"]
    *made, load, judged = load_lines(trip)
    refused = ["try:", f"    {load}", '    return "refused", "accepted"', "except CheckpointException:", "    return None, None"]
    loading = [*made, load, judged] if case.get("damage") == "stray" else [*made, *refused]
    imports = ["import os, pickle", "from torch.distributed.checkpoint.api import CheckpointException"]
    return script(trip, [(trip.worlds[0], saving), (trip.worlds[1], loading)], imports=imports)


DAMAGED = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R to.x=S(1) state={x:x,a:a,n:1} file=metadata damage=gone",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=3:- to.x=R state={x:x,d:{a:a},n:None} file=metadata damage=cut",
    "mesh=2 x=5:S(0) a=4:R file=metadata damage=empty",
    "mesh=2 mesh.load=1 x=5:S(0) a=4:- state={x:x,a:a,n:1} file=metadata damage=other",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R state={x:x,a:a,n:1} file=data damage=gone",
    "mesh=3 mesh.load=2 x=7:S(0):bool a=4:S(0) to.x=R state={x:x,a:a,n:1} file=data damage=cut",
    "mesh=2 x=5:S(0) a=4:R files=item file=data damage=empty",
    "mesh=1 mesh.load=2 x=5x2:S(0) state={x:x,n:1,m:2} files=item file=data damage=cut",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R state={x:x,a:a,n:1} damage=stray",
    "mesh=2x2 mesh.load=2 x=4x4:S(0),S(1) a=4:R,R to.x=S(0) to.a=- file=data damage=gone threads=2",
)

LAWS = (
    law_of(
        "refuses[damaged]",
        clause="A checkpoint whose metadata or data are missing, cut or something else is refused on all ranks, and the next load works.",
        source=f"{DOCS}, load; CheckpointException; StorageReader.read_metadata",
        check=check_damaged,
        holds="mesh=2 x=5:S(0) a=4:R file=data damage=gone",
        planted="missing_files_passed_over",
        texts=DAMAGED,
        sweeps=len(DAMAGED),
        stages=t.worlds,
        needs=IN_FILES,
        features=lambda case: {"must-refuse", f"damaged-file:{case.get('file', 'data')}-{case.get('damage')}"},
        script=damaged_script,
    ),
)
