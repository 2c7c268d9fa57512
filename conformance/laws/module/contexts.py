"""The law of models that train within contexts and with hooks on their parameters and layers."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from torch.autograd import graph
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.flop_counter import FlopCounterMode

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Claimed, Near, Of
from shardlaw.conformance.law.fields import NamedMesh
from shardlaw.conformance.laws.module.fsdp_methods import MLPModel
from shardlaw.conformance.laws.module.fully_shard import FSDP
from shardlaw.conformance.laws.module.model_fields import NEEDS, copied_parameters
from shardlaw.reference.mesh import Mesh

Parallel = Literal["fully-sharded", "tensor"]
Context = Literal[
    "autocast", "saved", "threaded", "counted", "stepped", "doubled", "scaled", "layers", "whole", "failed"
]
LAYOUTS = {"fully-sharded": "mesh=2 model=mlp dims=5x7x3", "tensor": "mesh=2 model=mlp dims=5x8x3"}
CASES = tuple(f"{LAYOUTS[of]} of={of} does={does}" for of in get_args(Parallel) for does in get_args(Context))


# Plain torch, for acts


def step_when_accumulated(parameter: Any) -> None:
    """Have an optimizer of its own step a parameter within the backward pass."""
    optim = torch.optim.SGD([parameter], lr=0.5, momentum=0.5)

    def step(_: Any) -> None:
        optim.step()
        optim.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


def double_when_accumulated(parameter: Any) -> None:
    def double(given: Any) -> None:
        given.grad.mul_(2)

    parameter.register_post_accumulate_grad_hook(double)


def scaled(gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)


def add_hooks(model: Any, does: str) -> None:
    for parameter in model.parameters() if does in ("stepped", "doubled") else ():
        (step_when_accumulated if does == "stepped" else double_when_accumulated)(parameter)
    if does == "scaled":
        model.net2.register_full_backward_pre_hook(lambda _, gradients: scaled(gradients))
        model.net1.register_full_backward_hook(lambda *hook_arguments: scaled(hook_arguments[1]))
    if does == "whole":
        model.register_full_backward_pre_hook(lambda _, gradients: scaled(gradients))
        model.register_full_backward_hook(lambda *hook_arguments: scaled(hook_arguments[1]))
    if does == "layers":
        model.net1.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,), prepend=True)
        model.net2.register_forward_hook(lambda *hook_arguments: hook_arguments[-1] * 2, always_call=True)


def fail(*hook_arguments: Any) -> None:
    raise ValueError("this layer fails")


def fail_once(model: Any, x: torch.Tensor) -> None:
    """A forward pass that ends in an error in the second layer."""
    hook = model.net2.register_forward_pre_hook(fail)
    try:
        model(x)
    except ValueError:
        hook.remove()


def train(model: Any, does: str) -> dict[str, Any]:
    """Two steps of a model."""
    dtype = next(model.parameters()).dtype
    x: Any = torch.linspace(-1, 1, 20).reshape(4, 5).to(dtype).requires_grad_()
    optim, steps = torch.optim.SGD(model.parameters(), lr=0.5), list[Any]()
    add_hooks(model, does)
    if does == "failed":
        fail_once(model, x.detach())
    counter = FlopCounterMode(display=False) if does == "counted" else nullcontext()
    for _ in range(2):
        x.grad = None
        autocast = torch.autocast(x.device.type, torch.bfloat16, does == "autocast")
        with counter, autocast, graph.save_on_cpu() if does == "saved" else nullcontext():
            out = model(x)
        loss = (out * out).sum()
        if does == "threaded":
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            with counter:
                loss.backward()
        gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
        steps.append({"forward": out.detach(), "input": x.grad.clone(), "gradients": gradients})
        optim.step()
        optim.zero_grad()
        steps[-1]["parameters"] = copied_parameters(model)
    flops = counter.get_total_flops() if isinstance(counter, FlopCounterMode) else 0
    return {"steps": steps, "flops": flops}


@law(
    "module.contexts",
    source=f"{FSDP}; torch.distributed.tensor.parallel docs; torch docs, Module and Tensor: hooks; amp and autograd",
    control=f"{LAYOUTS['fully-sharded']} of=fully-sharded does=doubled",
    cases=CASES,
    features=lambda case: {"module", "backward", f"way:{case.get('does')}"},
    needs=NEEDS,
    weight=0.3,
)
def contexts(model: MLPModel, mesh: NamedMesh, of: Parallel, does: Context):
    """A model that is parallel trains as the dense one under autocast, with what is saved on the host, with its
    backward pass in a thread, while its operations are counted, stepped within its backward pass, with hooks on
    parameters and layers, and after a forward pass that failed."""
    if of == "tensor":
        parallelize_module(model, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    else:
        for unit in (model.net1, model.net2, model):
            fully_shard(unit, mesh=mesh)
    return train(model, does)


@contexts.due
def _(model, mesh: Mesh, does: str):
    trained = train(model, does)
    rounding = torch.bfloat16 if does == "autocast" else None
    for step in trained["steps"]:
        for name in ("forward", "input"):
            step[name] = Near(step[name], rounding)
        for name in ("gradients", "parameters"):
            step[name] = {
                key: None if value is None else Claimed(value, mesh, exact=False, rounding=rounding)
                for key, value in step[name].items()
            }
    return {"steps": trained["steps"], "flops": Of(trained["flops"], "wrong-value")}
