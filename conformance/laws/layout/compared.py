"""The law of tensors that are compared with one another."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.laws.layout.distribute import DOC
from shardlaw.conformance.laws.module.arguments import DTensorValue, FromCase, dtensor

SHOWN = (
    "mesh=2 x=5x3:S(0) by=close",
    "mesh=2 x=4x3:R by=close at=5",
    "mesh=2 x=5x3:S(0) by=close at=14",
    "mesh=2x2 x=4x6:S(0),S(1) by=close at=0",
    "mesh=2 x=5x3:S(0) by=equal",
    "mesh=3 x=5x3:S(0) by=equal at=14",
    "mesh=2x2 x=4x6:R,S(1) by=equal at=23",
)


def other_of(case: Case) -> DTensorValue:
    """The tensor ``x``, of which the element at the position ``at``, if any, is another."""
    spec = case.tensor("x")
    full = spec.build(case.seed).clone()
    if "at" in case:
        full.view(-1)[case.integer("at")] += 1
    return dtensor(case.mesh(), full, *(spec.placements or ()))


Other = Annotated[Any, FromCase(other_of)]


@law(
    "layout.compared",
    source=f"torch.testing docs, assert_close: raises where actual and expected are not close; torch.equal; {DOC}",
    control=SHOWN[0],
    sweep=texts(*SHOWN),
    sweeps=len(SHOWN),
    features=lambda case: {f"way:{case.get('by')}"},
    needs=("all_reduce",),
    weight=0.3,
)
def compared(x: DTensor, other: Other, by: Literal["close", "equal"], at: int | None = None):
    """Tensors that differ in an element are told apart on every rank, whichever holds it, and equal ones on none."""
    if by == "equal":
        return {"told apart": not torch.equal(x, other)}
    return {"told apart": caught(torch.testing.assert_close, x, other)}


@compared.due
def _(at: int | None, by: str):
    if by == "equal":
        return {"told apart": Of(at is not None, "wrong-value")}
    return {"told apart": Of(None, "wrong-error") if at is None else Refused((AssertionError,))}
