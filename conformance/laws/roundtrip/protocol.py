"""Laws on the calls that a save and a load make to their planner and their storage: in which order, how often, and with
what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Folder, Rank, Word, WorldSize
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.fields import (
    CheckpointId,
    Destination,
    LoadMesh,
    PlannerField,
    Reader,
    Saved,
    SavePlanner,
    StateField,
    Writer,
)
from shardlaw.conformance.laws.checkpoint.trip import world_sizes
from shardlaw.conformance.laws.roundtrip.cases import add_load, after_save, trip_law
from shardlaw.conformance.laws.roundtrip.spying import COORDINATOR, LOAD_PLANNER, READER, SAVE_PLANNER, WRITER, Spy
from shardlaw.reference.mesh import Mesh

DOCS = "torch.distributed.checkpoint docs"
# calls that happen once for each item, in between
PER_ITEM = ("resolve_data", "load_bytes", "resolve_tensor", "commit_tensor")

SAVES = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R to.x=S(1) state={x:x,a:a,n:1} id=given",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=3:- b=():R to.x=S(0) state={x:x,d:{a:a,b:b},n:None} threads=2",
    "mesh=2@1,2 world.save=4 mesh.load=2 x=5:S(0) a=4:R:bool to.x=R among=group",
    "mesh=2x2 mesh.load=1 x=5x6:S(0),S(1) a=8:_S(0,2),S(0) b=0x3:S(1),R to.x=R to.a=R to.b=R dedup=lowest",
    "mesh=1 x=5:S(0) a=():- state={x:x,l:[a,1]} id=given files=item",
    "mesh=2@2,1 mesh.load=2 x=5x2:S(0) a=4:- among=group id=given state={x:x,n:1}",
)
LOADS = (
    "mesh=3 mesh.load=2 x=5x2:S(0) a=4:R to.x=S(1) state={x:x,a:a,n:1} id=given",
    "mesh=2 mesh.load=3 x=7:S(0):int64 a=3:- b=():R to.x=S(0) state={x:x,d:{a:a,b:b},n:None} threads=2",
    "mesh=2 mesh.load=2@1,2 world.load=4 x=5:S(0) a=4:R:bool to.x=R among=group",
    "mesh=1 mesh.load=2x2 x=5x6:S(0) a=8:S(0) b=0x3:S(1) to.x=S(0),S(1) to.a=S(0),R to.b=R,R",
    "mesh=1 x=5:S(0) a=():- state={x:x,l:[a,1]} id=given",
    "mesh=2 mesh.load=2@2,1 x=5x2:S(0) a=4:- to.x=S(1) among=group id=given state={x:x,n:1}",
)
COMPLETE = (
    "mesh=2 x=5x2:S(0) a=4:R state={x:x,d:{a:a},n:1}",
    "mesh=3 x=7:S(0):int64 a=2x5:S(1):bool b=():R threads=2",
    "mesh=2x2@0,2,1,3 x=5x6:S(0),S(1) a=7:S(0),S(0) b=3:- files=item",
    "mesh=2@0,2 x=0x2:S(0) a=5:S(0):float64 state={x:x,l:[a,(1,2)]}",
)


def of_protocol(case: Case) -> set[str]:
    return (
        {"storage-calls"}
        | ({"checkpoint-id"} if "id" in case else set())
        | ({"group"} if case.get("among", "all") != "all" else set())
    )


def steps(spy: Spy, named: str) -> list[str]:
    """The calls in order, but those for single items; a reset counts where the checkpoint is ``named``."""
    return [call.name for call in spy.calls if call.name not in PER_ITEM and (named or call.name != "reset")]


def handed_on(planner: Spy, storage: Spy, last: str) -> list[bool]:
    """Whether the storage gets the very plans that the planner gave: the local one, and the final one."""
    pairs = [("create_local_plan", "prepare_local_plan"), ("finish_plan", last)]
    return [
        all(taken.args[0] is given.result for given, taken in zip(planner.of(gave), storage.of(takes), strict=False))
        for gave, takes in pairs
    ]


def plans_of_ranks(planner: Spy, storage: Spy) -> list[int]:
    """How many plans the global steps get."""
    return [len(call.args[0]) for call in [*planner.of("create_global_plan"), *storage.of("prepare_global_plan")]]


def due_steps(methods: Sequence[str], leads: bool, named: str) -> Of:
    """The calls that are due, in order."""
    return Of(
        [
            name
            for name in methods
            if name not in PER_ITEM and (leads or name not in COORDINATOR) and (named or name != "reset")
        ]
    )


def seat(mesh: Mesh, rank: int, world: int, among: str) -> tuple[bool, int] | None:
    """Whether a rank leads, and how many take part; ``None`` outside. A group's first rank leads, and groups list
    theirs in order."""
    if among == "all":
        return rank == 0, world
    return None if mesh.coord(rank) is None else (rank == min(mesh.ranks), mesh.size)


@trip_law(
    "protocol[save]",
    source=f"{DOCS}, SavePlanner and StorageWriter: the expected sequence of calls",
    control="mesh=2 x=5:S(0) state={x:x,n:1}",
    texts=SAVES,
    stages=world_sizes,
    features=of_protocol,
)
def saves(
    state: Saved,
    mesh: DeviceMesh,
    planner: Annotated[Any, PlannerField(saves=True, planner_class=DefaultSavePlanner)],
    writer: Writer,
    checkpoint_id: CheckpointId,
    folder: Folder,
    among: Word = "all",
    id: Word = "",
):
    """A save calls its planner and its writer in the documented order, once each, the global steps on the leading rank
    alone."""
    if among != "all" and mesh.get_coordinate() is None:
        return {}
    how = {"process_group": mesh.get_group()} if among != "all" else {}
    how |= {"checkpoint_id": checkpoint_id(folder)} if id else {}
    of_planner, of_writer = Spy(), Spy()
    watched = of_writer.watch(writer(f"{folder}/elsewhere" if id else folder), WRITER)
    save(state, watched, of_planner.watch(planner, SAVE_PLANNER), **how)
    items = [item.index for call in of_writer.of("write_data") for item in call.args[0].items]
    resolved = [call.args[0].index for call in of_planner.of("resolve_data")]
    ends = [
        {**dict(zip(("metadata", "results"), call.args, strict=False)), **call.options}
        for call in of_writer.of("finish")
    ]
    made = [call.result[1] for call in of_planner.of("create_global_plan")]
    return {
        "planner calls": steps(of_planner, id),
        "writer calls": steps(of_writer, id),
        "place": [
            [*call.args, *call.options.values()] == [checkpoint_id(folder)] for call in of_writer.of("reset") if id
        ],
        "plans handed on": handed_on(of_planner, of_writer, "write_data"),
        "items never asked for": [index for index in items if index not in resolved],
        "other items asked for": [index for index in resolved if index not in items],
        "plans": plans_of_ranks(of_planner, of_writer),
        "results": [len(end["results"]) for end in ends],
        "metadata as planned": [end["metadata"] is made[0] for end in ends],
        "written as told": [
            sorted(str(one.index) for one in end["results"][0]) == sorted(map(str, items)) for end in ends
        ],
    }


@saves.due
def _(mesh, rank: Rank, world: WorldSize, among, id):
    found = seat(mesh, rank, world, among)
    if found is None:
        return {}
    leads, members = found
    return {
        "planner calls": due_steps(SAVE_PLANNER, leads, id),
        "writer calls": due_steps(WRITER, leads, id),
        "place": Of([True] if id else []),
        "plans handed on": Of([True, True]),
        "items never asked for": Of([]),
        "other items asked for": Of([]),
        "plans": Of([members, members] if leads else []),
        "results": Of([members] if leads else []),
        "metadata as planned": Of([True] if leads else []),
        "written as told": Of([True] if leads else []),
    }


add_load(saves)


@after_save(
    "protocol[load]",
    source=f"{DOCS}, LoadPlanner and StorageReader: the expected sequence of calls",
    control="mesh=2 x=5:S(0) state={x:x,n:1}",
    texts=LOADS,
    features=of_protocol,
)
def loads(
    state: Destination,
    mesh: LoadMesh,
    reader: Reader,
    checkpoint_id: CheckpointId,
    folder: Folder,
    among: Word = "all",
    id: Word = "",
):
    """A load calls its planner and its reader in the documented order, and commits every tensor that it resolved."""
    if among != "all" and mesh.get_coordinate() is None:
        return {}
    how = {"process_group": mesh.get_group()} if among != "all" else {}
    how |= {"checkpoint_id": checkpoint_id(folder)} if id else {}
    of_planner, of_reader = Spy(), Spy()
    watched = of_reader.watch(reader(f"{folder}/elsewhere" if id else folder), READER)
    load(state, watched, of_planner.watch(DefaultLoadPlanner(), LOAD_PLANNER), **how)
    items = [item for call in of_reader.of("read_data") for item in call.args[0].items]
    tensors = sorted(str(item) for item in items if item.type == LoadItemType.TENSOR)
    values = sorted(item.storage_index.fqn for item in items if item.type == LoadItemType.BYTE_IO)
    return {
        "loaded": state,
        "planner calls": steps(of_planner, id),
        "reader calls": steps(of_reader, id),
        "place": [
            [*call.args, *call.options.values()] == [checkpoint_id(folder)] for call in of_reader.of("reset") if id
        ],
        "plans handed on": handed_on(of_planner, of_reader, "read_data"),
        "each value once": sorted(call.args[0].storage_index.fqn for call in of_planner.of("load_bytes")) == values,
        "each part resolved once": sorted(str(call.args[0]) for call in of_planner.of("resolve_tensor")) == tensors,
        "each part committed once": sorted(str(call.args[0]) for call in of_planner.of("commit_tensor")) == tensors,
        "plans": plans_of_ranks(of_planner, of_reader),
    }


@loads.due
def _(state, mesh, rank: Rank, world: WorldSize, among, id):
    found = seat(mesh, rank, world, among)
    if found is None:
        return {}
    leads, members = found
    return {
        "loaded": state,
        "planner calls": due_steps(LOAD_PLANNER, leads, id),
        "reader calls": due_steps(READER, leads, id),
        "place": Of([True] if id else []),
        "plans handed on": Of([True, True]),
        "each value once": Of(True),
        "each part resolved once": Of(True),
        "each part committed once": Of(True),
        "plans": Of([members, members] if leads else []),
    }


@trip_law(
    "complete",
    source=f"{DOCS}, StorageWriter.finish: marks the current checkpoint as successful; save returns its metadata",
    control="mesh=2 x=5x2:S(0) a=4:R",
    texts=COMPLETE,
)
def complete(
    state: Saved,
    destination: Annotated[dict[str, Any], StateField("save", plain=True, fill="poison")],
    writer: Writer,
    reader: Reader,
    planner: SavePlanner,
    folder: Folder,
):
    """Once a save has returned on a rank, that rank finds the whole checkpoint, whatever the others do meanwhile."""
    save(state, writer(folder), planner)
    return {"loaded": load(destination, reader(folder), no_dist=True)}


@complete.due
def _(destination):
    return {"loaded": destination}
