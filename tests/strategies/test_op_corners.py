"""The tables of programs: each line means something, and the plain run of it gives a result."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.program.fields import operands_of
from shardlaw.conformance.law.program.parse import Program
from shardlaw.conformance.laws.op.backward import case_of as gradient_case
from shardlaw.conformance.laws.op.backward import flat, plain_run
from shardlaw.conformance.laws.op.forward import case_of
from shardlaw.conformance.laws.op.results import plain_of
from shardlaw.strategies.op_corners import FORWARD, corner_gradients, corner_samples
from shardlaw.strategies.op_gradients import Backward
from shardlaw.strategies.op_programs import family_histories
from shardlaw.strategies.ops import Sample


@pytest.mark.parametrize("sample", [*corner_samples(), *family_histories()], ids=lambda sample: sample.steps)
def test_programs_run_plain(sample: Sample) -> None:
    case = case_of(sample)
    assert flat(Program.parse(sample.steps).run_plain(plain_of(operands_of(case)))[-1])


@pytest.mark.parametrize("drawn", corner_gradients(), ids=lambda drawn: drawn.sample.steps)
def test_leaves_have_gradients(drawn: Backward) -> None:
    grads = plain_run(gradient_case(drawn)).grads
    assert grads
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())


def test_every_reduction_takes_the_place_of_a_star() -> None:
    assert "P(*)" in FORWARD
    found = {str(spec.placements) for sample in corner_samples("2 | a=4:P(*) | neg(a)") for _, spec in sample.tensors}
    assert len(found) == 4
