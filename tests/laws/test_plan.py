"""The laws of plans and of the arithmetic of layouts, one process playing all ranks: what must hold does, and each sees its fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.case import Case
from conformance.features import features_of, known
from conformance.law import Law
from conformance.laws import laws_of
from conformance.report.reproducer import reproducer
from tests.laws.planting import UNSEEN, Plant, first_cases, in_folders, planting

LAWS = [*in_folders("plan"), *laws_of("conformance.laws.layout.math")]
by_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    with planting(tmp_path_factory.mktemp("planted")) as plant:
        yield plant


@by_law
@pytest.mark.planted
def test_control_holds_and_the_planted_fault_is_seen(law: Law, plant: Plant) -> None:
    control = Case.parse(law.control)
    assert plant.judge(law, [control]) == "held"
    assert plant.judge(law, [control], law.planted) not in UNSEEN


@by_law
def test_every_case_is_for_one_process_and_can_be_told_again(law: Law) -> None:
    for case in first_cases(law):
        assert case.world == 1
        assert Case.parse(case.text) == case
        assert [feature for feature in features_of(case, law) if not known(feature)] == []


@by_law
def test_the_control_has_a_reproducer(law: Law) -> None:
    if law.script is not None:
        assert "dist.init_process_group" in reproducer(law, Case.parse(law.control))


def test_few_cases_are_too_long_for_a_reproducer() -> None:
    told = left = 0
    for law in LAWS:
        for case in first_cases(law) if law.script is not None else []:
            try:
                compile(reproducer(law, case), law.id, "exec")
                told += 1
            except ValueError:
                left += 1
    assert told > 300
    assert left <= told // 20
