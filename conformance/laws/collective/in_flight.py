"""Laws of several asynchronous collectives at once, in one group or in several, and of inputs that are only read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Device, IntsField, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import CALLS, IN_PLACE, LATE_SECONDS, STALE, prepare, results, start
from shardlaw.conformance.laws.collective.fields import Call, Calls, Group, Groups
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.collectives import groups as draw_group

# collectives that every backend supports on contiguous tensors
CONCURRENT = (
    "all_reduce",
    "all_gather_single",
    "broadcast",
    "reduce_scatter_single",
    "all_gather",
    "all_to_all_single",
    "reduce",
)
OUT_OF_PLACE = tuple(name for name in CALLS if name not in IN_PLACE)
NEEDS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter", "subgroups")


def copy_and_overwrite(xs):
    """Copies of tensors, which are then filled with :data:`STALE`."""
    copies = [x.clone() for x in xs]
    for x in xs:
        x.fill_(STALE)
    return copies


def run_concurrently(
    calls: Calls, groups: Groups, device: Device, wait: Annotated[Any, IntsField(".")] = (), late: int = -1
):
    """Start all calls, then wait for each in the order ``wait``; overwrite the inputs of a call after its wait."""
    if dist.get_rank() == late:
        time.sleep(LATE_SECONDS)
    prepared: list[Any] = [prepare(call, device) if call else None for _, call in calls]
    works: list[Any] = [
        start(call, groups[key], async_op=True) if call else None
        for (key, _), call in zip(calls, prepared, strict=True)
    ]
    inputs = [None] * len(calls)
    for at in wait or range(len(calls)):
        if works[at] is not None:
            works[at].wait()
            name, xs, _, _ = prepared[at]
            inputs[at] = None if name in IN_PLACE else copy_and_overwrite(xs)
    return {"input": inputs, "result": [results(call) if call else None for call in prepared]}


def concurrent_due(calls, rank: Rank):
    data = [(call, call.member_data(rank)) for _, call in calls]
    return {
        "input": [None if own is None or call.in_place else own.inputs for call, own in data],
        "result": [None if own is None else call.due(rank) for call, own in data],
    }


def draw_async(limits: Limits) -> SearchStrategy[Case]:
    def calls(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        names = draw(st.lists(st.sampled_from(CONCURRENT), min_size=1, max_size=4))
        wait = draw_wait(draw, len(names))
        late = draw(st.integers(-2, mesh.size - 1))
        return {"calls": "/".join(names), "wait": wait, "late": sorted(mesh.ranks)[late] if late >= 0 else None}

    return draws.calls(limits, root=True, memories=False, timing=False, min_dims=1, extra=calls)


def draw_wait(draw: st.DrawFn, count: int) -> str | None:
    """The order in which ``count`` calls are waited for; ``None`` for that in which they start."""
    order = draw(st.permutations(range(count)))
    return draws.join_ints(order) if list(order) != sorted(order) else None


def draw_interleaved(limits: Limits) -> SearchStrategy[Case]:
    def calls(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        others = draw(st.lists(draw_group(world_size=limits.world_size), min_size=1, max_size=2))
        keys = st.sampled_from(["a", "b", "c"][: len(others) + 1])
        names = draw(st.lists(st.tuples(keys, st.sampled_from(CONCURRENT)), min_size=2, max_size=5))
        return {
            "world": None,
            **{f"mesh__{key}": other for key, other in zip("bc", others, strict=False)},
            "calls": "/".join(f"{key}:{name}" for key, name in names),
            "wait": draw_wait(draw, len(names)),
        }

    return draws.calls(limits, memories=False, timing=False, min_dims=1, extra=calls)


def sweep_interleaved(limits: Limits) -> list[Case]:
    """Groups without a common rank, which few draws have."""
    pairs = (("2", "2@2,3"), ("2@0,2", "2@3,1"), ("1@1", "2@2,0"))
    calls = "a:all_reduce/b:all_gather/a:broadcast/b:reduce_scatter_single"
    cases = [fields(mesh=mesh, mesh__b=other, x="3x2", calls=calls, wait="3.1.0.2") for mesh, other in pairs]
    return [case for case in cases if case.world <= limits.world_size]


asynchronous = law(
    "collective.async",
    clause="Asynchronous collectives that overlap each give their result, in whatever order they are waited for, and "
    "their inputs can be overwritten after the wait.",
    source=draws.DOC + "synchronous and asynchronous collective operations",
    control="mesh=2 x=3 calls=all_reduce/all_gather wait=1.0",
    features=draws.features_of,
    draw=draw_async,
    draws=60,
    needs=NEEDS,
    weight=0.4,
)(run_concurrently)
asynchronous.due(concurrent_due)

interleaved = law(
    "collective.interleaved",
    clause="Collectives of several groups, overlapping or disjoint, do not interfere, however they are interleaved.",
    source=draws.DOC + "new_group",
    control="mesh=2 mesh.b=3 x=3 calls=a:all_reduce/b:all_reduce",
    features=draws.features_of,
    sweep=sweep_interleaved,
    sweeps=3,
    draw=draw_interleaved,
    draws=60,
    needs=NEEDS,
    weight=0.4,
)(run_concurrently)
interleaved.due(concurrent_due)


def draw_calls(limits: Limits, names: Sequence[str]) -> SearchStrategy[Case]:
    call = {"call": st.sampled_from(names)}
    return draws.calls(limits, root=True, memories=False, timing=False, min_dims=1, extra=call)


@law(
    "collective.inputs-kept",
    source=draws.DOC + "collective functions, input and output tensors",
    control="mesh=2 x=5x3 call=all_gather",
    features=draws.features_of_call,
    draw=lambda limits: draw_calls(limits, OUT_OF_PLACE),
    draws=50,
    members=True,
    needs=(*NEEDS, "gather", "scatter"),
    weight=0.3,
)
def inputs_kept(call: Call, group: Group, device: Device):
    """A collective with separate outputs leaves its inputs unchanged, and its outputs share no memory with them."""
    call = prepare(call, device)
    start(call, group)
    return {"input": copy_and_overwrite(call[1]), "result": results(call)}


@inputs_kept.due
def _(call, rank: Rank):
    return {"input": call.member_data(rank).inputs, "result": call.due(rank)}


@law(
    "collective.waited-twice",
    source=draws.DOC + "asynchronous collective operations, wait()",
    control="mesh=2 x=5x3 call=all_gather",
    features=lambda case: draws.features_of_call(case) | {"async"},
    cases=[f"mesh=2 x=4x3 call={name}" for name in CALLS],
    draw=lambda limits: draw_calls(limits, tuple(CALLS)),
    draws=20,
    members=True,
    needs=(*NEEDS, "gather", "scatter"),
    weight=0.3,
)
def waited_twice(call: Call, group: Group, device: Device):
    """A second wait for an asynchronous collective changes nothing: its results can be overwritten after the first."""
    call = prepare(call, device)
    work = start(call, group, async_op=True)
    work.wait()
    found = copy_and_overwrite(results(call))
    work.wait()
    return {"result": found, "kept": [torch.equal(x, torch.full_like(x, STALE)) for x in results(call)]}


@waited_twice.due
def _(call, rank: Rank):
    due = call.due(rank)
    return {"result": due, "kept": ... if due is ... else [True] * len(due)}
