"""Laws of the collectives that DTensor and checkpoints stand on: each gives every member what its lists say."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

import torch
import torch.distributed as dist
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Alike, Either, Of, Refused
from shardlaw.conformance.law.fields import Device, Rank
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import LATE_SECONDS, attempted, prepared
from shardlaw.conformance.laws.collective.case_fields import Calling, Group


def collective(call: Calling, group: Group, device: Device, work: Literal["async"] | None = None, late: int = -1):
    """Each member gets what its lists say; nothing beside it is written, and what was only read is as it was.

    The documents promise nothing of tensors that are not contiguous: all members alike may refuse them, in words that
    say so, before anything is sent.
    """
    if dist.get_rank(group) == late:
        time.sleep(LATE_SECONDS)
    call = prepared(call, device)
    _, xs, outs, _ = call
    found = attempted(call, group, work)
    refused = isinstance(found["result"], Exception)
    if refused and all(tensor.is_contiguous() for tensor in (*xs, *outs)):
        raise found["result"]
    return {**found, "refused": torch.tensor(refused)}


def due(call, rank: Rank):
    """What :func:`collective` must give; where tensors are not contiguous, or a refusal that leaves all as it was."""
    given, wanted = call.of_rank(rank).given, call.wanted(rank)
    refusable = (call.ask.memory, call.ask.out) != ("plain", "plain")
    kept = given if not call.changes else Either((None, given)) if refusable else None
    return {
        "result": Either((wanted, Refused(words=("contiguous",)))) if refusable else wanted,
        "beside": True,
        "written": False,
        "input": kept,
        "work": Of(True),
        "refused": Alike(call.mesh) if refusable else ...,
    }


# what fills its dtype, and what lies at its edges
VALUES = ("float64:wide", "int64:wide", "float32:edges")


def law(
    name: str, clause: str, control: str, *, number: int, corners: tuple[str, ...] = (), source: str = "", **ways: Any
) -> Law:
    """A law of one collective, of which a run draws ``number`` cases; ``corners`` are tried always."""

    def draw(limits: Limits) -> SearchStrategy[Case]:
        return draws.calls(limits, **ways)

    def narrow(case: Case) -> SearchStrategy[Case]:
        return draws.calls(Limits(case.world, (case.tensor("x").dtype,)), **ways)

    corners = (*corners, *(re.sub(r"x=(\S+)", rf"x=\1:-:{values}", control) for values in VALUES))
    made = draws.collective_law(
        name,
        draws.DOC + (source or name.replace("-", "_")),
        control,
        clause=clause,
        sweep=texts(*corners),
        sweeps=len(corners),
        draw=draw,
        draws=number,
        narrow=narrow,
        members=True,
        needs=(name.replace("-", "_"),),
        weight=0.4,
    )(collective)
    made.due(due)
    return made


LAWS = (
    law(
        "all-reduce",
        "all_reduce leaves the reduction of all members' tensors with each of them.",
        "mesh=2 x=5x3",
        corners=("mesh=2 x=5x3:-:float32:distinct:sliced", "mesh=3 x=5x3:-:float32:distinct:transposed op=max"),
        number=56,
        reduces=True,
        changes=True,
    ),
    law(
        "reduce",
        "reduce leaves the reduction of all members' tensors with the destination.",
        "mesh=2 x=5x3 root=1",
        corners=("mesh=2 x=5x3:-:float32:distinct:sliced", "mesh=3 x=5x3:-:float32:distinct:transposed root=1"),
        number=47,
        root=True,
        reduces=True,
        changes=True,
    ),
    law(
        "broadcast",
        "broadcast leaves what the source has with every member, whether the source is named by rank or by position.",
        "mesh=2 x=5x3 root=1",
        corners=("mesh=2 x=5x3:-:float32:distinct:sliced root=1", "mesh=3 x=5x3:-:float32:distinct:transposed root=1"),
        number=47,
        root=True,
        changes=True,
    ),
    law(
        "all-gather",
        "all_gather gives every member what all members have, in the order of the group, as a list or as one tensor.",
        "mesh=3 x=5x3 form=list",
        corners=(
            "mesh=2 x=5x3 form=stacked",
            "mesh=2 x=() form=stacked",
            "mesh=3 x=2x3 form=list extents=1.3.0",
            "mesh=2 x=5x3:-:float32:distinct:transposed form=list",
            "mesh=2 x=5x3:-:float32:distinct:sliced form=joined",
            "mesh=2 x=5x3 out=sliced form=list",
            "mesh=2 x=5x3 out=transposed form=joined",
        ),
        number=96,
        source="all_gather, all_gather_single",
        forms=("joined", "list", "stacked"),
        uneven=("list",),
        whole=("list", "stacked"),
    ),
    law(
        "gather",
        "gather gives the destination what all members have, in the order of the group.",
        "mesh=3 x=5x3 root=1",
        corners=("mesh=2 x=5x3:-:float32:distinct:sliced", "mesh=2 x=5x3 out=transposed"),
        number=47,
        root=True,
    ),
    law(
        "scatter",
        "scatter gives the member at position i entry i of the list that the source has.",
        "mesh=3 x=5x3 root=1",
        number=47,
        corners=("mesh=2 x=5x3:-:float32:distinct:transposed", "mesh=2 x=5x3 out=transposed"),
        root=True,
    ),
    law(
        "reduce-scatter",
        "reduce_scatter gives the member at position i the reduction of all members' entries i, from lists or tensors.",
        "mesh=2 x=5x3 form=joined",
        corners=(
            "mesh=2 x=5x3 form=stacked",
            "mesh=2 x=() form=stacked",
            "mesh=2 x=5x3 form=list work=async",
            "mesh=2 x=5x3:-:float32:distinct:transposed form=list",
            "mesh=2 x=5x3:-:float32:distinct:sliced form=joined",
            "mesh=2 x=5x3 out=sliced form=list",
            "mesh=2 x=5x3 out=transposed form=joined",
        ),
        number=96,
        source="reduce_scatter, reduce_scatter_single",
        forms=("joined", "list", "stacked"),
        reduces=True,
        uneven=("list",),
        whole=("stacked",),
        expanded=False,
    ),
    law(
        "all-to-all",
        "all_to_all gives the member at position j, as entry i, entry j of the one at position i, whatever the splits.",
        "mesh=2 x=3x2 form=joined splits=1.2/0.3",
        corners=(
            "mesh=2 x=3x2 form=list splits=1.2/3.1",
            "mesh=3 x=3 form=list splits=1.2.0/3.1.1/0.0.2",
            "mesh=2 x=3x2 out=transposed form=joined",
            "mesh=2 x=3x2:-:float32:distinct:transposed form=joined",
            "mesh=2 x=3x2 out=sliced form=list",
        ),
        number=96,
        source="all_to_all, all_to_all_single",
        forms=("joined", "list"),
        uneven=("joined",),
        splits=True,
        min_dims=1,
    ),
)
