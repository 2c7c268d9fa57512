"""The law on checkpoints whose files are damaged or missing: every rank refuses to load them."""

from __future__ import annotations

import os
import pickle
from typing import Any

from shardlaw.conformance.law.due import Meaningless, Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank, Word
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed, load, save
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import Destination, Reader, Saved, Writer
from shardlaw.conformance.laws.roundtrip.cases import DOCS, NEEDS_FILES, trip_law
from shardlaw.reference.checkpoint.state_dict import Slot, flatten

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


def damage_file(folder: str, metadata: Any, file: str, damage: str) -> None:
    """Damage the metadata of the checkpoint in a folder, or a data file within an item that has elements."""
    path, cut = os.path.join(folder, ".metadata"), 0
    if file == "data":
        leaves = metadata.state_dict_metadata.items()
        # chunks without elements are stored too, but not read
        empty = {
            (name, tuple(chunk.offsets))
            for name, leaf in leaves
            for chunk in getattr(leaf, "chunks", ())
            if 0 in chunk.sizes
        }
        read = [info for index, info in metadata.storage_data.items() if (index.fqn, index.offset) not in empty]
        info = max(read, key=lambda info: (info.relative_path, info.offset + info.length))
        path, cut = os.path.join(folder, info.relative_path), info.offset + info.length // 2
    if damage == "stray":
        with open(os.path.join(folder, "__9_9.distcp"), "wb") as stray:
            stray.write(b"no part of this checkpoint")
    elif damage == "gone":
        os.remove(path)
    elif damage == "other":
        with open(path, "wb") as stream:
            pickle.dump({}, stream)
    else:
        os.truncate(path, 0 if damage == "empty" else cut or os.path.getsize(path) // 2)


@trip_law(
    "refuses[damaged]",
    source=f"{DOCS}, load; CheckpointException; StorageReader.read_metadata",
    control="mesh=2 x=5:S(0) a=4:R file=data damage=gone",
    texts=DAMAGED,
    needs=NEEDS_FILES,
    features=lambda case: {"must-refuse", f"damaged-file:{case.get('file', 'data')}-{case.get('damage')}"},
)
def damaged(
    state: Saved, writer: Writer, reader: Reader, rank: Rank, folder: Folder, damage: Word, file: Word = "data"
):
    """A load of a checkpoint whose metadata or data are missing, cut or replaced is refused on all ranks; the next load
    works."""
    save(state, writer(folder))
    if rank == 0:
        damage_file(folder, reader(folder).read_metadata(), file, damage)
    save(state, writer(f"{folder}/undamaged"))
    return {}


@damaged.due
def _(state: Contents):
    specs = state.end.specs
    if all(isinstance(leaf, Slot) and 0 in specs[leaf.name].shape for _, leaf in flatten(state.tree).values()):
        raise Meaningless("a checkpoint without anything in it")
    return {}


@damaged.then
def _(state: Destination, second: Destination, reader: Reader, folder: Folder, damage: Word):
    if damage == "stray":
        return {"loaded": load(state, reader(folder))}
    refused = caught(lambda: load(state, reader(folder)))
    return {"damaged": refused, "kept": state, "afterwards": load(second, reader(f"{folder}/undamaged"))}


@damaged.due
def _(state: Contents, damage, file: Word = "data"):
    if damage == "stray":
        return {"loaded": state}
    return {
        "damaged": Refused((CheckpointFailed,)),
        "kept": state.before_load() if file == "metadata" else ...,
        "afterwards": state,
    }
