"""The first step of a trace whose result departs from the reference, and the first whose operands contradict their placements."""

from __future__ import annotations

import pytest
import torch

from shardlaw.conformance.law.evidence import Step, TracedTensor
from shardlaw.conformance.run.deviating_step import first_contradicting_step, first_deviating_step
from tests.harness.traces import FULL, RULE, halves, move, piece, ranks, right, wrong


def test_the_first_op_that_departs_is_found() -> None:
    assert first_deviating_step(ranks(right(), right())) is None
    steps = ranks(right(), wrong(), wrong())
    assert first_deviating_step(steps) is steps[0][1]


def test_the_redistribution_in_an_op_is_to_blame_before_the_op() -> None:
    torn = tuple(move(local, FULL + 1, within=0) for local in halves(FULL))
    whole = tuple(move(local, FULL, within=0) for local in halves(FULL))
    steps = ranks(wrong(), torn)  # type: ignore[arg-type]
    assert first_deviating_step(steps) is steps[0][1]
    steps = ranks(wrong(), whole)  # type: ignore[arg-type]
    assert first_deviating_step(steps) is steps[0][0]


@pytest.mark.parametrize("change", ["unfinished", "unlike", "unknown"])
def test_what_the_reference_cannot_judge_does_not_depart(change: str) -> None:
    steps = ranks(wrong())
    if change == "unfinished":
        steps[1][0].completed = False
    elif change == "unlike":
        steps[1][0].name = "aten.abs.default"
    else:
        for its in steps.values():
            its[0].arguments = ((TracedTensor((4,), "2", "", FULL),), {})
    assert first_deviating_step(steps) is None


@pytest.mark.parametrize(("value", "deviates"), [(0.1 + 0.2, False), (0.31, True)])
def test_a_number_may_differ_by_rounding(value: float, deviates: bool) -> None:
    given = TracedTensor((), "2", "R", torch.tensor(0.3, dtype=torch.float64))
    step = Step("op", "aten._local_scalar_dense.default", ((given,), {}), (value, ()), RULE, completed=True)
    assert (first_deviating_step(ranks((step, step))) is step) == deviates


def test_what_has_no_elements_departs_from_nothing() -> None:
    """A step that fills tensors of the meta device, where the whole has elements: nobody can say whether they are the right ones."""
    empty = FULL.to("meta")
    step = Step("op", "aten.relu_.default", ((FULL,), {}), (empty, []), RULE, completed=True, rule_asked=True)
    assert first_deviating_step({0: (step,), 1: (step,)}) is None


def late(name: str, local: torch.Tensor, placements: str) -> Step:
    return Step("op", name, ((piece(local, placements),), {}), (piece(-local, placements), []), RULE, completed=True)


@pytest.mark.parametrize("value", [FULL, FULL[:3]], ids=["replicas", "sizes"])
def test_an_operand_that_is_not_what_its_placements_say_was_made_wrongly(value: torch.Tensor) -> None:
    """A later op gives what it is given: it departs from nothing."""
    first, second = (late("aten.neg.default", local, "S(0)" if len(value) < 4 else "R") for local in (value, value + 1))
    steps = ranks(right(), (first, second))
    assert first_deviating_step(steps) is None
    assert first_contradicting_step(steps) is steps[0][1]
    assert first_contradicting_step(ranks(right(), wrong())) is None
