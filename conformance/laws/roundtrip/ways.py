"""Laws on other ways in and out of a checkpoint: by some of the ranks, by every rank for itself, and through a single file."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip.cases import IN_FILES, law_of
from conformance.report.reproducer import Script
from conformance.target import storage
from conformance.trip_script import compared, load_lines, save_lines, script
from reference.checkpoint.state_dict import flatten, unflatten

DOCS = "torch.distributed.checkpoint docs"


def check_group(case: Case, here: Here) -> None:
    """The ranks of a process group save, and those of another load: the others take no part."""
    trip = t.read_trip(case)
    end = trip.load if here.stage else trip.save
    t.reject_options(here, trip.writer)
    mesh = here.mesh(end.mesh)
    if here.coord(end.mesh) is None:
        return
    group = mesh.get_group()
    if here.stage == 0:
        t.save(trip, here, process_group=group)
    else:
        t.judge(trip, here, t.load(here, t.destination(trip, here), process_group=group))


def group_script(case: Case) -> Script:
    trip = t.read_trip(case)
    stages = []
    for end, world, lines in (
        (trip.save, trip.worlds[0], save_lines(trip, how=", process_group=mesh.get_group()")),
        (trip.load, trip.worlds[1], load_lines(trip, how=", process_group=mesh.get_group()")),
    ):
        made = next(at for at, line in enumerate(lines) if line.startswith("mesh = "))
        outside = [f"if rank not in {sorted(end.mesh.ranks)}:", "    return None, None"] if end.mesh.size < world else []
        stages.append((world, [*lines[: made + 1], *outside, *lines[made + 1 :], *([] if end is trip.load else ["return None, None"])]))
    return script(trip, stages)


def check_alone(case: Case, here: Here) -> None:
    """Without collectives every rank saves and loads what it holds itself."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here, use_collectives=False)
    else:
        t.judge(trip, here, t.load(here, t.destination(trip, here)))


def alone_script(case: Case) -> Script:
    trip = t.read_trip(case)
    return script(trip, [(trip.worlds[0], save_lines(trip, how=", use_collectives=False")), (trip.worlds[1], load_lines(trip))])


def check_file(case: Case, here: Here) -> None:
    """A checkpoint as one file holds whole tensors in the same tree; the checkpoint made of that file loads as the first one."""
    trip = t.read_trip(case)
    # nothing is stored for an empty dict, and keys become texts
    again = unflatten(flatten(trip.save.state))
    other = os.path.join(here.folder(), "other")
    if here.stage == 0:
        t.save(trip, here)
        if here.rank == 0:
            file = os.path.join(here.folder(), "whole.pt")
            if storage.convert(here.target, here.folder(), file):
                plain = t.End(again, trip.save.mesh, {name: spec.placed(None) for name, spec in trip.save.specs.items()})
                t.judge(trip, here, torch.load(file, weights_only=False), end=plain, check="file")
                storage.convert(here.target, other, file, back=True)
    elif os.path.exists(other):
        trip = replace(trip, load=replace(trip.load, state=again))
        t.judge(trip, here, t.load(here, t.destination(trip, here), folder=other))


def file_script(case: Case) -> Script:
    trip = t.read_trip(case)
    again = unflatten(flatten(trip.save.state))
    plain = t.End(again, trip.save.mesh, {name: spec.placed(None) for name, spec in trip.save.specs.items()})
    expected, got = compared(trip, plain, again, trip.worlds[0])
    first = [
        *save_lines(trip),
        "if rank > 0:",
        "    return None, None",
        'dcp_to_torch_save(folder, f"{folder}/whole.pt")',
        'torch_save_to_dcp(f"{folder}/whole.pt", f"{folder}/other")',
        'state = torch.load(f"{folder}/whole.pt", weights_only=False)',
        f"return {expected}, {got}",
    ]
    back = replace(trip, load=replace(trip.load, state=again))
    used = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp"
    return script(trip, [(trip.worlds[0], first), (trip.worlds[1], load_lines(back, folder='f"{folder}/other"'))], imports=[used])


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
)

LAWS = (
    law_of(
        "group",
        clause="The ranks of a process group save a checkpoint and those of another load it, while the others take no part.",
        source=f"{DOCS}, save and load: process_group, only its ranks call",
        check=check_group,
        holds="mesh=2@1,2 x=5x2:S(0) a=4:R",
        planted="coordinator_of_the_world",
        texts=GROUPS,
        sweeps=4,
        stages=t.worlds,
        script=group_script,
    ),
    law_of(
        "alone",
        clause="Without collectives every rank saves what it holds, and loads it again into the same layout.",
        source=f"{DOCS}, save: use_collectives=False saves without coordination of ranks",
        check=check_alone,
        holds="mesh=2 x=5x2:S(0) a=4:R",
        planted="metadata_of_rank_zero",
        texts=ALONE,
        sweeps=4,
        stages=t.worlds,
        script=alone_script,
    ),
    law_of(
        "file",
        clause="A checkpoint turned into one file holds every leaf in its place, whole; turned back, it is the same checkpoint.",
        source=f"{DOCS}, format_utils: dcp_to_torch_save, torch_save_to_dcp",
        check=check_file,
        holds="mesh=2 x=5x2:S(0) a=4:R state={m:{x:x,l:[a,1]},n:2}",
        planted="tree_flattened_for_good",
        texts=WHOLE,
        sweeps=4,
        stages=t.worlds,
        script=file_script,
        needs=IN_FILES,
    ),
)
