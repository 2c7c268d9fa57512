"""Laws on saves and loads that fail: every rank learns of it and of its cause, and what was there before is there afterwards."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip import fault_scripts
from conformance.laws.roundtrip.cases import law_of
from conformance.laws.roundtrip.saves import finish
from conformance.laws.roundtrip.spying import COORDINATOR, LOAD_PLANNER, READER, SAVE_PLANNER, WRITER, Spy
from conformance.target import storage
from reference.checkpoint.state_dict import Slot, flatten, slots, spoiled
from reference.placement import shard_dim

DOCS = "torch.distributed.checkpoint docs"
# what fails after the plan has been made; the rest of a save or load comes before
LATE = ("finish_plan", "write_data", "resolve_data", "finish", "read_data", "load_bytes", "resolve_tensor", "commit_tensor")


def failing_ranks(case: Case, world: int) -> list[int]:
    """The ranks on which the call fails."""
    text = case.get("ranks", "all")
    return [*range(world)] if text == "all" else [int(rank) for rank in text.split(",")]


def spies(case: Case, here: Here, *, saves: bool) -> dict[str, Any]:
    """A planner and a storage that fail as the case says, as arguments of :func:`conformance.trip.save` or ``load``."""
    at = case.get("at") if here.rank in failing_ranks(case, here.world) else ""
    spy = Spy(at, case.get("error", "plain"), in_thread=case.get("in", "") == "thread")
    trip = t.read_trip(case)
    if saves:
        planner = DefaultSavePlanner(**trip.planner)
        return {"planner": spy.watch(planner, SAVE_PLANNER), "writer": spy.watch(t.writer_of(trip, here), WRITER)}
    return {"planner": spy.watch(DefaultLoadPlanner(), LOAD_PLANNER), "reader": spy.watch(t.reader_of(here), READER)}


def must_fail(case: Case, here: Here, attempt: Callable[[], object], what: str) -> bool:
    """Whether ``attempt`` raises a ``CheckpointException``, as it must, which must tell what failed on which ranks.

    Another error passes: the rank that gets it has left the others.
    """
    try:
        attempt()
    except t.CheckpointFailed as failed:
        error = failed.__cause__
        assert isinstance(error, CheckpointException)
    else:
        message = f"a {what} in which {case.get('at')} fails: must be refused, was accepted"
        return here.require(False, "wrong-error", "fault", message, "an error", "")
    due, got = failing_ranks(case, here.world), sorted(error.failures)
    here.require(got == due, "wrong-error", "ranks", "the exception names other ranks than those that failed", due, got)
    for rank, (cause, _) in sorted(error.failures.items()):
        said = f"planted in {case.get('at')}" in str(cause)
        here.require(said, "wrong-error", "cause", "the exception gives another cause", case.get("at"), f"rank {rank}: {cause!r}")
    step = "plan" if case.get("at") not in LATE else "write" if what == "save" else "read"
    return here.require(error.args[0] == step, "wrong-error", "step", "the exception names another step", step, str(error.args[0]))


def reject_unless_called(case: Case, here: Here, end: t.End, *, at_least: int = 1) -> None:
    """Give up a case in which a call for single items, which is to fail, does not come: a failing rank has no such item for sure."""
    leaves = [leaf for _, leaf in flatten(end.state).values()]
    tensors = [leaf.name for leaf in leaves if isinstance(leaf, Slot)]
    for rank in failing_ranks(case, here.world):
        parts = sum(_holds(end, name, rank) for name in tensors)
        written = sum(_alone(end, name, rank) for name in tensors)
        items = {
            "resolve_data": written,
            "load_bytes": len(leaves) - len(tensors),
            "resolve_tensor": parts,
            "commit_tensor": parts,
        }
        if items.get(case.get("at"), at_least) < at_least:
            here.reject(f"rank {rank} has too few items for {case.get('at')} to fail")


def _holds(end: t.End, name: str, rank: int) -> bool:
    """Whether a rank holds elements of a tensor."""
    layout = end.layout(name)
    if layout is None:
        return 0 not in end.specs[name].shape
    coord = layout.mesh.coord(rank)
    return coord is not None and 0 not in layout.local_shape(coord)


def _alone(end: t.End, name: str, rank: int) -> bool:
    """Whether a rank holds elements that no other one has, and so must write them."""
    layout = end.layout(name)
    if layout is None:
        return end.mesh.size == 1 and _holds(end, name, rank)
    return _holds(end, name, rank) and all(shard_dim(placement) is not None for placement in layout.placements)


def check_failed_save(case: Case, here: Here) -> None:
    """All ranks learn that a save failed; nothing that can be loaded is left of it; the next save does its work."""
    trip = t.read_trip(case)
    if here.stage == 1:
        t.judge(trip, here, t.load(here, t.destination(trip, here)), check="afterwards")
        return
    reject_unless_called(case, here, trip.save, at_least=trip.writer.get("thread_count", 1) if case.get("in", "") == "thread" else 1)
    given = spies(case, here, saves=True)
    how: dict[str, Any] = {"use_collectives": False} if case.get("how", "") == "alone" else {}
    if case.get("at") == "reset":
        how["checkpoint_id"] = storage.place(here.target, here.folder())

    def attempt() -> None:
        if case.get("how", "") != "async":
            t.save(trip, here, **given, **how)
            return
        pending = t.dcp.async_save(t.source(trip, here), storage_writer=given["writer"], planner=given["planner"])
        with t.told_plainly():
            finish(pending)

    if must_fail(case, here, attempt, "save"):
        state = t.destination(replace(trip, load=trip.save), here)
        here.refused(lambda: t.load(here, state), "leftover", "a load of what a failed save left", errors=(t.CheckpointFailed,))
    t.save(trip, here)


def check_kept_by_failed_save(case: Case, here: Here) -> None:
    """A save that fails over an older checkpoint leaves it whole: it loads as it was, or not at all, but never as a mixture."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        newer = replace(trip, values={name: other(full) for name, full in trip.values.items()})
        given = spies(case, here, saves=True)
        must_fail(case, here, lambda: t.save(newer, here, **given), "save")
        return
    state = t.destination(trip, here)
    if case.get("at") not in LATE:
        t.judge(trip, here, t.load(here, state), check="older")
        return
    try:
        t.load(here, state)
    except t.CheckpointFailed:
        return
    t.judge(trip, here, state, check="mixture")


def other(full: torch.Tensor) -> torch.Tensor:
    """Values that differ from ``full`` in every element."""
    return ~full if full.dtype == torch.bool else full + 1


def check_failed_load(case: Case, here: Here) -> None:
    """All ranks learn that a load failed; one that failed in planning has changed nothing; the next load does its work."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    reject_unless_called(case, here, trip.load)
    state, given = t.destination(trip, here), spies(case, here, saves=False)
    how: dict[str, Any] = {"checkpoint_id": storage.place(here.target, here.folder())} if case.get("at") == "reset" else {}
    must_fail(case, here, lambda: t.load(here, state, **given, **how), "load")
    if case.get("at") not in LATE:
        t.judge(trip, here, state, check="kept", want=spoiled(trip.load.state), kept=slots(trip.load.state))
    t.judge(trip, here, t.load(here, t.destination(trip, here)), check="afterwards")


def check_retried_plan(case: Case, here: Here) -> None:
    """With kept plans: what is saved after a save that failed is what was given, whichever state the failed one was for."""
    trip = t.read_trip(case)
    ends = {"a": trip.save, "b": trip.load}
    name = f"Retrying{uuid.uuid4().hex}"

    def planner() -> DefaultSavePlanner:
        # plans are kept by the name of the planner's class: one of this case alone
        return type(name, (DefaultSavePlanner,), {})(enable_plan_caching=True)  # type: ignore[no-any-return]

    values = trip.values
    for at, which in enumerate(case.get("order")):
        values = {key: other(full) for key, full in values.items()}
        one = replace(trip, save=ends[which], load=ends[which], values=values)
        folder = f"{here.folder()}/{at}"
        spy = Spy(case.get("at") if at == case.integer("fails") and here.rank in failing_ranks(case, here.world) else "")
        watched, writer = spy.watch(planner(), SAVE_PLANNER), spy.watch(t.writer_of(one, here, folder), WRITER)
        if at == case.integer("fails"):
            must_fail(case, here, lambda: t.save(one, here, planner=watched, writer=writer), "save")  # noqa: B023
        else:
            t.save(one, here, planner=watched, writer=writer)
            t.judge(one, here, t.load(here, t.destination(one, here), folder=folder), check=f"save {at} of {case.get('order')}")


def of_fault(case: Case) -> set[str]:
    found = {f"fails:{case.get('at')}"}
    ranks = case.get("ranks", "all")
    if ranks == "all" or "," in ranks:
        found.add("fails-on-several")
    elif ranks != "0":
        found.add("fails-on-follower")
    if case.get("error", "plain") != "plain":
        found.add(f"error:{case.get('error')}")
    if case.get("in", "") == "thread":
        found.add("fails-in-thread")
    if "how" in case:
        found.add("no-collectives" if case.get("how") == "alone" else "async-save")
    if "fails" in case:
        found |= {"plan-cache", "first-save-fails"} if case.get("fails") == "0" else {"plan-cache"}
    return found


def late(case: Case) -> set[str]:
    return of_fault(case) | ({"fails-after-plan"} if case.get("at") in LATE else set())


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

LAWS = (
    law_of(
        "fault[save]",
        clause="When a planner or a writer fails anywhere, every rank gets an exception that names the ranks and the cause, and can go on.",
        source=f"{DOCS}, CheckpointException: failures maps ranks to their exceptions; StorageWriter.finish: marks as successful",
        check=check_failed_save,
        holds=f"{TWO} at=write_data ranks=1",
        planted="failures_of_followers_unheard",
        texts=FAILED_SAVES,
        sweeps=len(FAILED_SAVES),
        stages=t.worlds,
        features=of_fault,
        script=fault_scripts.failed_save,
    ),
    law_of(
        "fault[overwrite]",
        clause="A save that fails over an older checkpoint leaves it as it was, or beyond loading, and never mixed with the new one.",
        source=f"{DOCS}, StorageWriter.finish: writes the metadata and marks the current checkpoint as successful",
        check=check_kept_by_failed_save,
        holds="mesh=2 x=5:S(0) at=create_global_plan ranks=0",
        planted="data_written_in_planning",
        texts=FAILED_OVER,
        sweeps=len(FAILED_OVER),
        stages=t.worlds,
        features=late,
        script=fault_scripts.failed_over,
    ),
    law_of(
        "fault[load]",
        clause="When a planner or a reader fails anywhere, every rank gets an exception that names the ranks and the cause, and can go on.",
        source=f"{DOCS}, CheckpointException: failures maps ranks to their exceptions",
        check=check_failed_load,
        holds=f"{BACK} at=read_data ranks=1",
        planted="failures_of_followers_unheard",
        texts=FAILED_LOADS,
        sweeps=len(FAILED_LOADS),
        stages=t.worlds,
        features=of_fault,
        script=fault_scripts.failed_load,
    ),
    law_of(
        "fault[caching]",
        clause="With kept plans, what is saved after a save that failed is what was given.",
        source=f"{DOCS}, DefaultSavePlanner: enable_plan_caching",
        check=check_retried_plan,
        holds=f"{CHANGED} order=abb at=create_local_plan fails=1 ranks=1",
        planted="kept_plan_of_a_failed_save",
        texts=RETRIED,
        sweeps=len(RETRIED),
        features=of_fault,
        script=fault_scripts.retried,
    ),
)
