"""Laws on several saves and on asynchronous saves: overwriting, cached plans, staging."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from concurrent.futures import wait
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Folder, Word
from shardlaw.conformance.laws.checkpoint.calls import (
    CheckpointFailed,
    PlainWriter,
    convert_failures,
    load,
    poison,
    save,
    wait_for_save,
)
from shardlaw.conformance.laws.checkpoint.fields import (
    Destinations,
    Newer,
    Reader,
    Saved,
    StateField,
    States,
    Writer,
    WriterField,
)
from shardlaw.conformance.laws.checkpoint.trip import world_sizes
from shardlaw.conformance.laws.roundtrip.cases import (
    DOCS,
    add_load,
    due_loaded,
    due_source,
    one_world_law,
    save_act,
    trip_law,
)
from shardlaw.reference.checkpoint.state_dict import Slot, flatten

# the longest wait of a save for its turn, and the head start of the first
WAITING_SECONDS, AHEAD_SECONDS = 10, 0.2


OVERWRITE = (
    "mesh=3 mesh.load=2 x=7:S(0) a=4x3:R:int64 to.x=S(0) to.a=S(1)",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=6:S(0):bool to.x=S(1) to.a=R state={x:x,a:a,n:1} into={x:x,a:a,n:2} threads=2",
    "mesh=2 x=5:S(0) a=4:R state={x:x,a:a,n:1} into={x:x}",
    "mesh=1 mesh.load=2 x=5:S(0) a=4:- to.x=R to.a=R",
)
REFUSED = (
    "mesh=2 x=5:S(0) a=4:R state={x:x,a:a,n:1}",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=4:- to.x=S(0)",
    "mesh=1 x=5x2:S(0)",
    "mesh=2 x=5:S(0) state={x:x,n:1} how=alone",
    "mesh=3 x=7:S(0) a=4:R how=alone files=item",
    "mesh=1 x=5:S(0) a=4:R how=alone",
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
    "mesh=2 x=5x2:S(0) a=4:-:int64:distinct:sliced async=shared state={x:x,d:{a:a,l:[1,2]},n:1}",
    "mesh=2 mesh.load=1 x=5:S(0):bfloat16 a=4:- async=background state={x:x,l:[a,1],n:1} to.x=R",
    "mesh=2 x=5x2:S(1) a=4:R async=checked state={x:x,d:{a:a,l:[1,2]},n:1}",
    *(
        f"mesh=2 x=4x6:{held} async={how}"
        for held in ("S(1) held=wrapper cut=1@0,2@0,1@1,2@1 to.x=S(0)", "S(0) held=sharded cut=1@0,2@1,1@0 to.x=S(1)")
        for how in ("writer", "stager")
    ),
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R:int64 async=plain state={x:x,d:{a:a,l:[1,2]},n:1} to.x=S(1)",
)


# two states of the same tensors in two orders
CONCURRENT = (
    "mesh=2 x=4:S(0) a=4:S(0) state={x:x,a:a} into={a:a,x:x} order=ab groups=two",
    "mesh=3 x=7:S(0) a=4x3:S(1) state={x:x,a:a,n:1} into={a:a,n:2,x:x} order=ab groups=two",
    "mesh=2 x=4:S(0) a=4:S(0) state={x:x,a:a} into={a:a,x:x} order=ab groups=one",
    "mesh=2 x=5x2:S(1) a=3:R state={x:x,a:a} into={a:a,x:x} order=ba groups=two",
    "mesh=2x2 x=4x3:S(0),S(1) a=5:S(0),R state={x:x,d:{a:a}} into={d:{a:a},x:x} order=ab groups=two",
    "mesh=3 x=2:S(0):int64 a=7:-:float64 state={x:x,a:a} into={a:a,x:x} order=ab groups=two",
    "mesh=4 x=9:S(0) a=4x2:S(1) state={x:x,a:a} into={a:a,x:x} order=ba groups=two",
    "mesh=2@1,0 x=4:S(0) a=6:S(0) state={x:x,a:a} into={a:a,x:x} order=ab groups=two",
    "mesh=2 x=0:S(0) a=4:S(0) state={x:x,a:a,n:None} into={a:a,n:3,x:x} order=ab groups=two",
    "mesh=3 x=7x2:S(0):bfloat16 a=5:R:int32 state={x:x,a:a} into={a:a,x:x} order=ba groups=two",
)


def overwrite_worlds(case: Case) -> tuple[int, ...]:
    save, load = world_sizes(case)
    return save, load, save


overwrite = trip_law(
    "overwrite",
    clause="A checkpoint saved over one of another world with another layout loads as the new one.",
    source=f"{DOCS}, FileSystemWriter: overwrite",
    control="mesh=2 mesh.load=3 x=7:S(0) a=4:R",
    texts=OVERWRITE,
    stages=overwrite_worlds,
)(save_act)


overwrite.due(due_source)


@overwrite.then
def _(state: Annotated[dict[str, Any], StateField("load", newer=1)], writer: Writer, folder: Folder):
    save(state, writer(folder))
    return {"source": state}


overwrite.due(due_source)


@overwrite.then
def _(
    state: Annotated[dict[str, Any], StateField("save", tree="load", fill="poison", newer=1)],
    reader: Reader,
    folder: Folder,
):
    return {"loaded": load(state, reader(folder))}


overwrite.due(due_loaded)


@one_world_law(
    "again",
    source=f"{DOCS}, FileSystemWriter: overwrite; save: use_collectives",
    control="mesh=2 x=6:S(0) a=5:R to.x=R order=ab",
    texts=AGAIN,
)
def again(states: States, destinations: Destinations, writer: Writer, reader: Reader, folder: Folder, ways: Word = ""):
    """After each save over the last one in the same world, a load gives the new state, whatever its layout."""
    loaded = []
    for state, destination, way in zip(states, destinations, ways or "c" * len(states), strict=True):
        save(state, writer(folder), use_collectives=way != "a")
        loaded.append(load(destination, reader(folder)))
    return {"loaded": loaded}


@again.due
def _(destinations):
    return {"loaded": destinations}


@trip_law(
    "refuses[overwrite]",
    source=f"{DOCS}, FileSystemWriter: overwrite",
    control="mesh=2 x=5:S(0) a=4:R",
    texts=REFUSED,
    features=lambda case: {"must-refuse", "storage-option"},
)
def overwrite_refused(
    state: Saved,
    newer: Newer,
    writer: Writer,
    careful: Annotated[Any, WriterField(lambda case: {"overwrite": False})],
    folder: Folder,
    how: Word = "",
):
    """A save over a checkpoint with overwrite=False is refused on all ranks, and the checkpoint does not change."""
    save(state, writer(folder), use_collectives=how != "alone")
    return {"save": caught(lambda: save(newer, careful(folder), use_collectives=how != "alone"))}


@overwrite_refused.due
def _(how):
    # without collectives each rank raises the error of its own storage
    return {"save": Refused((Exception,) if how == "alone" else (CheckpointFailed,))}


add_load(overwrite_refused)


@one_world_law(
    "caching",
    source=f"{DOCS}, DefaultSavePlanner: enable_plan_caching; SavePlan.usable",
    control="mesh=2 x=6:S(0) a=3:R state={x:x} into={a:a} order=ab",
    texts=CACHING,
)
def caching(states: States, destinations: Destinations, order: Word, writer: Writer, reader: Reader, folder: Folder):
    """With enable_plan_caching every save stores its own state, and a state like the last one is not planned again."""
    is_planned = []

    class Caching(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            is_planned.append(plan.usable)
            return plan

    # the cache of plans is keyed by the name of the planner's class
    Caching.__name__ = f"Caching{uuid.uuid4().hex}"
    for at, state in enumerate(states):
        save(state, writer(f"{folder}/{at}"), Caching(enable_plan_caching=True))
    replanned = [at for at, (before, which) in enumerate(pairwise(order), 1) if which == before and is_planned[at]]
    saved = [reader(f"{folder}/{at}").read_metadata() for at in range(len(states))]
    return {
        "planned again": replanned,
        "names": [sorted(metadata.state_dict_metadata) for metadata in saved],
        "paths": [dict(metadata.planner_data) for metadata in saved],
        "dtypes": [
            {
                name: leaf.properties.dtype
                for name, leaf in metadata.state_dict_metadata.items()
                if isinstance(leaf, TensorStorageMetadata)
            }
            for metadata in saved
        ],
        "loaded": [load(destination, reader(f"{folder}/{at}")) for at, destination in enumerate(destinations)],
    }


@caching.due
def _(states):
    leaves = [flatten(state.tree) for state in states]
    dtypes = [
        {name: state.end.specs[leaf.name].torch_dtype for name, (_, leaf) in flat.items() if isinstance(leaf, Slot)}
        for state, flat in zip(states, leaves, strict=True)
    ]
    return {
        "planned again": Of([]),
        "names": Of([sorted(flat) for flat in leaves]),
        "paths": Of([{name: path for name, (path, _) in flat.items()} for flat in leaves]),
        "dtypes": Of(dtypes),
        "loaded": states,
    }


def mutate(value: Any) -> None:
    """Change a value in place: every tensor, and every mutable container and object."""
    if type(value) is torch.Tensor and value.is_sparse:
        value.zero_()
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        for shard in local.local_shards() if hasattr(local, "local_shards") else [local]:
            base = compat.base_tensor(getattr(shard, "tensor", shard))
            with torch.no_grad():
                base.copy_(poison(base))
    elif isinstance(value, dict):
        mutate(tuple(value.values()))
        value["late"] = 1
    elif isinstance(value, list | tuple | deque):
        for entry in value:
            mutate(entry)
        if not isinstance(value, tuple):
            value.append("late")
    elif isinstance(value, set):
        value.add("late")
    elif isinstance(value, bytearray):
        value.extend(b"late")
    elif hasattr(value, "__dict__"):
        for name in (*getattr(type(value), "__slots__", ()), *vars(value)):
            mutate(getattr(value, name))


def make_stager(name: str) -> Any:
    """A stager of an asynchronous save; ``None`` where the writer stages."""
    options = {
        "stager": StagingOptions(False, False, False, False),
        "shared": StagingOptions(False, True, False, False),
        "background": StagingOptions(False, False, True, False),
    }
    if name == "checked":
        return BlockingAsyncStager(type_check=True)
    return DefaultStager(options[name]) if name in options else None


def cache_options(case: Case) -> dict[str, bool]:
    return {"cache_staged_state_dict": True} if case.get("async") == "cached" else {}


@trip_law(
    "async",
    source=f"{DOCS}, async_save: de-stages the state_dict first; AsyncStager.stage",
    control="mesh=2 x=5:S(0) a=4:R async=writer",
    texts=ASYNC,
    features=lambda case: {"staging-cache"} if case.get("async") == "cached" else set(),
)
def asynchronous(
    state: Saved, newer: Newer, async_: Word, writer: Annotated[Any, WriterField(cache_options)], folder: Folder
):
    """An asynchronous save stores the values that the state has when it is called."""
    to, stager = writer(folder), make_stager(async_)
    to = PlainWriter(to) if async_ == "plain" else to
    if async_ == "cached":  # a first save through the cache, whose values the second must not store
        wait_for_save(dcp.async_save(newer, storage_writer=to))
    with convert_failures():
        pending: Any = dcp.async_save(state, storage_writer=to, async_stager=stager)
    if async_ == "background":  # the save stores the values that the state has while it is staged
        pending.staging_completion.result()
        stager.synchronize_staging()
    mutate(state)
    metadata = wait_for_save(pending)
    if stager is not None:
        stager.close()
    return {"metadata given": isinstance(metadata, Metadata)}


@asynchronous.due
def _():
    return {"metadata given": Of(True)}


add_load(asynchronous)


@one_world_law(
    "at-once",
    source=f"{DOCS}, async_save: a Future that holds the Metadata of its save; process_group",
    control="mesh=2 x=4:S(0) a=4:S(0) state={x:x,a:a} into={a:a,x:x} order=ab groups=two",
    texts=CONCURRENT,
    features=lambda case: {"async-save", "in-flight"},
)
def concurrent(
    states: States,
    destinations: Destinations,
    writer: Writer,
    reader: Reader,
    folder: Folder,
    groups: Literal["one", "two"],
):
    """Concurrent asynchronous saves each store their own state, in whatever order the ranks run them."""

    class Waiting(DefaultSavePlanner):
        def __init__(self):
            super().__init__()
            self.begin = threading.Event()

        def create_local_plan(self) -> SavePlan:
            self.begin.wait(WAITING_SECONDS)
            return super().create_local_plan()

    planners, pending = [Waiting() for _ in states], list[Any]()
    process_groups = [dist.new_group() if groups == "two" else None for _ in states]
    for at, state in enumerate(states):
        to = writer(f"{folder}/{at}")
        pending.append(dcp.async_save(state, storage_writer=to, planner=planners[at], process_group=process_groups[at]))
    # in one group the second save begins when the first has ended: concurrent collectives of a group may hang
    ahead = AHEAD_SECONDS if groups == "two" else WAITING_SECONDS / 2
    turns = [*zip(planners, pending, strict=True)]
    for planner, future in turns if dist.get_rank() % 2 else turns[::-1]:
        planner.begin.set()
        wait([future], ahead)
    for future in pending:
        wait_for_save(future)
    return {"loaded": [load(destination, reader(f"{folder}/{at}")) for at, destination in enumerate(destinations)]}


@concurrent.due
def _(destinations):
    return {"loaded": destinations}
