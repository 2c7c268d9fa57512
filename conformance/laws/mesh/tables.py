"""Laws of what a mesh is made of: a table in any form, a backend of its own for some mesh dims, and what no mesh has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.case import Case
from conformance.here import read_mesh
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.given import NAMES
from conformance.laws.mesh.coordinates import DOC, all_meshes, named
from conformance.report.reproducer import Script
from reference.mesh import Mesh

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


# how one table is given: each makes it of a nested list
FORMS: dict[str, Callable[[Any], Any]] = {
    "list": lambda rows: rows,
    "int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "int64": torch.tensor,
    "transposed": lambda rows: torch.tensor(rows).movedim(0, -1).contiguous().movedim(-1, 0),
    "strided": lambda rows: torch.tensor(rows).repeat_interleave(2, 0)[::2],
    "offset": lambda rows: torch.stack([torch.tensor(rows) + 1, torch.tensor(rows)])[1],
}  # fmt: skip
FORM_TEXTS = {
    "list": "{}",
    "int32": "torch.tensor({}, dtype=torch.int32)",
    "int64": "torch.tensor({})",
    "transposed": "torch.tensor({}).movedim(0, -1).contiguous().movedim(-1, 0)",
    "strided": "torch.tensor({}).repeat_interleave(2, 0)[::2]",
    "offset": "torch.stack([torch.tensor({0}) + 1, torch.tensor({0})])[1]",
}


def draw_tables(limits: Limits) -> SearchStrategy[Case]:
    return st.sampled_from([Case.of("mesh.tables", mesh=mesh, table=form) for mesh in all_meshes(limits) for form in FORMS])


def sweep_tables(limits: Limits) -> list[Case]:
    """Tables of two dims of several ranks in each form: of one row or column all forms but one lie alike."""
    meshes = [mesh for mesh in map(Mesh.parse, ("2x2", "2x2@0,2,1,3")) if mesh.size <= limits.world_size]
    forms = [("transposed", mesh) for mesh in meshes] + [(form, mesh) for mesh in meshes[:1] for form in FORMS if form != "transposed"]
    return [Case.of("mesh.tables", mesh=mesh, table=form) for form, mesh in forms]


def _rows(mesh: Mesh) -> Any:
    return torch.tensor(mesh.ranks).reshape(mesh.shape).tolist()


def check_tables(case: Case, here: Here) -> None:
    """A mesh is that of the numbers of its table, however they are given; the table is not changed."""
    mesh = case.mesh()
    table = FORMS[case.get("table")](_rows(mesh))
    live = DeviceMesh(here.target.device, table, mesh_dim_names=NAMES[: mesh.ndim])
    before = torch.as_tensor(table).tolist()
    here.require(before == _rows(mesh), "wrong-value", "input", "the table that was given is changed", _rows(mesh), before)
    here.require(tuple(live.shape) == mesh.shape, "wrong-layout", "shape", "mesh has another shape", mesh.shape, tuple(live.shape))
    here.require(live.mesh.tolist() == _rows(mesh), "wrong-layout", "table", "mesh holds other ranks", mesh, live.mesh.tolist())
    coord = here.coord(mesh)
    at = live.get_coordinate()
    here.require((None if at is None else tuple(at)) == coord, "wrong-value", "coordinate", "rank has another coordinate", coord, at)
    for dim in range(mesh.ndim if coord is not None else 0):
        got, want = sorted(dist.get_process_group_ranks(live.get_group(dim))), sorted(mesh.group(dim, coord or ()))
        here.require(got == want, "wrong-value", "members", f"group of mesh dim {dim} has other members", want, got)
    same = named(here, mesh)
    here.require(live == same and hash(live) == hash(same), "wrong-value", "equality", "it differs from the mesh of the same table")
    here.require(repr(live) == repr(same), "wrong-metadata", "repr", "it reads otherwise than the mesh of the same table", same, live)
    shown = all(f"{name}={size}" in repr(live) for name, size in zip(NAMES, mesh.shape, strict=False))
    here.require(shown and str(here.device) in repr(live), "wrong-metadata", "repr", "it does not read as its dims", "", repr(live))


def script_tables(case: Case) -> Script:
    mesh = case.mesh()
    table = FORM_TEXTS[case.get("table")].format(_rows(mesh))
    body = [f'mesh = DeviceMesh("cpu", {table}, mesh_dim_names={NAMES[: mesh.ndim]})', "at = mesh.get_coordinate()"]
    want = {rank: (_rows(mesh), mesh.coord(rank)) for rank in range(case.world)}
    return scripts.compared(case, body, "(mesh.mesh.tolist(), None if at is None else tuple(at))", want)


def sweep_backend(limits: Limits) -> list[Case]:
    plain = [mesh for mesh in all_meshes(limits) if mesh.ranks == tuple(range(mesh.size))]
    return [Case.of("mesh.init-backend", mesh=mesh, by=by) for by in ("name", "number", "some", "unknown", "both") for mesh in plain]


def check_backend(case: Case, here: Here) -> None:
    """A backend that is named for a mesh dim changes nothing about who sits where; one for a dim that is not there is refused."""
    mesh, by = case.mesh(), case.get("by")
    if "backend_override" not in inspect.signature(init_device_mesh).parameters:
        here.reject("this version of torch has no backend_override")
    names, backend = NAMES[: mesh.ndim], here.target.backend
    chosen: dict[int | str, Any] = {
        "name": dict.fromkeys(names, backend),
        "number": dict.fromkeys(range(mesh.ndim), backend),
        "some": {names[-1]: backend},
        "unknown": {"z": backend},
        "both": {names[0]: backend, 0: backend},
    }[by]  # type: ignore[assignment]

    def made() -> DeviceMesh:
        return init_device_mesh(str(here.device), mesh.shape, mesh_dim_names=names, backend_override=chosen)

    if by in ("unknown", "both"):
        here.refused(made, by, f"backends for {list(chosen)}")
        return
    live = made()
    here.require(read_mesh(live) == mesh, "wrong-layout", "table", "mesh holds other ranks", mesh, read_mesh(live))
    coord = here.coord(mesh)
    for dim in range(mesh.ndim if coord is not None else 0):
        want = mesh.group(dim, coord or ())
        got = sorted(dist.get_process_group_ranks(live.get_group(dim)))
        here.require(got == sorted(want), "wrong-value", "members", f"group of mesh dim {dim} has other members", sorted(want), got)
        total = here.tensor(torch.tensor([10**here.rank], dtype=torch.int64))
        dist.all_reduce(total, group=live.get_group(dim))
        here.same(total, torch.tensor([sum(10**rank for rank in want)]), "traffic", what=f"sum along mesh dim {dim}")


def script_backend(case: Case) -> Script:
    mesh, by = case.mesh(), case.get("by")
    names = NAMES[: mesh.ndim]
    chosen = {"name": dict.fromkeys(names, 0), "number": dict.fromkeys(range(mesh.ndim), 0), "some": {names[-1]: 0}, "unknown": {"z": 0},
              "both": {names[0]: 0, 0: 0}}[by]  # fmt: skip
    text = ", ".join(f"{key!r}: dist.get_backend()" for key in chosen)  # type: ignore[attr-defined]
    made = f'init_device_mesh("cpu", {mesh.shape}, mesh_dim_names={names}, backend_override={{{text}}})'
    if by in ("unknown", "both"):
        return scripts.refused(case, [], made)
    return scripts.compared(case, [f"mesh = {made}"], "mesh.mesh.tolist()", dict.fromkeys(range(case.world), _rows(mesh)))


def turned(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of the same shape and names whose ranks stand in the other order."""
    return DeviceMesh(mesh.device_type, mesh.mesh.flatten().flip(0).reshape(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)


# what no mesh has: how it is asked for, and how a script asks; ``mesh`` has the dims a, b, ..., ``bare`` the same table without names
VIEW_REFUSALS: dict[str, tuple[Callable[[DeviceMesh, DeviceMesh], Any], str]] = {
    "flatten-unnamed": (lambda mesh, bare: bare._flatten("flat"), 'bare._flatten("flat")'),
    "flatten-taken": (lambda mesh, bare: mesh._flatten("a"), 'mesh._flatten("a")'),
    "flatten-other": (lambda mesh, bare: (mesh._flatten("f"), mesh["b"]._flatten("f")), '(mesh._flatten("f"), mesh["b"]._flatten("f"))'),
    "flatten-alike": (
        lambda mesh, bare: (mesh["a"]._flatten("f"), mesh["b"]._flatten("f")),
        '(mesh["a"]._flatten("f"), mesh["b"]._flatten("f"))',
    ),
    "unflatten-names": (lambda mesh, bare: mesh._unflatten(0, (1, 2), ("p",)), 'mesh._unflatten(0, (1, 2), ("p",))'),
    "unflatten-size": (lambda mesh, bare: mesh._unflatten(0, (2, 5), ("p", "q")), 'mesh._unflatten(0, (2, 5), ("p", "q"))'),
    "unflatten-far": (lambda mesh, bare: mesh._unflatten(5, (1, 2), ("p", "q")), 'mesh._unflatten(5, (1, 2), ("p", "q"))'),
    "unflatten-unknown": (lambda mesh, bare: mesh._unflatten("z", (1, 2), ("p", "q")), 'mesh._unflatten("z", (1, 2), ("p", "q"))'),
    "group-far": (lambda mesh, bare: mesh.get_group(7), "mesh.get_group(7)"),
    "group-unnamed": (lambda mesh, bare: bare.get_group("a"), 'bare.get_group("a")'),
    "rank-far": (lambda mesh, bare: mesh.get_local_rank(7), "mesh.get_local_rank(7)"),
    "size-far": (lambda mesh, bare: mesh.size(7), "mesh.size(7)"),
    "join-others": (
        lambda mesh, bare: DeviceMesh._concatenate([mesh["a"], turned(mesh)["b"]]),
        'DeviceMesh._concatenate([mesh["a"], DeviceMesh("cpu", mesh.mesh.flatten().flip(0).reshape(mesh.shape), '
        'mesh_dim_names=mesh.mesh_dim_names)["b"]])',
    ),
}
VIEW_MESHES = ("2x2", "1x2", "2x1", "1x3", "2x1x2")


def sweep_view_refusals(limits: Limits) -> list[Case]:
    meshes = [mesh for mesh in map(Mesh.parse, VIEW_MESHES) if mesh.size <= limits.world_size]
    taken = [(attempt, mesh) for mesh in meshes for attempt in VIEW_REFUSALS]
    # flattened dims of size 1 add nothing: there the two flattenings are one
    usable = [(attempt, mesh) for attempt, mesh in taken if attempt != "flatten-other" or mesh.shape[1] < mesh.size]
    usable = [(attempt, mesh) for attempt, mesh in usable if attempt != "flatten-alike" or mesh.shape[0] == mesh.shape[1]]
    return [Case.of("mesh.view-refusals", mesh=mesh, attempt=attempt) for attempt, mesh in usable]


def check_view_refusals(case: Case, here: Here) -> None:
    """What no mesh has is refused on every rank, and the mesh is as it was."""
    mesh, attempt = case.mesh(), case.get("attempt")
    live, bare = here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim]), here.mesh(mesh)
    before = hash(live), repr(live), live.mesh.tolist()
    here.refused(lambda: VIEW_REFUSALS[attempt][0](live, bare), attempt, f"a mesh: {attempt}")
    after = hash(live), repr(live), live.mesh.tolist()
    here.require(before == after, "wrong-value", "afterwards", "what was refused has changed the mesh", before, after)
    coord = here.coord(mesh)
    for dim in range(mesh.ndim if coord is not None else 0):
        total = here.tensor(torch.tensor([10**here.rank], dtype=torch.int64))
        dist.all_reduce(total, group=live.get_group(dim))
        due = sum(10**rank for rank in mesh.group(dim, coord or ()))
        here.same(total, torch.tensor([due]), "traffic", what=f"sum along mesh dim {dim} afterwards")


def script_view_refusals(case: Case) -> Script:
    mesh = case.mesh()
    body = [f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}", f"bare = {scripts.mesh(mesh)}"]
    return scripts.refused(case, body, VIEW_REFUSALS[case.get("attempt")][1])


LAWS = (
    Law(
        id="mesh.tables",
        clause="A mesh is that of the numbers of its table, given as lists or as a tensor of any memory, and reads as its dims.",
        source=f"{DOC} (mesh: an array or integer tensor)",
        check=check_tables,
        script=script_tables,
        control="mesh.tables mesh=2x2 table=transposed",
        planted="mesh_reads_memory_not_elements",
        draw=draw_tables,
        draws=36,
        sweep=sweep_tables,
        sweeps=4,
        needs=("subgroups",),
        weight=0.4,
    ),
    Law(
        id="mesh.init-backend",
        clause="A backend named for some mesh dims leaves everybody in place; one for a dim that is not there is refused.",
        source="torch.distributed.device_mesh docs, init_device_mesh (backend_override)",
        check=check_backend,
        script=script_backend,
        control="mesh.init-backend mesh=2x2 by=name",
        planted="mesh_init_column_by_column",
        sweep=sweep_backend,
        sweeps=40,
        needs=("all_reduce", "subgroups"),
        weight=0.3,
        tier="extended",
    ),
    Law(
        id="mesh.view-refusals",
        clause="Views by missing names or numbers, of other sizes, or under a name that is taken are refused, and the mesh is as it was.",
        source=f"{DOC}, docstrings of _flatten and _unflatten",
        check=check_view_refusals,
        script=script_view_refusals,
        control="mesh.view-refusals mesh=2x2 attempt=flatten-taken",
        planted="mesh_flatten_takes_any_name",
        sweep=sweep_view_refusals,
        sweeps=59,
        needs=("all_reduce", "subgroups"),
        weight=0.3,
        tier="extended",
    ),
)
