"""Laws of slices, flattened dims and unflattened dims of a mesh."""

from __future__ import annotations

import itertools
from typing import Literal, get_args

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import DIM_NAMES, Device, MeshTable, NamedMesh, Rank, Shape
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import nested_ranks
from shardlaw.conformance.laws.mesh.cases import DOC, Dims, all_meshes, mesh_law
from shardlaw.conformance.laws.mesh.description import (
    describe,
    describe_due,
    dim_names,
    dim_ranks,
    flatten_at,
    gather_ranks,
    reduce_due,
    reduce_ranks,
    slice_at,
)
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh

SLICES = f"{DOC}.__getitem__"
FLATTEN = "torch.distributed.device_mesh, docstring of DeviceMesh._flatten"


def meshes(limits: Limits) -> list[Mesh]:
    """The meshes of several dims: those of :func:`draws.meshes` by weight, and the larger ones."""
    return [
        *draws.meshes(limits, dims=(2, 3)),
        *(mesh for mesh in all_meshes(limits) if mesh.ndim > 1 and mesh.size > 4),
    ]


def subsequences(names: tuple[str, ...], min_size: int, max_size: int) -> SearchStrategy[tuple[str, ...]]:
    """``min_size`` to ``max_size`` of the names, in order."""
    sizes = range(min_size, max_size + 1)
    return st.sampled_from([chosen for size in sizes for chosen in itertools.combinations(names, size)])


@st.composite
def draw_slice(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(meshes(limits)))
    return fields(mesh=mesh, slice=draw(subsequences(dim_names(mesh), 1, mesh.ndim)))


@mesh_law(
    "slice", SLICES, "mesh=2x2 slice=b", needs=("all_gather",), draw=draw_slice, draws=30, members=True, weight=0.5
)
def slice_by_names(mesh: NamedMesh, slice_: Dims):
    """A slice by names has the ranks of the table along these dims through this rank, and the groups of these dims."""
    view = mesh[slice_]
    return {"slice": describe(view), "gathered": [sorted(ranks) for ranks in gather_ranks(view)]}


@slice_by_names.due
def _(mesh, slice_, rank: Rank):
    view = slice_at(mesh, slice_, rank)
    return {
        "slice": describe_due(view, dim_names(mesh, slice_), rank),
        "gathered": [sorted(ranks) for ranks in dim_ranks(view, rank)],
    }


@st.composite
def draw_compose(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(meshes(limits)))
    outer = draw(subsequences(dim_names(mesh), 2, mesh.ndim))
    return fields(mesh=mesh, slice=outer, of=draw(subsequences(outer, 1, len(outer))))


@mesh_law("slice-compose", SLICES, "mesh=1x2x2 slice=a,c of=c", draw=draw_compose, draws=24, members=True, weight=0.4)
def slice_of_slice(mesh: NamedMesh, slice_: Dims, of: Dims):
    """A slice of a slice equals the slice of the mesh, repeated slices are equal, and so are their hashes."""
    direct, nested, repeated, full = mesh[of], mesh[slice_][of], mesh[of], mesh[mesh.mesh_dim_names]
    return {
        "nested": describe(nested),
        "direct": describe(direct),
        "equality": direct == nested,
        "hash": hash(direct) == hash(nested),
        "again": [direct == repeated, hash(direct) == hash(repeated)],
        "whole": [full == mesh, hash(full) == hash(mesh)],
    }


@slice_of_slice.due
def _(mesh, of, rank: Rank):
    view = describe_due(slice_at(mesh, of, rank), dim_names(mesh, of), rank)
    return {
        "nested": view,
        "direct": view,
        "equality": True,
        "hash": True,
        "again": [True, True],
        "whole": [True, True],
    }


# unknown, repeated or descending names; none: of a mesh without names
INVALID_SLICES = Literal["z", "a,z", "z,a", "b,z", "z,b", "a,b,z", "a,a", "b,b", "none", "b,a"]


@mesh_law(
    "slice-refusals",
    SLICES,
    "mesh=2x2 slice=a,z",
    sweep=texts(
        *(
            f"mesh={mesh} slice={names}"
            for mesh in ("2x2", "1x2x2", "1x2", "2x1", "1x3")
            for names in get_args(INVALID_SLICES)
        )
    ),
    sweeps=32,
    weight=0.3,
)
def invalid_slice(mesh: MeshTable, slice_: INVALID_SLICES, device: Device):
    """A slice by an unknown or repeated name, or of a mesh without names, is refused; the order of names is that of the
    dims of the slice."""
    table = torch.tensor(mesh)
    root = DeviceMesh(device.type, table, mesh_dim_names=None if slice_ == "none" else ("a", "b", "c")[: table.ndim])
    names = ("a",) if slice_ == "none" else tuple(slice_.split(","))
    view = caught(lambda: root[names if len(names) > 1 else names[0]])
    return {"slice": view if isinstance(view, Exception) else describe(view)}


@invalid_slice.due
def _(mesh, slice_, rank: Rank):
    if slice_ == "b,a":
        return {"slice": describe_due(slice_at(mesh, (1, 0), rank), ("b", "a"), rank)}
    return {"slice": Refused((KeyError, RuntimeError, ValueError))}


@st.composite
def draw_flatten(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(meshes(limits)))
    all_dims = mesh.size <= max(mesh.ranks)  # a rank outside the mesh has no slice of some dims
    named = draw(st.sampled_from([None, None, None, "default", "default" if all_dims else "itself"]))
    least, most = (1, 1) if named == "itself" else (mesh.ndim if all_dims else 2, mesh.ndim)
    return fields(mesh=mesh, flatten=draw(subsequences(dim_names(mesh), least, most)), named=named)


@mesh_law(
    "flatten",
    FLATTEN,
    "mesh=2x2 flatten=a,b",
    needs=("all_reduce",),
    draw=draw_flatten,
    draws=26,
    weight=0.5,
    tier="extended",
)
def flatten(mesh: NamedMesh, flatten: Dims, named: Literal["default", "itself"] | None = None):
    """Flattened dims, adjacent or not, are one dim of their ranks in row-major order, with the same mesh and group each
    time."""
    view = mesh if len(flatten) == mesh.ndim else mesh[flatten]
    name = None if named else "flat"
    flat, repeated = compat.flatten_mesh(view, name), compat.flatten_mesh(view, name)
    found = {"again": [flat == repeated, hash(flat) == hash(repeated)], "flatten": describe(flat)}
    if mesh.get_coordinate() is None:
        return found
    used_name = next(name for name in mesh.mesh_dim_names if len(flatten) > 1 or name != flatten)
    return found | {
        "itself": flat is view if len(flatten) == 1 else None,
        "group": flat.get_group() is repeated.get_group(),
        "reduced": reduce_ranks(flat),
        "origin": [mesh.mesh.tolist(), mesh.mesh_dim_names],
        "name": caught(lambda: compat.flatten_mesh(view, used_name)),
    }


@flatten.due
def _(mesh, flatten, named, rank: Rank):
    flat, names = flatten_at(mesh, flatten, rank), dim_names(mesh, flatten)
    found = {"again": [True, True], "flatten": describe_due(flat, ("_".join(names),) if named else ("flat",), rank)}
    if mesh.coord(rank) is None:
        return found
    return found | {
        "itself": True if len(flatten) == 1 else None,
        "group": True,
        "reduced": reduce_due(flat, rank),
        "origin": Of([nested_ranks(mesh), dim_names(mesh)], "wrong-layout"),
        "name": Refused((ValueError, RuntimeError, KeyError)),
    }


UNFLATTENED = ("2 2x1", "2 1x2", "3 3x1", "3 1x3", "4 2x2", "4 4x1", "4 2x1x2", "6 2x3", "6 3x2", "8 2x2x2", "8 4x2",
               "2@0,2 1x2", "3@2,0,1 1x3", "4@2,0,3,1 2x2")  # fmt: skip


@mesh_law(
    "unflatten",
    "torch.distributed.device_mesh, docstring of DeviceMesh._unflatten",
    "mesh=4 sizes=2x2",
    cases=[f"mesh={text.replace(' ', ' sizes=')}" for text in UNFLATTENED],
    weight=0.2,
    tier="extended",
)
def unflatten(mesh: MeshTable, sizes: Shape, device: Device):
    """Unflattened dims have the ranks of the dim in row-major order, and flatten to that dim again; the mesh itself
    stays as it is."""
    flat = DeviceMesh(device.type, mesh, mesh_dim_names=("flat",))
    cut = compat.unflatten_mesh(flat, 0, sizes, ("a", "b", "c")[: len(sizes)])
    back = compat.flatten_mesh(cut, "back")
    longer = caught(lambda: compat.unflatten_mesh(flat, 0, (len(mesh) + 1, 1), ("p", "q")))
    return {"unflatten": describe(cut), "back": describe(back), "itself": describe(flat), "size": longer}


@unflatten.due
def _(mesh, sizes, rank: Rank):
    cut = describe_due(Mesh(sizes, mesh.ranks), DIM_NAMES[: len(sizes)], rank)
    itself = describe_due(mesh, ("flat",), rank)
    return {"unflatten": cut, "back": describe_due(mesh, ("back",), rank), "itself": itself, "size": Refused()}
