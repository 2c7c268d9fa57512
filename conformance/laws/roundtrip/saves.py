"""Laws on saves that follow one another or run in the background: overwriting, plans that are kept, staging."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip import scripts as roundtrip_scripts
from conformance.laws.roundtrip.cases import law_of
from conformance.report.reproducer import Script
from conformance.target import storage
from reference.checkpoint.state_dict import Slot, flatten

DOCS = "torch.distributed.checkpoint docs"


def check_kept(case: Case, here: Here) -> None:
    """A writer that may not overwrite refuses on all ranks, and the checkpoint that is there stays as it is."""
    trip = t.read_trip(case)
    if here.stage == 0:
        alone = case.get("how", "") == "alone"
        how: dict[str, Any] = {"use_collectives": False} if alone else {}
        t.save(trip, here, **how)
        newer = replace(trip, values={name: _other(full) for name, full in trip.values.items()}, writer={**trip.writer, "overwrite": False})
        # without collectives each rank gets the error of its own storage
        errors: tuple[type[Exception], ...] = (Exception,) if alone else (t.CheckpointFailed,)
        here.refused(lambda: t.save(newer, here, **how), "save", "a save over a checkpoint without leave", errors=errors)
    else:
        t.judge(trip, here, t.load(here, t.destination(trip, here)), check="kept")


def check_overwrite(case: Case, here: Here) -> None:
    """A checkpoint that is saved over another one is the new one, whatever the old one was."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    newer = t.Trip(trip.load, trip.load, trip.worlds, {name: _other(full) for name, full in trip.values.items()}, trip.writer, trip.planner)
    if here.stage == 1:
        t.save(newer, here)
        return
    again = t.End(trip.load.state, trip.save.mesh, trip.save.specs)
    back = t.Trip(trip.load, again, trip.worlds, newer.values, trip.writer, trip.planner)
    t.judge(back, here, t.load(here, t.destination(back, here)))


def _other(full: torch.Tensor) -> torch.Tensor:
    """Values that differ from ``full`` in every element."""
    return ~full if full.dtype == torch.bool else full + 1


def overwrite_worlds(case: Case) -> tuple[int, ...]:
    save, load = t.worlds(case)
    return save, load, save


def check_caching(case: Case, here: Here) -> None:
    """A planner that keeps its plans writes what one that makes them anew writes, in every order of saves."""
    trip = t.read_trip(case)
    order = case.get("order")
    ends = {"a": trip.save, "b": trip.load}
    folders = [os.path.join(here.folder(), str(at)) for at in range(len(order))]
    values = [trip.values]
    for _ in order[1:]:
        values.append({name: _other(full) for name, full in values[-1].items()})
    usable: list[bool] = []

    class Keeping(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            usable.append(plan.usable)
            return plan

    # plans are kept by the name of the planner's class: one of this case alone
    Keeping.__name__ = f"Keeping{uuid.uuid4().hex}"
    saved = []
    for which, folder, full in zip(order, folders, values, strict=True):
        one = t.Trip(ends[which], ends[which], trip.worlds, full, trip.writer, trip.planner)
        saved.append(one)
        t.save(one, here, folder=folder, planner=Keeping(enable_plan_caching=True, **trip.planner))
    again = [which == before for before, which in pairwise(order)]
    same = [not fresh for fresh in usable[1:]]
    message = "a plan is made anew for a state that was just saved"
    here.require(all(same[at] for at, kept in enumerate(again) if kept), "wrong-metadata", "kept", message, again, same)
    for at, (one, folder) in enumerate(zip(saved, folders, strict=True)):
        metadata = storage.reader(here.target, folder).read_metadata()
        names, due = {*metadata.state_dict_metadata}, {*flatten(one.save.state)}
        message = f"save {at} names other leaves than it was given"
        if here.require(names == due, "wrong-metadata", "names", message, sorted(due), sorted(names)):
            for name, (path, leaf) in flatten(one.save.state).items():
                entry: Any = metadata.state_dict_metadata[name]
                told = (metadata.planner_data or {}).get(name)
                here.require(told == path, "wrong-metadata", "path", f"save {at}: the path of {name} is another", path, told)
                if isinstance(leaf, Slot) and isinstance(entry, TensorStorageMetadata):
                    want, got = one.save.specs[leaf.name].torch_dtype, entry.properties.dtype
                    here.require(got == want, "wrong-metadata", "dtype", f"save {at}: {name} is described with another dtype", want, got)
        t.judge(one, here, t.load(here, t.destination(one, here), folder=folder), check=f"loaded {order[: at + 1]}")


def of_again(case: Case) -> set[str]:
    ways = case.get("ways", "")
    return ({"no-collectives"} if "a" in ways else set()) | ({"no-collectives-after"} if "ca" in ways else set())


def check_again(case: Case, here: Here) -> None:
    """In one world, each save over the last one is what the next load gets, whatever its layout and its way."""
    trip = t.read_trip(case)
    ends, values = {"a": trip.save, "b": trip.load}, trip.values
    order = case.get("order")
    for at, (which, way) in enumerate(zip(order, case.get("ways", "c" * len(order)), strict=True)):
        one = replace(trip, save=ends[which], load=ends[which], values=values)
        how: dict[str, Any] = {"use_collectives": False} if way == "a" else {}
        t.save(one, here, **how)
        t.judge(one, here, t.load(here, t.destination(one, here)), check=f"save {at}")
        values = {name: _other(full) for name, full in values.items()}


def caching_script(case: Case) -> Script:
    trip = t.read_trip(case)
    return roundtrip_scripts.caching(case, {"a": trip.save, "b": trip.load}, case.get("order"))


def check_async(case: Case, here: Here) -> None:
    """An asynchronous save holds the values of the moment at which it was called, whatever happens to them afterwards."""
    trip = t.read_trip(case)
    if here.stage == 1:
        t.judge(trip, here, t.load(here, t.destination(trip, here)))
        return
    stager = case.get("async")
    options: dict[str, Any] = {"cache_staged_state_dict": True} if stager == "cached" else {}
    writer = t.writer_of(trip, here, **options)
    own = stager_of(case)
    state = t.source(trip, here)
    if stager == "cached":
        # the first of two saves through one cache: the second must not give its values
        older = t.Trip(trip.save, trip.save, trip.worlds, {n: _other(full) for n, full in trip.values.items()}, {}, {})
        finish(t.dcp.async_save(t.source(older, here), storage_writer=writer))
    with t.told_plainly():
        pending = t.dcp.async_save(state, storage_writer=writer, async_stager=own)
        _scramble(state)
        metadata = finish(pending)
    message = f"the save gave a {type(metadata).__name__}, must give its metadata"
    here.require(isinstance(metadata, Metadata), "wrong-metadata", "result", message)
    if own is not None:
        own.close()


def stager_of(case: Case) -> Any:
    """The stager that a case asks for; ``None`` where the writer stages."""
    return DefaultStager(StagingOptions(False, False, False, False)) if case.get("async") == "stager" else None


def finish(pending: Any) -> Any:
    """What an asynchronous save gives in the end."""
    future: Future[Any] = pending if isinstance(pending, Future) else pending.upload_completion
    return future.result()


def _scramble(value: Any) -> None:
    """Change every tensor of a state in place, and every dict and list."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            local = value.to_local() if hasattr(value, "to_local") else value
            local.copy_(t.poison(local))
    elif isinstance(value, t.App):
        _scramble(value.state)
    elif isinstance(value, dict):
        for entry in value.values():
            _scramble(entry)
        value["late"] = 1
    elif isinstance(value, list):
        for entry in value:
            _scramble(entry)
        value.append("late")


OVERWRITE = (
    "mesh=3 mesh.load=2 x=7:S(0) a=4x3:R:int64 to.x=S(0) to.a=S(1)",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=6:S(0):bool to.x=S(1) to.a=R state={x:x,a:a,n:1} into={x:x,a:a,n:2} threads=2",
    "mesh=2 x=5:S(0) a=4:R state={x:x,a:a,n:1} into={x:x}",
    "mesh=1 mesh.load=2 x=5:S(0) a=4:- to.x=R to.a=R",
)
KEPT = (
    "mesh=2 x=5:S(0) a=4:R state={x:x,a:a,n:1}",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=4:- to.x=S(0)",
    "mesh=1 x=5x2:S(0)",
    "mesh=2 x=5:S(0) state={x:x,n:1} how=alone",
    "mesh=3 x=7:S(0) a=4:R how=alone files=item",
)
AGAIN = (
    "mesh=2 x=6:S(0) a=5:R to.x=R order=ab",
    "mesh=3 mesh.load=2 world.load=3 x=7:S(0) a=4x3:S(1):int64 to.x=S(0) to.a=R order=aba",
    "mesh=2 x=6:S(0) a=4:- state={x:x,n:1} into={x:x,a:a,n:2} to.x=R order=abb threads=2",
    "mesh=1 x=5:S(0) a=():R order=aab files=item",
    "mesh=2 x=6:S(0) a=4:R order=aa ways=aa",
    "mesh=2 x=6:S(0) a=4:R state={a:a,x:x} order=aa ways=ac",
    "mesh=2 x=6:S(0) a=4:R state={a:a,x:x} order=aa ways=ca",
)
CACHING = (
    "mesh=2 x=6:S(0) a=5:S(0) state={x:x} into={x:x,a:a} order=abb",
    "mesh=2 x=6:S(0) to.x=R order=aab",
    "mesh=2 x=6:S(0) a=3:R state={x:x,n:1} into={a:a,n:2} order=aba",
    "mesh=3 x=7:S(0) a=3:R to.x=R to.a=S(0) order=abba",
    "mesh=2 x=6:S(0) order=ab dtype=int64",
    'mesh=2 x=6:S(0) state={"d.w":x} into={d:{w:x}} order=ab',
)
ASYNC = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R:int64 async=writer state={x:x,d:{a:a,l:[1,2]},n:1}",
    "mesh=2 x=5:S(0) a=4:- async=stager state={x:x,d:{a:a,l:[a,2]},n:[1]}",
    "mesh=2 x=5:S(0) a=4:R:bool async=cached state={x:x,a:a,n:1}",
    "mesh=3 mesh.load=1 x=5x2:S(1):float64 a=3x2:-:float32:distinct:transposed async=stager",
    "mesh=2 x=():R a=4:S(0) async=writer threads=2",
)


LAWS = (
    law_of(
        "overwrite",
        clause="A checkpoint that is saved over another one, by another world with another layout, loads as the new one.",
        source=f"{DOCS}, FileSystemWriter: overwrite",
        check=check_overwrite,
        script=roundtrip_scripts.overwrite,
        holds="mesh=2 mesh.load=3 x=7:S(0) a=4:R",
        planted="old_metadata_kept",
        texts=OVERWRITE,
        sweeps=4,
        stages=overwrite_worlds,
    ),
    law_of(
        "again",
        clause="In one world, each save over the last one is what the next load gets, whatever its layout.",
        source=f"{DOCS}, FileSystemWriter: overwrite; save: use_collectives",
        check=check_again,
        script=roundtrip_scripts.again,
        holds="mesh=2 x=6:S(0) a=5:R to.x=R order=ab",
        planted="metadata_remembered",
        texts=AGAIN,
        sweeps=7,
        features=of_again,
    ),
    law_of(
        "refuses[overwrite]",
        clause="A save over a checkpoint is refused on all ranks where the writer may not overwrite, and the checkpoint stays as it is.",
        source=f"{DOCS}, FileSystemWriter: overwrite",
        check=check_kept,
        script=roundtrip_scripts.kept,
        holds="mesh=2 x=5:S(0) a=4:R",
        planted="always_overwrites",
        texts=KEPT,
        sweeps=len(KEPT),
        stages=t.worlds,
        features=lambda case: {"must-refuse", "storage-option"} | ({"no-collectives"} if "how" in case else set()),
    ),
    law_of(
        "caching",
        clause="With enable_plan_caching every save holds what it was given, and what was just planned is not planned again.",
        source=f"{DOCS}, DefaultSavePlanner: enable_plan_caching; SavePlan.usable",
        check=check_caching,
        script=caching_script,
        holds="mesh=2 x=6:S(0) a=3:R state={x:x} into={a:a} order=ab",
        planted="stale_cached_metadata",
        texts=CACHING,
        sweeps=6,
    ),
    law_of(
        "async",
        clause="An asynchronous save holds the values of the moment at which it was called.",
        source=f"{DOCS}, async_save: de-stages the state_dict first; AsyncStager.stage",
        check=check_async,
        script=roundtrip_scripts.asynchronous,
        holds="mesh=2 x=5:S(0) a=4:R async=writer",
        planted="staging_without_copy",
        texts=ASYNC,
        sweeps=5,
        features=lambda case: {"staging-cache"} if case.get("async") == "cached" else set(),
        stages=t.worlds,
    ),
)
