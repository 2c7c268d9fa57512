"""Laws of the results of each collective."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

import torch
import torch.distributed as dist
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Alike, Either, Of, Refused
from shardlaw.conformance.law.fields import Device, Rank
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import LATE_SECONDS, prepare, run_call
from shardlaw.conformance.laws.collective.fields import Call, Group


def collective(call: Call, group: Group, device: Device, work: Literal["async"] | None = None, late: int = -1):
    """Each member gets its results; nothing else is written."""
    if dist.get_rank(group) == late:
        time.sleep(LATE_SECONDS)
    call = prepare(call, device)
    _, xs, outs, _ = call
    found = run_call(call, group, work)
    refused = isinstance(found["result"], Exception)
    if refused and all(tensor.is_contiguous() for tensor in (*xs, *outs)):
        raise found["result"]
    return {**found, "refused": torch.tensor(refused)}


def collective_due(call, rank: Rank):
    """The results of a member. The documents promise nothing of non-contiguous tensors: all members may refuse them,
    with an error that says so, and leave all tensors unchanged."""
    inputs, results = call.member_data(rank).inputs, call.due(rank)
    refusable = (call.spec.memory, call.spec.out) != ("plain", "plain")
    unchanged = inputs if not call.in_place else Either((None, inputs)) if refusable else None
    return {
        "result": Either((results, Refused(words=("contiguous",)))) if refusable else results,
        "beside": True,
        "written": False,
        "input": unchanged,
        "is_completed()": Of(True),
        "refused": Alike(call.mesh) if refusable else ...,
    }


# values that use all bits of their dtype, and special values
VALUES = ("float64:wide", "int64:wide", "float32:edges")
STACKED = ("mesh=2 x=5x3 form=stacked", "mesh=2 x=() form=stacked")
NONCONTIGUOUS = (
    "mesh=2 x=5x3:-:float32:distinct:transposed form=list",
    "mesh=2 x=5x3:-:float32:distinct:sliced form=joined",
    "mesh=2 x=5x3 out=sliced form=list",
    "mesh=2 x=5x3 out=transposed form=joined",
)


def results_law(
    name: str,
    clause: str,
    control: str,
    *,
    draws_count: int,
    corners: tuple[str, ...] = (),
    source: str = "",
    **draw_options: Any,
) -> Law:
    """A law of the results of one collective, of which a run draws ``draws_count`` cases, with the options of
    :func:`draws.calls`. It enumerates ``corners`` and, with :data:`VALUES`, the control."""

    def draw(limits: Limits) -> SearchStrategy[Case]:
        return draws.calls(limits, **draw_options)

    def narrow(case: Case) -> SearchStrategy[Case]:
        return draws.calls(Limits(case.world, (case.tensor("x").dtype,)), **draw_options)

    corners = (*corners, *(re.sub(r"x=(\S+)", rf"x=\1:-:{values}", control) for values in VALUES))
    made = draws.collective_law(
        name,
        draws.DOC + (source or name.replace("-", "_")),
        control,
        clause=clause,
        cases=corners,
        draw=draw,
        draws=draws_count,
        narrow=narrow,
        members=True,
        needs=(name.replace("-", "_"),),
        weight=0.4,
    )(collective)
    made.due(collective_due)
    return made


LAWS = (
    results_law(
        "all-reduce",
        "all_reduce leaves the reduction of all members' tensors with each of them.",
        "mesh=2 x=5x3",
        corners=("mesh=2 x=5x3:-:float32:distinct:sliced", "mesh=3 x=5x3:-:float32:distinct:transposed op=max"),
        draws_count=56,
        reduces=True,
        in_place=True,
    ),
    results_law(
        "reduce",
        "reduce leaves the reduction of all members' tensors with the destination.",
        "mesh=2 x=5x3 root=1",
        corners=("mesh=2 x=5x3:-:float32:distinct:sliced", "mesh=3 x=5x3:-:float32:distinct:transposed root=1"),
        draws_count=47,
        root=True,
        reduces=True,
        in_place=True,
    ),
    results_law(
        "broadcast",
        "broadcast leaves the source's tensor with every member, whether the source is named by rank or by position.",
        "mesh=2 x=5x3 root=1",
        corners=("mesh=2 x=5x3:-:float32:distinct:sliced root=1", "mesh=3 x=5x3:-:float32:distinct:transposed root=1"),
        draws_count=47,
        root=True,
        in_place=True,
    ),
    results_law(
        "all-gather",
        "all_gather gives every member the tensors of all members, in the order of the group, as a list or one tensor.",
        "mesh=3 x=5x3 form=list",
        corners=(*STACKED, "mesh=3 x=2x3 form=list extents=1.3.0", *NONCONTIGUOUS),
        draws_count=96,
        source="all_gather, all_gather_single",
        forms=("joined", "list", "stacked"),
        uneven=("list",),
        all_ranks=("list", "stacked"),
    ),
    results_law(
        "gather",
        "gather gives the destination the tensors of all members, in the order of the group.",
        "mesh=3 x=5x3 root=1",
        corners=("mesh=2 x=5x3:-:float32:distinct:sliced", "mesh=2 x=5x3 out=transposed"),
        draws_count=47,
        root=True,
    ),
    results_law(
        "scatter",
        "scatter gives the member at position i entry i of the source's list.",
        "mesh=3 x=5x3 root=1",
        draws_count=47,
        corners=("mesh=2 x=5x3:-:float32:distinct:transposed", "mesh=2 x=5x3 out=transposed"),
        root=True,
    ),
    results_law(
        "reduce-scatter",
        "reduce_scatter gives the member at position i the reduction of all members' entries i, from lists or tensors.",
        "mesh=2 x=5x3 form=joined",
        corners=(*STACKED, "mesh=2 x=5x3 form=list work=async", *NONCONTIGUOUS),
        draws_count=96,
        source="reduce_scatter, reduce_scatter_single",
        forms=("joined", "list", "stacked"),
        reduces=True,
        uneven=("list",),
        all_ranks=("stacked",),
        expanded=False,
    ),
    results_law(
        "all-to-all",
        "all_to_all gives the member at position j, as entry i, entry j of the member at position i, for any splits.",
        "mesh=2 x=3x2 form=joined splits=1.2/0.3",
        corners=(
            "mesh=2 x=3x2 form=list splits=1.2/3.1",
            "mesh=3 x=3 form=list splits=1.2.0/3.1.1/0.0.2",
            "mesh=2 x=3x2 out=transposed form=joined",
            "mesh=2 x=3x2:-:float32:distinct:transposed form=joined",
            "mesh=2 x=3x2 out=sliced form=list",
        ),
        draws_count=96,
        source="all_to_all, all_to_all_single",
        forms=("joined", "list"),
        uneven=("joined",),
        splits=True,
        min_dims=1,
    ),
)
