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
from shardlaw.strategies.op_corners import corner_samples

WAYS = ("inference", "no-grad")

# views and other ops, for torch's modes
MODES = """
2 | a=4x6:S(0) | mul(a,2) t(a) view(a,(2,2,6)) permute(a,(1,0)) unsqueeze(a,0) expand(a,(2,4,6)) narrow(a,1,1,2)
2 | a=4x6:S(0) | select(a,1,0) detach(a)
2 | a=4x6:S(0) | getitem(a,...) getitem(a,(slice(None),slice(1,3))) unflatten(a,0,(2,2)) view_as(a,a) clone(a)
2 | a=4x6:S(0) | sum(a,0) chunk(a,2,1) a.T
2 | a=4x6:S(0) b=4x6:R | add(a,b) maximum(b,a) cat([a,b]) where(gt(a,b),a,b) a.add_(b) a.copy_(b)
2 | a=4x6:S(0) b=4x6:R | nn.functional.softmax(a,1)
2 | a=4x3:S(0):float32:small b=3x4:S(1):float32:small | mm(a,b) matmul(b,a) nn.functional.linear(a,t(b))
2 | a=4x3:R w=3:R b=3:R | nn.functional.layer_norm(a,(3,),w,b) squeeze(unsqueeze(a,1),1) movedim(a,0,1)
2x2 | a=4x6:S(0),S(1) | t(a) view(a,(2,2,6)) add(a,a) sum(a) redistribute(a,'R,R') a.mul_(2)
3 | a=5x4:S(0) | t(a) unbind(a,1) split(a,2,1) cumsum(a,1) flip(a,(1,))
2 | a=4x3:P(sum):float32:small | t(a) mul(a,2) redistribute(a,'S(0)') nn.functional.relu(a)
2 | a=4x6:S(0) b=1x6:R | x=mul(a,2);y=mul(b,2);expand_as(y,x) x=mul(a,2);view_as(x,a) x=mul(a,2);unflatten(x,0,(2,2))
2 | a=4x6:S(0) b=1x6:R | x=mul(a,2);t(x)
2 | a=4x6:S(0) b=1x6:R | x=mul(a,2);reshape(x,(2,2,6)) x=mul(a,2);flatten(x) x=mul(a,2);tensor_split(x,3,1)
2 | a=4x6:S(0) b=1x6:R | expand_as(b,a)
"""


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
