"""Laws on checkpoints that are one file of ``torch.save``, and on loads by keys.

``through=reader``: the coordinator reads the file and broadcasts it, into plain tensors (torch 2.13 cannot load it into
DTensors). ``through=checkpoint``: the file is converted to a checkpoint first. ``keys``: names of leaves, or of dicts
that have some, joined by ``+``; or ``all``.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    torch_save_to_dcp,
)

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank, Word
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed, convert_failures, load
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import Destination, PlannerField, Reader, StateField
from shardlaw.conformance.laws.roundtrip.cases import DOCS, NEEDS_FILES, after_save, due_loaded, save_only, trip_law
from shardlaw.reference.checkpoint.state_dict import Slot, State, flatten, unflatten

FullState = Annotated[dict[str, Any], StateField("save", plain=True)]

FILES = (
    "mesh=2 x=5x2:- a=4:-:int64 through=reader",
    "mesh=3 x=7x3:- a=2x4:-:float64 b=3:-:bfloat16 state={m:{x:x,i:{a:a}},b:b} through=reader",
    "mesh=2x2 x=5x6:- a=():-:float64 state={x:x,a.b:a} through=reader id=named",
    "mesh=2 x=2x3:- a=1:-:bool through=reader nested=kept",
    "mesh=2 mesh.load=3 x=5x2:- a=7:-:bool state={m:{x:x,l:[a,1]},n:2} to.x=S(1) to.a=S(0) through=checkpoint",
    "mesh=1 mesh.load=2x2 x=5x6:- a=3:-:float64 to.x=S(0),S(0) to.a=R,S(0) through=checkpoint",
    "mesh=2 x=4x2:- to.x=S(0) through=reader",
    "mesh=2 x=4x3:-:float32:distinct:transposed memory=plain through=reader",
    "mesh=2 x=4x3:- a=5:- dtype=float64 through=reader",
    "mesh=2 x=4x3:- a=5:- to.x=S(1) dtype=int64 through=checkpoint",
    "mesh=2 x=4x3:- a=5:- through=reader lead=1",
)
# not in smoke: ranks that wait take the time limit of a case, and a crash takes a world
DIVERGING = (
    "mesh=2 x=5x2:- a=3x2:- state={x:x} into={y:x}",
    "mesh=2 x=5x2:- a=3x2:- state={x:x} into={x:a}",
)
OTHERS = (
    "mesh=3 x=5x2:- a=7x2:-:int64 b=4:- state={b:b,x:x} into={b:b,x:a}",
    "mesh=1 x=5x2:- a=4:- state={x:x} into={x:x,a:a}",
    "mesh=1 x=6:- a=3x2:- state={x:x} into={x:a}",
    "mesh=1 x=5x2:- a=3x2:- state={x:x} into={x:a}",
)
VALUES = (
    "mesh=2 x=5:- a=4:- state={x:x,n:1}",
    'mesh=3 x=7x2:- state={x:x,s:"text",d:{k:None}}',
    "mesh=2 x=4:- state={c:1j,x:x}",
)
KEYS = (
    "mesh=2 x=5x2:S(0) a=4:R state={mn:{x:x,n:1},m:a,k:2} keys=mn",
    "mesh=2 x=5x2:S(0) a=4:R:int64 state={m:{x:x,i:{a:a,n:3}},k:2} keys=m.i+k",
    "mesh=3 mesh.load=2 x=7:S(0) a=2x3:S(1):bfloat16 b=3:- state={m:{x:x,xx:a},n:{x:b}} keys=m.x+n",
    "mesh=2 x=5:S(0) a=4:R state={x:x,l:[a,1],t:(1,2)} keys=all",
    "mesh=2 mesh.load=1 x=5x2:S(0) a=4:R state={x:x,xa:a,n:1} keys=xa",
    "mesh=2 x=5x2:S(0) a=4:R state={m:{x:x,n:1},x:a} keys=m.x",
    "mesh=2 x=5x2:S(0) a=4:R state={m:{i:{j:{x:x,n:1},k:2},l:[a,3]},j:4} keys=m.i.j",
    "mesh=2 x=5x2:S(0) a=4:R state={m:{x:{p:x},i:{x:{q:a}}}} keys=m.x",
    "mesh=2 x=5x2:S(0) a=4:R state={x:x,a:a,n:1} keys=all nested=kept",
)


@save_only
@trip_law(
    "torch-file",
    source=f"{DOCS}, format_utils: BroadcastingTorchSaveReader, DynamicMetaLoadPlanner, torch_save_to_dcp",
    control="mesh=2 x=5x2:- a=4:- through=reader",
    texts=FILES,
    features=lambda case: {f"through:{case.get('through')}"},
    needs=NEEDS_FILES,
)
def torch_file(state: FullState, rank: Rank, folder: Folder, through: Word):
    """A file of full tensors, read by one rank, loads into plain tensors on all; converted to a checkpoint, into any
    layout."""
    if rank == 0:
        torch.save(state, f"{folder}/full.pt")
        if through == "checkpoint":
            torch_save_to_dcp(f"{folder}/full.pt", f"{folder}/converted")
    return {}


@torch_file.then
def _(
    state: Destination,
    reader: Reader,
    planner: Annotated[Any, PlannerField(saves=False, planner_class=DynamicMetaLoadPlanner)],
    folder: Folder,
    through: Word,
    id: Word = "",
    nested: Word = "",
    lead: int = 0,
):
    if lead:
        of_lead = BroadcastingTorchSaveReader(f"{folder}/full.pt", coordinator_rank=lead)
        with convert_failures():
            dcp.load_state_dict(state, of_lead, coordinator_rank=lead, planner=planner)
        return {"loaded": state}
    if through == "checkpoint":
        return {"loaded": load(state, reader(f"{folder}/converted"))}
    file_reader = (
        BroadcastingTorchSaveReader() if id and not nested else BroadcastingTorchSaveReader(f"{folder}/full.pt")
    )
    return {"loaded": load(state, file_reader, planner, checkpoint_id=f"{folder}/full.pt")}


torch_file.due(due_loaded)


@save_only
@trip_law(
    "refuses[value]",
    source=f"{DOCS}, format_utils: BroadcastingTorchSaveReader, DynamicMetaLoadPlanner: only supports loading Tensors",
    control="mesh=2 x=5x2:- a=4:- state={x:x,a:a,n:1}",
    texts=VALUES,
    needs=NEEDS_FILES,
)
def value_in_file(state: FullState, rank: Rank, folder: Folder):
    """A load of a value that is no tensor from a file is refused on every rank; the tensors in it can be loaded."""
    if rank == 0:
        torch.save(state, f"{folder}/full.pt")
    return {}


@value_in_file.then
def _(state: Destination, second: Destination, folder: Folder):
    file = f"{folder}/full.pt"
    reader, planner = BroadcastingTorchSaveReader(file), DynamicMetaLoadPlanner()
    refused = caught(lambda: load(state, reader, planner, checkpoint_id=file))
    tensors = {key: value for key, value in second.items() if isinstance(value, torch.Tensor)}
    load(tensors, BroadcastingTorchSaveReader(file), DynamicMetaLoadPlanner(), checkpoint_id=file)
    return {"value": refused, "tensors": tensors}


@value_in_file.due
def _(state: Contents):
    tensors = {key: value for key, value in state.tree.items() if isinstance(value, Slot)}
    return {"value": Refused(), "tensors": state.with_tree(tensors)}


@save_only
@trip_law(
    "refuses[file]",
    source=f"{DOCS}, format_utils: BroadcastingTorchSaveReader, DynamicMetaLoadPlanner; CheckpointException",
    control="mesh=2 x=5x2:- a=7x2:- state={x:x} into={x:a}",
    texts=OTHERS + DIVERGING,
    sweeps=len(OTHERS),
    needs=NEEDS_FILES,
    features=lambda case: {"must-refuse"},
)
def other_in_file(state: FullState, rank: Rank, folder: Folder):
    """A load of a tensor that a file lacks, or has in another shape, is refused on every rank."""
    if rank == 0:
        torch.save(state, f"{folder}/full.pt")
    return {}


@other_in_file.then
def _(state: Destination, folder: Folder):
    file = f"{folder}/full.pt"
    return {"load": caught(lambda: load(state, BroadcastingTorchSaveReader(file), DynamicMetaLoadPlanner()))}


@other_in_file.due
def _():
    return {"load": Refused((CheckpointFailed,))}


def select(state: State, keys: str) -> State:
    """The part of a state under these keys."""
    if keys == "all":
        return unflatten(flatten(state))
    names, selected = {*keys.split("+")}, {}
    for name, (path, leaf) in flatten(state).items():
        if names & {".".join(map(str, path[:end])) for end in range(1, len(path) + 1)}:
            selected[name] = (path, leaf)
    return unflatten(selected)


@after_save(
    "keys",
    source="torch.distributed.checkpoint.state_dict_loader._load_state_dict_from_keys: loads any key specified "
    "in this set",
    control="mesh=2 x=5x2:S(0) a=4:R state={m:{x:x,n:1},a:a} keys=m",
    texts=KEYS,
    needs=NEEDS_FILES,
)
def by_keys(reader: Reader, keys: Word, folder: Folder):
    """A load by keys gives the part of the saved state under these keys, with full tensors."""
    names = {*keys.split("+")}
    selected = None if keys == "all" else keys if len(names) == 1 else names
    with convert_failures():
        return {"keys": compat.load_state_dict_from_keys(selected, storage_reader=reader(folder))}


@by_keys.due
def _(keys, full: FullState):
    return {"keys": full.with_tree(select(full.tree, keys))}  # type: ignore[attr-defined]
