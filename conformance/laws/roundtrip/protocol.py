"""Laws on the calls that a save and a load make to their planner and their storage: in which order, how often, and with what."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip.cases import law_of
from conformance.laws.roundtrip.spying import COORDINATOR, LOAD_PLANNER, READER, SAVE_PLANNER, WRITER, Spy
from conformance.report.reproducer import Script
from conformance.target import storage
from conformance.trip_script import load_lines, save_lines, script, state_text

DOCS = "torch.distributed.checkpoint docs"
# calls that happen once for each item, in between
PER_ITEM = ("resolve_data", "load_bytes", "resolve_tensor", "commit_tensor")


def check_save_protocol(case: Case, here: Here) -> None:
    """Every documented call of a save comes once, in its place, on the ranks that it is meant for, and hands on what it was given."""
    trip = t.read_trip(case)
    if here.stage == 1:
        t.judge(trip, here, t.load(here, t.destination(trip, here)))
        return
    t.reject_options(here, trip.writer)
    group, leads, members = _group(case, here, trip.save)
    if members is None:
        return
    planner, writer = Spy(), Spy()
    watched = planner.watch(DefaultSavePlanner(**trip.planner), SAVE_PLANNER)
    told = writer.watch(t.writer_of(trip, here, _first(case, here)), WRITER)
    t.save(trip, here, planner=watched, writer=told, **group, **_named(case, here))
    before = _due(SAVE_PLANNER, leads)
    _judge_order(here, "planner", planner, before)
    _judge_order(here, "writer", writer, _due(WRITER, leads, reset="id" in case))
    _judge_reset(case, here, writer)
    _judge_data(here, planner, writer, "write_data")
    items = [item.index for item in writer.of("write_data")[0].args[0].items] if writer.of("write_data") else []
    resolved = [call.args[0].index for call in planner.of("resolve_data")]
    lost = [index for index in items if index not in resolved]
    here.require(not lost, "wrong-metadata", "items", "what is to be written is never asked for", lost, resolved)
    strange = [index for index in resolved if index not in items]
    here.require(not strange, "wrong-metadata", "items", "what is not to be written is asked for", items, strange)
    if not leads:
        return
    _judge_plans(here, planner, writer, members)
    for call in writer.of("finish"):
        given = {**dict(zip(("metadata", "results"), call.args, strict=False)), **call.options}
        results = given["results"]
        here.require(len(results) == members, "wrong-metadata", "results", "finish gets other than one list a rank", members, len(results))
        made = planner.of("create_global_plan")[0].result[1] if planner.of("create_global_plan") else None
        here.require(given["metadata"] is made, "wrong-metadata", "results", "finish gets other metadata than were planned")
        mine = sorted(str(result.index) for result in results[0])
        here.require(
            mine == sorted(map(str, items)), "wrong-metadata", "results", "finish hears of other items than were written", items, mine
        )


def check_load_protocol(case: Case, here: Here) -> None:
    """The same for a load: tensors are resolved and committed in pairs, values that are no tensors are loaded once."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    group, leads, members = _group(case, here, trip.load)
    if members is None:
        return
    planner, reader = Spy(), Spy()
    watched = planner.watch(DefaultLoadPlanner(), LOAD_PLANNER)
    told = reader.watch(t.reader_of(here, _first(case, here)), READER)
    t.judge(trip, here, t.load(here, t.destination(trip, here), planner=watched, reader=told, **group, **_named(case, here)))
    _judge_order(here, "planner", planner, _due(LOAD_PLANNER, leads))
    _judge_order(here, "reader", reader, _due(READER, leads, reset="id" in case))
    _judge_reset(case, here, reader)
    _judge_data(here, planner, reader, "read_data")
    for call in reader.of("read_data")[:1]:
        items = call.args[0].items
        values = sorted(item.storage_index.fqn for item in items if item.type == LoadItemType.BYTE_IO)
        loaded = sorted(call.args[0].storage_index.fqn for call in planner.of("load_bytes"))
        here.require(loaded == values, "wrong-metadata", "items", "values are loaded other than once each", values, loaded)
        tensors = [item for item in items if item.type == LoadItemType.TENSOR]
        for name in ("resolve_tensor", "commit_tensor"):
            got = [call.args[0] for call in planner.of(name)]
            same = sorted(map(str, got)) == sorted(map(str, tensors))
            here.require(same, "wrong-metadata", "items", f"{name} comes other than once for each part of a tensor", tensors, got)
    if leads:
        _judge_plans(here, planner, reader, members)


def _group(case: Case, here: Here, end: t.End) -> tuple[dict[str, Any], bool, int | None]:
    """The arguments that name the process group, whether this rank leads it, and how many ranks it has; ``None`` outside."""
    if case.get("among", "all") == "all":
        return {}, here.rank == 0, here.world
    mesh = here.mesh(end.mesh)
    if here.coord(end.mesh) is None:
        return {}, False, None
    # a group's first rank leads, and groups list their ranks in ascending order
    return {"process_group": mesh.get_group()}, here.rank == min(end.mesh.ranks), end.mesh.size


def _named(case: Case, here: Here) -> dict[str, Any]:
    return {"checkpoint_id": storage.place(here.target, here.folder())} if "id" in case else {}


def _first(case: Case, here: Here) -> str:
    """Where a storage is made for, before it is told another place."""
    return os.path.join(here.folder(), "elsewhere") if "id" in case else here.folder()


def _due(methods: Sequence[str], leads: bool, *, reset: bool = True) -> list[str]:
    """The calls that are due, in order."""
    return [name for name in methods if name not in PER_ITEM and (leads or name not in COORDINATOR) and (reset or name != "reset")]


def _judge_order(here: Here, who: str, spy: Spy, due: list[str]) -> None:
    got = [call.name for call in spy.calls if call.name not in PER_ITEM and (call.name in due or call.name != "reset")]
    here.require(got == due, "wrong-metadata", f"{who} calls", f"the {who} is called otherwise than documented", due, got)


def _judge_reset(case: Case, here: Here, spy: Spy) -> None:
    if "id" in case and spy.of("reset"):
        call, due = spy.of("reset")[0], storage.place(here.target, here.folder())
        got = [*call.args, *call.options.values()]
        here.require(got == [due], "wrong-metadata", "reset", "the storage is told another checkpoint_id", due, got)


def _judge_data(here: Here, planner: Spy, spy: Spy, last: str) -> None:
    """What one call gives is what the next one gets: the local plan, and the final one."""
    for giver, gave, taker, takes in ((planner, "create_local_plan", spy, "prepare_local_plan"), (planner, "finish_plan", spy, last)):
        for given, taken in zip(giver.of(gave), taker.of(takes), strict=False):
            here.require(taken.args[0] is given.result, "wrong-metadata", "plans", f"{takes} gets another plan than {gave} gave")


def _judge_plans(here: Here, planner: Spy, spy: Spy, members: int) -> None:
    """The leading rank plans for every rank."""
    for name, who in (("create_global_plan", planner), ("prepare_global_plan", spy)):
        for call in who.of(name):
            here.require(len(call.args[0]) == members, "wrong-metadata", "plans", f"{name} gets other than one plan a rank", members)


def check_complete(case: Case, here: Here) -> None:
    """As soon as a save has returned on a rank, that rank alone finds all of it."""
    trip = t.read_trip(case)
    t.save(trip, here)
    plain = t.End(trip.save.state, trip.save.mesh, {name: spec.placed(None) for name, spec in trip.save.specs.items()})
    alone = t.Trip(trip.save, plain, trip.worlds, trip.values, trip.writer, trip.planner)
    t.judge(alone, here, t.load(here, t.destination(alone, here), no_dist=True))


def complete_script(case: Case) -> Script:
    trip = t.read_trip(case)
    specs = {name: spec.placed(None) for name, spec in trip.save.specs.items()}
    plain = t.End(trip.save.state, trip.save.mesh, specs)
    return script(trip, [(case.world, [*save_lines(trip), *load_lines(trip, end=plain, how=", no_dist=True")])])


NOTING = (
    "def noting(thing, names, calls):",
    "    def noted(name, true):",
    "        return functools.wraps(true)(lambda *a, **k: calls.append(name) or true(*a, **k))",
    "    for name in names:",
    "        setattr(thing, name, noted(name, getattr(thing, name)))",
    "    return thing",
)


def protocol_script(case: Case, *, saves: bool) -> Script:
    """What the ranks call, apart from the calls for single items."""
    trip = t.read_trip(case)
    end = trip.save if saves else trip.load
    planner, store = (SAVE_PLANNER, WRITER) if saves else (LOAD_PLANNER, READER)
    members, how = [*range(trip.worlds[0 if saves else 1])], ""
    lines: list[str] = save_lines(trip) if saves else load_lines(trip)
    made = [line for line in lines if line.startswith("mesh = ")] or [f"mesh = dist.{_mesh(end)}"]
    if case.get("among", "all") != "all":
        members, how = sorted(end.mesh.ranks), ", process_group=mesh.get_group()"
    wanted = [[n for n in names if n not in PER_ITEM and n != "reset"] for names in (planner, store)]
    state = state_text(trip, end, trip.worlds[0 if saves else 1], spoil="" if saves else "+ 1")
    verb, kind = ("save", "storage_writer=noting(dcp.FileSystemWriter") if saves else ("load", "storage_reader=noting(dcp.FileSystemReader")
    body = [
        *made,
        *([f"if rank not in {members}:", "    return None, None"] if len(members) < trip.worlds[0 if saves else 1] else []),
        "calls, others = [], []",
        f"planner = noting(dcp.Default{verb.title()}Planner(), {wanted[0]}, calls)",
        f"dcp.{verb}({state}, {kind}(folder), {wanted[1]}, others), planner=planner{how})",
        f"spared = [] if rank == {min(members)} else {list(COORDINATOR)}",
        f"due = [[name for name in names if name not in spared] for names in {wanted}]",
        "return due, [calls, others]",
    ]
    stages = [(trip.worlds[0], body)] if saves else [(trip.worlds[0], save_lines(trip)), (trip.worlds[1], body)]
    return script(trip, stages, NOTING, ["import functools"])


def _mesh(end: t.End) -> str:
    from conformance.laws import scripts

    return scripts.mesh(end.mesh)


def of_protocol(case: Case) -> set[str]:
    return {"storage-calls"} | ({"checkpoint-id"} if "id" in case else set()) | ({"group"} if case.get("among", "all") != "all" else set())


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


def _protocol(variant: str, check: Callable[[Case, Here], None], clause: str, source: str, texts: Sequence[str], planted: str) -> Any:
    return law_of(
        f"protocol[{variant}]",
        clause=clause,
        source=source,
        check=check,
        holds="mesh=2 x=5:S(0) state={x:x,n:1}",
        planted=planted,
        texts=texts,
        sweeps=len(texts),
        stages=t.worlds,
        features=of_protocol,
        script=lambda case: protocol_script(case, saves=variant == "save"),
    )


LAWS = (
    _protocol(
        "save",
        check_save_protocol,
        "A save calls its planner and its writer in the documented order, once each, the global steps on the leading rank alone.",
        f"{DOCS}, SavePlanner and StorageWriter: the expected sequence of calls",
        SAVES,
        "planned_globally_on_every_rank",
    ),
    _protocol(
        "load",
        check_load_protocol,
        "A load calls its planner and its reader in the documented order, and commits every tensor that it resolved.",
        f"{DOCS}, LoadPlanner and StorageReader: the expected sequence of calls",
        LOADS,
        "tensors_never_committed",
    ),
    law_of(
        "complete",
        clause="Once a save has returned on a rank, that rank finds the whole checkpoint, whatever the others do meanwhile.",
        source=f"{DOCS}, StorageWriter.finish: marks the current checkpoint as successful; save returns its metadata",
        check=check_complete,
        script=complete_script,
        holds="mesh=2 x=5x2:S(0) a=4:R",
        planted="metadata_written_late",
        texts=COMPLETE,
        sweeps=4,
    ),
)
