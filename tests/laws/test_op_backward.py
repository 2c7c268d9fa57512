"""The cases of gradients through ops, of ``out=`` and of views."""

from __future__ import annotations

import contextlib

import pytest
import torch

from shardlaw.conformance.law.program.parse import Program
from shardlaw.strategies.op_catalogue import OPS
from shardlaw.strategies.op_gradients import DIFFERENTIABLE, UNSETTLED, WITHOUT_GRADIENT, GradientSweep


def test_every_op_has_a_law_or_no_gradient() -> None:
    left_out = set(OPS) - set(DIFFERENTIABLE)
    assert left_out == (WITHOUT_GRADIENT | UNSETTLED | {name for name in OPS if "in-place" in name}) & set(OPS)


def test_what_has_no_gradient_is_known() -> None:
    """No variant of an op that is left out for that gives its operands a gradient."""
    for name in WITHOUT_GRADIENT & set(OPS) - {
        "zeros_like",
        "ones_like",
        "empty_like",
        "setitem",
        "nextafter",
        "detach",
    }:
        for variant in OPS[name].variants:
            sizes = variant.fits(dict.fromkeys(variant.symbols, 3))
            specs = {arg.name: variant.spec(arg, sizes, "float32") for arg in variant.args}
            text = f"op.backward[{name}] mesh=2 {' '.join(f'{key}={spec}' for key, spec in specs.items())} steps={variant.steps(sizes)}"
            leaves = {key: spec.build(1) for key, spec in specs.items()}
            for leaf in leaves.values():
                leaf.requires_grad_(leaf.is_floating_point())
            with contextlib.suppress(RuntimeError):  # a derivative that is not implemented
                result = Program.parse(variant.steps(sizes)).run_plain(leaves)[-1]
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    torch.autograd.backward([result.sum()])
            assert all(leaf.grad is None for leaf in leaves.values()), text


def test_sweeps_are_repeatable() -> None:
    one, other = GradientSweep(DIFFERENTIABLE["addmm"]), GradientSweep(DIFFERENTIABLE["addmm"])
    assert one[3:40] == other[3:40]
    assert {drawn.arrives is None for drawn in one[:12]} == {True, False}
    with pytest.raises(IndexError):
        one[len(one)]
