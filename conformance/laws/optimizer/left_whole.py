"""The law of the states of a fully sharded model and its optimizer while parameters are whole.

``fully_shard`` leaves parameters whole after a pass without a backward pass, as after an evaluation, before a backward
pass, and after ``unshard``. ``call`` is the function that asks for states or sets them, with its options.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Meaningless, Near
from shardlaw.conformance.law.fields import NamedMesh
from shardlaw.conformance.laws.module.fsdp_methods import Inputs, MLPModel
from shardlaw.conformance.laws.module.fully_shard import Reshard
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Pairs,
    claimed,
    copied_parameters,
    mean_backward,
    uneven,
)
from shardlaw.reference.mesh import Mesh

Since = Literal["step", "evaluation", "unshard", "forward"]
Call = Literal[
    "get-model", "get-model-full", "get-optimizer", "get-optimizer-full", "get-optimizer-flat", "get-both",
    "set-model", "set-model-full", "set-optimizer", "set-optimizer-flat", "set-both", "set-both-full",
]  # fmt: skip
MODEL = "model=mlp dims=5x7x3"
CASES = (
    f"mesh=2 {MODEL} since=step call=get-both",
    f"mesh=3 {MODEL} since=step call=set-both-full units=1",
    f"mesh=2x2 {MODEL} since=step call=get-optimizer-flat reshard=no",
    f"mesh=2 {MODEL} since=evaluation call=get-model",
    f"mesh=3 {MODEL} since=unshard call=get-model-full units=1",
    f"mesh=2x2 {MODEL} since=forward call=get-both reshard=no",
    f"mesh=2 {MODEL} since=unshard call=set-model units=1 reshard=no",
    f"mesh=2 {MODEL} since=evaluation call=get-optimizer reshard=yes",
    f"mesh=2 {MODEL} since=evaluation call=set-both reshard=yes units=1",
    f"mesh=2 {MODEL} since=evaluation call=get-optimizer",
    f"mesh=3 {MODEL} since=forward call=get-optimizer-full units=1",
    f"mesh=2x2 {MODEL} since=unshard call=get-optimizer-flat",
    f"mesh=2 {MODEL} since=evaluation call=set-model-full",
    f"mesh=3 {MODEL} since=evaluation call=set-optimizer units=1",
    f"mesh=2 {MODEL} since=unshard call=set-optimizer-flat",
    f"mesh=2x2 {MODEL} since=evaluation call=set-both reshard=no",
    f"mesh=2 {MODEL} since=unshard call=set-both-full units=1",
)


def features(case: Case) -> set[str]:
    since, found = case.get("since"), {"module", "fully-sharded"}
    if since == "unshard" or (since != "step" and case.get("reshard", "") != "yes"):
        found.add("whole-parameters")
    return found | uneven(case.shape("dims")[1:], case.mesh().shape[-1])


# Plain torch, for acts


def doubled(state: Any) -> Any:
    """A state with the elements of every tensor doubled."""
    if isinstance(state, dict):
        return {key: doubled(value) for key, value in state.items()}
    if isinstance(state, list):
        return [doubled(value) for value in state]
    return state * 2 if isinstance(state, torch.Tensor) else state


def options_of(call: str) -> StateDictOptions:
    """The options that a call names."""
    return StateDictOptions(full_state_dict=call.endswith("full"), flatten_optimizer_state_dict=call.endswith("flat"))


def get_states(model: Any, optim: Any, call: str) -> tuple[Any, Any]:
    """The states of a model and its optimizer for which a call asks, or which it sets."""
    options = options_of(call)
    if "both" in call:
        return get_state_dict(model, optim, options=options)
    if "model" in call:
        return get_model_state_dict(model, options=options), {}
    return {}, get_optimizer_state_dict(model, optim, options=options)


def set_states(model: Any, optim: Any, call: str, states: tuple[Any, Any]) -> None:
    """Set the states of a model and its optimizer, or one of them."""
    options = options_of(call)
    if "both" in call:
        set_state_dict(model, optim, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    elif "model" in call:
        set_model_state_dict(model, states[0], options=options)
    else:
        set_optimizer_state_dict(model, optim, states[1], options=options)


def momenta(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The momentum of each parameter in the state of an optimizer, flat or not."""
    if "state" in state:
        return {name: entry["momentum_buffer"] for name, entry in state["state"].items()}
    start, end = "state.", ".momentum_buffer"
    return {name[len(start) : -len(end)]: value for name, value in state.items() if name.startswith(start)}


def leave_whole(model: Any, since: str, x: torch.Tensor) -> Any:
    """Have the parameters of a fully sharded model whole. Returns its output where a backward pass is due."""
    if since == "evaluation":
        with torch.no_grad():
            model(x)
    for module in model.modules() if since == "unshard" else ():
        if isinstance(module, FSDPModule):
            module.unshard()
    return model(x) if since == "forward" else None


@law(
    "optimizer.left-whole",
    source="torch.distributed.checkpoint.state_dict docs, get_state_dict, set_state_dict: a model under fully_shard; "
    "torch.distributed.fsdp docs, fully_shard: reshard_after_forward, which leaves the root whole by default",
    control=CASES[0],
    cases=CASES,
    features=features,
    needs=(*NEEDS, "object_collectives"),
    weight=0.3,
)
def left_whole(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Inputs,
    since: Since,
    call: Call,
    reshard: Reshard | None = None,
    units: bool = False,
):
    """The states of a fully sharded model and its optimizer can be asked for and set also while an evaluation, a
    forward pass or ``unshard`` has left parameters whole, and the model trains on as the dense one does."""
    for unit in [model.net1, model] if units else [model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    (x, grad), (second, second_grad) = inputs
    model(x).backward(grad)
    optim.step()
    optim.zero_grad()
    states = doubled(list(get_states(model, optim, call))) if call.startswith("set") else ({}, {})
    out = leave_whole(model, since, second)
    if call.startswith("set"):
        set_states(model, optim, call, states)
        found = {}
    else:
        model_state, optimizer_state = get_states(model, optim, call)
        tensors = {"model": model_state, "momenta": momenta(optimizer_state)}
        found = {key: {name: value.detach().clone() for name, value in held.items()} for key, held in tensors.items()}
    out = model(second) if out is None else out
    out.backward(second_grad)
    optim.step()
    return {**found, "trained": copied_parameters(model)}


@left_whole.due
def _(model, mesh: Mesh, inputs: list[Pairs], since: str, call: str):
    is_set = call.startswith("set")
    if since == "forward" and is_set:
        raise Meaningless("a backward pass needs the parameters of its forward pass")
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    mean_backward(model, inputs[0])
    optim.step()
    optim.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters() if is_set and "optimizer" not in call else ():
            parameter.mul_(2)
        for parameter in model.parameters() if is_set and "model" not in call else ():
            optim.state[parameter]["momentum_buffer"].mul_(2)
    found: dict[str, Any] = {} if is_set else {"model": {}, "momenta": {}}
    if not is_set and "optimizer" not in call:
        found["model"] = copied_parameters(model)
    if not is_set and "model" not in call:
        kept = {name: optim.state[of]["momentum_buffer"] for name, of in model.named_parameters()}
        found["momenta"] = {name: momentum.clone() for name, momentum in kept.items()}
    for key, tensors in found.items():
        whole = {name: Near(full) for name, full in tensors.items()}
        found[key] = whole if call.endswith("full") else claimed(tensors, mesh)
    mean_backward(model, inputs[1])
    optim.step()
    return {**found, "trained": claimed(copied_parameters(model), mesh)}
