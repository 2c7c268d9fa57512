"""Laws of the backends that are named for single mesh dims, wherever a mesh dim comes from: a shape, flattened dims, a dim that is cut."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance import compat
from conformance.case import Case
from conformance.here import read_mesh
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.given import NAMES
from conformance.report.reproducer import Script
from reference.mesh import Mesh

if TYPE_CHECKING:
    from conformance.here import Here

# a backend of our own, in effect that of the target: it notes the groups that it is asked for
OWN = "noted"
PATIENCE = timedelta(seconds=77)
NOTES: list[tuple[tuple[int, ...], Any, timedelta]] = []
GIVEN = ("backend", "options", "pair")
MADE = {
    "name": ("2x2", "1x2", "1", "2", "4", "2x1x2"),
    "number": ("2x2", "2", "1x3"),
    "flatten": ("2x2", "1x2", "2x1x2"),
    "cut": ("4", "2"),
}


def sweep(limits: Limits) -> list[Case]:
    found = []
    for how, texts in MADE.items():
        for mesh in map(Mesh.parse, texts):
            dims = range(mesh.ndim) if how in ("name", "number") else (0, 1) if how == "cut" else (0,)
            found += [Case.of("mesh.backends", mesh=mesh, how=how, of=NAMES[dim], options=given) for dim in dims for given in GIVEN]
    # each way, and what is given in each, before more meshes
    order: dict[tuple[str, str], int] = {}
    placed: list[tuple[int, int, Case]] = []
    for case in found:
        key = case.get("how"), case.get("options")
        order[key] = order.get(key, 0) + 1
        placed.append((order[key], len(placed), case))
    return [case for _, _, case in sorted(placed, key=lambda entry: entry[:2]) if case.world <= limits.world_size]


def _creator(options: Any, backend_options: Any) -> Any:
    NOTES.append((tuple(options.global_ranks_in_group), backend_options, options.timeout))
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)


def _registered(here: Here) -> None:
    if here.target.backend != dist.Backend.GLOO or "backend_override" not in inspect.signature(init_device_mesh).parameters:
        here.reject("backends are noted on gloo alone, where this version of torch takes any for a mesh dim")
    if OWN not in dist.Backend.backend_list:
        dist.Backend.register_backend(OWN, _creator, extended_api=True, devices=[torch.empty(0).device.type])
    NOTES.clear()


def _made(case: Case, here: Here, given: Any) -> tuple[DeviceMesh, Mesh]:
    """The mesh of which one dim has a backend of its own, and its table."""
    mesh, how, name = case.mesh(), case.get("how"), case.get("of")
    names = NAMES[: mesh.ndim]
    if how in ("name", "number"):
        key: int | str = name if how == "name" else NAMES.index(name)
        return init_device_mesh(here.device.type, mesh.shape, mesh_dim_names=names, backend_override={key: given}), mesh
    if how == "flatten":
        flat = here.mesh(mesh, fresh=True, names=names)._flatten("flat", backend_override=given)
        return flat, Mesh((mesh.size,), mesh.ranks)
    sizes = (2, mesh.size // 2)
    cut = here.mesh(mesh, fresh=True, names=("flat",))._unflatten(0, sizes, NAMES[:2], backend_override={name: given})
    return cut, Mesh(sizes, mesh.ranks)


def check_backends(case: Case, here: Here) -> None:
    """The dim that a backend, options or both are named for has them, the others have what groups have; traffic goes everywhere."""
    _registered(here)
    kind, at = case.get("options"), NAMES.index(case.get("of"))
    options = compat.name("BackendOptions")(OWN, PATIENCE)
    live, mesh = _made(case, here, {"backend": OWN, "options": options, "pair": (OWN, options)}[kind])
    here.require(read_mesh(live) == mesh, "wrong-layout", "table", "mesh holds other ranks", mesh, read_mesh(live))
    coord = here.coord(mesh)
    noted = [note for note in NOTES if here.rank in note[0]]
    if coord is None:
        here.require(not noted, "wrong-value", "outside", "a rank outside the mesh has a group", [], noted)
        return
    usual = dist.get_backend()
    for dim in range(mesh.ndim):
        group, members = live.get_group(dim), mesh.group(dim, coord)
        own = dim == at and kind != "options"
        backend, due = dist.get_backend(group), OWN if own else usual
        here.require(backend == due, "wrong-metadata", "backend", f"mesh dim {dim} communicates by another backend", due, backend)
        total = here.tensor(torch.tensor([10**here.rank], dtype=torch.int64))
        dist.all_reduce(total, group=group)
        here.same(total, torch.tensor([sum(10**rank for rank in members)]), "traffic", what=f"sum along mesh dim {dim}")
    if kind == "options":
        patience = compat.timeout_of(live.get_group(at), here.device)
        here.require(patience == PATIENCE, "wrong-metadata", "options", "the group is made without the options", PATIENCE, patience)
        return
    due_notes = [(mesh.group(at, coord), options if kind == "pair" else None)]
    got = [(ranks, given) for ranks, given, _ in noted]
    here.require(
        got == due_notes, "wrong-metadata", "options", "the backend is asked for other groups, or with other options", due_notes, got
    )
    if kind == "pair":
        here.require(noted[0][2] == PATIENCE, "wrong-metadata", "patience", "the group waits another while", PATIENCE, noted[0][2])


def script_backends(case: Case) -> Script:
    mesh, how, kind, name = case.mesh(), case.get("how"), case.get("options"), case.get("of")
    names = NAMES[: mesh.ndim]
    given = {"backend": f'"{OWN}"', "options": "options", "pair": f'("{OWN}", options)'}[kind]
    options = f'options = Backend.Options("{OWN}", timedelta(seconds={PATIENCE.seconds}))'
    body = [
        "make = lambda o, given: dist.ProcessGroupGloo(o.store, o.group_rank, o.group_size, timeout=o.timeout)",
        f'dist.Backend.register_backend("{OWN}", make, extended_api=True, devices=["cpu"])',
        *([options] if kind != "backend" else []),
    ]
    key = repr(name) if how != "number" else str(NAMES.index(name))
    if how in ("name", "number"):
        made = f'init_device_mesh("cpu", {mesh.shape}, mesh_dim_names={names}, backend_override={{{key}: {given}}})'
    elif how == "flatten":
        made = f'{scripts.mesh(mesh, names)}._flatten("flat", backend_override={given})'
    else:
        made = f"{scripts.mesh(mesh, ('flat',))}._unflatten(0, {(2, mesh.size // 2)}, {NAMES[:2]}, backend_override={{{key}: {given}}})"
    at, ndim = NAMES.index(name), 1 if how == "flatten" else 2 if how == "cut" else mesh.ndim
    want: Any = [OWN if dim == at and kind != "options" else dist.Backend.GLOO for dim in range(ndim)]
    got = "[dist.get_backend(group) for group in mesh.get_all_groups()]"
    if kind == "options":
        want = (want, PATIENCE.seconds)
        got = f'({got}, mesh.get_group({at})._get_backend(torch.device("cpu")).options._timeout.seconds)'
    script = scripts.compared(case, [*body, f"mesh = {made}"], got, dict.fromkeys(sorted(mesh.ranks), want))
    more = ("from datetime import timedelta", "from torch._C._distributed_c10d import Backend") if kind != "backend" else ()
    return Script(script.stages, (*script.imports, *more), script.constants)


LAWS = (
    Law(
        id="mesh.backends",
        clause="A backend, its options or both that are named for one mesh dim are those of its group, and of no other.",
        source="torch.distributed.device_mesh docs, init_device_mesh (backend_override); _flatten and _unflatten take the same",
        check=check_backends,
        script=script_backends,
        control="mesh.backends mesh=2x2 how=name of=a options=backend",
        planted="mesh_backends_of_the_next_dim",
        sweep=sweep,
        sweeps=24,
        needs=("all_reduce", "subgroups"),
        weight=0.3,
        tier="extended",
    ),
)
