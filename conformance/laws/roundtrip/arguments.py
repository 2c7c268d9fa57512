"""Laws on arguments of save and load (checkpoint_id, process_group, use_collectives), on checkpoints of older planners,
and on conversion to and from a file of ``torch.save``."""

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
from shardlaw.conformance.laws.roundtrip.cases import DOCS, NEEDS_FILES, add_load, one_world_law, save_only, trip_law

GROUPS = (
    "mesh=2@1,2 mesh.load=2@0,2 x=5x2:S(0) a=4:R to.x=S(1) to.a=S(0) state={x:x,a:a,n:1}",
    "mesh=2@0,1 world.save=3 mesh.load=3 x=7:S(0):int64 a=3:- to.x=S(0) threads=2",
    "mesh=3@1,2,3 mesh.load=2@1,3 x=7x2:S(0) a=4:R:bool to.x=R dedup=lowest",
    "mesh=2@2,3 mesh.load=1@1 x=5:S(0) a=():R state={d:{x:x},l:[a,None]}",
)
NO_COLLECTIVES = (
    "mesh=2 x=5x2:S(0) a=4:R b=3:-:int64 state={x:x,a:a,b:b,n:1,d:{k:None}}",
    "mesh=3 x=2:S(0) a=5x4:S(1):bool threads=2",
    "mesh=2x2 x=5x6:S(0),S(1) a=7:S(0),R files=item",
    "mesh=1 x=5:S(0) a=():R",
)
CONVERTED = (
    'mesh=2 mesh.load=3 x=5x2:S(0) a=4:R:int64 state={m:{x:x,l:[a,1]},n:2,s:"t"} to.x=S(1) to.a=R',
    "mesh=3 mesh.load=2 x=7:S(0):bfloat16 a=2x2:S(1):bool b=():R to.x=R to.a=S(0) to.b=-",
    'mesh=2x2 mesh.load=1 x=5x3:S(0),S(1) a=3:- state={"a.b":x,o:{0:{p:a,q:None}},t:(1,2)} to.x=S(0) to.a=-',
    "mesh=2@0,2 mesh.load=2 x=0x3:S(0) a=4:S(0):float64 threads=2 to.x=S(1) to.a=S(0)",
    "mesh=2 x=5x2:S(0) a=4:R state={x:x,a:a,n:1} nested=kept",
    "mesh=2 x=5:S(0) a=3:R state={l:[x,1,a],t:[[a],2]}",
)

IDS = (
    "mesh=2 x=5x2:S(0) a=4:R state={x:x,a:a,n:1}",
    "mesh=3 x=7:S(0):int64 a=4:-",
    "mesh=2x2 x=5x4:S(1),S(0) a=4:R,R:bool",
)
# a dict without tensors was one entry; of other dicts, and of lists, each leaf was one
OLDER = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R state={x:x,d:{n:1,e:{m:2}},o:{w:a,k:3}} to.x=S(1) one=d",
    "mesh=2 x=5x2:S(0) state={x:x,d:{n:1}} one=d",
    "mesh=1 mesh.load=2 x=7:S(0) a=4:- state={o:{w:x,d:{n:None,t:(1,2)}},l:[a,3],n:1} to.x=R one=o.d",
)


@one_world_law(
    "places",
    source=f"{DOCS}, save and load: checkpoint_id; StorageWriter.reset, StorageReader.reset: a new checkpoint starts",
    control="mesh=2 x=5:S(0) a=4:R",
    texts=IDS,
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
    """One writer and one reader save and load several checkpoints, each under its checkpoint_id."""
    to, source = writer(f"{folder}/other"), reader(f"{folder}/other")
    save(state, to, checkpoint_id=checkpoint_id(f"{folder}/first"))
    save(newer, to, checkpoint_id=checkpoint_id(f"{folder}/second"))
    return {
        "first": load(destination, source, checkpoint_id=checkpoint_id(f"{folder}/first")),
        "second": load(second, source, checkpoint_id=checkpoint_id(f"{folder}/second")),
    }


@places.due
def _(destination, second):
    return {"first": destination, "second": second}


class OlderPlanner(DefaultSavePlanner):
    """A planner that stores the dict at a path as one entry, as releases before 2.4 did for dicts without tensors."""

    path: tuple[str, ...]

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        name, entry = ".".join(self.path), state_dict
        for key in self.path:
            entry = entry[key]
        self.state_dict = {key: leaf for key, leaf in self.state_dict.items() if not key.startswith(f"{name}.")}
        self.state_dict[name] = entry
        self.mappings = {key: path for key, path in self.mappings.items() if key in self.state_dict}
        self.mappings[name] = self.path


@add_load
@save_only
@trip_law(
    "older",
    source="torch.distributed.checkpoint.metadata.Metadata: backward compatibility of the metadata; "
    "DefaultLoadPlanner.create_local_plan: checkpoints that are saved before v2.4",
    control="mesh=2 x=5:S(0) state={x:x,d:{n:1}} one=d",
    texts=OLDER,
)
def older(state: Saved, writer: Writer, folder: Folder, one: Word):
    """A checkpoint that stores a dict without tensors as one entry, as torch before 2.4 did, loads like others."""
    planner = OlderPlanner()
    planner.path = tuple(one.split("."))
    save(state, writer(folder), planner)
    return {}


@save_only
@trip_law(
    "group",
    source=f"{DOCS}, save and load: process_group, only its ranks call",
    control="mesh=2@1,2 x=5x2:S(0) a=4:R",
    texts=GROUPS,
)
def group(state: Saved, mesh: DeviceMesh, writer: Writer, planner: SavePlanner, folder: Folder):
    """A process group saves a checkpoint and another one loads it, without calls on other ranks."""
    if mesh.get_coordinate() is not None:
        save(state, writer(folder), planner, process_group=mesh.get_group())
    return {}


@group.then
def _(state: Destination, mesh: LoadMesh, reader: Reader, folder: Folder):
    if mesh.get_coordinate() is None:
        return {}
    return {"loaded": load(state, reader(folder), process_group=mesh.get_group())}


@group.due
def _(state, mesh, rank: Rank):
    return {} if mesh.coord(rank) is None else {"loaded": state}


@add_load
@save_only
@trip_law(
    "alone",
    source=f"{DOCS}, save: use_collectives=False saves without coordination of ranks",
    control="mesh=2 x=5x2:S(0) a=4:R",
    texts=NO_COLLECTIVES,
)
def no_collectives(state: Saved, writer: Writer, folder: Folder):
    """Without collectives every rank saves its part of the state, and loads it into the same layout."""
    save(state, writer(folder), use_collectives=False)
    return {}


@trip_law(
    "file",
    source=f"{DOCS}, format_utils: dcp_to_torch_save, torch_save_to_dcp",
    control="mesh=2 x=5x2:S(0) a=4:R state={m:{x:x,l:[a,1]},n:2}",
    texts=CONVERTED,
    needs=NEEDS_FILES,
)
def file(state: Saved, writer: Writer, planner: SavePlanner, rank: Rank, folder: Folder):
    """A checkpoint converted to one file has every leaf, with full tensors; converted back, it loads as before."""
    save(state, writer(folder), planner)
    if rank > 0:
        return {}
    dcp_to_torch_save(folder, f"{folder}/full.pt")
    torch_save_to_dcp(f"{folder}/full.pt", f"{folder}/other")
    return {"file": torch.load(f"{folder}/full.pt", weights_only=False)}


# empty dicts are not stored, and keys become texts
@file.due
def _(rank, full: Annotated[dict[str, Any], StateField("save", plain=True, rebuilt=True)]):
    return {"file": full} if rank == 0 else {}


@file.then
def _(
    state: Annotated[dict[str, Any], StateField("load", fill="poison", rebuilt=True)], reader: Reader, folder: Folder
):
    return {"loaded": load(state, reader(f"{folder}/other"))}


@file.due
def _(state):
    return {"loaded": state}
