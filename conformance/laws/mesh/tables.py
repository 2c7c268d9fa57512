"""Laws of the table of ranks from which a mesh is created, of backends for mesh dims, and of invalid views."""

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
from shardlaw.conformance.law.literal import nested_ranks
from shardlaw.conformance.laws.mesh.cases import DOC, all_meshes, ascending_meshes, mesh_law
from shardlaw.conformance.laws.mesh.description import describe, describe_due, dim_names, reduce_due, reduce_ranks

# forms of a table, from nested lists
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


# on a 2-D mesh without dims of size 1, so that every form has another memory layout
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
    """A mesh depends only on the numbers in its table, given as lists or as a tensor of any memory layout; its repr
    shows the dims."""
    given = FORMS[table](mesh.mesh.tolist())
    created = DeviceMesh(mesh.device_type, given, mesh_dim_names=mesh.mesh_dim_names)
    shown = [f"{name}={size}" in repr(created) for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=False)]
    return {
        "input": torch.as_tensor(given).tolist(),
        "mesh": describe(created),
        "equality": [created == mesh, hash(created) == hash(mesh)],
        "repr": [repr(created) == repr(mesh), mesh.device_type in repr(created), *shown],
    }


@tables.due
def _(mesh, rank: Rank):
    return {
        "input": nested_ranks(mesh),
        "mesh": describe_due(mesh, dim_names(mesh), rank),
        "equality": [True, True],
        "repr": Of([True] * (2 + mesh.ndim)),
    }


BACKENDS = Literal["name", "number", "some", "unknown", "both", "beyond"]  # beyond: a number, of a mesh without names


@mesh_law(
    "init-backend",
    "torch.distributed.device_mesh docs, init_device_mesh (backend_override)",
    "mesh=2x2 by=name",
    needs=("all_reduce",),
    sweep=lambda limits: [fields(mesh=mesh, by=by) for by in get_args(BACKENDS) for mesh in ascending_meshes(limits)],
    sweeps=108,
    weight=0.3,
    tier="extended",
)
def init_backend(mesh: KeptNamedMesh, by: BACKENDS):
    """A backend for some mesh dims changes neither the table nor the groups; a backend for a missing dim is refused."""
    names, backend = mesh.mesh_dim_names, dist.get_backend()
    override: Any = {
        "name": dict.fromkeys(names, backend),
        "number": dict.fromkeys(range(mesh.ndim), backend),
        "some": {names[-1]: backend},
        "unknown": {"z": backend},
        "both": {names[0]: backend, 0: backend},
        "beyond": {mesh.ndim: backend},
    }[by]
    names = None if by == "beyond" else names

    def make():
        return init_device_mesh(mesh.device_type, tuple(mesh.shape), mesh_dim_names=names, backend_override=override)

    if by in ("unknown", "both", "beyond"):
        return {"refusal": caught(make)}
    created = make()
    return {"mesh": describe(created), "reduced": reduce_ranks(created)}


@init_backend.due
def _(mesh, by, rank: Rank):
    if "backend_override" not in inspect.signature(init_device_mesh).parameters:
        raise Meaningless("this version of torch has no backend_override")
    if by in ("unknown", "both", "beyond"):
        return {"refusal": Refused()}
    return {"mesh": describe_due(mesh, dim_names(mesh), rank), "reduced": reduce_due(mesh, rank)}


def reversed_mesh(mesh):
    """The mesh of the same shape and names with the ranks in reverse order."""
    return DeviceMesh(
        mesh.device_type, mesh.mesh.flatten().flip(0).reshape(mesh.shape), mesh_dim_names=mesh.mesh_dim_names
    )


def unflatten_unit_dim(mesh, name):
    """The mesh with dim 1 unflattened into ``name``, of size 1, and ``q``."""
    return compat.unflatten_mesh(mesh, 1, (1, mesh.size(1)), (name, "q"))


# invalid calls on ``mesh``, with the dims a, b, ..., and on ``bare``, with the same table and no names
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
    "join-others": lambda mesh, bare: compat.concatenate_meshes([mesh["a"], reversed_mesh(mesh)["b"]]),
    "unflatten-taken": lambda mesh, bare: compat.unflatten_mesh(mesh, 1, (1, mesh.size(1)), ("a", "q")),
    "flatten-as-cut": lambda mesh, bare: compat.flatten_mesh(unflatten_unit_dim(mesh, "p"), "p"),
    "cut-as-flat": lambda mesh, bare: (compat.flatten_mesh(mesh, "f"), unflatten_unit_dim(mesh, "f")),
}


def sweep_view_refusals(limits: Limits) -> list[Case]:
    cases = [
        fields(mesh=mesh, attempt=attempt)
        for mesh in ("2x2", "1x2", "2x1", "1x3", "2x1x2")
        for attempt in VIEW_REFUSALS
    ]
    return [case for case in cases if case.world <= limits.world_size and must_refuse(case)]


def must_refuse(case: Case) -> bool:
    """Whether the two flattened meshes of an attempt differ: dims of size 1 do not count."""
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
    """Views of missing dims, of wrong sizes or under a used name are refused, and the mesh is unchanged."""
    bare = DeviceMesh(mesh.device_type, mesh.mesh)
    before = hash(mesh), repr(mesh), mesh.mesh.tolist()
    got = caught(lambda: VIEW_REFUSALS[attempt](mesh, bare))
    unchanged = (hash(mesh), repr(mesh), mesh.mesh.tolist()) == before
    return {"refusal": got, "afterwards": unchanged, "reduced": reduce_ranks(mesh)}


@view_refusals.due
def _(mesh, rank: Rank):
    return {"refusal": Refused(), "afterwards": True, "reduced": reduce_due(mesh, rank)}
