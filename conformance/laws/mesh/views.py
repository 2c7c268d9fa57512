"""Laws of what is made from a mesh: slices, flattened dims, unflattened dims."""

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
from shardlaw.conformance.law.due import Either, Of, Refused, caught
from shardlaw.conformance.law.fields import DIM_NAMES, Device, MeshTable, NamedMesh, Rank, Shape
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import nested_ranks
from shardlaw.conformance.laws.mesh.cases import DOC, Dims, all_meshes, mesh_law
from shardlaw.conformance.laws.mesh.description import description, gathered, sums
from shardlaw.conformance.laws.mesh.expected import described, flat_of, lines, names_of, slice_of, summed
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh

SLICES = f"{DOC}.__getitem__"
FLATTEN = "torch.distributed.device_mesh, docstring of DeviceMesh._flatten"


def meshes(limits: Limits) -> list[Mesh]:
    """The palette, and in larger worlds the larger meshes, of several dims."""
    return [
        *draws.meshes(limits, dims=(2, 3)),
        *(mesh for mesh in all_meshes(limits) if mesh.ndim > 1 and mesh.size > 4),
    ]


def some(names: tuple[str, ...], least: int, most: int) -> SearchStrategy[tuple[str, ...]]:
    """Some names, in order."""
    return st.sampled_from(
        [chosen for count in range(least, most + 1) for chosen in itertools.combinations(names, count)]
    )


def draw_slice(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(meshes(limits)))
        return fields(mesh=mesh, slice=draw(some(names_of(mesh), 1, mesh.ndim)))

    return case()


@mesh_law(
    "slice", SLICES, "mesh=2x2 slice=b", needs=("all_gather",), draw=draw_slice, draws=30, members=True, weight=0.5
)
def part(mesh: NamedMesh, slice_: Dims):
    """A slice by names is the part of the table through this rank that these dims span, with their groups."""
    part = mesh[slice_]
    return {"slice": description(part), "traffic": [sorted(ranks) for ranks in gathered(part)]}


@part.due
def _(mesh, slice_, rank: Rank):
    part = slice_of(mesh, slice_, rank)
    return {
        "slice": described(part, names_of(mesh, slice_), rank),
        "traffic": [sorted(line) for line in lines(part, rank)],
    }


def draw_compose(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(meshes(limits)))
        outer = draw(some(names_of(mesh), 2, mesh.ndim))
        return fields(mesh=mesh, slice=outer, of=draw(some(outer, 1, len(outer))))

    return case()


@mesh_law("slice-compose", SLICES, "mesh=1x2x2 slice=a,c of=c", draw=draw_compose, draws=24, members=True, weight=0.4)
def slice_of_slice(mesh: NamedMesh, slice_: Dims, of: Dims):
    """A slice of a slice is the slice of the mesh, equal and of equal hash, however often it is taken."""
    direct, nested, again, whole = mesh[of], mesh[slice_][of], mesh[of], mesh[mesh.mesh_dim_names]
    return {
        "nested": description(nested),
        "direct": description(direct),
        "equality": direct == nested,
        "hash": hash(direct) == hash(nested),
        "again": [direct == again, hash(direct) == hash(again)],
        "whole": [whole == mesh, hash(whole) == hash(mesh)],
    }


@slice_of_slice.due
def _(mesh, of, rank: Rank):
    part = described(slice_of(mesh, of, rank), names_of(mesh, of), rank)
    return {
        "nested": part,
        "direct": part,
        "equality": True,
        "hash": True,
        "again": [True, True],
        "whole": [True, True],
    }


# names that no ascending slice has
ODD_SLICES = Literal["z", "a,z", "z,a", "b,z", "z,b", "a,b,z", "a,a", "b,b", "none", "b,a"]


@mesh_law(
    "slice-refusals",
    SLICES,
    "mesh=2x2 slice=a,z",
    sweep=texts(
        *(f"mesh={mesh} slice={odd}" for mesh in ("2x2", "1x2x2", "1x2", "2x1", "1x3") for odd in get_args(ODD_SLICES))
    ),
    sweeps=32,
    weight=0.3,
)
def odd_slice(mesh: MeshTable, slice_: ODD_SLICES, device: Device):
    """A slice by an unknown name, a name twice, or without names is refused; other orders are refused or honoured."""
    table = torch.tensor(mesh)
    live = DeviceMesh(device.type, table, mesh_dim_names=None if slice_ == "none" else ("a", "b", "c")[: table.ndim])
    names = ("a",) if slice_ == "none" else tuple(slice_.split(","))
    part = caught(lambda: live[names if len(names) > 1 else names[0]])
    return {"slice": part if isinstance(part, Exception) else description(part)}


@odd_slice.due
def _(mesh, slice_, rank: Rank):
    refused = Refused((KeyError, RuntimeError, ValueError))
    turned = described(slice_of(mesh, (1, 0), rank), ("b", "a"), rank)
    return {"slice": Either((turned, refused)) if slice_ == "b,a" else refused}


def draw_flatten(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(meshes(limits)))
        whole = mesh.size <= max(mesh.ranks)  # ranks outside cannot name a part of the table that is theirs
        named = draw(st.sampled_from([None, None, None, "default", "default" if whole else "itself"]))
        least, most = (1, 1) if named == "itself" else (mesh.ndim if whole else 2, mesh.ndim)
        return fields(mesh=mesh, flatten=draw(some(names_of(mesh), least, most)), named=named)

    return case()


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
    """Flattened dims, neighbours or not, are one dim over their ranks row by row, the same mesh and group each time."""
    part = mesh if len(flatten) == mesh.ndim else mesh[flatten]
    name = None if named else "flat"
    flat, again = compat.flatten_mesh(part, name), compat.flatten_mesh(part, name)
    found = {"again": [flat == again, hash(flat) == hash(again)], "flatten": description(flat)}
    if mesh.get_coordinate() is None:
        return found
    taken = next(name for name in mesh.mesh_dim_names if len(flatten) > 1 or name != flatten)
    return found | {
        "itself": flat is part if len(flatten) == 1 else None,
        "group": flat.get_group() is again.get_group(),
        "traffic": sums(flat),
        "origin": [mesh.mesh.tolist(), mesh.mesh_dim_names],
        "name": caught(lambda: compat.flatten_mesh(part, taken)),
    }


@flatten.due
def _(mesh, flatten, named, rank: Rank):
    flat, names = flat_of(mesh, flatten, rank), names_of(mesh, flatten)
    found = {"again": [True, True], "flatten": described(flat, ("_".join(names),) if named else ("flat",), rank)}
    if mesh.coord(rank) is None:
        return found
    return found | {
        "itself": True if len(flatten) == 1 else None,
        "group": True,
        "traffic": summed(flat, rank),
        "origin": Of([nested_ranks(mesh), names_of(mesh)], "wrong-layout"),
        "name": Refused((ValueError, RuntimeError, KeyError)),
    }


UNFLATTENED = ("2 2x1", "2 1x2", "3 3x1", "3 1x3", "4 2x2", "4 4x1", "4 2x1x2", "6 2x3", "6 3x2", "8 2x2x2", "8 4x2",
               "2@0,2 1x2", "3@2,0,1 1x3", "4@2,0,3,1 2x2")  # fmt: skip


@mesh_law(
    "unflatten",
    "torch.distributed.device_mesh, docstring of DeviceMesh._unflatten",
    "mesh=4 sizes=2x2",
    sweep=texts(*(f"mesh={text.replace(' ', ' sizes=')}" for text in UNFLATTENED)),
    sweeps=14,
    weight=0.2,
    tier="extended",
)
def unflatten(mesh: MeshTable, sizes: Shape, device: Device):
    """A dim cut into several holds its ranks row by row, and flattens back to the dim."""
    flat = DeviceMesh(device.type, mesh, mesh_dim_names=("flat",))
    cut = compat.unflatten_mesh(flat, 0, sizes, ("a", "b", "c")[: len(sizes)])
    back = compat.flatten_mesh(cut, "back")
    longer = caught(lambda: compat.unflatten_mesh(flat, 0, (len(mesh) + 1, 1), ("p", "q")))
    return {"unflatten": description(cut), "back": description(back), "size": longer}


@unflatten.due
def _(mesh, sizes, rank: Rank):
    cut = described(Mesh(sizes, mesh.ranks), DIM_NAMES[: len(sizes)], rank)
    return {"unflatten": cut, "back": described(mesh, ("back",), rank), "size": Refused()}
