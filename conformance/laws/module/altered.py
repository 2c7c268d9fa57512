"""The law of what is done to a tensor-parallel model besides training it: it is copied, averaged, cast, loaded, called
with other parameters, and its parameters are replaced, pruned and parametrized."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Model,
    ModelMesh,
    OneBatch,
    StylePlan,
    claimed,
    forward_backward,
    take_step,
)
from shardlaw.reference.mesh import Mesh

Does = Literal[
    "copied", "averaged", "averaged-exponentially", "cast", "cast-by-swap", "loaded", "loaded-by-swap", "loaded-whole",
    "assigned", "called", "replaced", "swapped", "pruned", "pruned-later", "parametrized-later", "parametrized",
    "parametrized-rows",
]  # fmt: skip
CASES = tuple(
    f"mesh={2 + at % 2} way=pair dims=5x6x3 rows=3 model=mlp does={does}" for at, does in enumerate(get_args(Does))
)


# Plain torch, for acts


class UnitRows(nn.Module):
    """A parametrization: rows of length one."""

    def forward(self, weight: torch.Tensor) -> Any:
        return weight / weight.norm(dim=1, keepdim=True)


def train(model: Any, x: torch.Tensor, grad: torch.Tensor, after: Callable[[], Any] = bool) -> list[Any]:
    """Two steps of a model; ``after`` is called after each of them."""
    optim, steps = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), list[Any]()
    dtype = next(model.parameters()).dtype
    for _ in range(2):
        out = forward_backward(model, x.detach().to(dtype), grad.to(dtype))
        steps.append([out.detach(), take_step(model, optim)])
        after()
    return steps


def make_whole(x: Any) -> Any:
    """Replicas of a DTensor; another tensor as it is."""
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) if isinstance(x, DTensor) else x


def load(model: Any, does: str) -> None:
    """Load the doubled state of a model into it."""
    whole = make_whole if does == "loaded-whole" else torch.clone
    model.load_state_dict({name: whole(x) * 2 for name, x in model.state_dict().items()}, assign=does == "assigned")


def replace(layer: Any, does: str) -> None:
    """Give a layer another parameter for its weight, or swap the two."""
    other = nn.Parameter(layer.weight.detach() * 2)
    if does == "swapped":
        torch.utils.swap_tensors(layer.weight, other)
    else:
        del layer.weight
        layer.register_parameter("weight", other)


def alter_before(model: Any, does: str) -> None:
    if does == "pruned":
        prune.l1_unstructured(model.net1, "weight", 0.4)
    if does in ("parametrized", "parametrized-rows"):
        layer = model.net1 if does == "parametrized" else model.net2
        parametrize.register_parametrization(layer, "weight", UnitRows())


def alter(model: Any, does: str) -> None:
    """What is done to a model whose weights are sharded."""
    if does.startswith("cast"):
        model.float()
    if does.startswith("loaded") or does == "assigned":
        load(model, does)
    if does in ("replaced", "swapped"):
        replace(model.net1, does)
    if does == "pruned-later":
        prune.identity(model.net1, "weight")
        prune.remove(model.net1, "weight")
    if does == "parametrized-later":
        parametrize.register_parametrization(model.net1, "weight", UnitRows())


def use(model: Any, x: torch.Tensor, grad: torch.Tensor, does: str) -> list[Any]:
    """Alter a model after a first step, and train it, its copy too. Returns what the steps gave."""
    steps = train(model, x, grad)
    torch.__future__.set_swap_module_params_on_conversion(does.endswith("-by-swap"))
    try:
        alter(model, does)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if does == "copied":
        steps += train(copy.deepcopy(model), x, grad)
    if does == "called":
        parameters = {name: parameter * 2 for name, parameter in model.named_parameters()}
        steps.append([torch.func.functional_call(model, parameters, (x.detach(),)).detach(), {}])
    if not does.startswith("averaged"):
        return steps + train(model, x, grad)
    average = get_ema_multi_avg_fn(0.5) if does == "averaged-exponentially" else None
    averaged = AveragedModel(model, multi_avg_fn=average)
    steps += train(model, x, grad, lambda: averaged.update_parameters(model))
    return steps + train(averaged, x, grad)


@law(
    "module.altered",
    source="torch.distributed.tensor.parallel docs, parallelize_module: the parallelised module computes what the "
    "dense one does; copy.deepcopy, torch.optim.swa_utils, torch.nn.utils.prune, torch.nn.utils.parametrize and "
    "torch.func.functional_call: of a module",
    control=CASES[0],
    cases=CASES,
    features=lambda case: {"module", "backward", f"way:{case.get('does')}"},
    needs=NEEDS,
    weight=0.2,
)
def altered(model: Model, mesh: ModelMesh, way: StylePlan, batch: OneBatch, does: Does):
    """A tensor-parallel model that is copied, averaged, cast, loaded, called with other parameters, pruned or
    parametrized, or of which a parameter is replaced, goes on as the dense one does."""
    alter_before(model, does)
    parallelize_module(model, mesh, way)
    ((x, grad),) = batch
    return use(model, x, grad, does)


@altered.due
def _(model, mesh: Mesh, batch, does):
    alter_before(model, does)
    ((x, grad),) = batch
    steps = use(model, x, grad, does)
    return [[Near(out), {key: claimed(named, mesh) for key, named in step.items()}] for out, step in steps]
