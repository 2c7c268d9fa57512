"""Laws on the calls of a save and a load to their planner and storage: their order, number and arguments."""

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
from shardlaw.conformance.laws.roundtrip.cases import DOCS, add_load, after_save, one_world_law, trip_law
from shardlaw.conformance.laws.roundtrip.spies import COORDINATOR, LOAD_PLANNER, READER, SAVE_PLANNER, WRITER, Spy
from shardlaw.reference.mesh import Mesh

# methods that are called once for each item
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


def protocol_features(case: Case) -> set[str]:
    return (
        {"storage-calls"}
        | ({"checkpoint-id"} if "id" in case else set())
        | ({"group"} if case.get("among", "all") != "all" else set())
    )


def ordered_calls(spy: Spy, has_id: str) -> list[str]:
    """The calls in order, without those for single items, and without ``reset`` where the checkpoint has no id."""
    return [call.name for call in spy.calls if call.name not in PER_ITEM and (has_id or call.name != "reset")]


def passes_plans(planner: Spy, storage: Spy, last: str) -> list[bool]:
    """Whether the storage gets the objects that the planner returned: the local plan, and the final one."""
    pairs = [("create_local_plan", "prepare_local_plan"), ("finish_plan", last)]
    return [
        all(
            get.args[0] is create.result
            for create, get in zip(planner.calls_to(creator), storage.calls_to(getter), strict=False)
        )
        for creator, getter in pairs
    ]


def count_plans(planner: Spy, storage: Spy) -> list[int]:
    """The numbers of plans that the global steps get."""
    return [
        len(call.args[0])
        for call in [*planner.calls_to("create_global_plan"), *storage.calls_to("prepare_global_plan")]
    ]


def due_calls(methods: Sequence[str], is_coordinator: bool, has_id: str) -> Of:
    """The due :func:`ordered_calls`."""
    skipped = {*PER_ITEM, *(() if is_coordinator else COORDINATOR), *(() if has_id else ("reset",))}
    return Of([name for name in methods if name not in skipped])


def find_role(mesh: Mesh, rank: int, world: int, among: str) -> tuple[bool, int] | None:
    """Whether a rank is the coordinator, which is the lowest of its group, and the number of participants; ``None`` for
    ranks outside the group."""
    if among == "all":
        return rank == 0, world
    return None if mesh.coord(rank) is None else (rank == min(mesh.ranks), mesh.size)


@trip_law(
    "protocol[save]",
    source=f"{DOCS}, SavePlanner and StorageWriter: the expected sequence of calls",
    control="mesh=2 x=5:S(0) state={x:x,n:1}",
    texts=SAVES,
    features=protocol_features,
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
    """A save calls its planner and writer in the documented order, each step once, and the global steps on the
    coordinator only."""
    if among != "all" and mesh.get_coordinate() is None:
        return {}
    options = {"process_group": mesh.get_group()} if among != "all" else {}
    options |= {"checkpoint_id": checkpoint_id(folder)} if id else {}
    planner_spy, writer_spy = Spy(), Spy()
    watched = writer_spy.watch(writer(f"{folder}/elsewhere" if id else folder), WRITER)
    save(state, watched, planner_spy.watch(planner, SAVE_PLANNER), **options)
    items = [item.index for call in writer_spy.calls_to("write_data") for item in call.args[0].items]
    resolved = [call.args[0].index for call in planner_spy.calls_to("resolve_data")]
    ends = [
        {**dict(zip(("metadata", "results"), call.args, strict=False)), **call.options}
        for call in writer_spy.calls_to("finish")
    ]
    planned = [call.result[1] for call in planner_spy.calls_to("create_global_plan")]
    return {
        "planner calls": ordered_calls(planner_spy, id),
        "writer calls": ordered_calls(writer_spy, id),
        "place": [
            [*call.args, *call.options.values()] == [checkpoint_id(folder)]
            for call in writer_spy.calls_to("reset")
            if id
        ],
        "plans handed on": passes_plans(planner_spy, writer_spy, "write_data"),
        "items never asked for": [index for index in items if index not in resolved],
        "other items asked for": [index for index in resolved if index not in items],
        "plans": count_plans(planner_spy, writer_spy),
        "results": [len(end["results"]) for end in ends],
        "metadata as planned": [end["metadata"] is planned[0] for end in ends],
        "written as told": [
            sorted(str(result.index) for result in end["results"][0]) == sorted(map(str, items)) for end in ends
        ],
    }


@saves.due
def _(mesh, rank: Rank, world: WorldSize, among, id):
    role = find_role(mesh, rank, world, among)
    if role is None:
        return {}
    is_coordinator, members = role
    return {
        "planner calls": due_calls(SAVE_PLANNER, is_coordinator, id),
        "writer calls": due_calls(WRITER, is_coordinator, id),
        "place": Of([True] if id else []),
        "plans handed on": Of([True, True]),
        "items never asked for": Of([]),
        "other items asked for": Of([]),
        "plans": Of([members, members] if is_coordinator else []),
        "results": Of([members] if is_coordinator else []),
        "metadata as planned": Of([True] if is_coordinator else []),
        "written as told": Of([True] if is_coordinator else []),
    }


add_load(saves)


@after_save(
    "protocol[load]",
    source=f"{DOCS}, LoadPlanner and StorageReader: the expected sequence of calls",
    control="mesh=2 x=5:S(0) state={x:x,n:1}",
    texts=LOADS,
    features=protocol_features,
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
    """A load calls its planner and reader in the documented order, and resolves and commits every tensor part once."""
    if among != "all" and mesh.get_coordinate() is None:
        return {}
    options = {"process_group": mesh.get_group()} if among != "all" else {}
    options |= {"checkpoint_id": checkpoint_id(folder)} if id else {}
    planner_spy, reader_spy = Spy(), Spy()
    watched = reader_spy.watch(reader(f"{folder}/elsewhere" if id else folder), READER)
    load(state, watched, planner_spy.watch(DefaultLoadPlanner(), LOAD_PLANNER), **options)
    items = [item for call in reader_spy.calls_to("read_data") for item in call.args[0].items]
    tensors = sorted(str(item) for item in items if item.type == LoadItemType.TENSOR)
    values = sorted(item.storage_index.fqn for item in items if item.type == LoadItemType.BYTE_IO)
    return {
        "loaded": state,
        "planner calls": ordered_calls(planner_spy, id),
        "reader calls": ordered_calls(reader_spy, id),
        "place": [
            [*call.args, *call.options.values()] == [checkpoint_id(folder)]
            for call in reader_spy.calls_to("reset")
            if id
        ],
        "plans handed on": passes_plans(planner_spy, reader_spy, "read_data"),
        "each value once": sorted(call.args[0].storage_index.fqn for call in planner_spy.calls_to("load_bytes"))
        == values,
        "each part resolved once": sorted(str(call.args[0]) for call in planner_spy.calls_to("resolve_tensor"))
        == tensors,
        "each part committed once": sorted(str(call.args[0]) for call in planner_spy.calls_to("commit_tensor"))
        == tensors,
        "plans": count_plans(planner_spy, reader_spy),
    }


@loads.due
def _(state, mesh, rank: Rank, world: WorldSize, among, id):
    role = find_role(mesh, rank, world, among)
    if role is None:
        return {}
    is_coordinator, members = role
    return {
        "loaded": state,
        "planner calls": due_calls(LOAD_PLANNER, is_coordinator, id),
        "reader calls": due_calls(READER, is_coordinator, id),
        "place": Of([True] if id else []),
        "plans handed on": Of([True, True]),
        "each value once": Of(True),
        "each part resolved once": Of(True),
        "each part committed once": Of(True),
        "plans": Of([members, members] if is_coordinator else []),
    }


@one_world_law(
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
    """Once a save has returned on a rank, the checkpoint loads there, whatever other ranks do meanwhile."""
    save(state, writer(folder), planner)
    return {"loaded": load(destination, reader(folder), no_dist=True)}


@complete.due
def _(destination):
    return {"loaded": destination}
