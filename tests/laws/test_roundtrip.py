"""The cases of round trips: what they say of both ends, and how they grow smaller."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of, is_known
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.checkpoint.trip import read_trip, tensor_names
from shardlaw.conformance.run.search import draw
from tests.laws.planting import in_folders

LAWS = [law for law in in_folders("roundtrip") if law.id != "roundtrip.example"]  # its cases name models
by_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)


@by_law
def test_every_written_case_is_a_round_trip(law: Law) -> None:
    assert law.sweep is not None
    cases = law.sweep(Limits())
    assert len(set(cases)) == len(cases) >= 3
    assert len(law.sweep(Limits(larger=8))) >= law.sweeps >= 3
    for case in (Case.parse(law.control), *cases):
        trip = read_trip(case)
        assert max(trip.world_sizes) <= 4
        assert Case.parse(case.text) == case
        assert all(map(is_known, features_of(case, law)))
        for end in (trip.save, trip.load):
            for name in tensor_names(case):
                layout = end.layout(name)
                assert layout is None or layout.shape == end.specs[name].shape


# shapes of blocks and of their scales go together: what is narrowed alone is rejected
@pytest.mark.parametrize("law", [law for law in LAWS if law.id != "roundtrip.quantized"], ids=lambda law: law.id)
def test_cases_are_narrowed_to_smaller_ones(law: Law) -> None:
    assert law.narrow is not None
    for case in dict.fromkeys([Case.parse(law.control), *law.sweep(Limits())[:3]]):  # type: ignore[misc]
        near: list[Case] = []
        draw(law.narrow(case), 0, 12, near.append)
        assert len(set(near)) > 1
        for smaller in near:
            assert {*tensor_names(smaller)} <= {*tensor_names(case)}
            assert max(read_trip(smaller).world_sizes) <= max(read_trip(case).world_sizes)
