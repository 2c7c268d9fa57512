"""Laws of ops within torch's modes: what an op gives does not depend on whether it may be gone back from."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.program.fields import Operands, Program
from shardlaw.conformance.laws.op.forward import DTENSOR, case_of
from shardlaw.conformance.laws.op.results import plain_run, registered_everywhere, unless
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.op_corners import MODES, corner_samples

WAYS = ("inference", "no-grad")


def sweep_modes(limits: Limits) -> list[Case]:
    samples = [sample for sample in corner_samples(MODES) if max(sample.mesh.ranks) < limits.most]
    return [case_of(sample).with_fields(mode=mode) for mode in WAYS for sample in samples]


@law(
    "op.modes",
    source=f"{DTENSOR}; torch docs, inference_mode and no_grad: ops on tensors that were made outside are allowed",
    control="mesh=2 a=4x6:S(0) steps=mul(a,2) mode=inference",
    sweep=sweep_modes,
    sweeps=2 * len(corner_samples(MODES)),
    weight=0.6,
    refusal=unless(registered_everywhere),
    features=lambda case: {f"way:{case.get('mode')}"},
)
def modes(steps: Program, operands: Operands, mode: Literal["inference", "no-grad"]):
    """In inference mode and without gradients, an op on tensors that were made before gives what it gives otherwise."""
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        value = steps(operands)[-1]
    # a copy is no inference tensor, of which nothing else may be asked
    return value.clone() if isinstance(value, torch.Tensor) else [one.clone() for one in value]


@modes.due
def _(steps, operands, mesh: DeviceMesh, rank: Rank):
    values, _ = plain_run(steps, operands, cast("Mesh", mesh), rank, exact=False)
    return values[-1]
