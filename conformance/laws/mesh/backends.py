"""Laws of backends named for single mesh dims, whether a dim comes from a shape, from flattened dims or from a cut."""

from __future__ import annotations

import inspect
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
from shardlaw.conformance.laws.mesh.description import description, sums
from shardlaw.conformance.laws.mesh.expected import described, lines, names_of, summed
from shardlaw.reference.mesh import Mesh

PATIENCE = timedelta(seconds=77)
# the groups that the backend of our own was asked for: their ranks, their options, and how long they wait
NOTES: list[Any] = []
MADE = {
    "name": ("2x2", "1x2", "1", "2", "4", "2x1x2"),
    "number": ("2x2", "2", "1x3"),
    "flatten": ("2x2", "1x2", "2x1x2"),
    "cut": ("4", "2"),
    "again": ("2x2", "1x2"),
}


def noted(request, options):
    """A backend of our own, in effect gloo: it notes the groups that it is asked for."""
    NOTES.append((list(request.global_ranks_in_group), options, request.timeout))
    return dist.ProcessGroupGloo(request.store, request.group_rank, request.group_size, timeout=request.timeout)


def on_gloo(here: Any) -> str:
    if (
        here.target.backend != dist.Backend.GLOO
        or "backend_override" not in inspect.signature(init_device_mesh).parameters
    ):
        here.reject("backends are noted on gloo alone, where this version of torch takes any for a mesh dim")
    return dist.Backend.GLOO


def sweep(limits: Limits) -> list[Case]:
    found: dict[tuple[str, str], list[Case]] = {}
    for how, meshes in MADE.items():
        for mesh in map(Mesh.parse, meshes):
            dims = range(mesh.ndim) if how in ("name", "number", "again") else (0, 1) if how == "cut" else (0,)
            for case in [
                fields(mesh=mesh, how=how, of=DIM_NAMES[dim], options=given)
                for dim in dims
                for given in ("backend", "options", "pair")
            ]:
                found.setdefault((how, case.get("options")), []).append(case)
    # each way, and what is given in each, before more meshes
    longest = max(map(len, found.values()))
    cases = [cases[at] for at in range(longest) for cases in found.values() if at < len(cases)]
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
    usual: Annotated[str, RankField(on_gloo, '"gloo"')],
):
    """A backend, its options or both that are named for one mesh dim are those of its group, and of no other."""
    if "noted" not in dist.Backend.backend_list:
        dist.Backend.register_backend("noted", noted, extended_api=True, devices=[device.type])
    NOTES.clear()
    table = torch.tensor(mesh)
    names, at = ("a", "b", "c")[: table.ndim], "abc".index(of)
    patient = compat.BackendOptions("noted", PATIENCE)
    given = {"backend": "noted", "options": patient, "pair": ("noted", patient)}[options]
    if how == "flatten":
        made = compat.flatten_mesh(DeviceMesh(device.type, table, mesh_dim_names=names), "flat", backend_override=given)
    elif how == "cut":
        line = DeviceMesh(device.type, table, mesh_dim_names=("flat",))
        made = compat.unflatten_mesh(line, 0, (2, len(table) // 2), ("a", "b"), backend_override={of: given})
    else:
        chosen: dict[int | str, Any] = {at if how == "number" else of: given}
        for _ in range(2 if how == "again" else 1):  # what is said of the backends serves for the next mesh too
            NOTES.clear()
            made = init_device_mesh(device.type, tuple(table.shape), mesh_dim_names=names, backend_override=chosen)
    groups = made.get_all_groups() if made.get_coordinate() is not None else []
    own = [(ranks, given is patient, patience) for ranks, given, patience in NOTES if dist.get_rank() in ranks]
    return {
        "mesh": description(made),
        "backend": [dist.get_backend(group) for group in groups],
        "traffic": sums(made),
        "options": [(ranks, is_ours) for ranks, is_ours, _ in own],
        "patience": [patience.seconds for _, _, patience in own] if options == "pair" else [],
        "waits": [compat.group_timeout(group, device).seconds for group in groups[at : at + 1] if options == "options"],
    }


@backends.due
def _(mesh, how, of, options, rank: Rank):
    tables = {"flatten": (mesh.size,), "cut": (2, mesh.size // 2)}
    live = Mesh(tables.get(how, mesh.shape), mesh.ranks)
    at, asked, along = DIM_NAMES.index(of), options != "options", lines(live, rank)
    names = ("flat",) if how == "flatten" else names_of(live)
    return {
        "mesh": described(live, names, rank),
        "backend": Of(["noted" if dim == at and asked else dist.Backend.GLOO for dim in range(len(along))]),
        "traffic": summed(live, rank),
        "options": Of([(line, options == "pair") for line in along[at : at + 1] if asked]),
        "patience": Of([PATIENCE.seconds for _ in along[at : at + 1] if options == "pair"]),
        "waits": Of([PATIENCE.seconds for _ in along[at : at + 1] if not asked]),
    }
