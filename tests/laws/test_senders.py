"""A receiver is told who sent what it got."""

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
        "collective.send-recv mesh=2 x=5x3 sends=0-1 how=blocking",
        "collective.any-source mesh=2 x=5x3 sends=0-1 how=blocking by=anyone",
        "collective.objects mesh=2 call=send_object_list values=text count=1",
    ],
)
def test_a_receiver_that_is_told_of_another_sender_is_seen(text: str, plant: Plant) -> None:
    case = Case.parse(text)
    law = find(case.law)
    assert plant.holds(law, case) == "held"
    verdict = plant.verdict(law, case, "receivers_are_told_of_themselves")
    assert (verdict.kind, verdict.check) == ("wrong-value", "sender")
