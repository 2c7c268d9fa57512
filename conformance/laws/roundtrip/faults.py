"""Laws on saves and loads that fail: every rank learns of it and of its cause, and what was there before is there
afterwards."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Meaningless, Of, Refused
from shardlaw.conformance.law.fields import Field, Folder, ScriptArgument, Word, WorldSize
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed, caught_failure, load, save, wait_for_save
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import (
    CheckpointId,
    Destination,
    Destinations,
    Newer,
    PlannerField,
    Reader,
    Saved,
    StateField,
    States,
    Writer,
)
from shardlaw.conformance.laws.roundtrip.cases import add_load, after_save, trip_law
from shardlaw.conformance.laws.roundtrip.spying import COORDINATOR, LOAD_PLANNER, READER, SAVE_PLANNER, WRITER, Spy
from shardlaw.reference.checkpoint.state_dict import Slot, flatten

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

DOCS = "torch.distributed.checkpoint docs"
# what fails after the plan has been made; the rest of a save or load comes before
LATE = (
    "finish_plan",
    "write_data",
    "resolve_data",
    "finish",
    "read_data",
    "load_bytes",
    "resolve_tensor",
    "commit_tensor",
)
Planner = Annotated[Any, PlannerField(saves=True, planner_class=DefaultSavePlanner)]
OfSave = Annotated[dict[str, Any], StateField("save", fill="poison")]


def of_fault(case: Case) -> set[str]:
    found = {f"fails:{case.get('at')}"}
    ranks = case.get("ranks", "all")
    if ranks == "all" or "," in ranks:
        found.add("fails-on-several")
    elif ranks != "0":
        found.add("fails-on-follower")
    if case.get("error", "plain") != "plain":
        found.add(f"error:{case.get('error')}")
    if case.get("how", "alone") != "alone":
        found.add("async-save")
    if "fails" in case:
        found |= {"plan-cache", "first-save-fails"} if case.get("fails") == "0" else {"plan-cache"}
    return found


def _everywhere(methods: tuple[str, ...], *meshes: str) -> tuple[str, ...]:
    """A case for each method, on one follower, on the leader, on several or on all ranks in turn."""
    texts = []
    for at, method in enumerate(methods):
        ranks = "0" if method in COORDINATOR else ("1", "0", "all", "0,1")[at % 4]
        texts.append(f"{meshes[at % len(meshes)]} at={method} ranks={ranks}")
    return tuple(texts)


TWO = "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R state={x:x,a:a,n:1,m:2}"
THREE = "mesh=3 mesh.load=2 x=7:S(0):int64 a=3x3:S(0):bool state={x:x,d:{a:a},n:1,m:2,k:3}"
BACK = "mesh=3 mesh.load=2 x=5x2:S(0) a=4:R state={x:x,a:a,n:1}"
ON = "mesh=2 mesh.load=3 x=7:S(0):int64 a=3x3:S(0):bool to.x=R state={x:x,d:{a:a},n:1}"
FAILED_SAVES = (
    *_everywhere((*SAVE_PLANNER, *WRITER[1:]), TWO, THREE),
    f"{THREE} at=write_data ranks=2",
    f"{THREE} at=write_data ranks=0,2",
    f"{TWO} at=create_local_plan ranks=1 error=exit",
    f"{TWO} at=resolve_data ranks=0 files=item",
    "mesh=1 mesh.load=2 x=5:S(0) a=4:- at=write_data ranks=0",
    "mesh=2x2 mesh.load=1 x=4x4:S(0),S(1) a=4:R,R to.x=R to.a=R at=prepare_local_plan ranks=1,3",
    f"{TWO} at=write_data ranks=1 how=async",
    f"{THREE} at=finish ranks=0 how=async",
    "mesh=2 x=5:S(0) a=3:S(0) threads=2 at=resolve_data ranks=1 in=thread",
    "mesh=2 x=5:S(0) a=3:R at=write_data ranks=1 error=wide",
    "mesh=2 x=5:S(0) a=3:R at=reset ranks=1",
    "mesh=2 x=5x2:S(0) state={x:x,n:1} how=alone at=write_data ranks=1",
    f"{TWO} at=finish ranks=0 error=exit",
    f"{THREE} at=write_data ranks=1 error=exit",
    f"{TWO} at=create_global_plan ranks=0 error=exit",
)
FAILED_OVER = (
    *_everywhere(("set_up_planner", "create_local_plan", "create_global_plan", *WRITER[1:4]), TWO, THREE),
    f"{THREE} at=prepare_local_plan ranks=2",
    "mesh=1 x=5:S(0) a=4:- at=create_global_plan ranks=0",
    f"{TWO} at=create_local_plan ranks=all",
    f"{THREE} at=set_up_planner ranks=0,2",
    "mesh=2 x=5:S(0) a=3:R at=finish ranks=0",
    "mesh=3 mesh.load=2 x=7:S(0) at=write_data ranks=2",
)
FAILED_LOADS = (
    *_everywhere(LOAD_PLANNER, BACK, ON),
    *_everywhere(READER[2:], ON, BACK),
    f"{BACK} at=read_metadata ranks=1",
    f"{ON} at=read_data ranks=0,2",
    f"{ON} at=create_local_plan ranks=2 error=exit",
    "mesh=2 mesh.load=1 x=5:S(0) a=4:- at=resolve_tensor ranks=0",
    "mesh=2 x=5:S(0) a=3:R at=read_data ranks=1 error=wide",
    "mesh=2 x=5:S(0) a=3:R at=reset ranks=0",
    f"{BACK} at=read_data ranks=1 error=exit",
    f"{ON} at=create_global_plan ranks=0 error=exit",
)
CHANGED = "mesh=2 x=6:S(0) a=5:S(0) state={x:x} into={x:x,a:a}"
RETRIED = (
    f"{CHANGED} order=abb at=create_local_plan fails=1 ranks=1",
    f"{CHANGED} order=aba at=write_data fails=1 ranks=0",
    f"{CHANGED} order=abb at=set_up_storage_writer fails=1 ranks=all",
    f"{CHANGED} order=aab at=finish fails=1 ranks=0",
    f"{CHANGED} order=aa at=create_local_plan fails=0 ranks=0",
    f"{CHANGED} order=aa at=write_data fails=0 ranks=1",
    "mesh=3 x=7:S(0) a=3:R to.x=R to.a=S(0) order=abab at=create_global_plan fails=1 ranks=0",
    f"{CHANGED} order=aa at=prepare_global_plan fails=0 ranks=0",
    "mesh=2 x=6:S(0) a=5:S(0) state={x:x,a:a} into={x:x} order=aba at=prepare_global_plan fails=1 ranks=0",
    f"{CHANGED} order=abb at=finish_plan fails=1 ranks=1",
)


@dataclass(frozen=True)
class Fault:
    """Which method fails, on which ranks, with which error, and whether only in a further thread."""

    at: str
    ranks: str
    error: str
    in_thread: bool

    def on(self, world: int) -> list[int]:
        """The ranks on which the call fails."""
        return [*range(world)] if self.ranks == "all" else [int(rank) for rank in self.ranks.split(",")]


class SpyField(Field):
    """A spy that makes the method fail on this rank, where it is to; a due function gets the :class:`Fault`."""

    always = True

    def fields(self, name: str) -> tuple[str, ...]:
        return "at", "ranks", "error", "in"

    def read(self, case: Case, name: str) -> Fault:
        error, in_thread = case.get("error", "plain"), case.get("in", "") == "thread"
        return Fault(case.get("at"), case.get("ranks", "all"), error, in_thread)

    def build(self, value: Fault, here: RankContext) -> Spy:
        fails = value.at if here.rank in value.on(here.world) else ""
        return Spy(fails, value.error, value.in_thread)

    def to_script(self, value: Fault, name: str, world: int) -> ScriptArgument:
        fails = f'{value.at!r} if rank in {value.on(world)} else ""'
        return ScriptArgument(f"Spy({fails}, {value.error!r}, {value.in_thread})", uses=(Spy,))


Failing = Annotated[Spy, SpyField()]


def told_by(failed: Any, at: str) -> dict[str, Any]:
    """What an exception says of a failure: the ranks that failed, those whose cause is another, and the step."""
    if failed is None:
        return {"fault": "accepted", "ranks": [], "other causes": [], "step": ""}
    causes = {rank: cause for rank, (cause, _) in failed.failures.items()}
    others = [f"rank {rank}: {cause!r}" for rank, cause in causes.items() if f"planted in {at}" not in str(cause)]
    return {"fault": failed, "ranks": sorted(causes), "other causes": others, "step": failed.step}


def due_of_failure(what: str, fault: Fault, world: int) -> dict[str, Any]:
    step = "plan" if fault.at not in LATE else "write" if what == "save" else "read"
    return {
        "fault": Refused((CheckpointFailed,)),
        "ranks": Of(fault.on(world), "wrong-error"),
        "other causes": Of([], "wrong-error"),
        "step": Of(step, "wrong-error"),
    }


def want_calls(end: t.End, fault: Fault, world: int, threads: int = 1) -> None:
    """Give up a case in which a call for single items, which is to fail, does not come: a failing rank has no such item
    for sure. Further threads have none of the first ones."""
    leaves = [leaf for _, leaf in flatten(end.state).values()]
    tensors = [end.shards(leaf.name, range(world)).without_empty() for leaf in leaves if isinstance(leaf, Slot)]
    at_least = threads if fault.in_thread else 1
    for rank in fault.on(world):
        parts = sum(bool(shards.boxes_of(rank)) for shards in tensors)
        # what no other one holds a rank must write
        sweep_texts = sum((rank,) in [ranks for _, ranks in shards.parts] for shards in tensors)
        values = len(leaves) - len(tensors)
        items = {"resolve_data": sweep_texts, "load_bytes": values, "resolve_tensor": parts, "commit_tensor": parts}
        if items.get(fault.at, at_least) < at_least:
            raise Meaningless(f"rank {rank} has too few items for {fault.at} to fail")


@trip_law(
    "fault[save]",
    clause="When a planner or a writer fails anywhere, every rank gets an exception that names the ranks and "
    "the cause, and can go on.",
    source=f"{DOCS}, CheckpointException: failures maps ranks to their exceptions; StorageWriter.finish: marks "
    "as successful",
    control=f"{TWO} at=write_data ranks=1",
    texts=FAILED_SAVES,
    stages=t.world_sizes,
    features=of_fault,
)
def failed_save(
    state: Saved,
    leftover: OfSave,
    planner: Planner,
    writer: Writer,
    reader: Reader,
    checkpoint_id: CheckpointId,
    folder: Folder,
    spy: Failing,
    at: Word,
    how: Word = "",
):
    """All ranks learn that a save failed; nothing that can be loaded is left of it; the next save does its work."""
    watched, watched_planner = spy.watch(writer(folder), WRITER), spy.watch(planner, SAVE_PLANNER)
    if how == "async":
        failed = caught_failure(
            lambda: wait_for_save(dcp.async_save(state, storage_writer=watched, planner=watched_planner))
        )
    else:
        options = {"use_collectives": False} if how == "alone" else {}
        options |= {"checkpoint_id": checkpoint_id(folder)} if at == "reset" else {}
        failed = caught_failure(lambda: save(state, watched, watched_planner, **options))
    left = caught_failure(lambda: load(leftover, reader(folder))) if failed else None
    save(state, writer(folder))
    return {**told_by(failed, at), "leftover": left}


@failed_save.due
def _(state: Contents, spy, world: WorldSize, threads: int = 1):
    want_calls(state.end, spy, world, threads)
    return {**due_of_failure("save", spy, world), "leftover": Refused((CheckpointFailed,))}


add_load(failed_save)


@trip_law(
    "fault[overwrite]",
    source=f"{DOCS}, StorageWriter.finish: writes the metadata and marks the current checkpoint as successful",
    control="mesh=2 x=5:S(0) at=create_global_plan ranks=0",
    texts=FAILED_OVER,
    stages=t.world_sizes,
    features=of_fault,
)
def failed_over(state: Saved, newer: Newer, planner: Planner, writer: Writer, folder: Folder, spy: Failing, at: Word):
    """A save that fails over an older checkpoint leaves it as it was, or beyond loading, and never mixed with the new
    one."""
    save(state, writer(folder))
    watched = spy.watch(writer(folder), WRITER)
    return told_by(caught_failure(lambda: save(newer, watched, spy.watch(planner, SAVE_PLANNER))), at)


@failed_over.due
def _(spy, world: WorldSize):
    return due_of_failure("save", spy, world)


@failed_over.then
def _(state: Destination, reader: Reader, folder: Folder):
    failed = caught_failure(lambda: load(state, reader(folder)))
    return {"older": failed or state}


@failed_over.due
def _(state, at: Word):
    return {"older": Either((state, Refused((CheckpointFailed,)))) if at in LATE else state}


@after_save(
    "fault[load]",
    clause="When a planner or a reader fails anywhere, every rank gets an exception that names the ranks and "
    "the cause, and can go on.",
    source=f"{DOCS}, CheckpointException: failures maps ranks to their exceptions",
    control=f"{BACK} at=read_data ranks=1",
    texts=FAILED_LOADS,
    features=of_fault,
)
def failed_load(
    state: Destination,
    second: Destination,
    reader: Reader,
    checkpoint_id: CheckpointId,
    folder: Folder,
    spy: Failing,
    at: Word,
):
    """All ranks learn that a load failed; one that failed in planning has changed nothing; the next load does its
    work."""
    watched, planner = spy.watch(reader(folder), READER), spy.watch(DefaultLoadPlanner(), LOAD_PLANNER)
    options = {"checkpoint_id": checkpoint_id(folder)} if at == "reset" else {}
    failed = caught_failure(lambda: load(state, watched, planner, **options))
    return {**told_by(failed, at), "kept": state, "afterwards": load(second, reader(folder))}


@failed_load.due
def _(state: Contents, spy, world: WorldSize, at):
    want_calls(state.end, spy, world)
    return {
        **due_of_failure("load", spy, world),
        "kept": ... if at in LATE else state.before_load(),
        "afterwards": state,
    }


@trip_law(
    "fault[caching]",
    source=f"{DOCS}, DefaultSavePlanner: enable_plan_caching",
    control=f"{CHANGED} order=abb at=create_local_plan fails=1 ranks=1",
    texts=RETRIED,
    features=of_fault,
)
def retried(
    states: States,
    destinations: Destinations,
    writer: Writer,
    reader: Reader,
    folder: Folder,
    spy: Failing,
    at: Word,
    fails: int,
):
    """With kept plans, what is saved after a save that failed is what was given."""
    # plans are kept by the name of the planner's class: one of this case alone
    made = type(f"Retrying{uuid.uuid4().hex}", (DefaultSavePlanner,), {})
    told, loaded = {}, []
    for number, (state, destination) in enumerate(zip(states, destinations, strict=True)):
        watching = spy if number == fails else Spy()
        planner = watching.watch(made(enable_plan_caching=True), SAVE_PLANNER)
        watched = watching.watch(writer(f"{folder}/{number}"), WRITER)
        if number == fails:
            told = told_by(
                caught_failure(lambda state=state, watched=watched, planner=planner: save(state, watched, planner)),  # type: ignore[misc]
                at,
            )
        else:
            save(state, watched, planner)
            loaded.append(load(destination, reader(f"{folder}/{number}")))
    return {**told, "loaded": loaded}


@retried.due
def _(destinations, spy, world: WorldSize, fails):
    return {
        **due_of_failure("save", spy, world),
        "loaded": [destination for number, destination in enumerate(destinations) if number != fails],
    }
