"""The laws of sharded tensors, optimizers' states and examples on real ranks: what must hold does, and each sees its planted fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.case import Case
from conformance.features import features_of, known
from conformance.law import Law
from conformance.report.reproducer import ScriptError, reproducer
from tests.laws.planting import UNSEEN, Plant, first_cases, in_folders, planting

LAWS = in_folders("sharded_tensor", "optimizer", "documents")
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
def test_every_case_can_be_told_again(law: Law) -> None:
    for case in first_cases(law, 24):
        assert Case.parse(case.text) == case
        assert case.world <= 4
        assert [feature for feature in features_of(case, law) if not known(feature)] == []


@by_law
def test_cases_have_reproducers(law: Law) -> None:
    told = 0
    cases = first_cases(law, 12) if law.script is not None else []
    for case in cases:
        try:
            compile(reproducer(law, case), law.id, "exec")
            told += 1
        except ScriptError:
            continue
    assert 2 * told >= len(cases)
