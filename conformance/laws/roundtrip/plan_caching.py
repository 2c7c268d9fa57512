"""The law of saves with cached plans that are made in another way than the one before.

``first`` and ``next`` say how each of two saves is made: by ``all`` ranks, by a process group of the first two
(``pair``), by rank 0 without others (``one``), or by all with what several ranks have written by the ``lowest``.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shardlaw.conformance.law.due import Meaningless, Of
from shardlaw.conformance.law.fields import Folder, Rank
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.fields import Destination, Newer, NewerDestination, Reader, Saved, Writer
from shardlaw.conformance.laws.roundtrip.cases import one_world_law
from shardlaw.reference.checkpoint.state_dict import flatten

Way = Literal["all", "pair", "one", "lowest"]
STATE = "x=5x2:- a=4:-:int64 b=7:- c=2x2:-"
CHANGES = (
    f"mesh=3 {STATE} first=all next=all",
    f"mesh=3 {STATE} first=pair next=pair",
    f"mesh=2 {STATE} first=one next=one",
    "mesh=3 x=5x2:- a=4:-:int64 state={x:x,d:{a:a,n:1}} first=lowest next=lowest",
    "mesh=2 x=5:S(0) a=4:R state={x:x,a:a,n:1} first=all next=all",
    f"mesh=3 {STATE} first=all next=pair",
    f"mesh=2 {STATE} first=all next=one",
    f"mesh=3 {STATE} first=all next=lowest",
    f"mesh=3 {STATE} first=lowest next=all",
    f"mesh=3 {STATE} first=pair next=one",
)


@one_world_law(
    "caching-anew",
    source="torch.distributed.checkpoint docs, DefaultSavePlanner: enable_plan_caching, dedup_save_to_lowest_rank; "
    "save: process_group, no_dist",
    control=CHANGES[0],
    texts=CHANGES,
    features=lambda case: {"plan-cache"},
)
def caching_anew(
    state: Saved,
    newer: Newer,
    destination: Destination,
    second: NewerDestination,
    first: Way,
    next: Way,
    rank: Rank,
    writer: Writer,
    reader: Reader,
    folder: Folder,
):
    """With enable_plan_caching a save stores its state in the way asked for also where the last save of this state was
    made by other ranks or with another option of the planner."""

    class Caching(DefaultSavePlanner):
        written: list[str]

        def finish_plan(self, new_plan: Any) -> Any:
            plan = super().finish_plan(new_plan)
            self.written = sorted(item.index.fqn for item in plan.items)
            return plan

    Caching.__name__ = f"Caching{uuid.uuid4().hex}"  # the cache of plans is keyed by the name of the planner's class
    pair, found = dist.new_group([0, 1]), dict[str, Any]()
    for at, (way, saved, into) in enumerate(((first, state, destination), (next, newer, second))):
        options = {"process_group": pair} if way == "pair" else {"no_dist": way == "one"}
        if rank < {"pair": 2, "one": 1}.get(way, dist.get_world_size()):
            planner = Caching(enable_plan_caching=True, dedup_save_to_lowest_rank=way == "lowest")
            save(saved, writer(f"{folder}/{at}"), planner, **options)
            found[f"written {at}"] = planner.written if way == "lowest" else []
            found[f"loaded {at}"] = load(into, reader(f"{folder}/{at}"), **options)
    return found


@caching_anew.due
def _(destination, second, first: str, next: str, rank: Rank):
    specs = destination.trip.save.specs.values()
    if "lowest" in (first, next) and any(spec.placements is not None for spec in specs):
        raise Meaningless("of a sharded tensor each rank writes its own part")
    found = dict[str, Any]()
    for at, (way, loaded) in enumerate(((first, destination), (next, second))):
        if way not in ("pair", "one") or rank < {"pair": 2, "one": 1}[way]:
            names = sorted(flatten(loaded.tree)) if rank == 0 else []
            found[f"written {at}"] = Of(names if way == "lowest" else [])
            found[f"loaded {at}"] = loaded
    return found
