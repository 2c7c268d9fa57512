"""The law of backward passes that end when the program says so: gradients that are shared once they are finalized."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Meaningless, Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.fsdp_methods import Inputs, MLPModel, fsdp_law
from shardlaw.conformance.laws.module.model_fields import (
    Pairs,
    claimed,
    copied_parameters,
    mean_backward,
    reduced_gradients,
    sgd,
    take_step,
)
from shardlaw.conformance.laws.shared.newer import require_attribute
from shardlaw.reference.mesh import Mesh

By = Literal["fully-shard", "ddp"]
OfDDP = Literal["hooked", "static", "view", "copied"]
How = Literal["itself", "each", "accumulated", "part", "waited", "off", "early", OfDDP]
CASES = (
    "mesh=2 model=mlp dims=5x7x3 by=fully-shard how=itself",
    "mesh=2 model=mlp dims=5x7x3 by=ddp how=itself",
    "mesh=2 model=mlp dims=5x7x3 by=fully-shard how=each",
    "mesh=3 model=mlp dims=5x7x3 passes=2 by=fully-shard how=each units=1",
    "mesh=2 model=mlp dims=5x7x3 passes=2 by=fully-shard how=accumulated",
    "mesh=2x2 model=mlp dims=5x7x3 passes=2 by=fully-shard how=accumulated units=1",
    "mesh=2 model=mlp dims=5x3x3 passes=2 by=fully-shard how=part units=1",
    "mesh=3 model=mlp dims=5x3x3 passes=2 by=fully-shard how=part",
    "mesh=2 model=mlp dims=5x7x3 by=fully-shard how=waited units=1",
    "mesh=2x2 model=mlp dims=5x7x3 passes=2 by=fully-shard how=waited",
    "mesh=2 model=mlp dims=5x7x3 by=fully-shard how=off units=1",
    "mesh=2 model=mlp dims=5x7x3 by=fully-shard how=early",
    "mesh=2 model=mlp dims=5x7x3 by=ddp how=each",
    "mesh=3 model=mlp dims=5x7x3 passes=2 by=ddp how=each",
    "mesh=2 model=mlp dims=5x7x3 passes=2 by=ddp how=accumulated",
    "mesh=2 model=mlp dims=5x3x3 passes=2 by=ddp how=part",
    "mesh=2 model=mlp dims=5x7x3 by=ddp how=off",
    "mesh=3 model=mlp dims=5x7x3 passes=2 by=ddp how=hooked",
    "mesh=2 model=mlp dims=5x7x3 by=ddp how=static",
    "mesh=2 model=mlp dims=5x7x3 passes=2 by=ddp how=view",
    "mesh=2 model=mlp dims=5x7x3 by=ddp how=copied",
)


# Plain torch, for acts


def forward_of_part(model: Any, how: str, last: bool) -> None:
    """Have the last pass run the first layer alone, for ``part``; all others run the whole model."""
    vars(model).pop("forward", None)
    if how == "part" and last:
        model.forward = lambda x: model.net1(x)


def replicate(model: nn.Module, mesh: Any, how: str) -> Any:
    """The model under DistributedDataParallel, whose backward passes end when told to, unless by themselves."""
    options: dict[str, Any] = {"find_unused_parameters": how == "part", "static_graph": how == "static"}
    parallel: Any = DistributedDataParallel(
        model, process_group=mesh.get_group(), gradient_as_bucket_view=how == "view", **options
    )
    if how != "itself":
        require_attribute(parallel, "finalize_backward")
        parallel.require_manual_backward_finalization = True
    return parallel


def features(case: Case) -> set[str]:
    found = {"module", "backward", f"way:{case.get('how')}"}
    return found | ({"fully-sharded"} if case.get("by") == "fully-shard" else set())


@fsdp_law(
    "finalized",
    "; docstrings of FSDPModule.set_manual_backward_finalization and finalize_backward, and of "
    "DistributedDataParallel: require_manual_backward_finalization, should_finalize_after_backward, finalize_backward",
    CASES,
    features=features,
)
def finalized(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Inputs,
    by: By,
    how: How,
    passes: int = 1,
    units: bool = False,
):
    """Gradients are the mean over the ranks once the backward passes are finalized: after each pass or after several,
    where the last one does not reach all parameters, by a handle, in a hook, before the first pass, which does
    nothing, and in a copy; once passes end by themselves again, too."""
    replicated = by == "ddp"
    if replicated:
        trained = replicate(model, mesh, how)
    else:
        for unit in [model.net1, model.net2, model] if units else [model]:
            fully_shard(unit, mesh=mesh)
        trained = model
        if how != "itself":
            require_attribute(model, "set_manual_backward_finalization")(True)
    if how == "early":
        trained.finalize_backward()
    if how == "copied":
        trained = copy.deepcopy(trained)
        model = trained.module
    optim, steps = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(2):
        outs = []
        if how == "off" and step and replicated:
            trained.require_manual_backward_finalization = False
        elif how == "off" and step:
            trained.set_manual_backward_finalization(False)
        for number, (x, grad) in enumerate(inputs[step * passes : (step + 1) * passes]):
            last = number == passes - 1
            synced = last or how == "each"
            forward_of_part(model, how, last)
            if not replicated:
                trained.set_requires_gradient_sync(synced)
            with trained.no_sync() if replicated and not synced else nullcontext():
                x.requires_grad_()
                outs.append(trained(x * 1))
                waits = synced and how != "itself" and not (how == "off" and step)
                if how == "hooked" and waits and not trained.should_finalize_after_backward:
                    x.register_post_accumulate_grad_hook(lambda _: trained.finalize_backward())
                    waits = False
                outs[-1].backward(grad)
            if how == "waited" and waits:
                trained.finalize_backward(async_op=True).wait()
            elif waits:
                trained.finalize_backward()
        steps.append({"forward": outs, **take_step(model, optim)})
    return {"steps": steps}


@finalized.due
def _(model, mesh: Mesh, inputs: list[Pairs], by: str, how: str, passes: int, rank: Rank):
    if by != {"waited": "fully-shard", "early": "fully-shard", **dict.fromkeys(get_args(OfDDP), "ddp")}.get(how, by):
        raise Meaningless(f"there is no how={how} by={by}")

    def due(named: dict[str, Any]) -> dict[str, Any]:
        if by == "fully-shard":
            return claimed(named, mesh)
        return {name: None if full is None else Near(full) for name, full in named.items()}

    steps = []
    for step in range(2):
        trained, outs = copy.deepcopy(model), []
        for number, pairs in enumerate(inputs[step * passes : (step + 1) * passes]):
            part = trained.net1 if how == "part" and number == passes - 1 else trained
            outs.append(Near(mean_backward(part, pairs)[mesh.ranks.index(rank)].detach()))
        grads = reduced_gradients(trained)
        sgd(model, grads)
        steps.append({"forward": outs, "gradients": due(grads), "parameters": due(copied_parameters(model))})
    return {"steps": steps}
