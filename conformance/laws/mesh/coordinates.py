"""Laws of device meshes: coordinates, groups, equality, and copies."""

from __future__ import annotations

import copy
import pickle
from typing import Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Device, MeshTable, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import nested_ranks
from shardlaw.conformance.laws.mesh.cases import DOC, mesh_law, on_every_mesh
from shardlaw.conformance.laws.mesh.description import description, gathered, members, sums
from shardlaw.conformance.laws.mesh.expected import described, lines, summed
from shardlaw.conformance.laws.shared import draws


@on_every_mesh("coordinates", f"{DOC}.get_coordinate", weight=0.2)
def coordinates(mesh: DeviceMesh):
    """A mesh has the table that it was made from; a coordinate is a rank's place there; a rank outside has none."""
    at = mesh.get_coordinate()
    return {
        "shape": tuple(mesh.shape),
        "ndim": mesh.ndim,
        "size": [mesh.size(), *map(mesh.size, range(mesh.ndim))],
        "table": mesh.mesh.tolist(),
        "coordinate": None if at is None else tuple(at),
        "rank": mesh.get_rank(),
    }


@coordinates.due
def _(mesh, rank: Rank):
    layout = {"shape": mesh.shape, "ndim": mesh.ndim, "size": [mesh.size, *mesh.shape], "table": nested_ranks(mesh)}
    return {
        **{key: Of(value, "wrong-layout") for key, value in layout.items()},
        "coordinate": mesh.coord(rank),
        "rank": rank,
    }


@on_every_mesh("local-rank", f"{DOC}.get_local_rank", members=True, weight=0.2)
def local_rank(mesh: DeviceMesh):
    """The local rank along a mesh dim is the coordinate along it; the dim need not be named where there is only one."""
    return {"local rank": [mesh.get_local_rank(dim) for dim in range(mesh.ndim)], "no dim": caught(mesh.get_local_rank)}


@local_rank.due
def _(mesh, rank: Rank):
    coord = mesh.coord(rank)
    return {"local rank": coord, "no dim": coord[0] if mesh.ndim == 1 else Refused()}


@on_every_mesh("groups", f"{DOC}.get_group", needs=("all_reduce", "subgroups"), members=True, weight=0.3)
def groups(mesh: DeviceMesh):
    """The group of a mesh dim holds exactly the ranks along that dim through this rank, and reaches them."""
    listed, only = mesh.get_all_groups(), caught(mesh.get_group)
    along = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return {
        "count": len(listed),
        "no dim": only is along[0] if mesh.ndim == 1 else only,
        "members": [members(group) for group in along],
        "all groups": [one is other for one, other in zip(listed, along, strict=False)],
        "traffic": sums(mesh),
    }


@groups.due
def _(mesh, rank: Rank):
    return {
        "count": Of(mesh.ndim),
        "no dim": Of(True) if mesh.ndim == 1 else Refused(),
        "members": [sorted(line) for line in lines(mesh, rank)],
        "all groups": [True] * mesh.ndim,
        "traffic": summed(mesh, rank),
    }


@on_every_mesh(
    "group-order",
    f"{DOC}: a mesh's table describes the layout of devices; get_group returns the group of a dim of it",
    needs=("all_gather", "subgroups"),
    members=True,
    weight=0.3,
)
def group_order(mesh: DeviceMesh):
    """The group of a mesh dim lists, and gathers from, its ranks in the order of the table."""
    listed = [list(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in range(mesh.ndim)]
    return {"members": listed, "gathered": gathered(mesh)}


@group_order.due
def _(mesh, rank: Rank):
    return {"members": lines(mesh, rank), "gathered": lines(mesh, rank)}


def draw_equality(limits: Limits) -> SearchStrategy[Case]:
    few = st.sampled_from(list(dict.fromkeys(draws.meshes(limits, min_size=2))))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        one = draw(few)
        alike = [
            mesh
            for mesh in dict.fromkeys(draws.meshes(limits))
            if mesh.size == one.size and max(mesh.ranks) == max(one.ranks)
        ]
        other = draw(st.sampled_from([one, *alike]))
        return fields(mesh=one, mesh__b=other, names=draw(st.sampled_from(["none", "first", "both", "differ"])))

    return case()


@mesh_law(
    "equality",
    "torch.distributed.device_mesh, DeviceMesh.__eq__ and __hash__",
    "mesh=1x2 mesh.b=1x2@1,0 names=both",
    draw=draw_equality,
    draws=28,
    weight=0.4,
)
def equality(mesh: MeshTable, mesh__b: MeshTable, names: Literal["none", "first", "both", "differ"], device: Device):
    """Two meshes are equal exactly when their table, shape, names and device are, and equal meshes hash alike."""
    one, other = torch.tensor(mesh), torch.tensor(mesh__b)
    ours, theirs = ("a", "b", "c")[: one.ndim], ("a", "b", "c")[: other.ndim]
    a = DeviceMesh(device.type, one, mesh_dim_names=None if names == "none" else ours)
    b = DeviceMesh(device.type, other, mesh_dim_names={"both": theirs, "differ": theirs[::-1]}.get(names))
    return {
        "equality": a == b,
        "inequality": a != b,
        "hash": hash(a) == hash(b),
        "set": len({a, b}),
        "other kind": a == "a mesh",
    }


@equality.due
def _(mesh, mesh__b, names):
    equal = mesh == mesh__b and (names in ("none", "both") or (names == "differ" and mesh.ndim == 1))
    return {
        "equality": equal,
        "inequality": not equal,
        "hash": True if equal else ...,
        "set": 1 if equal else 2,
        "other kind": False,
    }


@on_every_mesh(
    "copies", "torch.distributed.device_mesh, DeviceMesh.__getstate__ and __setstate__", weight=0.1, tier="extended"
)
def copies(mesh: DeviceMesh):
    """A mesh survives pickling and copying: it is equal, hashes alike, and has the same table and groups."""
    copied = {"pickle": pickle.loads(pickle.dumps(mesh)), "copy": copy.copy(mesh)}
    return {
        how: {"equal": [made == mesh, hash(made) == hash(mesh)], **description(made)} for how, made in copied.items()
    }


@copies.due
def _(mesh, rank: Rank):
    due = {"equal": [True, True], **described(mesh, None, rank)}
    return {"pickle": due, "copy": due}
