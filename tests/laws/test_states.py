"""What laws of states judge beside the values that are set: each check is made to fail by a fault of its own."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.laws import find
from tests.laws.planting import Plant

BLANK = "optimizer.blank mesh=2 x=4x2:S(0):float32:small a=2:S(0):float32:small how=broadcast"


@pytest.mark.ranks
@pytest.mark.planted
@pytest.mark.parametrize(
    ("text", "fault", "check"),
    [
        (f"{BLANK} blank=first", "parameters_replaced_when_set", "others in place"),
        (f"{BLANK} blank=all again=yes", "parameters_replaced_when_set", "others in place next"),
        (f"{BLANK} blank=all", "parameters_become_buffers", "parameters"),
        ("optimizer.whole-model mesh=2 x=4x2:-:float64 how=sharded", "states_set_as_zeros", "x"),
        (
            "optimizer.unfrozen mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small with=frozen by=module",
            "frozen_parameters_stay",
            "names",
        ),
        ("roundtrip.metadata mesh=2 x=5:S(0) state={x:x,n:1}", "metadata_returned_without_paths", "returned otherwise"),
        ("roundtrip.subset mesh=2 x=4:S(0) state={x:x,u:[1,2]} into={x:x,u:[]}", "values_left_as_they_were", "loaded"),
    ],
)
def test_each_check_of_a_state_is_made_to_fail(text: str, fault: str, check: str, plant: Plant) -> None:
    case = Case.parse(text)
    law = find(case.law)
    assert plant.holds(law, case) == "held"
    verdict = plant.verdict(law, case, fault)
    assert (verdict.status, verdict.check) == ("deviates", check)
