"""What a mesh says of itself and what its groups communicate: for acts, in plain torch, and as due values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import DIM_NAMES
from shardlaw.conformance.law.literal import nested_ranks
from shardlaw.reference.mesh import Mesh


def sorted_ranks(group):
    """The ranks of a group, ascending."""
    return sorted(dist.get_process_group_ranks(group))


def describe(mesh):
    """The table and dim names of a mesh, this rank's coordinate, and the ranks of its groups."""
    coordinate = mesh.get_coordinate()
    groups = mesh.get_all_groups() if coordinate is not None else []
    return {
        "table": mesh.mesh.tolist(),
        "names": mesh.mesh_dim_names,
        "coordinate": None if coordinate is None else tuple(coordinate),
        "members": [sorted_ranks(group) for group in groups],
    }


def reduce_ranks(mesh):
    """The sum of ``10**rank`` along each mesh dim: a digit for each member. Empty on a rank outside."""
    totals = []
    for dim in range(mesh.ndim if mesh.get_coordinate() is not None else 0):
        total = torch.tensor([10 ** dist.get_rank()], device=mesh.device_type)
        dist.all_reduce(total, group=mesh.get_group(dim))
        totals.append(total.item())
    return totals


def gather_ranks(mesh):
    """The ranks along each mesh dim, in the order in which all_gather returns them."""
    found = []
    for dim in range(mesh.ndim):
        rank = torch.tensor([dist.get_rank()], device=mesh.device_type)
        parts = [torch.empty_like(rank) for _ in range(mesh.size(dim))]
        dist.all_gather(parts, rank, group=mesh.get_group(dim))
        found.append(torch.cat(parts).tolist())
    return found


def dim_ranks(mesh: Mesh, rank: int) -> list[list[int]]:
    """The ranks along each mesh dim through this one, in the order of the table. Empty for a rank outside."""
    coord = mesh.coord(rank)
    return [] if coord is None else [list(mesh.group(dim, coord)) for dim in range(mesh.ndim)]


def describe_due(mesh: Mesh, names: tuple[str, ...] | None, rank: int) -> dict[str, Any]:
    """The due value of :func:`describe`."""
    return {
        "table": Of(nested_ranks(mesh), "wrong-layout"),
        "names": Of(names),
        "coordinate": mesh.coord(rank),
        "members": [sorted(ranks) for ranks in dim_ranks(mesh, rank)],
    }


def reduce_due(mesh: Mesh, rank: int) -> list[int]:
    """The due value of :func:`reduce_ranks`."""
    return [sum(10**member for member in ranks) for ranks in dim_ranks(mesh, rank)]


def dim_names(mesh: Mesh, dims: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """The names of mesh dims; of all if none are given."""
    return tuple(DIM_NAMES[dim] for dim in (range(mesh.ndim) if dims is None else dims))


def slice_at(mesh: Mesh, dims: tuple[int, ...], rank: int) -> Mesh:
    """The slice of these dims through a rank of the mesh."""
    return mesh.slice(dims, mesh.coord(rank) or ())


def flatten_at(mesh: Mesh, dims: tuple[int, ...], rank: int) -> Mesh:
    """These dims, flattened, through a rank of the mesh; all dims also for a rank outside."""
    return mesh.flatten(dims, mesh.coord(rank) or (0,) * mesh.ndim)
