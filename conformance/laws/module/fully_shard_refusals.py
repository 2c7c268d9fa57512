"""The law of what fully_shard and the methods of FSDPModule refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Near, Refused, caught
from shardlaw.conformance.law.fields import NamedMesh, Rank, WordField
from shardlaw.conformance.laws.module.act_helpers import OwnAllGather, OwnReduceScatter
from shardlaw.conformance.laws.module.fsdp_methods import Inputs, MLPModel, fsdp_law
from shardlaw.conformance.laws.module.model_fields import Pairs, claimed, mean_backward, reduced_gradients
from shardlaw.conformance.laws.shared.newer import require_attribute
from shardlaw.reference.mesh import Mesh

# Plain torch, for acts


def shard(model: Any, mesh: Any, **options: Any) -> Any:
    return fully_shard(model, mesh=mesh, **options)


def shard_weights(model: Any, mesh: Any, placement: Any) -> Any:
    """Shard weights so, and biases as usual."""
    return shard(model, mesh, shard_placement_fn=lambda parameter: placement if parameter.ndim > 1 else None)


def shard_on_infos(model: Any, mesh: Any, placement: Any = None, *, one: bool = True) -> Any:
    """Give each parameter a placement and a mesh: one object for all, or a new one each time."""
    result, info = require_attribute(compat.fsdp_common, "ShardPlacementResult"), compat.fsdp_common.FSDPMeshInfo
    own = info(mesh, shard_mesh_dim=0)
    place = {"shard_placement_fn": lambda _: result(placement, own if one else info(mesh, shard_mesh_dim=0))}
    return shard(model, mesh, **place)


def shard_by_groups(model: Any, mesh: Any) -> None:
    """Shard the first layer along the first mesh dim, and the second along the second."""
    result, info = require_attribute(compat.fsdp_common, "ShardPlacementResult"), compat.fsdp_common.FSDPMeshInfo
    own, second = info(mesh["b"], shard_mesh_dim=0), {*model.net2.parameters()}
    place = {"shard_placement_fn": lambda parameter: result(Shard(0), own) if parameter in second else None}
    shard(model, mesh["a"], **place)


def shard_along_dims(model: Any, mesh: Any, dims: dict[str, Any], **options: Any) -> Any:
    """Shard a model along dims of a mesh that has further ones."""
    return shard(model, mesh, dp_mesh_dims=require_attribute(fsdp, "DataParallelMeshDims")(**dims), **options)


def other_mesh(mesh: Any, *shape: int) -> Any:
    """A mesh of the same ranks with another shape and without names."""
    return DeviceMesh(mesh.device_type, mesh.mesh.view(*shape))


def place_weights(model: Any, mesh: Any, placements: Any) -> None:
    """Make the parameters of a model DTensors."""
    for layer in (model.net1, model.net2):
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))


def set_after(model: Any, first: Any, then: str, *values: Any) -> None:
    """Set a collective of the user's own, and then what does not go with it."""
    model.set_custom_all_gather(first) if isinstance(first, OwnAllGather) else model.set_custom_reduce_scatter(first)
    getattr(model, then)(*values)


def run_each(*modules: Any) -> None:
    """Run modules one after the other."""
    for module in modules:
        module(torch.ones(1, next(module.parameters()).shape[1]).double())


# attempts on a model that is not sharded
UNSHARDED: dict[str, Callable[[Any, Any], Any]] = {
    "mesh-3-d": lambda model, mesh: shard(model, other_mesh(mesh, 1, 1, -1)),
    "mesh-unnamed": lambda model, mesh: shard(model, other_mesh(mesh, 1, -1)),
    "reshard-text": lambda model, mesh: shard(model, mesh, reshard_after_forward="yes"),
    "reshard-fraction": lambda model, mesh: shard(model, mesh, reshard_after_forward=1.0),
    "reshard-0": lambda model, mesh: shard(model, mesh, reshard_after_forward=0),
    "reshard-3": lambda model, mesh: shard(model, mesh, reshard_after_forward=3),
    "at-replicate": lambda model, mesh: shard_weights(model, mesh, Replicate()),
    "at-number": lambda model, mesh: shard_weights(model, mesh, 1),
    "at-dim-2": lambda model, mesh: shard_weights(model, mesh, Shard(2)),
    "at-dim-below": lambda model, mesh: shard_weights(model, mesh, Shard(-3)),
    "at-uneven": lambda model, mesh: shard_weights(model, mesh, Shard(1)),
    "at-uneven-below": lambda model, mesh: shard_weights(model, mesh, Shard(-1)),
    "info-replicate": lambda model, mesh: shard_on_infos(model, mesh, Replicate()),
    "infos": lambda model, mesh: shard_on_infos(model, mesh, one=False),
    "scalar": shard,
    "strided": shard,
    "list": lambda model, mesh: shard(nn.ModuleList([model]), mesh),
    "dict": lambda model, mesh: shard(nn.ModuleDict({"one": model}), mesh),
    "dims-none": lambda model, mesh: shard_along_dims(model, mesh, {}),
    "dims-unnamed": lambda model, mesh: shard_along_dims(model, other_mesh(mesh, -1), {"shard": "a"}),
    "dims-unknown": lambda model, mesh: shard_along_dims(model, mesh, {"shard": "c"}),
    "dims-plain": lambda model, mesh: shard_along_dims(model, mesh, {"shard": "b"}),
}
# attempts on a model of DTensors, whose placements are in WEIGHTS
DTENSORS: dict[str, Callable[[Any, Any], Any]] = {
    "dims-sharded": lambda model, mesh: shard_along_dims(model, mesh, {"shard": "b"}),
    "dims-sharded-replicas": lambda model, mesh: shard_along_dims(model, mesh, {"shard": "b", "replicate": "a"}),
    "dims-number": lambda model, mesh: shard_along_dims(model, mesh, {"shard": "b"}, reshard_after_forward=1),
    "dims-infos": lambda model, mesh: shard_along_dims(
        model, mesh, {"replicate": "b"}, shard_placement_fn=lambda _: Shard(0)
    ),
    "same-mesh": shard,
    "unnamed": lambda model, mesh: shard(model, other_mesh(mesh, -1)),
}
WEIGHTS = {"dims-sharded": [Replicate(), Shard(0)], "dims-sharded-replicas": [Shard(0), Replicate()]}
# attempts on a sharded model, by methods and by running it
SHARDED: dict[str, Callable[[Any, Any], Any]] = {
    "twice": shard,
    "set-reshard-text": lambda model, mesh: model.set_reshard_after_forward("yes"),
    "set-reshard-1": lambda model, mesh: model.set_reshard_after_forward(1),
    "buffers-0": lambda model, mesh: require_attribute(model, "set_reduce_scatter_max_input_buffers")(0),
    "buffers-yes": lambda model, mesh: require_attribute(model, "set_reduce_scatter_max_input_buffers")(True),
    "prefetch-forward": lambda model, mesh: model.set_modules_to_forward_prefetch([model.net1]),
    "prefetch-backward": lambda model, mesh: model.set_modules_to_backward_prefetch([model.net2, model.net1]),
    "no-method": lambda model, mesh: fsdp.register_fsdp_forward_method(model, "nothing"),
    "share-unsharded": lambda model, mesh: fsdp.share_comm_ctx([model.net2, model.net1]),
    "gather-allocated": lambda model, mesh: set_after(
        model, OwnAllGather(), "set_allocate_memory_from_process_group_for_comm", True
    ),
    "scatter-allocated": lambda model, mesh: set_after(
        model, OwnReduceScatter(), "set_allocate_memory_from_process_group_for_comm", True
    ),
    "gather-symmetric": lambda model, mesh: set_after(
        model, require_attribute(model, "set_symm_mem_for_comm") and OwnAllGather(), "set_symm_mem_for_comm"
    ),
    "copied": lambda model, mesh: copy.deepcopy(model),
    "reset-second": lambda model, mesh: require_attribute(model.net2, "reset_iter_state")(),
    "stream": lambda model, mesh: model.set_all_reduce_hook(
        lambda reduced: reduced.mul_(2), stream=getattr(torch, mesh.device_type).Stream()
    ),
    "groups-gather": lambda model, mesh: model.set_custom_all_gather(OwnAllGather()),
    "groups-scatter": lambda model, mesh: model.set_custom_reduce_scatter(OwnReduceScatter()),
    "groups-hook": lambda model, mesh: model.set_all_reduce_hook(lambda reduced: reduced.mul_(2)),
    "second-first": lambda model, mesh: run_each(model.net2, model),
    "one-of-two": lambda model, mesh: run_each(model.net1, model.net2),
    "dtypes": lambda model, mesh: run_each(model),
    "meta": lambda model, mesh: run_each(model),
}
UNUSABLE = (*DTENSORS, "second-first", "one-of-two", "dtypes", "meta")  # take no plain input, or cannot be run
WORDS = {"unnamed": ("name",), "dtypes": ("uniform",)}  # what a refusal must speak of
ATTEMPTS = {**UNSHARDED, **DTENSORS, **SHARDED}


def prepare(model: Any, mesh: Any, attempt: str) -> None:
    """What precedes an attempt: the model is changed or sharded."""
    if attempt == "scalar":
        model.scale = nn.Parameter(torch.ones(()))
    if attempt == "strided":
        model.net2.weight = nn.Parameter(model.net2.weight.data.t().contiguous().t())
    if attempt == "dtypes":
        model.net2.float()
    if attempt == "meta":
        model.to(torch.device("meta"))
    if attempt in DTENSORS:
        place_weights(model, mesh, WEIGHTS.get(attempt, [Replicate()] * mesh.ndim))
    if attempt == "one-of-two":
        shard([model.net1, model.net2], mesh)
    elif attempt.startswith("groups"):
        shard_by_groups(model, mesh)
    elif attempt == "dtypes":
        shard(model, mesh)
    elif attempt in SHARDED:
        for unit in (model.net2, model):
            shard(unit, mesh)
    if attempt == "reset-second":  # after a first pass
        run_each(model)
        model.reshard()


OTHER_MESHES = {
    "2x2": ("stream",),
    "1x2": ("stream", "groups-gather", "groups-scatter", "groups-hook", "dims-none", "dims-unknown", "dims-plain",
            "dims-sharded", "dims-sharded-replicas", "dims-number", "dims-infos"),
}  # fmt: skip
CASES = (
    *(f"mesh=2 model=mlp dims=5x7x3 attempt={attempt}" for attempt in ATTEMPTS if attempt not in OTHER_MESHES["1x2"]),
    *(f"mesh={mesh} model=mlp dims=5x7x3 attempt={attempt}" for mesh, some in OTHER_MESHES.items() for attempt in some),
    "mesh=2 model=mlp dims=4x7x3 attempt=at-uneven",
    "mesh=3 model=mlp dims=4x6x2 attempt=at-uneven-below",
    "mesh=2 model=mlp dims=5x7x3 attempt=reshard-0 anew=1",
    "mesh=2 model=mlp dims=5x7x3 attempt=scalar anew=1",
)


@fsdp_law(
    "fully-shard-refuses",
    ": what mesh, reshard_after_forward, shard_placement_fn and dp_mesh_dims may be; the methods of FSDPModule",
    CASES,
    lambda case: {"module", "fully-sharded", "must-refuse"},
)
def refuses(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Inputs,
    attempt: Annotated[str, WordField(ATTEMPTS)],
    anew: bool = False,
):
    """Every rank refuses, each time, what fully_shard and the methods of FSDPModule do not support, and the model stays
    as it was: it computes as before, and can be sharded anew."""
    prepare(model, mesh, attempt)
    refused = [caught(ATTEMPTS[attempt], model, mesh) for _ in range(2)]
    if "not supported by torch" in str(refused[0]):
        raise refused[0]
    if anew:
        if attempt == "scalar":
            del model.scale
        shard(model, mesh)
    if attempt in UNUSABLE:
        return {"refused": refused, "sharded": None, "forward": None, "gradients": None}
    sharded = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    x, grad = inputs[0]
    out = model(x)
    out.backward(grad)
    grads = None if attempt.startswith("groups") else reduced_gradients(model)
    return {"refused": refused, "sharded": sharded, "forward": out, "gradients": grads}


@refuses.due
def _(model, mesh: Mesh, inputs: list[Pairs], attempt: str, anew: bool, rank: Rank):
    errors = (TypeError,) if attempt == "buffers-yes" else (ValueError, RuntimeError, AssertionError)
    refused = [Refused(errors, WORDS.get(attempt, ()))] * 2
    if attempt in UNUSABLE:
        return {"refused": refused, "sharded": None, "forward": None, "gradients": None}
    sharded = [attempt not in UNSHARDED or anew] * (len(list(model.parameters())) + (attempt == "scalar" and not anew))
    (x, grad), index = inputs[0][mesh.ranks.index(rank)], mesh.ranks.index(rank)
    if attempt in SHARDED or anew:
        out, due = mean_backward(model, inputs[0])[index], claimed(reduced_gradients(model), mesh)
    else:
        out = model(x)
        out.backward(grad)
        due = {name: Near(full) for name, full in reduced_gradients(model).items()}
        due |= {"scale": None} if attempt == "scalar" else {}
    grads = None if attempt.startswith("groups") else due
    return {"refused": refused, "sharded": sharded, "forward": Near(out.detach()), "gradients": grads}
