"""The law of data parallelism of each kind beside tensor parallelism."""

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
from shardlaw.conformance.law.due import Claimed, Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.arguments import FromCase, dtensor
from shardlaw.conformance.laws.module.fsdp_methods import Whole, offered, told_law
from shardlaw.conformance.laws.module.fully_shard import inputs_of
from shardlaw.conformance.laws.module.fully_shard_options import sgd
from shardlaw.conformance.laws.module.model_fields import Pairs, copied_parameters, reduced_gradients
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S

SHOWN = (
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
)
PLACES: dict[str, Placement] = {"net1.weight": S(0), "net1.bias": S(0), "net2.weight": S(1), "net2.bias": R()}


def features(case: Case) -> set[str]:
    return {"module", "backward", f"way:{case.get('way')}"} | (set() if "ddp" in case.get("way") else {"fully-sharded"})


# Plain torch, for the act


def spread(model: Any, mesh: Any) -> None:
    """Shard the layers of a model along the last dim of a mesh, and replicate them along the others."""
    places = {"net1.weight": Shard(0), "net1.bias": Shard(0), "net2.weight": Shard(1)}

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            at = [Replicate()] * (mesh.ndim - 1) + [places.get(f"{name}.{key}", Replicate())]
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, at)))

    distribute_module(model, mesh, partition)


def data_dims(way: str, names: Any) -> Any:
    """Which of the dims of a mesh share out the data, as fully_shard takes it: parameters are sharded along the last
    of them, along all, or along none."""
    dims = offered(fsdp, "DataParallelMeshDims")
    if way == "replicated":
        return dims(replicate=tuple(names) if len(names) > 1 else names[0])
    if way == "flat":
        return dims(shard=tuple(names))
    return dims(shard=names[-1], replicate=names[0] if len(names) > 1 else None)


@told_law(
    "both-parallel",
    ", dp_mesh_dims; torch.distributed.tensor.parallel; FullyShardedDataParallel, device_mesh",
    SHOWN,
    features,
)
def both_parallel(
    model: Whole,
    mesh: NamedMesh,
    inputs: Annotated[Pairs, FromCase(lambda case: inputs_of(case, shared=True))],
    way: Literal["fully", "told", "flat", "replicated", "remade", "wrapped", "ddp", "ddp-named"],
):
    """A tensor-parallel model whose data is shared out along the other dims of its mesh computes the dense output, and
    its parameters become the dense model's, with the mean of all gradients."""
    names, spmd = mesh.mesh_dim_names, way in ("told", "flat", "replicated", "remade")
    compat.op_plans()  # which mesh of equal ones a rule has seen first is no question but of one way
    if way == "remade":
        spread(copy.deepcopy(model), DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names))
    if spmd:
        spread(model, mesh)
        fully_shard(model, mesh=mesh, dp_mesh_dims=data_dims(way, names[:-1]))
    else:
        parallelize_module(model, mesh[names[-1]], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
        data = mesh[names[:-1]]
        if way == "fully":
            fully_shard(model, mesh=data)
        if way == "wrapped":
            model = FullyShardedDataParallel(
                model, device_mesh=data, use_orig_params=True, device_id=torch.device(mesh.device_type)
            )
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        if way.startswith("ddp"):
            compat.pre_dp_module_transform(model)
            model = DistributedDataParallel(model, process_group=data.get_group())
    kept = dict(model.module.named_parameters()) if way == "ddp" else {}

    def state() -> dict[str, Any]:
        if way in ("wrapped", "ddp"):
            return {name: one.detach().clone() for name, one in (kept or model.state_dict()).items()}
        return copied_parameters(model.module if way == "ddp-named" else model)

    def result(x: torch.Tensor) -> Any:
        if not spmd:
            return model(x)
        split = [Shard(0)] * (mesh.ndim - 1) + [Replicate()]
        out = model(DTensor.from_local(x, mesh, split, run_check=False))
        return out.redistribute(placements=split).to_local()

    stepping, steps, first = torch.optim.SGD(model.parameters(), lr=0.5), [], state()
    for x, grad in inputs:
        out = result(x)
        out.backward(grad)
        stepping.step()
        stepping.zero_grad()
        steps.append({"forward": out, "parameters": state()})
    again = None
    if way == "wrapped":
        model.load_state_dict(first)
        again = result(inputs[0][0])
    return {"first": first, "steps": steps, "again": again}


@both_parallel.due
def _(model, mesh: Mesh, inputs: list[Pairs], way: str, rank: Rank):
    row = mesh.ranks.index(rank) // mesh.shape[-1]
    pair = mesh.slice((mesh.ndim - 1,), mesh.coord(rank) or (0,) * mesh.ndim)
    over = Mesh.parse(f"{mesh.size // mesh.shape[-1]}x{mesh.shape[-1]}") if way == "flat" else mesh

    def lie(named: dict[str, Any]) -> dict[str, Any]:
        if way.startswith("ddp"):
            return {name: Near(dtensor(pair, whole, PLACES[name]).local(rank)) for name, whole in named.items()}
        return {name: Claimed(whole, over, exact=False) for name, whole in named.items()}

    steps, first = [], lie(copied_parameters(model))
    for pairs in inputs:
        model.zero_grad()
        outs = [model(x) for x, _ in pairs]
        for out, (_, grad) in zip(outs, pairs, strict=True):
            out.backward(grad / len(pairs))
        sgd(model, reduced_gradients(model))
        steps.append({"forward": Near(outs[row].detach()), "parameters": lie(copied_parameters(model))})
    return {"first": first, "steps": steps, "again": steps[0]["forward"] if way == "wrapped" else None}
