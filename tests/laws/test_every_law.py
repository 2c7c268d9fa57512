"""Every law on real ranks: its control holds and its script exits 0; with the planted fault the same case deviates and the script exits 1.

The laws of ops, hundreds of a kind, meet their faults together in ``test_op*.py``.
"""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws import MODULES
from shardlaw.conformance.report.reproducer import FaultInfo, render_reproducer
from shardlaw.conformance.run import proof
from tests.laws.planting import PLANT, UNSEEN, Plant, in_folders
from tests.planted.hook import Fault, fault_of

LAWS = in_folders(*{room.partition(".")[0] for room in MODULES} - {"op"})
by_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)


def shown_by(law: Law) -> tuple[Fault, Case]:
    """The fault that a law must catch, and the case that shows it."""
    fault = fault_of(law.id)
    assert fault is not None, f"no fault of tests/planted breaks {law.id}"
    return fault, Case.parse(fault.case or law.control)


@by_law
@pytest.mark.ranks
def test_control_holds(law: Law, plant: Plant) -> None:
    assert plant.holds(law, Case.parse(law.control)) == "held"


@by_law
@pytest.mark.ranks
@pytest.mark.planted
def test_the_planted_fault_is_seen_in_a_case_that_holds_without_it(law: Law, plant: Plant) -> None:
    fault, case = shown_by(law)
    assert plant.holds(law, case) == "held"
    verdict = plant.verdict(law, case, fault.name)
    assert (verdict.kind or verdict.status) not in UNSEEN, verdict.message
    script = render_reproducer(law, case, FaultInfo.from_verdict(verdict))
    healthy = proof.run_script(script)
    assert healthy.code == 0, healthy.output
    faulty = proof.run_script(script, setup=PLANT, argument=fault.name)
    assert faulty.code == 1, faulty.output
