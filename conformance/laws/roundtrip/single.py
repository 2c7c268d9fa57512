"""Laws on checkpoints that are one file of ``torch.save``, and on loads that build their own state.

``torch-file``: the tensors of a case are saved whole in one file, which the ranks of the load get: read by the coordinator and handed out
(``through=reader``, into plain tensors: torch 2.13 has no way from there into DTensors), or turned into a checkpoint first
(``through=checkpoint``). ``keys`` of ``keys`` are names of leaves, or of dicts that hold some, joined by ``+``; ``all`` is everything.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

from conformance import compat
from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip.cases import IN_FILES, law_of
from conformance.report.reproducer import Script
from conformance.target import storage
from conformance.trip_script import compared, load_lines, save_lines, script, state_text
from reference.checkpoint.state_dict import Slot, State, flatten, unflatten

DOCS = "torch.distributed.checkpoint docs"
FILE = "whole.pt"


def plain_end(trip: t.Trip) -> t.End:
    """The state of the save with whole tensors in it."""
    return t.End(trip.save.state, trip.save.mesh, {name: spec.placed(None) for name, spec in trip.save.specs.items()})


def check_torch_file(case: Case, here: Here) -> None:
    """One file of whole tensors gives every rank its part, whatever the layout that it is loaded into."""
    trip = t.read_trip(case)
    file = os.path.join(here.folder(), FILE)
    converted = case.get("through") == "checkpoint"
    if here.stage == 0:
        if here.rank == 0:
            torch.save(t.build(plain_end(trip), lambda name: trip.values[name].clone()), file)
            if converted:
                storage.convert(here.target, os.path.join(here.folder(), "turned"), file, back=True)
        return
    state = t.destination(trip, here)
    if converted:
        t.load(here, state, folder=os.path.join(here.folder(), "turned"))
    elif trip.reading or "id" not in case:
        planner = DynamicMetaLoadPlanner(**trip.reading)
        t.load(here, state, reader=BroadcastingTorchSaveReader(file), planner=planner, checkpoint_id=file)
    else:
        t.load(here, state, reader=BroadcastingTorchSaveReader(), planner=DynamicMetaLoadPlanner(), checkpoint_id=file)
    t.judge(trip, here, state)


def check_torch_value(case: Case, here: Here) -> None:
    """A value that is no tensor cannot be read out of one file, and is refused by every rank; the next load works."""
    trip = t.read_trip(case)
    file = os.path.join(here.folder(), FILE)
    if here.stage == 0:
        if here.rank == 0:
            torch.save(t.build(plain_end(trip), lambda name: trip.values[name].clone()), file)
        return
    state = t.destination(trip, here)
    reader, planner = BroadcastingTorchSaveReader(file), DynamicMetaLoadPlanner()
    message = "a value that is no tensor, loaded from one file of tensors"
    here.refused(lambda: t.load(here, state, reader=reader, planner=planner, checkpoint_id=file), "value", message)
    tensors = {key: value for key, value in t.destination(trip, here).items() if isinstance(value, torch.Tensor)}
    t.load(here, tensors, reader=BroadcastingTorchSaveReader(file), planner=DynamicMetaLoadPlanner(), checkpoint_id=file)
    want = {key: value for key, value in trip.load.state.items() if isinstance(value, Slot)}
    t.judge(trip, here, tensors, want=want)


def chosen(case: Case, trip: t.Trip) -> State:
    """The part of the saved state that the keys name."""
    keys = case.get("keys")
    if keys == "all":
        return unflatten(flatten(trip.save.state))
    named = keys.split("+")
    kept = {}
    for name, (path, leaf) in flatten(trip.save.state).items():
        inside = {".".join(map(str, path[:end])) for end in range(1, len(path) + 1)}
        if inside & {*named}:
            kept[name] = (path, leaf)
    return unflatten(kept)


def check_keys(case: Case, here: Here) -> None:
    """A load by keys gives a new state: what the keys name, whole, and nothing else."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    named = case.get("keys").split("+")
    keys: Any = None if case.get("keys") == "all" else named[0] if len(named) == 1 else {*named}
    with t.told_plainly():
        state = compat.name("load_state_dict_from_keys")(keys, storage_reader=t.reader_of(here))
    end = plain_end(trip)
    t.judge(trip, here, state, end=t.End(chosen(case, trip), end.mesh, end.specs), check="keys")


PLANNED = "from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner"


def torch_file_script(case: Case) -> Script:
    trip = t.read_trip(case)
    file = f'f"{{folder}}/{FILE}"'
    end = plain_end(trip)
    first = ["if rank == 0:", f"    torch.save({state_text(trip, end, trip.worlds[0])}, {file})"]
    if case.get("through") == "checkpoint":
        first.append(f'    torch_save_to_dcp({file}, f"{{folder}}/turned")')
        used = "from torch.distributed.checkpoint.format_utils import torch_save_to_dcp"
        second = load_lines(trip, folder='f"{folder}/turned"')
    else:
        used = PLANNED
        given = ", ".join(f"{name}={value}" for name, value in trip.reading.items())
        how = f", planner=DynamicMetaLoadPlanner({given}), checkpoint_id={file}"
        second = load_lines(trip, reader=f"BroadcastingTorchSaveReader({file})", how=how)
        second = [line.replace(", planner=dcp.DefaultLoadPlanner(flatten_state_dict=False)", "") for line in second]
    return script(trip, [(trip.worlds[0], [*first, "return None, None"]), (trip.worlds[1], second)], imports=[used])


def torch_value_script(case: Case) -> Script:
    trip = t.read_trip(case)
    file = f'f"{{folder}}/{FILE}"'
    first = ["if rank == 0:", f"    torch.save({state_text(trip, plain_end(trip), trip.worlds[0])}, {file})", "return None, None"]
    how = f", planner=DynamicMetaLoadPlanner(), checkpoint_id={file}"
    *made, loaded, _ = load_lines(trip, reader=f"BroadcastingTorchSaveReader({file})", how=how)
    caught = "except dcp.api.CheckpointException:"
    second = [*made, "try:", f"    {loaded}", '    return "refused", "accepted"', caught, "    return None, None"]
    return script(trip, [(trip.worlds[0], first), (trip.worlds[1], second)], imports=[PLANNED])


def keys_script(case: Case) -> Script:
    trip = t.read_trip(case)
    named, end = case.get("keys").split("+"), plain_end(trip)
    keys = None if named == ["all"] else named[0] if len(named) == 1 else {*named}
    want = chosen(case, trip)
    expected, got = compared(trip, t.End(want, end.mesh, end.specs), want, trip.worlds[1])
    lines = [
        f"state = _load_state_dict_from_keys({keys!r}, storage_reader=dcp.FileSystemReader(folder))",
        f"return [*{expected}, {sorted(map(str, want))}], [*{got}, sorted(map(str, state))]",
    ]
    used = "from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys"
    return script(trip, [(trip.worlds[0], save_lines(trip)), (trip.worlds[1], lines)], imports=[used])


FILES = (
    "mesh=2 x=5x2:- a=4:-:int64 through=reader",
    "mesh=3 x=7x3:- a=2x4:-:float64 b=3:-:bfloat16 state={m:{x:x,i:{a:a}},b:b} through=reader",
    "mesh=2x2 x=5x6:- a=():-:float64 state={x:x,a.b:a} through=reader id=named",
    "mesh=2 x=2x3:- a=1:-:bool through=reader nested=kept",
    "mesh=2 mesh.load=3 x=5x2:- a=7:-:bool state={m:{x:x,l:[a,1]},n:2} to.x=S(1) to.a=S(0) through=checkpoint",
    "mesh=1 mesh.load=2x2 x=5x6:- a=3:-:float64 to.x=S(0),S(0) to.a=R,S(0) through=checkpoint",
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
)


LAWS = (
    law_of(
        "torch-file",
        clause="One file of whole tensors, read by one rank, fills those of all ranks; turned into a checkpoint, tensors of any layout.",
        source=f"{DOCS}, format_utils: BroadcastingTorchSaveReader, DynamicMetaLoadPlanner, torch_save_to_dcp",
        check=check_torch_file,
        holds="mesh=2 x=5x2:- a=4:- through=reader",
        planted="file_read_in_reverse",
        texts=FILES,
        sweeps=len(FILES),
        features=lambda case: {f"through:{case.get('through')}"},
        stages=t.worlds,
        script=torch_file_script,
        needs=IN_FILES,
    ),
    law_of(
        "refuses[value]",
        clause="Of a file of tensors, a value that is no tensor is refused by every rank, and the tensors can be loaded still.",
        source=f"{DOCS}, format_utils: BroadcastingTorchSaveReader, DynamicMetaLoadPlanner: only supports loading Tensors",
        check=check_torch_value,
        holds="mesh=2 x=5x2:- a=4:- state={x:x,a:a,n:1}",
        planted="values_of_files_are_skipped",
        texts=VALUES,
        sweeps=len(VALUES),
        stages=t.worlds,
        script=torch_value_script,
        needs=IN_FILES,
    ),
    law_of(
        "keys",
        clause="A load by keys gives what stands under them in the saved state, whole and in its place, and nothing else.",
        source="torch.distributed.checkpoint.state_dict_loader._load_state_dict_from_keys: loads any key specified in this set",
        check=check_keys,
        holds="mesh=2 x=5x2:S(0) a=4:R state={m:{x:x,n:1},a:a} keys=m",
        planted="keys_of_the_top_alone",
        texts=KEYS,
        sweeps=len(KEYS),
        stages=t.worlds,
        script=keys_script,
        needs=IN_FILES,
    ),
)
