"""Laws of several collectives under way at once, in one group or in several, and of what they only read."""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Device, IntsField, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import CALLS, CHANGING, LATE_SECONDS, STALE, prepared, results, start
from shardlaw.conformance.laws.collective.case_fields import Calling, Callings, Group, Groups
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.collectives import groups as some_groups

# what every backend carries between the same buffers in any memory: other ways have laws of their own
FLYING = (
    "all_reduce",
    "all_gather_single",
    "broadcast",
    "reduce_scatter_single",
    "all_gather",
    "all_to_all_single",
    "reduce",
)
READING = tuple(name for name in CALLS if name not in CHANGING)
NEEDS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter", "subgroups")


def spent(xs):
    """Copies of what a call has read, which is then overwritten."""
    copies = [x.clone() for x in xs]
    for x in xs:
        x.fill_(STALE)
    return copies


def flight(calls: Callings, groups: Groups, device: Device, wait: Annotated[Any, IntsField(".")] = (), late: int = -1):
    """Starts all calls, then waits for their ends; what a call has read is overwritten as soon as it has ended."""
    if dist.get_rank() == late:
        time.sleep(LATE_SECONDS)
    calls = [(groups[key], prepared(call, device)) if call else None for key, call in calls]
    works: list[Any] = [start(mine[1], mine[0], async_op=True) if mine else None for mine in calls]
    read = [None] * len(calls)
    for at in wait or range(len(calls)):
        if works[at] is not None:
            works[at].wait()
            name, xs, _, _ = calls[at][1]
            read[at] = None if name in CHANGING else spent(xs)
    return {"input": read, "result": [results(mine[1]) if mine else None for mine in calls]}


def due_of_flight(calls, rank: Rank):
    inside = [(call, call.of_rank(rank)) for _, call in calls]
    return {
        "input": [None if mine is None or call.changes else mine.given for call, mine in inside],
        "result": [None if mine is None else call.wanted(rank) for call, mine in inside],
    }


def draw_async(limits: Limits) -> SearchStrategy[Case]:
    def calls(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        names = draw(st.lists(st.sampled_from(FLYING), min_size=1, max_size=4))
        order = draw(st.permutations(range(len(names))))
        wait = ".".join(map(str, order)) if list(order) != sorted(order) else None
        late = draw(st.integers(-2, mesh.size - 1))
        return {"calls": "/".join(names), "wait": wait, "late": sorted(mesh.ranks)[late] if late >= 0 else None}

    return draws.calls(limits, root=True, memories=False, works=False, min_dims=1, extra=calls)


def draw_interleaved(limits: Limits) -> SearchStrategy[Case]:
    def calls(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        others = draw(st.lists(some_groups(world_size=limits.world_size), min_size=1, max_size=2))
        letters = ["a", "b", "c"][: len(others) + 1]
        names = draw(st.lists(st.tuples(st.sampled_from(letters), st.sampled_from(FLYING)), min_size=2, max_size=5))
        order = draw(st.permutations(range(len(names))))
        return {
            "world": None,
            **{f"mesh__{letter}": other for letter, other in zip("bc", others, strict=False)},
            "calls": "/".join(f"{letter}:{name}" for letter, name in names),
            "wait": ".".join(map(str, order)) if list(order) != sorted(order) else None,
        }

    return draws.calls(limits, memories=False, works=False, min_dims=1, extra=calls)


def sweep_interleaved(limits: Limits) -> list[Case]:
    """Groups without a common rank, which few draws have."""
    pairs = (("2", "2@2,3"), ("2@0,2", "2@3,1"), ("1@1", "2@2,0"))
    calls = "a:all_reduce/b:all_gather/a:broadcast/b:reduce_scatter_single"
    cases = [fields(mesh=one, mesh__b=other, x="3x2", calls=calls, wait="3.1.0.2") for one, other in pairs]
    return [case for case in cases if case.world <= limits.world_size]


asynchronous = law(
    "collective.async",
    clause="Works under way together each end as if alone, whatever the order of waiting; inputs are free then.",
    source=draws.DOC + "synchronous and asynchronous collective operations",
    control="mesh=2 x=3 calls=all_reduce/all_gather wait=1.0",
    features=draws.features_of,
    draw=draw_async,
    draws=60,
    needs=NEEDS,
    weight=0.4,
)(flight)
asynchronous.due(due_of_flight)

interleaved = law(
    "collective.interleaved",
    clause="Collectives in groups that overlap, or have no rank in common, do not meet, however they are interleaved.",
    source=draws.DOC + "new_group",
    control="mesh=2 mesh.b=3 x=3 calls=a:all_reduce/b:all_reduce",
    features=draws.features_of,
    sweep=sweep_interleaved,
    sweeps=3,
    draw=draw_interleaved,
    draws=60,
    needs=NEEDS,
    weight=0.4,
)(flight)
interleaved.due(due_of_flight)


def draw_kept(limits: Limits) -> SearchStrategy[Case]:
    def call(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        return {"call": draw(st.sampled_from(READING))}

    return draws.calls(limits, root=True, memories=False, works=False, min_dims=1, extra=call)


@law(
    "collective.inputs-kept",
    source=draws.DOC + "collective functions, input and output tensors",
    control="mesh=2 x=5x3 call=all_gather",
    features=draws.features_of_call,
    draw=draw_kept,
    draws=50,
    members=True,
    needs=(*NEEDS, "gather", "scatter"),
    weight=0.3,
)
def inputs_kept(call: Calling, group: Group, device: Device):
    """What a collective only reads is as it was, and shares no memory with what it wrote."""
    call = prepared(call, device)
    start(call, group)
    return {"input": spent(call[1]), "result": results(call)}


@inputs_kept.due
def _(call, rank: Rank):
    return {"input": call.of_rank(rank).given, "result": call.wanted(rank)}
