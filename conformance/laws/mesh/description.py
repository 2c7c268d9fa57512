"""What a mesh says of itself and what its members tell each other, in plain torch: for acts."""

from __future__ import annotations

import torch
import torch.distributed as dist


def members(group):
    """The ranks of a group, ascending."""
    return sorted(dist.get_process_group_ranks(group))


def description(mesh):
    """The table and names of a mesh, where this rank sits in it, and the members of its groups."""
    at = mesh.get_coordinate()
    groups = mesh.get_all_groups() if at is not None else []
    return {
        "table": mesh.mesh.tolist(),
        "names": mesh.mesh_dim_names,
        "coordinate": None if at is None else tuple(at),
        "members": [members(group) for group in groups],
    }


def sums(mesh):
    """What its members add up to along each mesh dim, a digit for each; nothing on a rank outside."""
    totals = []
    for dim in range(mesh.ndim if mesh.get_coordinate() is not None else 0):
        total = torch.tensor([10 ** dist.get_rank()], device=mesh.device_type)
        dist.all_reduce(total, group=mesh.get_group(dim))
        totals.append(total.item())
    return totals


def gathered(mesh):
    """The ranks that a gather collects along each mesh dim."""
    found = []
    for dim in range(mesh.ndim):
        rank = torch.tensor([dist.get_rank()], device=mesh.device_type)
        parts = [torch.empty_like(rank) for _ in range(mesh.size(dim))]
        dist.all_gather(parts, rank, group=mesh.get_group(dim))
        found.append(torch.cat(parts).tolist())
    return found
