"""The strides that results of ops claim are judged, and what operands that an op must not change claim after it."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.laws import find
from tests.laws.planting import Plant


@pytest.mark.ranks
@pytest.mark.planted
@pytest.mark.parametrize(
    "text",
    [
        "op.forward[add] mesh=2 a=4x6:S(0) steps=add(a,1)",
        "op.forward[sort] mesh=2 a=4x6:S(0) steps=sort(a,1)",
        "op.program mesh=2 a=4x6:S(0) steps=x=mul(a,2);neg(x)",
        "op.history mesh=2 a=4x6:S(0) steps=neg(a);abs(a)",
    ],
)
def test_results_that_claim_the_strides_of_a_transpose_are_seen(text: str, plant: Plant) -> None:
    case = Case.parse(text)
    law = find(case.law)
    assert plant.holds(law, case) == "held"
    verdict = plant.verdict(law, case, "strides_of_a_transpose_claimed")
    assert verdict.kind == "wrong-metadata"
    assert verdict.check == "strides"


@pytest.mark.ranks
@pytest.mark.planted
def test_operands_that_claim_other_placements_afterwards_are_seen(plant: Plant) -> None:
    case = Case.parse("op.forward[neg] mesh=2 a=4x6:S(0) steps=neg(a)")
    law = find(case.law)
    assert plant.holds(law, case) == "held"
    verdict = plant.verdict(law, case, "operands_left_under_other_placements")
    assert (verdict.kind, verdict.check) == ("wrong-metadata", "operand.a")
