"""Laws of how meshes are made: from a shape, from process groups that exist already, and what makes none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.case import Case
from conformance.here import read_mesh
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.given import NAMES
from conformance.laws.mesh.coordinates import all_meshes
from conformance.report.reproducer import Script
from reference.mesh import Mesh

if TYPE_CHECKING:
    from conformance.here import Here

DOC = "torch.distributed.device_mesh docs, DeviceMesh.from_group"


def sweep_init(limits: Limits) -> list[Case]:
    ascending = [mesh for mesh in all_meshes(limits) if mesh.ranks == tuple(range(mesh.size))]
    return [Case.of("mesh.init", mesh=mesh) for mesh in ascending]


def check_init(case: Case, here: Here) -> None:
    """``init_device_mesh`` of a shape is the mesh of the ranks from 0 on, row by row, with the names that were given."""
    mesh, names = case.mesh(), NAMES[: case.mesh().ndim]
    live = init_device_mesh(str(here.device), mesh.shape, mesh_dim_names=names)
    here.require(read_mesh(live) == mesh, "wrong-layout", "table", "mesh holds other ranks", mesh, read_mesh(live))
    here.require(live.mesh_dim_names == names, "wrong-metadata", "names", "mesh dims have other names", names, live.mesh_dim_names)
    here.require(
        live == here.mesh(mesh, fresh=True, names=names), "wrong-value", "equality", "it differs from DeviceMesh of the same table"
    )
    coord = here.coord(mesh)
    got = live.get_coordinate()
    here.require((None if got is None else tuple(got)) == coord, "wrong-value", "coordinate", "rank has another coordinate", coord, got)
    for dim, name in enumerate(names if coord is not None else ()):
        want = sorted(mesh.group(dim, coord or ()))
        members = sorted(dist.get_process_group_ranks(live.get_group(name)))
        here.require(members == want, "wrong-value", "members", f"group {name!r} has other members", want, members)


def script_init(case: Case) -> Script:
    mesh, names = case.mesh(), NAMES[: case.mesh().ndim]
    body = [f'mesh = init_device_mesh("cpu", {mesh.shape}, mesh_dim_names={names})']
    want = dict.fromkeys(range(case.world), (torch.tensor(mesh.ranks).reshape(mesh.shape).tolist(), names))
    return scripts.compared(case, body, "(mesh.mesh.tolist(), mesh.mesh_dim_names)", want)


REFUSALS = {
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
}
REFUSED_TEXTS = {
    "rank-twice": 'DeviceMesh("cpu", [*range({world} - 1), 0])',
    "rank-outside": 'DeviceMesh("cpu", [*range({world} - 1), {world}])',
    "rank-far-outside": 'DeviceMesh("cpu", [0, {world} + 7])',
    "row-twice": 'DeviceMesh("cpu", [[0, 1], [0, 1]])',
    "too-large": 'init_device_mesh("cpu", ({world} + 1,))',
    "too-large-2d": 'init_device_mesh("cpu", (2, {world}))',
    "same-name": 'init_device_mesh("cpu", (1, {world}), mesh_dim_names=("a", "a"))',
    "few-names": 'init_device_mesh("cpu", (1, {world}), mesh_dim_names=("a",))',
    "many-names": 'init_device_mesh("cpu", ({world},), mesh_dim_names=("a", "b"))',
    "device-index": 'init_device_mesh("cpu:0", ({world},))',
    "no-mesh": 'DeviceMesh("cpu")',
}


def sweep_refusals(limits: Limits) -> list[Case]:
    worlds = {attempt: (2, 3) if attempt.startswith("rank-") else (2, 3, 4) for attempt in REFUSALS}
    cases = [Case.of("mesh.refusals", attempt=attempt, world=world) for attempt in REFUSALS for world in worlds[attempt]]
    return [case for case in cases if case.world <= limits.world_size]


def features_refusals(case: Case) -> set[str]:
    attempt = case.get("attempt")
    return {"rank-twice"} if attempt == "rank-twice" else {"rank-outside"} if attempt.startswith("rank-") else set()


def check_refusals(case: Case, here: Here) -> None:
    """What is no mesh is refused, on every rank."""
    attempt = case.get("attempt")
    here.refused(lambda: REFUSALS[attempt](str(here.device), here.world), attempt, f"a mesh with {attempt}")


def script_refusals(case: Case) -> Script:
    return scripts.refused(case, [], REFUSED_TEXTS[case.get("attempt")].format(world=case.world))


def _made(mesh: Mesh) -> list[tuple[int, ...]]:
    """The groups of all fibres, dim by dim, in one order for all ranks."""
    return [mesh.group(dim, coord) for dim in range(mesh.ndim) for coord in mesh.coords() if coord[dim] == 0]


def _own(mesh: Mesh, rank: int) -> list[dist.ProcessGroup]:
    """A new group for each mesh dim: the fibre through this rank. Every rank of the world makes all of them."""
    own = []
    for ranks in _made(mesh):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own.append(group)
    return own


def sweep_one(limits: Limits) -> list[Case]:
    meshes = ("2", "3", "2@0,2", "2@1,2", "1@1", "4", "3@0,1,3")
    wanted = [Mesh.parse(text) for text in meshes]
    return [
        Case.of("mesh.from-group", mesh=mesh, table=table)
        for table in ("none", "list", "tensor")
        for mesh in wanted
        if max(mesh.ranks) < limits.world_size
    ]


def check_one(case: Case, here: Here) -> None:
    """A mesh from one group is the 1-D mesh of its ranks and communicates by it; a table of other ranks is refused."""
    mesh, how = case.mesh(), case.get("table")
    groups = _own(mesh, here.rank)
    coord = here.coord(mesh)
    if coord is None:
        return
    device, ranks = str(here.device), list(mesh.ranks)
    table = {"none": None, "list": ranks, "tensor": torch.tensor(ranks)}[how]
    live = DeviceMesh.from_group(groups[0], device, mesh=table, mesh_dim_names=("a",))
    here.require(read_mesh(live) == mesh, "wrong-layout", "table", "the mesh of a group holds other ranks", mesh, read_mesh(live))
    here.require(live.mesh_dim_names == ("a",), "wrong-metadata", "names", "the dim has another name", ("a",), live.mesh_dim_names)
    here.require(live.get_group() is groups[0], "wrong-value", "group", "the mesh of a group communicates by another group")
    at = live.get_coordinate()
    here.require((None if at is None else tuple(at)) == coord, "wrong-value", "coordinate", "this rank sits elsewhere", coord, at)
    others = {"other table": [rank + 1 for rank in ranks], "other order": ranks[::-1]}
    for check, other in others.items():
        given = torch.tensor(other) if how == "tensor" else other
        if other != ranks:
            made = partial(DeviceMesh.from_group, groups[0], device, mesh=given)
            here.refused(made, check, f"a table of {check}")


def script_one(case: Case) -> Script:
    mesh = case.mesh()
    body = [f"group = dist.new_group({list(mesh.ranks)})"]
    want = {rank: (list(mesh.ranks), True) for rank in sorted(mesh.ranks)}
    body += ["if rank not in WANT:", "    return None, None"] if len(want) < case.world else []
    body += ['mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("a",))']
    return scripts.compared(case, body, "(mesh.mesh.tolist(), mesh.get_group() is group)", want)


def sweep_many(limits: Limits) -> list[Case]:
    wanted = [
        Mesh.parse(text)
        for text in ("1x2", "2x1", "2x2", "1x3", "3x1", "1x2x2", "1x2@0,2", "2x2@0,2,1,3", "2", "3@0,1,3", "2x3", "2x2x2")
        if max(Mesh.parse(text).ranks) < limits.world_size
    ]
    return [Case.of("mesh.from-groups", mesh=mesh, groups=groups) for groups in ("own", "sliced") for mesh in wanted]


def check_many(case: Case, here: Here) -> None:
    """A mesh from several groups has the given table, and its dim ``i`` communicates by group ``i``; too few groups, a missing
    table and missing names are refused."""
    mesh, names = case.mesh(), NAMES[: case.mesh().ndim]
    coord = here.coord(mesh)
    if case.get("groups") == "own":
        groups = _own(mesh, here.rank)
    else:
        parent = here.mesh(mesh, fresh=True, names=names)
        groups = parent.get_all_groups() if coord is not None else []
    if coord is None:
        return
    device, table = str(here.device), torch.tensor(mesh.ranks).reshape(mesh.shape)
    live = DeviceMesh.from_group(groups, device, mesh=table, mesh_dim_names=names)
    here.require(read_mesh(live) == mesh, "wrong-layout", "table", "the mesh of several groups holds other ranks", mesh, read_mesh(live))
    for dim, group in enumerate(groups):
        got, want = sorted(dist.get_process_group_ranks(live.get_group(dim))), sorted(mesh.group(dim, coord))
        here.require(got == want, "wrong-value", "members", f"mesh dim {dim} has a group of other members", want, got)
        here.require(
            live.get_group(names[dim]) is group, "wrong-value", "group", f"mesh dim {dim} communicates by another group than it was given"
        )
        total = here.tensor(torch.tensor([10**here.rank], dtype=torch.int64))
        dist.all_reduce(total, group=live.get_group(dim))
        here.same(total, torch.tensor([sum(10**rank for rank in want)]), "traffic", what=f"sum along mesh dim {dim}")
    errors = (ValueError, RuntimeError, TypeError)
    here.refused(lambda: DeviceMesh.from_group([], device, mesh=table, mesh_dim_names=names), "none", "no group at all", errors=errors)
    if mesh.ndim > 1:
        here.refused(lambda: DeviceMesh.from_group(groups, device, mesh=table), "no names", "several groups without names", errors=errors)
        here.refused(
            lambda: DeviceMesh.from_group(groups, device, mesh_dim_names=names), "no table", "several groups without a table", errors=errors
        )
        few = groups[:1]
        here.refused(
            lambda: DeviceMesh.from_group(few, device, mesh=table, mesh_dim_names=names),
            "arity",
            "one group for a table of more dims",
            errors=errors,
        )


def script_many(case: Case) -> Script:
    mesh, names = case.mesh(), NAMES[: case.mesh().ndim]
    table = torch.tensor(mesh.ranks).reshape(mesh.shape).tolist()
    body = [
        "groups = []",
        f"for ranks in {[list(ranks) for ranks in _made(mesh)]}:",
        "    group = dist.new_group(ranks)",
        "    groups += [group] if rank in ranks else []",
    ]
    want = {}
    for rank in sorted(mesh.ranks):
        coord = mesh.coord(rank) or ()
        want[rank] = [sorted(mesh.group(dim, coord)) for dim in range(mesh.ndim)]
    body += ["if not groups:", "    return None, None"] if len(want) < case.world else []
    body += [f'mesh = DeviceMesh.from_group(groups, "cpu", mesh={table}, mesh_dim_names={names})']
    return scripts.compared(case, body, "[sorted(dist.get_process_group_ranks(mesh.get_group(i))) for i in range(mesh.ndim)]", want)


LAWS = (
    Law(
        id="mesh.init",
        clause="init_device_mesh of a shape is the mesh of ranks 0, 1, ... row by row, with the names given.",
        source="torch.distributed.device_mesh docs, init_device_mesh",
        check=check_init,
        script=script_init,
        control="mesh.init mesh=2x2",
        planted="mesh_init_column_by_column",
        sweep=sweep_init,
        sweeps=16,
        needs=("subgroups",),
        weight=0.3,
    ),
    Law(
        id="mesh.refusals",
        clause="A rank twice or outside the world, a shape larger than it, and names that are not one for each dim are refused.",
        source="torch.distributed.device_mesh docs, DeviceMesh and init_device_mesh",
        check=check_refusals,
        script=script_refusals,
        features=features_refusals,
        control="mesh.refusals attempt=same-name world=2",
        planted="mesh_accepts_repeated_names",
        sweep=sweep_refusals,
        sweeps=30,
        weight=0.2,
    ),
    Law(
        id="mesh.from-group",
        clause="A mesh from one group is the 1-D mesh of its ranks and communicates by that group; another table is refused.",
        source=DOC,
        check=check_one,
        script=script_one,
        control="mesh.from-group mesh=2 table=list",
        planted="mesh_from_group_ignores_table",
        sweep=sweep_one,
        sweeps=21,
        needs=("subgroups",),
        weight=0.3,
    ),
    Law(
        id="mesh.from-groups",
        clause="A mesh from several groups has the table given, and its dim i communicates by group i.",
        source=DOC,
        check=check_many,
        script=script_many,
        control="mesh.from-groups mesh=2x2 groups=own",
        planted="mesh_from_groups_reversed",
        sweep=sweep_many,
        sweeps=24,
        needs=("all_reduce", "subgroups"),
        weight=0.4,
    ),
)
