"""Laws of device meshes: coordinates, groups, equality, and copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Of, Refused, caught
from shardlaw.conformance.law.fields import Device, MeshTable, NamedMesh, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import nested_ranks
from shardlaw.conformance.laws.mesh.cases import DOC, every_mesh_law, mesh_law
from shardlaw.conformance.laws.mesh.description import (
    describe,
    describe_due,
    dim_ranks,
    gather_ranks,
    reduce_due,
    reduce_ranks,
    sorted_ranks,
)
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference import placement as ref
from shardlaw.reference.layout import Layout


@every_mesh_law("coordinates", f"{DOC}.get_coordinate", weight=0.2)
def coordinates(mesh: DeviceMesh):
    """A mesh has the table from which it was created; get_coordinate is the position of a rank there, or None
    outside."""
    coordinate = mesh.get_coordinate()
    return {
        "shape": tuple(mesh.shape),
        "ndim": mesh.ndim,
        "size": [mesh.size(), *map(mesh.size, range(mesh.ndim))],
        "table": mesh.mesh.tolist(),
        "coordinate": None if coordinate is None else tuple(coordinate),
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


@every_mesh_law("local-rank", f"{DOC}.get_local_rank", members=True, weight=0.2)
def local_rank(mesh: DeviceMesh):
    """get_local_rank of a mesh dim is the coordinate on it; a 1-D mesh needs no dim, others require one."""
    return {"local rank": [mesh.get_local_rank(dim) for dim in range(mesh.ndim)], "no dim": caught(mesh.get_local_rank)}


@local_rank.due
def _(mesh, rank: Rank):
    coord = mesh.coord(rank)
    return {"local rank": coord, "no dim": coord[0] if mesh.ndim == 1 else Refused()}


@every_mesh_law("groups", f"{DOC}.get_group", needs=("all_reduce", "subgroups"), members=True, weight=0.3)
def groups(mesh: DeviceMesh):
    """The group of a mesh dim has exactly the ranks along that dim through this rank, and communicates among them."""
    listed, without_dim = mesh.get_all_groups(), caught(mesh.get_group)
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return {
        "count": len(listed),
        "no dim": without_dim is groups[0] if mesh.ndim == 1 else without_dim,
        "members": [sorted_ranks(group) for group in groups],
        "all groups": [first is second for first, second in zip(listed, groups, strict=False)],
        "reduced": reduce_ranks(mesh),
    }


@groups.due
def _(mesh, rank: Rank):
    return {
        "count": Of(mesh.ndim),
        "no dim": Of(True) if mesh.ndim == 1 else Refused(),
        "members": [sorted(ranks) for ranks in dim_ranks(mesh, rank)],
        "all groups": [True] * mesh.ndim,
        "reduced": reduce_due(mesh, rank),
    }


@every_mesh_law(
    "group-order",
    f"{DOC}: a mesh's table describes the layout of devices; get_group returns the group of a dim of it",
    needs=("all_gather", "subgroups"),
    members=True,
    weight=0.3,
)
def group_order(mesh: DeviceMesh):
    """The group of a mesh dim lists its ranks, and gathers from them, in the order of the table."""
    listed = [list(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in range(mesh.ndim)]
    return {"members": listed, "gathered": gather_ranks(mesh)}


@group_order.due
def _(mesh, rank: Rank):
    return {"members": dim_ranks(mesh, rank), "gathered": dim_ranks(mesh, rank)}


@st.composite
def draw_equality(draw: st.DrawFn, limits: Limits) -> Case:
    first = draw(st.sampled_from(list(dict.fromkeys(draws.meshes(limits, min_size=2)))))
    similar = [
        mesh
        for mesh in dict.fromkeys(draws.meshes(limits))
        if mesh.size == first.size and max(mesh.ranks) == max(first.ranks)
    ]
    second = draw(st.sampled_from([first, *similar]))
    return fields(mesh=first, mesh__b=second, names=draw(st.sampled_from(["none", "first", "both", "differ"])))


@mesh_law(
    "equality",
    "torch.distributed.device_mesh, DeviceMesh.__eq__ and __hash__",
    "mesh=1x2 mesh.b=1x2@1,0 names=both",
    draw=draw_equality,
    draws=28,
    weight=0.4,
)
def equality(mesh: MeshTable, mesh__b: MeshTable, names: Literal["none", "first", "both", "differ"], device: Device):
    """Two meshes are equal exactly when their tables, shapes, names and devices are; equal meshes have equal hashes."""
    table_a, table_b = torch.tensor(mesh), torch.tensor(mesh__b)
    names_a, names_b = ("a", "b", "c")[: table_a.ndim], ("a", "b", "c")[: table_b.ndim]
    a = DeviceMesh(device.type, table_a, mesh_dim_names=None if names == "none" else names_a)
    b = DeviceMesh(device.type, table_b, mesh_dim_names={"both": names_b, "differ": names_b[::-1]}.get(names))
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


@every_mesh_law(
    "copies", "torch.distributed.device_mesh, DeviceMesh.__getstate__ and __setstate__", weight=0.1, tier="extended"
)
def copies(mesh: DeviceMesh):
    """A pickled or copied mesh is equal to the original, with the same hash, table and groups."""
    copies = {"pickle": pickle.loads(pickle.dumps(mesh)), "copy": copy.copy(mesh)}
    return {
        how: {"equal": [copied == mesh, hash(copied) == hash(mesh)], **describe(copied)}
        for how, copied in copies.items()
    }


@copies.due
def _(mesh, rank: Rank):
    due = {"equal": [True, True], **describe_due(mesh, None, rank)}
    return {"pickle": due, "copy": due}


SENT = (
    "mesh=2 asked=table",
    "mesh=2x2 asked=table source=3",
    "mesh=2 asked=place",
    "mesh=2x2 asked=place source=1",
    "mesh=2 asked=groups",
    "mesh=2x2 asked=groups",
    "mesh=3 asked=part source=1",
    "mesh=2x2 asked=part",
    "mesh=1x2 asked=part source=1",
    "mesh=2x2 asked=flat source=1",
)


@mesh_law(
    "sent",
    "torch.distributed.device_mesh, DeviceMesh.__setstate__, which finds groups again in another process; "
    "DeviceMesh.get_coordinate: the indices of this rank",
    SENT[0],
    needs=("broadcast",),
    cases=SENT,
    weight=0.1,
    tier="extended",
)
def sent(
    mesh: NamedMesh,
    asked: Literal["table", "place", "groups", "part", "flat"],
    device: Device,
    source: int = 0,
):
    """A mesh that one rank sends to the others is equal to theirs, and has its flattened dims, and the place and the
    groups of the rank that received it, which cuts its own shards on it."""
    if asked == "flat":
        compat.flatten_mesh(mesh, "flat")
    objects: list[Any] = [mesh if dist.get_rank() == source else None]
    dist.broadcast_object_list(objects, src=source)
    got = objects[0]
    if asked == "table":
        return {"equal": [got == mesh, hash(got) == hash(mesh)], "table": got.mesh.tolist()}
    if asked == "flat":
        return {"table": got["flat"].mesh.tolist()}
    if asked == "place":
        return {"coordinate": list(got.get_coordinate()), "rank": got.get_rank()}
    if asked == "groups":
        return {"groups": caught(lambda: list(map(dist.get_process_group_ranks, got.get_all_groups())))}
    whole = torch.arange(24.0, device=device).reshape(6, 4)
    part = distribute_tensor(whole, got, [Shard(dim) for dim in range(got.ndim)], src_data_rank=None)
    return {"part": part.to_local()}


@sent.due
def _(mesh, asked, rank: Rank):
    if asked == "table":
        return {"equal": [True, True], "table": nested_ranks(mesh)}
    if asked == "flat":
        return {"table": list(mesh.ranks)}
    if asked == "place":
        return {"coordinate": list(mesh.coord(rank)), "rank": rank}
    if asked == "groups":
        return {"groups": dim_ranks(mesh, rank)}
    whole = torch.arange(24.0).reshape(6, 4)
    layout = Layout((6, 4), mesh, tuple(ref.Shard(dim) for dim in range(mesh.ndim)))
    return {"part": Global(whole, layout).local(rank)}
