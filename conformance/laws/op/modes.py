"""The law of ops in inference mode and without gradients."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.program.fields import Operands, Program
from shardlaw.conformance.laws.op.forward import DTENSOR, to_case
from shardlaw.conformance.laws.op.results import due_results, has_plain_tensors, refusal_unless
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.op_corners import MODES, corner_samples

WAYS = ("inference", "no-grad")


def sweep_modes(limits: Limits) -> list[Case]:
    samples = [sample for sample in corner_samples(MODES) if max(sample.mesh.ranks) < limits.most]
    return [to_case(sample).with_fields(mode=mode) for mode in WAYS for sample in samples]


@law(
    "op.modes",
    source=f"{DTENSOR}; torch docs, inference_mode and no_grad: ops on tensors that were made outside are allowed",
    control="mesh=2 a=4x6:S(0) steps=mul(a,2) mode=inference",
    sweep=sweep_modes,
    sweeps=2 * len(corner_samples(MODES)),
    weight=0.6,
    refusal=refusal_unless(has_plain_tensors),
    features=lambda case: {f"way:{case.get('mode')}"},
)
def modes(steps: Program, operands: Operands, mode: Literal["inference", "no-grad"]):
    """In inference mode and under no_grad, an op on tensors created before has the same result as outside."""
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        value = steps(operands)[-1]
    # a copy is no inference tensor, which would refuse further calls
    return value.clone() if isinstance(value, torch.Tensor) else [part.clone() for part in value]


@modes.due
def _(steps, operands, mesh: DeviceMesh, rank: Rank):
    values, _ = due_results(steps, operands, cast("Mesh", mesh), rank, exact=False)
    return values[-1]
