"""The laws of meshes, layouts, redistributions and gradients on real ranks: what must hold does, and each sees its planted fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.case import Case
from conformance.features import features_of, known
from conformance.law import Law
from conformance.report.reproducer import reproducer
from tests.laws.planting import UNSEEN, Plant, first_cases, in_folders, planting

LAWS = [law for law in in_folders("mesh", "layout", "redistribute", "gradient") if not law.id.startswith("layout.math")]
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
    said = plant.judge(law, healthy, law.planted)
    assert said not in UNSEEN


@by_law
def test_every_case_can_be_told_again(law: Law) -> None:
    for case in first_cases(law, 24):
        assert Case.parse(case.text) == case
        assert case.world <= 4
        assert [feature for feature in features_of(case, law) if not known(feature)] == []


@by_law
def test_the_control_has_a_reproducer(law: Law) -> None:
    assert "dist.init_process_group" in reproducer(law, Case.parse(law.control))
