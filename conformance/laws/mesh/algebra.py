"""Laws of views of a mesh that are concatenated, overlap, have dims of size 1, or are unflattened."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, caught
from shardlaw.conformance.law.fields import DIM_NAMES, KeptNamedMesh, NamedMesh, Rank, Shape, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import nested_ranks
from shardlaw.conformance.laws.mesh.cases import MeshDimsField, MeshSlicesField, mesh_law, multi_dim_meshes
from shardlaw.conformance.laws.mesh.description import (
    describe,
    describe_due,
    dim_names,
    reduce_due,
    reduce_ranks,
    slice_at,
    sorted_ranks,
)
from shardlaw.conformance.laws.mesh.views import FLATTEN, SLICES
from shardlaw.reference.mesh import Mesh

CONCATENATE = "torch.distributed.device_mesh, DeviceMesh._concatenate: meshes of one root, side by side"


def draw_concatenate(limits: Limits) -> SearchStrategy[Case]:
    parts = {2: ("a,b",), 3: ("a,b", "a,c", "b,c", "a+b,c", "a,b+c", "a,b,c")}
    return st.sampled_from(
        [fields(mesh=mesh, parts=part) for mesh in multi_dim_meshes(limits) for part in parts[mesh.ndim]]
    )


@mesh_law(
    "concatenate",
    CONCATENATE,
    "mesh=2x2 parts=a,b",
    needs=("all_reduce",),
    draw=draw_concatenate,
    draws=18,
    members=True,
    weight=0.3,
    tier="extended",
)
def concatenate(mesh: KeptNamedMesh, parts: Annotated[Any, MeshSlicesField()]):
    """The concatenation of disjoint slices of a mesh is the slice by all their names."""
    joined = compat.concatenate_meshes([mesh[names] for names in parts])
    direct = mesh[tuple(name for names in parts for name in names)]
    return {
        "joined": describe(joined),
        "equality": [joined == direct, hash(joined) == hash(direct)],
        "reduced": reduce_ranks(joined),
    }


@concatenate.due
def _(mesh, parts, rank: Rank):
    dims = tuple(dim for part in parts for dim in part)
    joined = slice_at(mesh, dims, rank)
    return {
        "joined": describe_due(joined, dim_names(mesh, dims), rank),
        "equality": [True, True],
        "reduced": reduce_due(joined, rank),
    }


OVERLAPS = {
    "slice-flat-first": ("flat", "a"),
    "slice-flat-last": ("a", "flat"),
    "slice-flat-second": ("b", "flat"),
    "join-twice": ("a", "a"),
    "join-flat": ("a", "flat"),
    "join-part": ("b", "a+b"),
}


def sweep_overlaps(limits: Limits) -> list[Case]:
    meshes = [mesh for mesh in multi_dim_meshes(limits) if 1 not in mesh.shape[:2] and mesh.size <= limits.world_size]
    return [fields(mesh=mesh, attempt=attempt) for attempt in OVERLAPS for mesh in meshes]


@mesh_law(
    "overlap-refusals",
    f"{SLICES}; {CONCATENATE}",
    "mesh=2x2 attempt=slice-flat-last",
    sweep=sweep_overlaps,
    sweeps=24,
    weight=0.3,
    tier="extended",
)
def overlaps(mesh: NamedMesh, attempt: Annotated[str, WordField(OVERLAPS)]):
    """A slice or concatenation that contains a mesh dim twice is refused, by an error that names the overlapping
    dims."""
    names = OVERLAPS[attempt]
    flat = compat.flatten_mesh(mesh["a", "b"] if mesh.ndim > 2 else mesh, "flat")
    views = {"flat": flat, "a+b": mesh["a", "b"], "a": mesh["a"], "b": mesh["b"]}
    if attempt.startswith("slice"):
        got = caught(lambda: mesh[names])
    else:
        got = caught(lambda: compat.concatenate_meshes([views[name] for name in names]))
    unnamed = [name for name in names for part in name.split("+") if part not in str(got)]
    return {"overlap": got, "unnamed": unnamed if isinstance(got, Exception) else []}


@overlaps.due
def _():
    return {"overlap": Refused((KeyError, RuntimeError, ValueError)), "unnamed": Of([], "wrong-error")}


def sweep_unit_dims(limits: Limits) -> list[Case]:
    meshes = [mesh for mesh in multi_dim_meshes(limits) if 1 in mesh.shape and mesh.size > 1]
    pairs = [(mesh, unit, other) for mesh in meshes for unit in range(mesh.ndim) for other in range(mesh.ndim)]
    return [
        fields(mesh=mesh, of="+".join(dim_names(mesh, tuple(sorted((unit, other))))))
        for mesh, unit, other in pairs
        if mesh.shape[unit] == 1 and mesh.shape[other] > 1
    ]


@mesh_law("unit-dims", f"{SLICES}; {FLATTEN}", "mesh=2x1 of=a+b", sweep=sweep_unit_dims, sweeps=24, weight=0.2)
def unit_dims(mesh: NamedMesh, of: Annotated[Any, MeshDimsField("+")]):
    """A mesh dim of size 1 changes neither slices nor flattened dims nor groups."""
    other = next(name for name in of if mesh[name].size() > 1)
    pair, alone = mesh[of], mesh[other]
    flat = compat.flatten_mesh(pair, "flat")
    groups = pair.get_group(other), flat.get_group()
    later = mesh.mesh_dim_names[mesh.mesh_dim_names.index(of[-1]) + 1 :]
    mixed = caught(lambda: mesh["flat", *later].mesh.tolist()) if later else None
    return {
        "slice": pair.mesh.flatten().tolist(),
        "bare slice": alone.mesh.tolist(),
        "flattened": flat.mesh.tolist(),
        "members": [sorted_ranks(group) for group in groups],
        "local rank": flat.get_local_rank() == alone.get_local_rank(),
        "mixed": mixed,
    }


@unit_dims.due
def _(mesh, of, rank: Rank):
    other = next(dim for dim in of if mesh.shape[dim] > 1)
    later = tuple(range(of[-1] + 1, mesh.ndim))
    ranks = list(slice_at(mesh, (other,), rank).ranks)
    mixed = Of(nested_ranks(slice_at(mesh, (other, *later), rank)), "wrong-layout")
    return {
        **dict.fromkeys(("slice", "bare slice", "flattened"), Of(ranks, "wrong-layout")),
        "members": [sorted(ranks)] * 2,
        "local rank": True,
        # torch deprecates slices by flattened names
        "mixed": Either((mixed, Refused((KeyError,)))) if later else None,
    }


# (mesh, dim, sizes): the dim is unflattened into these sizes
UNFLATTENED = (
    *(("1x4", "b", "2x2"), ("4x1", "a", "2x2"), ("2x2", "b", "2x1"), ("2x2", "a", "1x2"), ("2x2@0,2,1,3", "b", "1x2")),
    *(("2x1x2", "c", "2x1"), ("1x2", "b", "2x1"), ("2x1", "a", "1x2"), ("1x3", "b", "1x3"), ("2x1", "b", "1x1")),
    *(("1x2@0,2", "b", "1x2"), ("2x4", "b", "2x2"), ("4x2", "a", "2x2"), ("2x3", "b", "3x1"), ("2x2x2", "b", "1x2")),
)


def sweep_unflattened(limits: Limits) -> list[Case]:
    cases = [
        fields(mesh=mesh, of=dim, sizes=sizes, by=by) for mesh, dim, sizes in UNFLATTENED for by in ("name", "number")
    ]
    return [case for case in cases if case.world <= limits.world_size]


@mesh_law(
    "unflatten-one",
    "torch.distributed.device_mesh, docstring of DeviceMesh._unflatten",
    "mesh=2x2 of=b sizes=2x1 by=name",
    needs=("all_reduce",),
    sweep=sweep_unflattened,
    sweeps=30,
    weight=0.3,
    tier="extended",
)
def unflatten_one(mesh: NamedMesh, of: Annotated[str, MeshDimsField()], sizes: Shape, by: Literal["name", "number"]):
    """Unflattening one of several mesh dims leaves the others unchanged, and every dim can be sliced and has its
    group."""
    cut = compat.unflatten_mesh(mesh, of if by == "name" else mesh.mesh_dim_names.index(of), sizes, ("p", "q"))
    slices = [cut[name] for name in cut.mesh_dim_names] if cut.get_coordinate() is not None else []
    return {
        "cut": describe(cut),
        "slices": [describe(part) for part in slices],
        "reduced": [reduce_ranks(part) for part in slices],
    }


@unflatten_one.due
def _(mesh, of, sizes, rank: Rank):
    (at,) = of
    cut = Mesh((*mesh.shape[:at], *sizes, *mesh.shape[at + 1 :]), mesh.ranks)
    names = (*DIM_NAMES[:at], "p", "q", *DIM_NAMES[at + 1 : mesh.ndim])
    inside = cut.coord(rank) is not None
    slices = [slice_at(cut, (dim,), rank) for dim in range(cut.ndim)] if inside else []
    return {
        "cut": describe_due(cut, names, rank),
        "slices": [describe_due(part, (name,), rank) for part, name in zip(slices, names, strict=False)],
        "reduced": [reduce_due(part, rank) for part in slices],
    }
