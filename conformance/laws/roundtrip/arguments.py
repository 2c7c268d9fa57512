"""Laws on other ways in and out of a checkpoint: by some of the ranks, by every rank for itself, and through a single
file."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law.fields import Folder, Rank, Word
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.fields import (
    CheckpointId,
    Destination,
    LoadMesh,
    Newer,
    NewerDestination,
    Reader,
    Saved,
    SavePlanner,
    StateField,
    Writer,
)
from shardlaw.conformance.laws.checkpoint.trip import world_sizes
from shardlaw.conformance.laws.roundtrip.cases import NEEDS_FILES, add_load, trip_law

DOCS = "torch.distributed.checkpoint docs"

GROUPS = (
    "mesh=2@1,2 mesh.load=2@0,2 x=5x2:S(0) a=4:R to.x=S(1) to.a=S(0) state={x:x,a:a,n:1}",
    "mesh=2@0,1 world.save=3 mesh.load=3 x=7:S(0):int64 a=3:- to.x=S(0) threads=2",
    "mesh=3@1,2,3 mesh.load=2@1,3 x=7x2:S(0) a=4:R:bool to.x=R dedup=lowest",
    "mesh=2@2,3 mesh.load=1@1 x=5:S(0) a=():R state={d:{x:x},l:[a,None]}",
)
ALONE = (
    "mesh=2 x=5x2:S(0) a=4:R b=3:-:int64 state={x:x,a:a,b:b,n:1,d:{k:None}}",
    "mesh=3 x=2:S(0) a=5x4:S(1):bool threads=2",
    "mesh=2x2 x=5x6:S(0),S(1) a=7:S(0),R files=item",
    "mesh=1 x=5:S(0) a=():R",
)
WHOLE = (
    'mesh=2 mesh.load=3 x=5x2:S(0) a=4:R:int64 state={m:{x:x,l:[a,1]},n:2,s:"t"} to.x=S(1) to.a=R',
    "mesh=3 mesh.load=2 x=7:S(0):bfloat16 a=2x2:S(1):bool b=():R to.x=R to.a=S(0) to.b=-",
    'mesh=2x2 mesh.load=1 x=5x3:S(0),S(1) a=3:- state={"a.b":x,o:{0:{p:a,q:None}},t:(1,2)} to.x=S(0) to.a=-',
    "mesh=2@0,2 mesh.load=2 x=0x3:S(0) a=4:S(0):float64 threads=2 to.x=S(1) to.a=S(0)",
    "mesh=2 x=5x2:S(0) a=4:R state={x:x,a:a,n:1} nested=kept",
)

PLACES = (
    "mesh=2 x=5x2:S(0) a=4:R state={x:x,a:a,n:1}",
    "mesh=3 x=7:S(0):int64 a=4:-",
    "mesh=2x2 x=5x4:S(1),S(0) a=4:R,R:bool",
)
# a dict without tensors was one entry; of one that has tensors, and of a list, each leaf was
OLDER = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R state={x:x,d:{n:1,e:{m:2}},o:{w:a,k:3}} to.x=S(1) one=d",
    "mesh=2 x=5x2:S(0) state={x:x,d:{n:1}} one=d",
    "mesh=1 mesh.load=2 x=7:S(0) a=4:- state={o:{w:x,d:{n:None,t:(1,2)}},l:[a,3],n:1} to.x=R one=o.d",
)


@trip_law(
    "places",
    source=f"{DOCS}, save and load: checkpoint_id; StorageWriter.reset, StorageReader.reset: a new checkpoint starts",
    control="mesh=2 x=5:S(0) a=4:R",
    texts=PLACES,
)
def places(
    state: Saved,
    newer: Newer,
    destination: Destination,
    second: NewerDestination,
    writer: Writer,
    reader: Reader,
    checkpoint_id: CheckpointId,
    folder: Folder,
):
    """One writer and one reader serve one checkpoint after another, each under the name that it is given."""
    to, of = writer(f"{folder}/other"), reader(f"{folder}/other")
    save(state, to, checkpoint_id=checkpoint_id(f"{folder}/first"))
    save(newer, to, checkpoint_id=checkpoint_id(f"{folder}/second"))
    return {
        "first": load(destination, of, checkpoint_id=checkpoint_id(f"{folder}/first")),
        "second": load(second, of, checkpoint_id=checkpoint_id(f"{folder}/second")),
    }


@places.due
def _(destination, second):
    return {"first": destination, "second": second}


class Older(DefaultSavePlanner):
    """A planner that makes one entry of the dict at a path, as releases before 2.4 did where it holds no tensors."""

    one: tuple[str, ...]

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        name, kept = ".".join(self.one), state_dict
        for key in self.one:
            kept = kept[key]
        self.state_dict = {key: one for key, one in self.state_dict.items() if not key.startswith(f"{name}.")}
        self.state_dict[name] = kept
        self.mappings = {key: path for key, path in self.mappings.items() if key in self.state_dict}
        self.mappings[name] = self.one


@trip_law(
    "older",
    source="torch.distributed.checkpoint.metadata.Metadata: backward compatibility of the metadata; "
    "DefaultLoadPlanner.create_local_plan: checkpoints that are saved before v2.4",
    control="mesh=2 x=5:S(0) state={x:x,d:{n:1}} one=d",
    texts=OLDER,
    stages=world_sizes,
)
def older(state: Saved, writer: Writer, folder: Folder, one: Word):
    """A checkpoint of which a dict without tensors is one entry, as before torch 2.4, is loaded like one of now."""
    planner = Older()
    planner.one = tuple(one.split("."))
    save(state, writer(folder), planner)
    return {}


older.due(lambda: {})


add_load(older)


@trip_law(
    "group",
    source=f"{DOCS}, save and load: process_group, only its ranks call",
    control="mesh=2@1,2 x=5x2:S(0) a=4:R",
    texts=GROUPS,
    stages=world_sizes,
)
def group(state: Saved, mesh: DeviceMesh, writer: Writer, planner: SavePlanner, folder: Folder):
    """The ranks of a process group save a checkpoint and those of another load it, while the others take no part."""
    if mesh.get_coordinate() is not None:
        save(state, writer(folder), planner, process_group=mesh.get_group())
    return {}


group.due(lambda: {})


@group.then
def _(state: Destination, mesh: LoadMesh, reader: Reader, folder: Folder):
    if mesh.get_coordinate() is None:
        return {}
    return {"loaded": load(state, reader(folder), process_group=mesh.get_group())}


@group.due
def _(state, mesh, rank: Rank):
    return {} if mesh.coord(rank) is None else {"loaded": state}


@trip_law(
    "alone",
    source=f"{DOCS}, save: use_collectives=False saves without coordination of ranks",
    control="mesh=2 x=5x2:S(0) a=4:R",
    texts=ALONE,
    stages=world_sizes,
)
def alone(state: Saved, writer: Writer, folder: Folder):
    """Without collectives every rank saves what it holds, and loads it again into the same layout."""
    save(state, writer(folder), use_collectives=False)
    return {}


alone.due(lambda: {})


add_load(alone)


@trip_law(
    "file",
    source=f"{DOCS}, format_utils: dcp_to_torch_save, torch_save_to_dcp",
    control="mesh=2 x=5x2:S(0) a=4:R state={m:{x:x,l:[a,1]},n:2}",
    texts=WHOLE,
    stages=world_sizes,
    needs=NEEDS_FILES,
)
def file(state: Saved, writer: Writer, planner: SavePlanner, rank: Rank, folder: Folder):
    """A checkpoint turned into one file holds every leaf in its place, whole; turned back, it is the same
    checkpoint."""
    save(state, writer(folder), planner)
    if rank > 0:
        return {}
    dcp_to_torch_save(folder, f"{folder}/whole.pt")
    torch_save_to_dcp(f"{folder}/whole.pt", f"{folder}/other")
    return {"file": torch.load(f"{folder}/whole.pt", weights_only=False)}


# nothing is stored for an empty dict, and keys become texts
@file.due
def _(rank, whole: Annotated[dict[str, Any], StateField("save", plain=True, rebuilt=True)]):
    return {"file": whole} if rank == 0 else {}


@file.then
def _(
    state: Annotated[dict[str, Any], StateField("load", fill="poison", rebuilt=True)], reader: Reader, folder: Folder
):
    return {"loaded": load(state, reader(f"{folder}/other"))}


@file.due
def _(state):
    return {"loaded": state}
