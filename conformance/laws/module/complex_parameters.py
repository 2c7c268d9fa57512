"""A law of the complex parameters of a fully_shard model, which has a policy for floats."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.fields import NamedMesh
from shardlaw.conformance.laws.module.arguments import dtensor
from shardlaw.conformance.laws.module.fully_shard import FSDP
from shardlaw.conformance.laws.module.model_fields import NEEDS, reduced_gradients
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S


class Waves(nn.Module):
    """A complex weight; the output is the sum of the squares of its scaled elements."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.arange(rows) + 1.0, 2.0 - torch.arange(rows)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.weight * x).square().sum()


@law(
    "module.complex",
    source=f"{FSDP}, MixedPrecisionPolicy; torch docs, complex numbers: gradients of real losses are complex",
    control="mesh=2 rows=4",
    cases=(
        "mesh=2 rows=4",
        "mesh=2x2 rows=3",
        "mesh=2 rows=4 compute=bfloat16 reduce=float32",
        "mesh=2 rows=3 reduce=bfloat16",
        "mesh=2 rows=4 compute=bfloat16",
    ),
    features=lambda case: {"module", "fully-sharded", "backward"},
    needs=NEEDS,
    weight=0.1,
)
def complex_parameters(
    mesh: NamedMesh, rows: int, compute: torch.dtype | None = None, reduce: torch.dtype | None = None
):
    """The gradients of complex parameters are complex, and means over all ranks, whatever floats are computed or
    reduced in."""
    model = Waves(rows)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce))
    index = mesh.mesh.flatten().tolist().index(dist.get_rank())
    model(torch.tensor(index + 1.0)).backward()
    return reduced_gradients(model)


@complex_parameters.due
def _(mesh: Mesh, rows: int):
    scale = 2 * sum((index + 1) ** 2 for index in range(mesh.size)) / mesh.size
    return {"weight": dtensor(mesh, Waves(rows).weight * scale, *(R(),) * (mesh.ndim - 1), S(0))}
