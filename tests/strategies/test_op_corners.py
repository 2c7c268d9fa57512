"""The tables of programs: each line means something, and the plain run of it gives a result."""

from __future__ import annotations

import pytest

from conformance.laws.op.backward import case_of as gradient_case
from conformance.laws.op.backward import plain_gradients
from conformance.laws.op.check import leaves, operands, plain_of, program_of
from conformance.laws.op.forward import case_of
from strategies.op_corners import FORWARD, corner_gradients, corner_samples
from strategies.op_gradients import Backward
from strategies.op_programs import family_histories
from strategies.ops import Sample


@pytest.mark.parametrize("sample", [*corner_samples(), *family_histories()], ids=lambda sample: sample.steps)
def test_programs_run_plain(sample: Sample) -> None:
    case = case_of("op.program", sample)
    assert list(leaves(program_of(case).run(plain_of(operands(case)))[-1]))


@pytest.mark.parametrize("drawn", corner_gradients(), ids=lambda drawn: drawn.sample.steps)
def test_leaves_have_gradients(drawn: Backward) -> None:
    case = gradient_case("op.program-backward", drawn)
    _, _, grads = plain_gradients(case, operands(case))
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())


def test_every_reduction_takes_the_place_of_a_star() -> None:
    assert "P(*)" in FORWARD
    found = {str(spec.placements) for sample in corner_samples("2 | a=4:P(*) | neg(a)") for _, spec in sample.tensors}
    assert len(found) == 4
