"""The strategies that other suites use: each one in a plain test, typed, and honest about its options."""

from __future__ import annotations

import inspect
import typing

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw import strategies
from shardlaw.conformance.law.program.parse import Program
from shardlaw.reference.mesh import Mesh

pytestmark = pytest.mark.ranks

NEEDED: dict[str, tuple[object, ...]] = {"exact_meshes": (4,), "placements": (Mesh.of(2), 2), "shards": (Mesh.of(3),)}
# one name is an enumerator
NAMES = [name for name in strategies.__all__ if name != "placement_pairs"]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_strategy_by_itself(name: str) -> None:
    made = getattr(strategies, name)(*NEEDED.get(name, ()))
    assert isinstance(made, SearchStrategy)
    drawn = []

    @settings(max_examples=10, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @hypothesis.given(made)
    def take(example: object) -> None:
        drawn.append(example)

    take()
    assert drawn


@pytest.mark.parametrize("name", NAMES)
def test_each_is_typed_and_says_how_it_shrinks(name: str) -> None:
    function = getattr(strategies, name)
    hints = typing.get_type_hints(function)
    assert set(inspect.signature(function).parameters) <= set(hints)
    assert typing.get_origin(hints["return"]) is SearchStrategy
    assert "Shrinks" in (function.__doc__ or "")


def test_ops_can_be_carried_out() -> None:
    @settings(max_examples=30, deadline=None, database=None)
    @hypothesis.given(strategies.ops(["add", "nn.functional.softmax", "sum"], world_size=3, dtypes=["float64"]))
    def carry_out(sample: typing.Any) -> None:
        assert max(sample.mesh.ranks) < 3
        values = Program.parse(sample.steps).run({name: spec.build(0) for name, spec in sample.tensors})
        assert values

    carry_out()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"names": ["meen"]}, r"names: no op is called 'meen' \(nearest: mean"),
        ({"names": "mean"}, "names='mean': want a sequence of choices"),
        ({"names": []}, "names is empty: want at least one choice"),
        ({"world_size": 1}, "world_size=1: want a whole number, 2 or more"),
    ],
)
def test_ops_say_what_is_wrong(options: dict[str, typing.Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        strategies.ops(**options)
