"""Laws of backends and backend options for single mesh dims."""

from __future__ import annotations

import inspect
import itertools
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import DIM_NAMES, Device, MeshTable, Rank, RankField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.mesh.cases import mesh_law
from shardlaw.conformance.laws.mesh.description import (
    describe,
    describe_due,
    dim_names,
    dim_ranks,
    reduce_due,
    reduce_ranks,
)
from shardlaw.reference.mesh import Mesh

TIMEOUT = timedelta(seconds=77)
# the ranks, options and timeouts of the groups that the recording backend has created
CREATED: list[Any] = []
# meshes by the way in which the dim is created
MESHES = {
    "name": ("2x2", "1x2", "1", "2", "4", "2x1x2"),
    "number": ("2x2", "2", "1x3"),
    "flatten": ("2x2", "1x2", "2x1x2"),
    "cut": ("4", "2"),
    "again": ("2x2", "1x2"),
}


def create_recorded(request, options):
    """Create a group of gloo, and record it."""
    CREATED.append((list(request.global_ranks_in_group), options, request.timeout))
    return dist.ProcessGroupGloo(request.store, request.group_rank, request.group_size, timeout=request.timeout)


def require_gloo(here: Any) -> str:
    if (
        here.target.backend != dist.Backend.GLOO
        or "backend_override" not in inspect.signature(init_device_mesh).parameters
    ):
        here.reject("backends of mesh dims are recorded on gloo alone, where this version of torch supports them")
    return dist.Backend.GLOO


def sweep(limits: Limits) -> list[Case]:
    """Every way with every form of ``options``, on the first dim of the first mesh, then on the next dims and
    meshes."""
    columns = []
    for how, meshes in MESHES.items():
        dims = {"cut": [0, 1], "flatten": [0]}
        pairs = [(mesh, dim) for mesh in map(Mesh.parse, meshes) for dim in dims.get(how, range(mesh.ndim))]
        for options in ("backend", "options", "pair"):
            columns.append([fields(mesh=mesh, how=how, of=DIM_NAMES[dim], options=options) for mesh, dim in pairs])
    cases = [case for row in itertools.zip_longest(*columns) for case in row if case]
    return [case for case in cases if case.world <= limits.world_size]


@mesh_law(
    "backends",
    "torch.distributed.device_mesh docs, init_device_mesh (backend_override); _flatten and _unflatten take the same",
    "mesh=2x2 how=name of=a options=backend",
    needs=("all_reduce",),
    sweep=sweep,
    sweeps=30,
    weight=0.3,
    tier="extended",
)
def backends(
    mesh: MeshTable,
    how: Literal["name", "number", "flatten", "cut", "again"],
    of: Literal["a", "b", "c"],
    options: Literal["backend", "options", "pair"],
    device: Device,
    usual: Annotated[str, RankField(require_gloo, '"gloo"')],
):
    """A backend, backend options or both for one mesh dim are used for the group of this dim and for no other."""
    if "noted" not in dist.Backend.backend_list:
        dist.Backend.register_backend("noted", create_recorded, extended_api=True, devices=[device.type])
    CREATED.clear()
    table = torch.tensor(mesh)
    names, at = ("a", "b", "c")[: table.ndim], "abc".index(of)
    timeout_options = compat.BackendOptions("noted", TIMEOUT)
    given = {"backend": "noted", "options": timeout_options, "pair": ("noted", timeout_options)}[options]
    if how == "flatten":
        root = DeviceMesh(device.type, table, mesh_dim_names=names)
        created = compat.flatten_mesh(root, "flat", backend_override=given)
    elif how == "cut":
        root = DeviceMesh(device.type, table, mesh_dim_names=("flat",))
        created = compat.unflatten_mesh(root, 0, (2, len(table) // 2), ("a", "b"), backend_override={of: given})
    else:
        override: dict[int | str, Any] = {at if how == "number" else of: given}
        for _ in range(2 if how == "again" else 1):  # init_device_mesh must not change the dict
            CREATED.clear()
            created = init_device_mesh(device.type, tuple(table.shape), mesh_dim_names=names, backend_override=override)
    groups = created.get_all_groups() if created.get_coordinate() is not None else []
    own = [(ranks, used is timeout_options, timeout) for ranks, used, timeout in CREATED if dist.get_rank() in ranks]
    return {
        "mesh": describe(created),
        "backend": [dist.get_backend(group) for group in groups],
        "traffic": reduce_ranks(created),
        "options": [(ranks, is_ours) for ranks, is_ours, _ in own],
        "patience": [timeout.seconds for _, _, timeout in own] if options == "pair" else [],
        "waits": [compat.group_timeout(group, device).seconds for group in groups[at : at + 1] if options == "options"],
    }


@backends.due
def _(mesh, how, of, options, rank: Rank):
    shapes = {"flatten": (mesh.size,), "cut": (2, mesh.size // 2)}
    created = Mesh(shapes.get(how, mesh.shape), mesh.ranks)
    at, has_backend, ranks_by_dim = DIM_NAMES.index(of), options != "options", dim_ranks(created, rank)
    own = ranks_by_dim[at : at + 1]  # none on a rank outside the mesh
    return {
        "mesh": describe_due(created, ("flat",) if how == "flatten" else dim_names(created), rank),
        "backend": Of(
            ["noted" if dim == at and has_backend else dist.Backend.GLOO for dim in range(len(ranks_by_dim))]
        ),
        "traffic": reduce_due(created, rank),
        "options": Of([(ranks, options == "pair") for ranks in own if has_backend]),
        "patience": Of([TIMEOUT.seconds for _ in own if options == "pair"]),
        "waits": Of([TIMEOUT.seconds for _ in own if not has_backend]),
    }
