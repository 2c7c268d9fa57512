"""The law of meshes that keep the order of their ranks in their groups."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Device, MeshTable, Rank
from shardlaw.conformance.laws.mesh.cases import DOC, mesh_law
from shardlaw.conformance.laws.mesh.description import dim_ranks
from shardlaw.conformance.laws.shared.newer import is_unsupported, require_options
from shardlaw.reference import placement as ref
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh

CASES = (
    "mesh=2x2",
    "mesh=2@1,0 kept=1",
    "mesh=3@2,0,1 kept=1",
    "mesh=4@3,1,0,2 kept=1",
    "mesh=2x2@0,2,3,1 kept=1",
    "mesh=2x2@3,2,1,0 kept=1",
    "mesh=1x4@1,0,3,2 kept=1",
    "mesh=2x2 kept=1",
    "mesh=2x1x2@2,3,0,1 kept=1",
)


def look_at(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """The ranks of the groups of a mesh, the place of this rank in each, and a tensor that is sharded on it."""
    full = torch.arange(2.0 * mesh.size(), device=device)
    sharded = distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim)
    return {
        "members": [list(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups()],
        "local rank": [mesh.get_local_rank(dim) for dim in range(mesh.ndim)],
        "local": sharded.to_local(),
        "whole": sharded.full_tensor(),
    }


@mesh_law(
    "kept-order",
    f"{DOC}: preserve_rank_order, subgroup rank order is preserved instead of being sorted in ascending order",
    CASES[0],
    needs=("all_gather", "scatter"),
    cases=CASES,
    refusal=is_unsupported,
    weight=0.2,
)
def kept_order(mesh: MeshTable, device: Device, kept: bool = False):
    """The groups of a mesh that preserves the order of ranks list them as its table does, also those of a copy, of a
    slice and of flattened dims, and tensors on these are cut and put together in this order."""
    table = torch.tensor(mesh)
    names = ("a", "b", "c")[: table.ndim]
    options: dict[str, Any] = {"preserve_rank_order": True} if kept else {}
    require_options(DeviceMesh.__init__, options)
    made = DeviceMesh(device.type, table, mesh_dim_names=names, **options)
    found = {"whole": look_at(made, device), "copy": look_at(copy.deepcopy(made), device)}
    for name in names if len(names) > 1 else ():
        found[name] = look_at(made[name], device)
    if len(names) > 1:
        found["flat"] = look_at(compat.flatten_mesh(made, "flat"), device)
    return found


def due_on(mesh: Mesh, rank: int) -> dict[str, Any]:
    """What is due of :func:`look_at`."""
    full = torch.arange(2.0 * mesh.size)
    layout = Layout(tuple(full.shape), mesh, (ref.Shard(0),) * mesh.ndim)
    return {
        "members": dim_ranks(mesh, rank),
        "local rank": list(mesh.coord(rank) or ()),
        "local": Global(full, layout).local(rank),
        "whole": full,
    }


@kept_order.due
def _(mesh: Mesh, rank: Rank):
    coord, names = mesh.coord(rank) or (), ("a", "b", "c")[: mesh.ndim]
    due = {"whole": due_on(mesh, rank), "copy": due_on(mesh, rank)}
    for dim, name in enumerate(names if len(names) > 1 else ()):
        due[name] = due_on(mesh.slice((dim,), coord), rank)
    if len(names) > 1:
        due["flat"] = due_on(Mesh((mesh.size,), mesh.ranks), rank)
    return due
