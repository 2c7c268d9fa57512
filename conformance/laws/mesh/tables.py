"""Laws of what a mesh is made of: a table in any form, backends for some mesh dims, and what no mesh has."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, get_args

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Meaningless, Of, Refused, caught
from shardlaw.conformance.law.fields import KeptNamedMesh, NamedMesh, Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import nested_ranks as rows_of
from shardlaw.conformance.laws.mesh.cases import DOC, all_meshes, ascending, mesh_law
from shardlaw.conformance.laws.mesh.description import description, sums
from shardlaw.conformance.laws.mesh.expected import described, names_of, summed

# how one table is given: each makes it of a nested list
FORMS = {
    "list": lambda rows: rows,
    "int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "int64": torch.tensor,
    "transposed": lambda rows: torch.tensor(rows).movedim(0, -1).contiguous().movedim(-1, 0),
    "strided": lambda rows: torch.tensor(rows).repeat_interleave(2, 0)[::2],
    "offset": lambda rows: torch.stack([torch.tensor(rows) + 1, torch.tensor(rows)])[1],
}  # fmt: skip


def draw_tables(limits: Limits) -> SearchStrategy[Case]:
    return st.sampled_from([fields(mesh=mesh, table=form) for mesh in all_meshes(limits) for form in FORMS])


# of two dims of several ranks in each form: of one row or column all forms but one lie alike
TABLES = ("mesh=2x2 table=transposed", "mesh=2x2@0,2,1,3 table=transposed",
          *(f"mesh=2x2 table={form}" for form in FORMS if form != "transposed"))  # fmt: skip


@mesh_law(
    "tables",
    f"{DOC} (mesh: an array or integer tensor)",
    "mesh=2x2 table=transposed",
    draw=draw_tables,
    draws=36,
    sweep=texts(*TABLES),
    sweeps=4,
    weight=0.4,
)
def tables(mesh: KeptNamedMesh, table: Annotated[str, WordField(FORMS)]):
    """A mesh is that of the numbers of its table, given as lists or as a tensor of any memory; it reads as its dims."""
    given = FORMS[table](mesh.mesh.tolist())
    made = DeviceMesh(mesh.device_type, given, mesh_dim_names=mesh.mesh_dim_names)
    shown = [f"{name}={size}" in repr(made) for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=False)]
    return {
        "input": torch.as_tensor(given).tolist(),
        "mesh": description(made),
        "equality": [made == mesh, hash(made) == hash(mesh)],
        "repr": [repr(made) == repr(mesh), mesh.device_type in repr(made), *shown],
    }


@tables.due
def _(mesh, rank: Rank):
    return {
        "input": rows_of(mesh),
        "mesh": described(mesh, names_of(mesh), rank),
        "equality": [True, True],
        "repr": Of([True] * (2 + mesh.ndim)),
    }


BACKENDS = Literal["name", "number", "some", "unknown", "both"]


@mesh_law(
    "init-backend",
    "torch.distributed.device_mesh docs, init_device_mesh (backend_override)",
    "mesh=2x2 by=name",
    needs=("all_reduce",),
    sweep=lambda limits: [fields(mesh=mesh, by=by) for by in get_args(BACKENDS) for mesh in ascending(limits)],
    sweeps=90,
    weight=0.3,
    tier="extended",
)
def init_backend(mesh: KeptNamedMesh, by: BACKENDS):
    """A backend named for some mesh dims leaves everybody in place; one for a dim that is not there is refused."""
    names, backend = mesh.mesh_dim_names, dist.get_backend()
    chosen: Any = {
        "name": dict.fromkeys(names, backend),
        "number": dict.fromkeys(range(mesh.ndim), backend),
        "some": {names[-1]: backend},
        "unknown": {"z": backend},
        "both": {names[0]: backend, 0: backend},
    }[by]

    def make():
        return init_device_mesh(mesh.device_type, tuple(mesh.shape), mesh_dim_names=names, backend_override=chosen)

    if by in ("unknown", "both"):
        return {"refusal": caught(make)}
    made = make()
    return {"mesh": description(made), "traffic": sums(made)}


@init_backend.due
def _(mesh, by, rank: Rank):
    if "backend_override" not in inspect.signature(init_device_mesh).parameters:
        raise Meaningless("this version of torch has no backend_override")
    if by in ("unknown", "both"):
        return {"refusal": Refused()}
    return {"mesh": described(mesh, names_of(mesh), rank), "traffic": summed(mesh, rank)}


def turned(mesh):
    """The mesh of the same shape and names whose ranks stand in the other order."""
    return DeviceMesh(
        mesh.device_type, mesh.mesh.flatten().flip(0).reshape(mesh.shape), mesh_dim_names=mesh.mesh_dim_names
    )


def cut(mesh, name):
    """The mesh with its dim 1 cut into one of size 1, which has the name, and the rest."""
    return compat.unflatten_mesh(mesh, 1, (1, mesh.size(1)), (name, "q"))


# what no mesh has: ``mesh`` has the dims a, b, ..., ``bare`` the same table without names
VIEW_REFUSALS = {
    "flatten-unnamed": lambda mesh, bare: compat.flatten_mesh(bare, "flat"),
    "flatten-taken": lambda mesh, bare: compat.flatten_mesh(mesh, "a"),
    "flatten-other": lambda mesh, bare: (compat.flatten_mesh(mesh, "f"), compat.flatten_mesh(mesh["b"], "f")),
    "flatten-alike": lambda mesh, bare: (compat.flatten_mesh(mesh["a"], "f"), compat.flatten_mesh(mesh["b"], "f")),
    "unflatten-names": lambda mesh, bare: compat.unflatten_mesh(mesh, 0, (1, 2), ("p",)),
    "unflatten-size": lambda mesh, bare: compat.unflatten_mesh(mesh, 0, (2, 5), ("p", "q")),
    "unflatten-far": lambda mesh, bare: compat.unflatten_mesh(mesh, 5, (1, 2), ("p", "q")),
    "unflatten-unknown": lambda mesh, bare: compat.unflatten_mesh(mesh, "z", (1, 2), ("p", "q")),
    "group-far": lambda mesh, bare: mesh.get_group(7),
    "group-unnamed": lambda mesh, bare: bare.get_group("a"),
    "rank-far": lambda mesh, bare: mesh.get_local_rank(7),
    "size-far": lambda mesh, bare: mesh.size(7),
    "join-others": lambda mesh, bare: compat.concatenate_meshes([mesh["a"], turned(mesh)["b"]]),
    "unflatten-taken": lambda mesh, bare: compat.unflatten_mesh(mesh, 1, (1, mesh.size(1)), ("a", "q")),
    "flatten-as-cut": lambda mesh, bare: compat.flatten_mesh(cut(mesh, "p"), "p"),
    "cut-as-flat": lambda mesh, bare: (compat.flatten_mesh(mesh, "f"), cut(mesh, "f")),
}


def sweep_view_refusals(limits: Limits) -> list[Case]:
    cases = [
        fields(mesh=mesh, attempt=attempt)
        for mesh in ("2x2", "1x2", "2x1", "1x3", "2x1x2")
        for attempt in VIEW_REFUSALS
    ]
    return [case for case in cases if case.world <= limits.world_size and differs(case)]


def differs(case: Case) -> bool:
    """Whether two flattenings are two: flattened dims of size 1 add nothing."""
    attempt, mesh = case.get("attempt"), case.mesh()
    if attempt == "flatten-other":
        return mesh.shape[1] < mesh.size
    return attempt != "flatten-alike" or mesh.shape[0] == mesh.shape[1]


@mesh_law(
    "view-refusals",
    f"{DOC}, docstrings of _flatten and _unflatten",
    "mesh=2x2 attempt=flatten-taken",
    needs=("all_reduce",),
    sweep=sweep_view_refusals,
    sweeps=74,
    weight=0.3,
    tier="extended",
)
def view_refusals(mesh: NamedMesh, attempt: Annotated[str, WordField(VIEW_REFUSALS)]):
    """Views by missing names or numbers, of other sizes, or under a taken name are refused; the mesh is as it was."""
    bare = DeviceMesh(mesh.device_type, mesh.mesh)
    before = hash(mesh), repr(mesh), mesh.mesh.tolist()
    got = caught(lambda: VIEW_REFUSALS[attempt](mesh, bare))
    return {"refusal": got, "afterwards": (hash(mesh), repr(mesh), mesh.mesh.tolist()) == before, "traffic": sums(mesh)}


@view_refusals.due
def _(mesh, rank: Rank):
    return {"refusal": Refused(), "afterwards": True, "traffic": summed(mesh, rank)}
