"""The tables of programs: each line means something, and the plain run of it gives a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from shardlaw.conformance.law.program.fields import operands_of
from shardlaw.conformance.law.program.parse import Program
from shardlaw.conformance.laws.op.backward import flatten, run_dense
from shardlaw.conformance.laws.op.backward import to_case as gradient_case
from shardlaw.conformance.laws.op.forward import to_case
from shardlaw.conformance.laws.op.results import dense_operands
from shardlaw.strategies.op_corners import FORWARD, corner_samples
from shardlaw.strategies.op_gradient_corners import corner_gradients
from shardlaw.strategies.op_gradients import Backward
from shardlaw.strategies.op_programs import family_histories
from shardlaw.strategies.ops import Sample

Item = TypeVar("Item")


def nothing_of(give: Callable[[Item], bool], items: Iterable[Item]) -> dict[str, str]:
    """Those that do not give what they should, or raise."""
    wrong = {}
    for item in items:
        try:
            found = "" if give(item) else "nothing"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found:
            wrong[str(item)] = found
    return wrong


def has_result(sample: Sample) -> bool:
    return bool([*flatten(Program.parse(sample.steps).run_plain(dense_operands(operands_of(to_case(sample))))[-1])])


def has_gradients(drawn: Backward) -> bool:
    grads = run_dense(gradient_case(drawn)).grads
    return bool(grads) and all(grad is not None and bool(grad.isfinite().all()) for grad in grads.values())


def test_programs_run_plain() -> None:
    samples = [*corner_samples(), *family_histories()]
    assert len(samples) >= 300
    assert nothing_of(has_result, samples) == {}


def test_leaves_have_gradients() -> None:
    gradients = corner_gradients()
    assert len(gradients) >= 30
    assert nothing_of(has_gradients, gradients) == {}


def test_every_reduction_takes_the_place_of_a_star() -> None:
    assert "P(*)" in FORWARD
    found = {str(spec.placements) for sample in corner_samples("2 | a=4:P(*) | neg(a)") for _, spec in sample.tensors}
    assert len(found) == 4
