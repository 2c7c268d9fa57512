"""The law of parameters that say themselves how fully_shard gathers them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near, Refused, caught
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.act_helpers import (
    AfterAlone,
    BeforeAlone,
    GivenAll,
    GivenMesh,
    GivenTwo,
    InUnlikeParts,
    TwoParts,
)
from shardlaw.conformance.laws.module.fsdp_methods import Inputs, MLPModel
from shardlaw.conformance.laws.module.fully_shard import FSDP, Reshard
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Pairs,
    claimed,
    copied_parameters,
    mean_backward,
    reduced_gradients,
    sgd,
    take_step,
    uneven,
)
from shardlaw.reference.mesh import Mesh

# the hooks of a tensor subclass: which classes have them
HOOKS: dict[str, Any] = {
    "mesh": GivenMesh,
    "all": GivenAll,
    "before": BeforeAlone,
    "after": AfterAlone,
    "two": GivenTwo,
    "unlike": InUnlikeParts,
}
CASES = (
    "mesh=2 model=mlp dims=5x7x3 hooks=all",
    "mesh=3 model=mlp dims=5x7x4 hooks=all units=1",
    "mesh=2 model=mlp dims=5x6x4 hooks=mesh",
    "mesh=2x2 model=mlp dims=5x6x4 hooks=mesh units=1 reshard=no",
    "mesh=2 model=mlp dims=5x7x3 hooks=before",
    "mesh=2 model=mlp dims=5x7x3 hooks=after",
    "mesh=2 model=mlp dims=5x7x3 hooks=two",
    "mesh=4 model=mlp dims=5x8x4 hooks=mesh reshard=2",
    "mesh=2 model=mlp dims=5x6x4 hooks=unlike",
    "mesh=1x2 model=mlp dims=5x6x4 hooks=mesh",
)


def features(case: Case) -> set[str]:
    return {"module", "fully-sharded", "backward"} | uneven(case.shape("dims")[1:], case.mesh().shape[-1])


# Plain torch, for the act


def full_values(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters whose local tensors are no subclass."""
    for name, parameter in parameters.items():
        local = parameter.to_local()
        if isinstance(local, TwoParts):
            sizes = {"shape": parameter.shape, "stride": parameter.stride()}
            mesh, placements = parameter.device_mesh, parameter.placements
            parameters[name] = DTensor.from_local(local.full(), mesh, placements, run_check=False, **sizes)
    return parameters


@law(
    "module.gather-hooks",
    source=f"{FSDP}; its errors about fsdp_pre_all_gather and fsdp_post_all_gather of local tensors",
    control=CASES[0],
    cases=CASES,
    features=features,
    needs=NEEDS,
    weight=0.2,
)
def gather_hooks(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Inputs,
    hooks: Literal["mesh", "all", "before", "after", "two", "unlike"],
    units: bool = False,
    reshard: Reshard = True,
):
    """A model with weights of a tensor subclass that says how it is gathered trains as the dense one; one of the two
    hooks alone, other arguments, and weights that stay sharded over fewer ranks are refused."""
    for layer in (model.net1, model.net2):
        layer.weight = nn.Parameter(HOOKS[hooks].of(layer.weight.detach()))

    def train() -> Any:
        for unit in [model.net1, model.net2, model] if units else [model]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        optim, steps = torch.optim.SGD(model.parameters(), lr=0.5), []
        for x, grad in inputs:
            out = model(x)
            out.backward(grad)
            step = take_step(model, optim)
            steps.append({**step, "forward": out, "parameters": full_values(step["parameters"])})
        return steps

    return {"steps": caught(train)}


@gather_hooks.due
def _(model, mesh: Mesh, inputs: list[Pairs], hooks: str, reshard: Any, rank: Rank):
    if hooks in ("before", "after", "two") or (isinstance(reshard, int) and not isinstance(reshard, bool)):
        return {"steps": Refused((AssertionError, NotImplementedError))}
    steps = []
    for pairs in inputs:
        model.zero_grad()
        outs = mean_backward(model, pairs)
        grads = reduced_gradients(model)
        sgd(model, grads)
        due = {"gradients": claimed(grads, mesh), "parameters": claimed(copied_parameters(model), mesh)}
        steps.append({**due, "forward": Near(outs[mesh.ranks.index(rank)].detach())})
    return {"steps": steps}
