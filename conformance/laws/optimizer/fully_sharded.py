"""Laws of the states of ``FullyShardedDataParallel`` models: each of its state dict types, full states, names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Device, Rank, WorldSize
from shardlaw.conformance.laws.checkpoint.calls import poison
from shardlaw.conformance.laws.checkpoint.models import OTHER_RATES, RATES, adam, saved_rates
from shardlaw.conformance.laws.optimizer.both_states import DOCS, FEATURES, SMALL, How
from shardlaw.conformance.laws.optimizer.checkpointed import (
    PATHS,
    due_optimizer_contents,
    optimizer_contents,
    sharded_model,
)
from shardlaw.conformance.laws.optimizer.fields import Gradients, WorldMesh
from shardlaw.conformance.laws.optimizer.nets import state_options, train_step
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe_if_sharded
from shardlaw.conformance.laws.sharded_tensor.fields import due_rows

COMMON: dict[str, Any] = {"needs": ("checkpoint", "object_collectives"), "smallest": 1, "weight": 0.3}
FORMS = (
    f"world=3 a=5x3:-:{SMALL} b=7:-:{SMALL} form=full",
    f"world=3 a=5x3:-:{SMALL} b=2:-:{SMALL} form=sharded",
    f"world=3 a=4x3:-:{SMALL} b=2:-:{SMALL} form=local",
    f"world=2 a=5x3:-:{SMALL} b=7:-:{SMALL} c=3:-:{SMALL} form=full whole=yes",
    f"world=2 a=5x3:-:{SMALL} b=3:-:{SMALL} c=3:-:{SMALL} form=sharded whole=yes",
    f"world=2 a=5x3:-:{SMALL} b=3:-:{SMALL} form=full strategy=NO_SHARD",
    f"world=2 a=4x3:-:{SMALL} b=3:-:{SMALL} form=sharded strategy=SHARD_GRAD_OP",
)
FULL = (
    f"world=2 a=5x3:-:{SMALL} b=7:-:{SMALL} c=3:-:{SMALL} how=whole",
    f"world=3 a=5x3:-:{SMALL} b=2:-:{SMALL} how=broadcast",
    f"world=4 a=3x3:-:{SMALL} b=9:-:{SMALL} c=5:-:{SMALL} how=broadcast",
    f"world=4 a=5x3:-:{SMALL} b=7:-:{SMALL} how=broadcast replicas=2",
    f"world=2 a=5x3:-:{SMALL} b=3:-:{SMALL} how=broadcast replicas=2",
    f"world=2 a=4x3:-:{SMALL} b=3:-:{SMALL} how=whole replicas=2",
    # not in smoke: it ends the process
    f"world=2 a=5x3:-:{SMALL} b=3:-:{SMALL} how=broadcast,offload",
)


COMPILED = (
    f"world=2 a=4:-:{SMALL} b=2:-:{SMALL} c=6:-:{SMALL} called=b",
    f"world=3 a=5x3:-:{SMALL} b=7:-:{SMALL} c=3:-:{SMALL} called=c",
)


def features(case: Case) -> set[str]:
    words = {*case.get("how", "").split(",")}
    return {"module", "fully-sharded", "way:fsdp1"} | {FEATURES[word] for word in words & {*FEATURES}}


class ParameterModule(nn.Module):
    """A module with these parameters, and perhaps an inner module."""

    inner: nn.Module

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def fsdp_model(tensors: Mapping[str, torch.Tensor], **options: Any) -> FullyShardedDataParallel:
    """A model of these tensors with ``b`` in an inner module; FSDP shards both."""
    inner = ParameterModule({"b": tensors["b"]})
    outer = ParameterModule({name: tensor for name, tensor in tensors.items() if name != "b"})
    outer.inner = FullyShardedDataParallel(inner, **options)
    return FullyShardedDataParallel(outer, **options)


def full_parameters(model: FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    """The full parameters, by name."""
    with FullyShardedDataParallel.summon_full_params(model):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


@law(
    "optimizer.fsdp-forms",
    source="torch.distributed.fsdp docs, FullyShardedDataParallel.state_dict_type: full, sharded and local states",
    control=f"world=2 a=4x3:-:{SMALL} b=6:-:{SMALL} form=full",
    cases=FORMS,
    features=features,
    **COMMON,
)
def state_forms(
    tensors: Gradients,
    device: Device,
    form: Literal["full", "sharded", "local"],
    whole: bool = False,
    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = "FULL_SHARD",
):
    """FSDP returns its state in full, in chunks of rows or as flat parameters, and another model can load it; a full
    state does not change with the model."""
    options = {"use_orig_params": whole, "device_id": device, "sharding_strategy": ShardingStrategy[strategy]}
    model = fsdp_model(tensors, **options)
    other = fsdp_model({name: poison(tensor) for name, tensor in tensors.items()}, **options)
    kind = StateDictType[f"{form.upper()}_STATE_DICT"]
    with FullyShardedDataParallel.state_dict_type(model, kind):
        state = model.state_dict()
    if form == "full":
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    saved = {name: describe_if_sharded(tensor) for name, tensor in state.items()}
    if form == "local":  # a flat parameter is due under the name of its module
        saved = {name.rpartition(".")[0]: tensor for name, tensor in saved.items()}
    with FullyShardedDataParallel.state_dict_type(other, kind):
        other.load_state_dict(state)
    return {"taken": saved, "given": full_parameters(other)}


@state_forms.due
def _(tensors, form, strategy, rank: Rank, world: WorldSize):
    values = {PATHS[name]: tensor for name, tensor in tensors.items()}
    if form == "full" or strategy == "NO_SHARD":
        return {"taken": values, "given": values}
    saved = values
    if form == "local":
        outer = torch.cat([tensor.flatten() for name, tensor in tensors.items() if name != "b"])
        saved = {"": outer, "inner": tensors["b"].flatten()}
    return {"taken": {name: due_rows(full, range(world), rank) for name, full in saved.items()}, "given": values}


def without_steps(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer without the step counts."""
    return {path: {key: value for key, value in entries.items() if key != "step"} for path, entries in state.items()}


@law(
    "optimizer.fsdp-whole",
    source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0, cpu_offload; FSDP",
    control=f"world=2 a=4x3:-:{SMALL} b=6:-:{SMALL} how=whole",
    sweep=texts(*FULL),
    sweeps=len(FULL) - 1,
    features=features,
    **COMMON,
)
def full_states(grads: Gradients, mesh: WorldMesh, device: Device, rank: Rank, how: How, replicas: int = 1):
    """The full states of an FSDP model and its optimizer, of every rank or of rank 0, can be set on another FSDP model
    and its optimizer, also where each shard has several replicas."""
    if replicas > 1:
        mesh = DeviceMesh(mesh.device_type, mesh.mesh.view(replicas, -1), mesh_dim_names=("replica", "shard"))
    model, used = sharded_model(grads, "fsdp1", mesh, device)
    optimizer = adam([*model.parameters()], RATES)
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
    options, get_options = state_options(how), state_options([word if word != "broadcast" else "whole" for word in how])
    model_state, optimizer_state = get_state_dict(model, optimizer, options=get_options)
    learned_state: Any = optimizer_state.get("state", {})
    saved = {"names": sorted(model_state), "averages taken": without_steps(learned_state)}
    other, _ = sharded_model(grads, "fsdp1", mesh, device)
    second = adam([*other.parameters()], OTHER_RATES)
    states: Sequence[Any] = (model_state, optimizer_state) if rank == 0 or "broadcast" not in how else ({}, {})
    set_model_state_dict(other, states[0], options=options)
    set_optimizer_state_dict(other, second, states[1], options=options)
    parameters, loaded = full_parameters(model), full_parameters(other)
    differing = [name for name, tensor in parameters.items() if not torch.equal(tensor, loaded[name])]
    return {**saved, "differing": differing, **optimizer_contents(other, second, "fsdp1", used)}


@full_states.due
def _(grads, rank: Rank, world: WorldSize, how, replicas=1):
    shards = world // replicas
    first = rank // shards * shards
    due = due_optimizer_contents(grads, "fsdp1", rank, shards, [], saved_rates([*grads]), first)
    averages = {PATHS[name]: {"exp_avg": grad / 2, "exp_avg_sq": grad * grad / 2} for name, grad in grads.items()}
    is_offloaded = rank > 0 and "offload" in how
    return {
        "names": Of([] if is_offloaded else sorted(averages)),
        "averages taken": {} if is_offloaded else averages,
        "differing": Of([]),
        **due,
    }


@law(
    "optimizer.fsdp-compiled",
    source=f"{DOCS}, get_state_dict: keys are canonical FQNs; FSDP and any combination; set_optimizer_state_dict",
    control=f"world=2 a=4:-:{SMALL} b=2:-:{SMALL} c=6:-:{SMALL} called=c",
    cases=COMPILED,
    features=features,
    **COMMON,
)
def compiled_inside(grads: Gradients, device: Device, called: Literal["b", "c"]):
    """The state of the optimizer of an FSDP model with a compiled module can be set on another optimizer, whatever
    parameters inside are called."""
    inner, outer = ParameterModule({"b": grads["b"]}), ParameterModule({"a": grads["a"]})
    inner.inner = ParameterModule({called: grads["c"]})
    outer.inner = torch.compile(inner, backend="eager")  # type: ignore[assignment]
    model = FullyShardedDataParallel(outer, use_orig_params=True, device_id=device)
    optimizer, second = adam([*model.parameters()], RATES), adam([*model.parameters()], OTHER_RATES)
    train_step(optimizer)
    set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, optimizer))
    states: Any = get_optimizer_state_dict(model, second)["state"]
    return {
        "rates": [group["lr"] for group in second.param_groups],
        "averages": {path: describe_if_sharded(state["exp_avg"]) for path, state in states.items()},
    }


@compiled_inside.due
def _(grads, rank: Rank, world: WorldSize, called):
    paths = {"a": grads["a"], "inner.b": grads["b"], f"inner.inner.{called}": grads["c"]}
    averages = {path: due_rows(grad / 2, range(world), rank) for path, grad in paths.items()}
    return {"rates": saved_rates([*paths]), "averages": averages}
