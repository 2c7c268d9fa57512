"""Laws of the creation of meshes, from a shape or from existing process groups, and of invalid arguments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Refused, caught
from shardlaw.conformance.law.fields import Device, MeshTable, NamedMesh, Rank, WordField, WorldSize
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.mesh.cases import DOC, ascending_meshes, mesh_law
from shardlaw.conformance.laws.mesh.description import describe, describe_due, dim_names, reduce_due, reduce_ranks

FROM_GROUP = f"{DOC}.from_group"


@mesh_law(
    "init",
    "torch.distributed.device_mesh docs, init_device_mesh",
    "mesh=2x2",
    sweep=lambda limits: [fields(mesh=mesh) for mesh in ascending_meshes(limits)],
    sweeps=16,
    weight=0.3,
)
def init(mesh: NamedMesh):
    """init_device_mesh of a shape creates the mesh of ranks 0, 1, ... in row-major order, with the given names."""
    created = init_device_mesh(mesh.device_type, tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
    return {"mesh": describe(created), "equality": created == mesh}


@init.due
def _(mesh, rank: Rank):
    return {"mesh": describe_due(mesh, dim_names(mesh), rank), "equality": True}


def default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def mesh_from_world(device, **options):
    """The mesh from the default group."""
    return DeviceMesh.from_group(default_group(), device, **options)


REFUSED = {
    "rank-twice": lambda device, world: DeviceMesh(device, [*range(world - 1), 0]),
    "rank-outside": lambda device, world: DeviceMesh(device, [*range(world - 1), world]),
    "rank-far-outside": lambda device, world: DeviceMesh(device, [0, world + 7]),
    "row-twice": lambda device, world: DeviceMesh(device, [[0, 1], [0, 1]]),
    "too-large": lambda device, world: init_device_mesh(device, (world + 1,)),
    "too-large-2d": lambda device, world: init_device_mesh(device, (2, world)),
    "same-name": lambda device, world: init_device_mesh(device, (1, world), mesh_dim_names=("a", "a")),
    "few-names": lambda device, world: init_device_mesh(device, (1, world), mesh_dim_names=("a",)),
    "many-names": lambda device, world: init_device_mesh(device, (world,), mesh_dim_names=("a", "b")),
    "device-index": lambda device, world: init_device_mesh(f"{device}:0", (world,)),
    "no-mesh": lambda device, world: DeviceMesh(device),
    "fractions": lambda device, world: DeviceMesh(device, torch.arange(world) + 0.5),
    "table-many-names": lambda device, world: DeviceMesh(device, [*range(world)], mesh_dim_names=("a", "b")),
    "table-same-name": lambda device, world: DeviceMesh(device, [[*range(world)]], mesh_dim_names=("a", "a")),
    "group-many-names": lambda device, world: mesh_from_world(device, mesh_dim_names=("a", "b")),
    "group-device-index": lambda device, world: mesh_from_world(f"{device}:0"),
    "groups-of-one-dim": lambda device, world: DeviceMesh.from_group(
        [default_group()] * 2, device, mesh=torch.arange(world), mesh_dim_names=("a",)
    ),
}


def sweep_refusals(limits: Limits) -> list[Case]:
    worlds = {attempt: (2, 3) if attempt.startswith("rank-") else (2, 3, 4) for attempt in REFUSED}
    cases = [fields(attempt=attempt, world=world) for attempt in REFUSED for world in worlds[attempt]]
    return [case for case in cases if case.world <= limits.world_size]


@law(
    "mesh.refusals",
    source="torch.distributed.device_mesh docs, DeviceMesh, DeviceMesh.from_group and init_device_mesh",
    control="attempt=same-name world=2",
    sweep=sweep_refusals,
    sweeps=48,
    weight=0.2,
)
def refusals(attempt: Annotated[str, WordField(REFUSED)], device: Device, world: WorldSize):
    """Creating a mesh refuses repeated, missing and fractional ranks, too large shapes, names or groups that
    are not one for each dim, and a device index."""
    return {"refusal": caught(lambda: REFUSED[attempt](device.type, world))}


@refusals.due
def _():
    return {"refusal": Refused()}


def create_own_groups(table):
    """Create the groups along all dims of a table, on every rank. Returns those of this rank, one for each dim."""
    lists = [table.movedim(dim, -1).reshape(-1, table.shape[dim]).tolist() for dim in range(table.ndim)]
    own = [dist.new_subgroups_by_enumeration(ranks)[0] for ranks in lists]
    return [group for group in own if group is not None]


def sweep_from_group(limits: Limits) -> list[Case]:
    tables, meshes = ("none", "list", "tensor", "tuple", "array"), ("2", "3", "2@0,2", "2@1,2", "1@1", "4", "3@0,1,3")
    return texts(*(f"mesh={mesh} table={table}" for table in tables for mesh in meshes))(limits)


@mesh_law("from-group", FROM_GROUP, "mesh=2 table=list", sweep=sweep_from_group, sweeps=35, weight=0.3)
def from_group(mesh: MeshTable, table: Literal["none", "list", "tensor", "tuple", "array"], device: Device):
    """A mesh from one group is the 1-D mesh of its ranks and has that group; a table of other ranks is refused."""
    groups = create_own_groups(torch.tensor(mesh))
    if not groups:
        return {}

    forms = {"tensor": torch.tensor, "tuple": tuple, "array": lambda ranks: torch.tensor(ranks).numpy()}
    form: Any = forms.get(table, list)

    def from_table(ranks):
        return DeviceMesh.from_group(groups[0], device.type, mesh=form(ranks))

    given = {} if table == "none" else {"mesh": form(mesh)}
    created = DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=("a",), **given)
    return {
        "mesh": describe(created),
        "group": created.get_group() is groups[0],
        "other table": caught(from_table, [rank + 1 for rank in mesh]),
        "other order": caught(from_table, mesh[::-1]) if len(mesh) > 1 else None,
    }


@from_group.due
def _(mesh, rank: Rank):
    if mesh.coord(rank) is None:
        return {}
    order = Refused() if mesh.size > 1 else None
    return {"mesh": describe_due(mesh, ("a",), rank), "group": True, "other table": Refused(), "other order": order}


def sweep_from_groups(limits: Limits) -> list[Case]:
    meshes = ("1x2", "2x1", "2x2", "1x3", "3x1", "1x2x2", "1x2@0,2", "2x2@0,2,1,3", "2", "3@0,1,3", "2x3", "2x2x2")
    cases = [f"mesh={mesh} groups={groups}" for groups in ("own", "sliced") for mesh in meshes]
    return texts(*cases, *(f"mesh={mesh} groups=turned" for mesh in ("2x2", "1x2", "3x1", "2x2@0,2,1,3")))(limits)


@mesh_law(
    "from-groups",
    FROM_GROUP,
    "mesh=2x2 groups=own",
    needs=("all_reduce",),
    sweep=sweep_from_groups,
    sweeps=28,
    weight=0.4,
)
def from_groups(mesh: MeshTable, groups: Literal["own", "sliced", "turned"], device: Device):
    """A mesh from several groups has the given table, and group i is that of dim i; missing groups, names or tables are
    refused, and so are groups in another order than the dims of the table."""
    table = torch.tensor(mesh)
    names = ("a", "b", "c")[: table.ndim]
    if groups != "sliced":
        given = create_own_groups(table)
    else:
        parent = DeviceMesh(device.type, table, mesh_dim_names=names)
        given = parent.get_all_groups() if parent.get_coordinate() is not None else []
    if not given:
        return {}

    def make(groups=given, mesh=table, mesh_dim_names=names):
        return DeviceMesh.from_group(groups, device.type, mesh=mesh, mesh_dim_names=mesh_dim_names)

    if groups == "turned":
        return {"turned": caught(lambda: make(groups=given[::-1]))}
    created = make()
    found = {
        "mesh": describe(created),
        "group": [created.get_group(name) is group for name, group in zip(names, given, strict=False)],
        "reduced": reduce_ranks(created),
        "none": caught(lambda: make(groups=[])),
    }
    if table.ndim > 1:
        found["no names"] = caught(lambda: make(mesh_dim_names=None))
        found["no table"] = caught(lambda: make(mesh=None))
        found["arity"] = caught(lambda: make(groups=given[:1]))
    return found


@from_groups.due
def _(mesh, groups, rank: Rank):
    if mesh.coord(rank) is None:
        return {}
    if groups == "turned":
        return {"turned": Refused()}
    refused = ("none", "no names", "no table", "arity") if mesh.ndim > 1 else ("none",)
    return {
        "mesh": describe_due(mesh, dim_names(mesh), rank),
        "group": [True] * mesh.ndim,
        "reduced": reduce_due(mesh, rank),
        **dict.fromkeys(refused, Refused((ValueError, RuntimeError, TypeError))),
    }
