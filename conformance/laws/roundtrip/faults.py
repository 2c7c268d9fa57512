"""Laws on saves and loads that fail: every rank gets the cause, and earlier checkpoints and states do not change."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Meaningless, Of, Refused
from shardlaw.conformance.law.fields import Field, Folder, Rank, ScriptArgument, Word, WorldSize
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.calls import (
    CheckpointFailed,
    caught_failure,
    convert_failures,
    load,
    save,
    wait_for_save,
)
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
from shardlaw.conformance.laws.roundtrip.cases import DOCS, add_load, after_save, one_world_law, trip_law
from shardlaw.conformance.laws.roundtrip.options import require_package
from shardlaw.conformance.laws.roundtrip.spies import COORDINATOR, LOAD_PLANNER, READER, SAVE_PLANNER, WRITER, Spy
from shardlaw.reference.checkpoint.state_dict import Slot, flatten

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

# methods that are called after planning
AFTER_PLANNING = (
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
SaveDestination = Annotated[dict[str, Any], StateField("save", fill="poison")]


def fault_features(case: Case) -> set[str]:
    features = {f"fails:{case.get('at')}"}
    ranks = case.get("ranks", "all")
    if ranks == "all" or "," in ranks:
        features.add("fails-on-several")
    elif ranks != "0":
        features.add("fails-on-follower")
    if case.get("error", "plain") != "plain":
        features.add(f"error:{case.get('error')}")
    if case.get("how", "alone") != "alone":
        features.add("async-save")
    if "fails" in case:
        features |= {"plan-cache", "first-save-fails"} if case.get("fails") == "0" else {"plan-cache"}
    return features


def _for_each_method(methods: tuple[str, ...], *meshes: str) -> tuple[str, ...]:
    """A case for each method, which fails in turn on rank 1, on the coordinator, on all ranks and on two."""
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
    *_for_each_method((*SAVE_PLANNER, *WRITER[1:]), TWO, THREE),
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
    "mesh=2 x=5:S(0) a=4:R at=resolve_data ranks=1 storage=fsspec",
    "mesh=2 x=5:S(0) a=4:R at=finish ranks=1 lead=1",
    "mesh=2 x=5:S(0) a=3:S(0) at=resolve_data ranks=1 error=full",
)
FAILED_OVERWRITES = (
    *_for_each_method(("set_up_planner", "create_local_plan", "create_global_plan", *WRITER[1:4]), TWO, THREE),
    f"{THREE} at=prepare_local_plan ranks=2",
    "mesh=1 x=5:S(0) a=4:- at=create_global_plan ranks=0",
    f"{TWO} at=create_local_plan ranks=all",
    f"{THREE} at=set_up_planner ranks=0,2",
    "mesh=2 x=5:S(0) a=3:R at=finish ranks=0",
    "mesh=3 mesh.load=2 x=7:S(0) at=write_data ranks=2",
)
FAILED_LOADS = (
    *_for_each_method(LOAD_PLANNER, BACK, ON),
    *_for_each_method(READER[2:], ON, BACK),
    f"{BACK} at=read_metadata ranks=1",
    f"{ON} at=read_data ranks=0,2",
    f"{ON} at=create_local_plan ranks=2 error=exit",
    "mesh=2 mesh.load=1 x=5:S(0) a=4:- at=resolve_tensor ranks=0",
    "mesh=2 x=5:S(0) a=3:R at=read_data ranks=1 error=wide",
    "mesh=2 x=5:S(0) a=3:R at=reset ranks=0",
    f"{BACK} at=read_data ranks=1 error=exit",
    f"{ON} at=create_global_plan ranks=0 error=exit",
    "mesh=2 x=5:S(0) a=4:R at=commit_tensor ranks=all storage=fsspec",
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
    """The method ``at`` fails on ``ranks`` with an ``error``; with ``in_thread`` only outside the main thread."""

    at: str
    ranks: str
    error: str
    in_thread: bool

    def on(self, world: int) -> list[int]:
        """The ranks on which the method fails."""
        return [*range(world)] if self.ranks == "all" else [int(rank) for rank in self.ranks.split(",")]


class SpyField(Field):
    """A spy that makes the method of the fault fail, on its ranks; a due function gets the :class:`Fault`."""

    always = True
    reads = ("at", "ranks", "error", "in")

    def read(self, case: Case, name: str) -> Fault:
        error, in_thread = case.get("error", "plain"), case.get("in", "") == "thread"
        return Fault(case.get("at"), case.get("ranks", "all"), error, in_thread)

    def build(self, value: Fault, here: RankContext) -> Spy:
        fails = value.at if here.rank in value.on(here.world) else ""
        return Spy(fails, value.error, value.in_thread)

    def to_script(self, value: Fault, name: str, world: int) -> ScriptArgument:
        fails = f'{value.at!r} if rank in {value.on(world)} else ""'
        return ScriptArgument(f"Spy({fails}, {value.error!r}, {value.in_thread})", uses=(Spy,))


FailingSpy = Annotated[Spy, SpyField()]


def save_led(state: dict[str, Any], writer: Any, planner: Any, lead: int) -> None:
    """Save a state by the deprecated call that takes the rank of the coordinator."""
    with convert_failures():
        dcp.save_state_dict(state, writer, coordinator_rank=lead, planner=planner)


def describe_failure(error: Any, at: str) -> dict[str, Any]:
    """A failure: the error, the ranks that failed, those with another cause than the fault at ``at``, and the step."""
    if error is None:
        return {"fault": "accepted", "ranks": [], "other causes": [], "step": ""}
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    others = [f"rank {rank}: {cause!r}" for rank, cause in causes.items() if f"planted in {at}" not in str(cause)]
    return {"fault": error, "ranks": sorted(causes), "other causes": others, "step": error.step}


def due_failure(late_step: str, fault: Fault, world: int) -> dict[str, Any]:
    """The due :func:`describe_failure`. ``late_step``: the step after planning."""
    step = late_step if fault.at in AFTER_PLANNING else "plan"
    return {
        "fault": Refused((CheckpointFailed,)),
        "ranks": Of(fault.on(world), "wrong-error"),
        "other causes": Of([], "wrong-error"),
        "step": Of(step, "wrong-error"),
    }


def require_items(end: t.End, fault: Fault, world: int, threads: int = 1) -> None:
    """Raise :class:`Meaningless` where a failing rank may have no item for which the failing method is called. The
    main thread has the first items."""
    leaves = [leaf for _, leaf in flatten(end.state).values()]
    tensors = [end.shards(leaf.name, range(world)).without_empty() for leaf in leaves if isinstance(leaf, Slot)]
    at_least = threads if fault.in_thread else 1
    for rank in fault.on(world):
        parts = sum(bool(shards.boxes_of(rank)) for shards in tensors)
        # a rank must write what no other rank has
        sweep_texts = sum((rank,) in [ranks for _, ranks in shards.parts] for shards in tensors)
        values = len(leaves) - len(tensors)
        items = {"resolve_data": sweep_texts, "load_bytes": values, "resolve_tensor": parts, "commit_tensor": parts}
        if items.get(fault.at, at_least) < at_least:
            raise Meaningless(f"rank {rank} has too few items for {fault.at} to fail")


@trip_law(
    "fault[save]",
    clause="If a planner or writer fails during a save, every rank raises an exception with the failed ranks and the "
    "cause; nothing loads of that save; the next save works.",
    source=f"{DOCS}, CheckpointException: failures maps ranks to their exceptions; StorageWriter.finish: marks "
    "as successful",
    control=f"{TWO} at=write_data ranks=1",
    texts=FAILED_SAVES,
    features=fault_features,
)
def failed_save(
    state: Saved,
    leftover: SaveDestination,
    planner: Planner,
    writer: Writer,
    reader: Reader,
    checkpoint_id: CheckpointId,
    folder: Folder,
    rank: Rank,
    spy: FailingSpy,
    at: Word,
    how: Word = "",
    storage: Word = "",
    lead: int = 0,
):
    """Let a save fail, load what it left, and save again."""
    to = compat.fsspec_writer(folder, sync_files=False) if storage == "fsspec" else writer(folder)
    watched, watched_planner = spy.watch(to, WRITER), spy.watch(planner, SAVE_PLANNER)
    if lead:
        failed = caught_failure(lambda: save_led(state, watched, watched_planner, lead))
    elif how == "async":
        failed = caught_failure(
            lambda: wait_for_save(dcp.async_save(state, storage_writer=watched, planner=watched_planner))
        )
    else:
        options = {"use_collectives": False} if how == "alone" else {}
        options |= {"checkpoint_id": checkpoint_id(folder)} if at == "reset" else {}
        failed = caught_failure(lambda: save(state, watched, watched_planner, **options))
    # a writer through fsspec removes the file that it was writing
    torn = [name for name in os.listdir(folder) if name.startswith(f"__{rank}_")] if storage and spy.fails else []
    refused = caught_failure(lambda: load(leftover, reader(folder))) if failed else None
    save(state, writer(folder))
    return {**describe_failure(failed, at), "leftover": refused, "torn files": torn}


@failed_save.due
def _(state: Contents, spy, storage, world: WorldSize, threads: int = 1):
    if storage:
        require_package("fsspec")
    require_items(state.end, spy, world, threads)
    return {**due_failure("write", spy, world), "leftover": Refused((CheckpointFailed,)), "torn files": Of([])}


add_load(failed_save)


@trip_law(
    "fault[overwrite]",
    source=f"{DOCS}, StorageWriter.finish: writes the metadata and marks the current checkpoint as successful",
    control="mesh=2 x=5:S(0) at=create_global_plan ranks=0",
    texts=FAILED_OVERWRITES,
    features=fault_features,
)
def failed_overwrite(
    state: Saved, newer: Newer, planner: Planner, writer: Writer, folder: Folder, spy: FailingSpy, at: Word
):
    """After a save over an older checkpoint has failed, the older one loads, or nothing does; never a mixture."""
    save(state, writer(folder))
    watched = spy.watch(writer(folder), WRITER)
    return describe_failure(caught_failure(lambda: save(newer, watched, spy.watch(planner, SAVE_PLANNER))), at)


@failed_overwrite.due
def _(spy, world: WorldSize):
    return due_failure("write", spy, world)


@failed_overwrite.then
def _(state: Destination, reader: Reader, folder: Folder):
    failed = caught_failure(lambda: load(state, reader(folder)))
    return {"older": failed or state}


@failed_overwrite.due
def _(state, at: Word):
    return {"older": Either((state, Refused((CheckpointFailed,)))) if at in AFTER_PLANNING else state}


@after_save(
    "fault[load]",
    clause="If a planner or reader fails during a load, every rank raises an exception with the failed ranks and the "
    "cause; a failure in planning changes nothing; the next load works.",
    source=f"{DOCS}, CheckpointException: failures maps ranks to their exceptions",
    control=f"{BACK} at=read_data ranks=1",
    texts=FAILED_LOADS,
    features=fault_features,
)
def failed_load(
    state: Destination,
    second: Destination,
    reader: Reader,
    checkpoint_id: CheckpointId,
    folder: Folder,
    spy: FailingSpy,
    at: Word,
    storage: Word = "",
):
    """Let a load fail, and load again."""
    source = compat.fsspec_reader(folder) if storage == "fsspec" else reader(folder)
    watched, planner = spy.watch(source, READER), spy.watch(DefaultLoadPlanner(), LOAD_PLANNER)
    options = {"checkpoint_id": checkpoint_id(folder)} if at == "reset" else {}
    failed = caught_failure(lambda: load(state, watched, planner, **options))
    return {**describe_failure(failed, at), "kept": state, "afterwards": load(second, reader(folder))}


@failed_load.due
def _(state: Contents, spy, world: WorldSize, at):
    require_items(state.end, spy, world)
    return {
        **due_failure("read", spy, world),
        "kept": ... if at in AFTER_PLANNING else state.before_load(),
        "afterwards": state,
    }


@one_world_law(
    "fault[caching]",
    source=f"{DOCS}, DefaultSavePlanner: enable_plan_caching",
    control=f"{CHANGED} order=abb at=create_local_plan fails=1 ranks=1",
    texts=RETRIED,
    features=fault_features,
)
def retried(
    states: States,
    destinations: Destinations,
    writer: Writer,
    reader: Reader,
    folder: Folder,
    spy: FailingSpy,
    at: Word,
    fails: int,
):
    """With enable_plan_caching, saves before and after a failed one store their own state."""
    # the cache of plans is keyed by the name of the planner's class
    planner_class = type(f"Retrying{uuid.uuid4().hex}", (DefaultSavePlanner,), {})
    failure, loaded = {}, []
    for number, (state, destination) in enumerate(zip(states, destinations, strict=True)):
        current_spy = spy if number == fails else Spy()
        planner = current_spy.watch(planner_class(enable_plan_caching=True), SAVE_PLANNER)
        watched = current_spy.watch(writer(f"{folder}/{number}"), WRITER)
        if number == fails:
            failure = describe_failure(
                caught_failure(lambda state=state, watched=watched, planner=planner: save(state, watched, planner)),  # type: ignore[misc]
                at,
            )
        else:
            save(state, watched, planner)
            loaded.append(load(destination, reader(f"{folder}/{number}")))
    return {**failure, "loaded": loaded}


@retried.due
def _(destinations, spy, world: WorldSize, fails):
    return {
        **due_failure("write", spy, world),
        "loaded": [destination for number, destination in enumerate(destinations) if number != fails],
    }
