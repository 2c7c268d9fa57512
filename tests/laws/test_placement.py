"""The laws of meshes, layouts, redistributions and gradients on real ranks: what must hold does, and each sees its planted fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.case import Case
from conformance.features import features_of, known
from conformance.law import Law, Limits
from conformance.laws import laws_of
from conformance.report.reproducer import reproducer
from conformance.search import draw, seed_of
from conformance.target import Target
from conformance.world import Pool

ROOT = Path(__file__).parents[2]
ROOMS = (
    "mesh",
    "mesh_views",
    "mesh_made",
    "mesh_algebra",
    "mesh_tables",
    "layout",
    "layout_local",
    "layout_factories",
    "layout_wrapper",
    "layout_kinds",
    "layout_modules",
    "layout_random",
    "redistribute",
    "redistribute_partial",
    "redistribute_refusals",
    "redistribute_history",
    "redistribute_pairs",
    "redistribute_closure",
    "redistribute_masked",
    "redistribute_values",
    "redistribute_views",
    "gradient",
    "gradient_ways",
    "gradient_graphs",
)
LAWS = [law for room in ROOMS for law in laws_of(f"conformance.laws.{room}")]
FIRST_CASES = 48
by_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)


def first_cases(law: Law, count: int = FIRST_CASES) -> list[Case]:
    """What a run tries first, after the control."""
    cases = [Case.parse(law.control)]
    limits = Limits()
    if law.sweep is not None:
        cases += law.sweep(limits)[:count]
    if law.draw is not None:
        draw(law.draw(limits), seed_of(0, law.id), count, cases.append)
    return list(dict.fromkeys(cases))


@dataclass
class Plant:
    """Worlds in which one fault at a time is planted: every case goes to a world of its own, made after the fault was named."""

    pool: Pool
    named: Path

    def judge(self, law: Law, cases: Sequence[Case], fault: str = "") -> list[str]:
        """What is said of each case, up to the first that deviates."""
        self.named.write_text(fault)
        said: list[str] = []
        for case in cases:
            verdict = self.pool.fresh(law, case)
            said.append(verdict.kind or verdict.status)
            if verdict.status == "deviates":
                break
        return said


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    named = tmp_path_factory.mktemp("planted") / "fault"
    named.write_text("")
    env = (("PYTHONPATH", str(ROOT)), ("PLANTED_FAULT_FILE", str(named)))
    with Pool(Target(setup="tests.planted.placement_faults:planted", env=env)) as pool:
        yield Plant(pool, named)


@by_law
def test_control_holds(law: Law, plant: Plant) -> None:
    plant.named.write_text("")
    (verdict,) = plant.pool.judge(law, [Case.parse(law.control)])
    assert verdict.status == "held", verdict.message


@by_law
@pytest.mark.planted
def test_the_planted_fault_is_seen(law: Law, plant: Plant) -> None:
    control, *more = first_cases(law)
    healthy = [control, *(case for case in more if "@" not in case.text)]  # on tables out of order torch deviates by itself
    said = plant.judge(law, healthy, law.planted)
    assert said[-1] not in ("held", "refused", "rejected", "hang", "crash"), said


@by_law
def test_every_case_can_be_told_again(law: Law) -> None:
    for case in first_cases(law, 24):
        assert Case.parse(case.text) == case
        assert case.world <= 4
        assert [feature for feature in features_of(case, law) if not known(feature)] == []


@by_law
def test_the_control_has_a_reproducer(law: Law) -> None:
    assert "dist.init_process_group" in reproducer(law, Case.parse(law.control))
