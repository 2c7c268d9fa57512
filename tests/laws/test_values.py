"""Backends that handle most values right: what a smoke run always tries shows each fault, in collectives and in redistributions."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws import find
from tests.laws.planting import Plant

SHOWN = {
    "reductions_lose_nan": (
        "collective.all-reduce mesh=2 x=5x3:-:float32:edges",
        "redistribute.reduce mesh=2 x=5x3:P(sum):float32:edges to=R",
        "redistribute.reduce-scatter mesh=2 x=5x3:P(sum):float32:edges to=S(0)",
    ),
    "doubles_are_reduced_as_floats": (
        "collective.all-reduce mesh=2 x=5x3:-:float64:wide",
        "collective.reduce-scatter mesh=2 x=5x3:-:float64:wide form=joined",
        "redistribute.reduce mesh=2 x=5x3:P(sum):float64:wide to=R",
        "redistribute.reduce-scatter mesh=2 x=5x3:P(sum):float64:wide to=S(0)",
    ),
    "payloads_end_at_64_kib": (
        "collective.large mesh=2 call=all_reduce elements=65537 dtype=uint8",
        "redistribute.large mesh=2 rows=5463 dtype=float32 from=P(sum) to=R",
        "redistribute.large mesh=4 rows=43691 dtype=float64 from=S(0) to=R",
    ),
}


@pytest.mark.ranks
@pytest.mark.planted
@pytest.mark.parametrize(("fault", "text"), [(fault, text) for fault, texts in SHOWN.items() for text in texts])
def test_smoke_runs_try_a_case_that_shows_the_fault(fault: str, text: str, plant: Plant) -> None:
    case = Case.parse(text)
    law = find(case.law)
    assert law.sweep is not None
    assert case in law.sweep(Limits())[: law.sweeps]
    assert plant.holds(law, case) == "held"
    assert plant.verdict(law, case, fault).kind == "wrong-value"
