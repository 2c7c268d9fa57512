"""The law of tensor parallelism combined with each kind of data parallelism."""

from __future__ import annotations

import copy
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.arguments import FromCase, dtensor
from shardlaw.conformance.laws.module.fsdp_methods import MLPModel, fsdp_law
from shardlaw.conformance.laws.module.fully_shard import read_rank_batches
from shardlaw.conformance.laws.module.model_fields import (
    Pairs,
    claimed,
    copied_parameters,
    mean_backward,
    reduced_gradients,
    sgd,
)
from shardlaw.conformance.laws.module.plans import MLP
from shardlaw.conformance.laws.shared.newer import require_attribute
from shardlaw.reference.mesh import Mesh

CASES = (
    "mesh=2x2 model=mlp dims=5x4x3 way=fully",
    "mesh=1x2x2 model=mlp dims=5x4x3 way=fully",
    "mesh=2x2x1 model=mlp dims=5x4x3 way=fully",
    "mesh=2x2 model=mlp dims=5x4x3 way=told",
    "mesh=2x2 model=mlp dims=4x6x2 way=told seed=1",
    "mesh=2x1x2 model=mlp dims=5x4x3 way=told",
    "mesh=1x2x2 model=mlp dims=5x4x3 way=told",
    "mesh=2x1x2 model=mlp dims=5x4x3 way=flat",
    "mesh=2x2 model=mlp dims=5x4x3 way=replicated",
    "mesh=2x2 model=mlp dims=5x4x3 way=remade",
    "mesh=2x2 model=mlp dims=5x4x3 way=wrapped",
    "mesh=2x2 model=mlp dims=4x6x2 way=wrapped seed=1",
    "mesh=2x2 model=mlp dims=5x4x3 way=ddp",
    "mesh=1x2 model=mlp dims=5x6x3 way=ddp",
    "mesh=2x2 model=mlp dims=5x4x3 way=ddp-named",
    "mesh=2x1x2 model=mlp dims=5x4x3 way=replicated",
    # shards of unlike sizes, whose results are gathered
    "mesh=2x2 model=mlp dims=5x7x3 way=ddp gathered=1",
    # a module in modules
    "mesh=2x2 model=mlp dims=5x4x3 way=ddp nested=1",
    *(f"mesh=2x2 model=mlp dims=5x4x3 way={way} frozen=1" for way in ("ddp", "fully", "told", "wrapped")),
)


def features(case: Case) -> set[str]:
    way = case.get("way")
    return {"module", "backward", f"way:{way}"} | ({"fully-sharded"} if "ddp" not in way else set())


# Plain torch, for the act


def shard_layers(model: Any, mesh: Any) -> None:
    """Shard the layers of a model along the last dim of a mesh, and replicate them along the others."""
    placements = {"net1.weight": Shard(0), "net1.bias": Shard(0), "net2.weight": Shard(1)}

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            along = [Replicate()] * (mesh.ndim - 1) + [placements.get(f"{name}.{key}", Replicate())]
            placed = distribute_tensor(parameter.data, mesh, along)
            module.register_parameter(key, nn.Parameter(placed, requires_grad=parameter.requires_grad))

    distribute_module(model, mesh, partition)


def data_dims(way: str, names: Any) -> Any:
    """The data-parallel dims of a mesh, in the form that fully_shard takes: parameters are sharded along the last of
    them, along all, or along none."""
    dims = require_attribute(fsdp, "DataParallelMeshDims")
    if way == "replicated":
        return dims(replicate=tuple(names) if len(names) > 1 else names[0])
    if way == "flat":
        return dims(shard=tuple(names))
    return dims(shard=names[-1], replicate=names[0] if len(names) > 1 else None)


@fsdp_law(
    "both-parallel",
    ", dp_mesh_dims; torch.distributed.tensor.parallel; FullyShardedDataParallel, device_mesh",
    CASES,
    features,
)
def both_parallel(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Annotated[Pairs, FromCase(lambda case: read_rank_batches(case, shared=True))],
    way: Literal["fully", "told", "flat", "replicated", "remade", "wrapped", "ddp", "ddp-named"],
    gathered: bool = False,
    nested: bool = False,
    frozen: bool = False,
):
    """A tensor-parallel model with data parallelism along the other dims of its mesh has the dense output, and its
    parameters take the dense steps, with the mean of all gradients, but for a frozen one, which stays as it is."""
    model.net1.weight.requires_grad_(not frozen)
    names, spmd = mesh.mesh_dim_names, way in ("told", "flat", "replicated", "remade")
    ddp_parameters = dict[str, Any]()
    compat.op_plans()  # drop cached plans: they may hold an equal mesh of another case
    if way == "remade":
        shard_layers(copy.deepcopy(model), DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names))
    if spmd:
        shard_layers(model, mesh)
        fully_shard(model, mesh=mesh, dp_mesh_dims=data_dims(way, names[:-1]))
    else:
        between = Replicate() if gathered else None
        plan = {"net1": ColwiseParallel(output_layouts=between), "net2": RowwiseParallel(input_layouts=between)}
        parallelize_module(model, mesh[names[-1]], plan)
        data = mesh[names[:-1]]
        if way == "fully":
            fully_shard(model, mesh=data)
        if way == "wrapped":
            model = FullyShardedDataParallel(
                model, device_mesh=data, use_orig_params=True, device_id=torch.device(mesh.device_type)
            )
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        if way.startswith("ddp"):
            whole = nn.Sequential(nn.Sequential(model)) if nested else model
            compat.pre_dp_module_transform(whole)
            ddp_parameters = dict(model.named_parameters()) if way == "ddp" else {}
            model = DistributedDataParallel(whole, process_group=data.get_group())

    def state() -> dict[str, Any]:
        if way in ("wrapped", "ddp"):
            return {name: value.detach().clone() for name, value in (ddp_parameters or model.state_dict()).items()}
        return copied_parameters(model.module if way == "ddp-named" else model)

    def run(x: torch.Tensor) -> Any:
        if not spmd:
            return model(x)
        batch = [Shard(0)] * (mesh.ndim - 1) + [Replicate()]
        out = model(DTensor.from_local(x, mesh, batch, run_check=False))
        return out.redistribute(placements=batch).to_local()

    optim, steps, first = torch.optim.SGD(model.parameters(), lr=0.5), [], state()
    for x, grad in inputs:
        out = run(x)
        out.backward(grad)
        optim.step()
        optim.zero_grad()
        steps.append({"forward": out, "parameters": state()})
    again = None
    if way == "wrapped":
        model.load_state_dict(first)
        again = run(inputs[0][0])
    return {"first": first, "steps": steps, "again": again}


@both_parallel.due
def _(model, mesh: Mesh, inputs: list[Pairs], way: str, frozen: bool, rank: Rank):
    model.net1.weight.requires_grad_(not frozen)
    row = mesh.ranks.index(rank) // mesh.shape[-1]
    tp_mesh = mesh.slice((mesh.ndim - 1,), mesh.coord(rank) or (0,) * mesh.ndim)
    dp_mesh = Mesh.parse(f"{mesh.size // mesh.shape[-1]}x{mesh.shape[-1]}") if way == "flat" else mesh

    def due_state() -> dict[str, Any]:
        named = copied_parameters(model)
        if way.startswith("ddp"):
            return {name: Near(dtensor(tp_mesh, full, MLP[name]).local(rank)) for name, full in named.items()}
        return claimed(named, dp_mesh)

    steps, first = [], due_state()
    for pairs in inputs:
        model.zero_grad()
        outs = mean_backward(model, pairs)
        sgd(model, reduced_gradients(model))
        steps.append({"forward": Near(outs[row].detach()), "parameters": due_state()})
    return {"first": first, "steps": steps, "again": steps[0]["forward"] if way == "wrapped" else None}
