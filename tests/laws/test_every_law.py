"""Every law on real ranks: what must hold does, the fault that is planted for it is seen, its cases read back, and a script tells them.

The laws of ops, hundreds of a kind, meet their faults together in ``test_op*.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.case import Case
from conformance.features import features_of, known
from conformance.law import Law
from conformance.laws import MODULES
from conformance.report.reproducer import ScriptError, reproducer
from tests.laws.planting import UNSEEN, Plant, first_cases, in_folders, planting

LAWS = in_folders(*{room.partition(".")[0] for room in MODULES} - {"op"})
by_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    with planting(tmp_path_factory.mktemp("planted")) as plant:
        yield plant


@by_law
def test_control_holds(law: Law, plant: Plant) -> None:
    assert plant.holds(law, Case.parse(law.control)) == "held"


@by_law
@pytest.mark.planted
def test_the_planted_fault_is_seen(law: Law, plant: Plant) -> None:
    control, *more = first_cases(law)
    healthy = [control, *(case for case in more if "@" not in case.text)]  # on tables out of order torch deviates by itself
    assert plant.judge(law, healthy, law.planted) not in UNSEEN


@by_law
def test_every_case_can_be_told_again(law: Law) -> None:
    for case in first_cases(law, 24):
        assert Case.parse(case.text) == case
        assert case.world <= 4
        assert [feature for feature in features_of(case, law) if not known(feature)] == []


@by_law
def test_cases_have_reproducers_unless_they_are_large(law: Law) -> None:
    said = [script_or_reason(law, case) for case in first_cases(law, 12)] if law.script is not None else []
    told = [text for text in said if "dist.init_process_group" in text]
    assert [reason for reason in said if reason not in told and "at most" not in reason] == []
    assert told or not said


def script_or_reason(law: Law, case: Case) -> str:
    try:
        return reproducer(law, case)
    except ScriptError as error:
        return str(error)
