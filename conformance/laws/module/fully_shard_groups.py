"""The law of modules that fully_shard shards as one group, and of which a pass runs a part, or each on its own."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.fsdp_methods import Inputs, MLPModel, are_unsharded, fsdp_law
from shardlaw.conformance.laws.module.model_fields import (
    Pairs,
    claimed,
    copied_parameters,
    mean_backward,
    reduced_gradients,
    sgd,
    take_step,
)
from shardlaw.reference.mesh import Mesh

# Plain torch, for acts


def run_first(model: Any) -> Any:
    """The first layer of a model alone, as what the model computes."""
    return lambda x: model.relu(model.net1(x))


def backward_by_chunks(model: Any, hidden: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Call the second layer of a model for each row of what the first one has given, and go back through it before the
    next. Returns all rows, and leaves in ``hidden.grad`` what goes back through the first layer."""
    outs = []
    for row, row_grad in zip(hidden.split(1), grad.split(1), strict=True):
        outs.append(model.net2(row))
        outs[-1].backward(row_grad.to(outs[-1].dtype), retain_graph=True)
    return torch.cat(outs)


CASES = (
    "mesh=2 model=mlp dims=5x7x3 way=first",
    "mesh=2 model=mlp dims=5x7x3 way=chunks",
    "mesh=3 model=mlp dims=5x4x3 way=chunks compute=float32",
    "mesh=2 model=mlp dims=5x7x3 way=whole compute=float32",
    "mesh=2 model=mlp dims=5x7x3 way=first compute=float32",
    "mesh=2x2 model=mlp dims=5x7x3 way=chunks",
)


@fsdp_law("grouped", ": module, a list of modules that are grouped; MixedPrecisionPolicy", CASES)
def grouped(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Inputs,
    way: Literal["first", "chunks", "whole"],
    compute: torch.dtype | None = None,
):
    """Modules that are sharded together are trained as they are dense: where a pass runs one of them alone, where the
    last is called for each row on its own, and then where all run. Each is resharded after the forward pass, computes
    in param_dtype and gives its outputs in output_dtype."""
    layers, dtypes = [model.net1, model.net2], list[tuple[str, str]]()
    policy = MixedPrecisionPolicy(param_dtype=compute, output_dtype=torch.float64)
    fully_shard(layers, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    for layer in layers:
        layer.register_forward_hook(lambda _, args, out: dtypes.append((str(args[0].dtype), str(out.dtype))))
    optim, steps, whole = torch.optim.SGD(model.parameters(), lr=0.5), [], model.forward
    for step, (x, grad) in enumerate(inputs):
        model.forward = whole if step or way == "whole" else run_first(model)
        out = model(x)
        unsharded = [are_unsharded(layers)]
        if way == "chunks" and not step:
            hidden = out.detach().requires_grad_()
            out, hidden_out = backward_by_chunks(model, hidden, grad), out
            hidden_out.backward(hidden.grad)
        else:
            out.backward(torch.ones_like(out) if way == "first" and not step else grad)
        unsharded.append(are_unsharded(layers))
        steps.append({"forward": out, "whole": unsharded, **take_step(model, optim)})
    return {"steps": steps, "dtypes": dtypes}


@grouped.due
def _(model, mesh: Mesh, inputs: list[Pairs], way: str, compute, rank: Rank):
    steps, rows = [], len(inputs[0][0][0])
    for step, pairs in enumerate(inputs):
        trained = copy.deepcopy(model)
        if way == "first" and not step:
            trained.forward = run_first(trained)
            pairs = [(x, torch.ones_like(trained(x))) for x, _ in pairs]
        out = mean_backward(trained, pairs)[mesh.ranks.index(rank)].detach()
        grads = reduced_gradients(trained)
        sgd(model, grads)
        steps.append(
            {
                "forward": Near(out, compute),
                "whole": [[False, False]] * 2,
                "gradients": claimed(grads, mesh, compute),
                "parameters": claimed(copied_parameters(model), mesh, compute),
            }
        )
    calls = {"first": 3, "chunks": 3 + rows, "whole": 4}[way]
    return {"steps": steps, "dtypes": [(str(compute or torch.float64), "torch.float64")] * calls}
