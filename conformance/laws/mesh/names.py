"""Laws of named mesh dims: names are equivalent to numbers, also in copies."""

from __future__ import annotations

import copy
import pickle
from typing import Annotated, Any, Literal

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, caught
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.mesh.cases import DOC, Dims, MeshDimsField, all_meshes, mesh_law, multi_dim_meshes
from shardlaw.conformance.laws.mesh.description import (
    describe,
    describe_due,
    dim_names,
    flatten_at,
    slice_at,
    sorted_ranks,
)
from shardlaw.conformance.laws.mesh.views import FLATTEN


def draw_names(limits: Limits) -> SearchStrategy[Case]:
    cases = []
    for mesh in all_meshes(limits):
        pairs = [None] if mesh.ndim == 1 else ["a,b"] if mesh.ndim == 2 else ["a,b", "a,c", "b,c", "a,b,c"]
        cases += [fields(mesh=mesh, flatten=pair if mesh.size == max(mesh.ranks) + 1 else None) for pair in pairs]
    return st.sampled_from(cases)


@mesh_law(
    "names",
    f"{DOC}.get_group, get_local_rank; {FLATTEN}",
    "mesh=2x2 flatten=a,b",
    draw=draw_names,
    draws=25,
    weight=0.4,
)
def names(mesh: NamedMesh, flatten: Dims = None):
    """The name of a mesh dim gives what its number gives, also that of flattened dims; an unknown name is refused."""
    if flatten:
        compat.flatten_mesh(mesh[flatten], "flat")
    if mesh.get_coordinate() is None:
        return {"names": mesh.mesh_dim_names}
    dims = [*enumerate(mesh.mesh_dim_names)]
    return {
        "names": mesh.mesh_dim_names,
        "group": [mesh.get_group(name) is mesh.get_group(dim) for dim, name in dims],
        "local rank": [mesh.get_local_rank(name) == mesh.get_local_rank(dim) for dim, name in dims],
        "slice group": [mesh[name].get_group() is mesh.get_group(dim) for dim, name in dims],
        "size": [mesh[name].size() for _, name in dims],
        "no group": caught(lambda: mesh.get_group("z")),
        "no local rank": caught(lambda: mesh.get_local_rank("z")),
        "no slice": caught(lambda: mesh["z"]),
        "flat group": sorted_ranks(mesh.get_group("flat")) if flatten else None,
        "flat slice": caught(lambda: sorted_ranks(mesh["flat"].get_group())) if flatten else None,
    }


@names.due
def _(mesh, flatten, rank: Rank):
    names = {"names": Of(dim_names(mesh))}
    if mesh.coord(rank) is None:
        return names
    flat = sorted(flatten_at(mesh, flatten, rank).ranks) if flatten else None
    return {
        **names,
        **dict.fromkeys(("group", "local rank", "slice group"), [True] * mesh.ndim),
        "size": mesh.shape,
        **dict.fromkeys(("no group", "no local rank", "no slice"), Refused()),
        "flat group": flat,
        # torch deprecates slices by flattened names
        "flat slice": Either((flat, Refused((KeyError,)))) if flatten else None,
    }


class ViewField(MeshDimsField):
    """A view of the named mesh: ``none`` for the mesh, ``a,c`` for a slice, ``a+c`` for flattened dims."""

    takes = "none, or names of dims of the mesh, such as a,c or a+c"

    def read(self, case: Case, name: str) -> Any:
        text = case.get(name)
        return text, () if text == "none" else self.dims(text.replace("+", ","), case.mesh())

    def build(self, value: Any, here: Any) -> Any:
        return value[0]


def draw_view_copies(limits: Limits) -> SearchStrategy[Case]:
    cases = []
    for mesh in multi_dim_meshes(limits):
        views = ("none", "a", "b", "a+b") if mesh.ndim == 2 else ("none", "a", "b,c", "a,c", "a+c", "b+c", "a+b+c")
        cases += [fields(mesh=mesh, of=view, how=how) for view in views for how in ("pickle", "deepcopy")]
    return st.sampled_from(cases)


@mesh_law(
    "view-copies",
    "torch.distributed.device_mesh, DeviceMesh.__getstate__ and __setstate__",
    "mesh=2x2 of=b how=pickle",
    draw=draw_view_copies,
    draws=25,
    weight=0.4,
    tier="extended",
)
def view_copies(mesh: NamedMesh, of: Annotated[str, ViewField()], how: Literal["pickle", "deepcopy"]):
    """Pickled and deep-copied meshes, slices and flattened dims are equal to the originals, with the same repr and
    groups."""
    view = mesh if of == "none" else mesh[tuple(of.replace("+", ",").split(","))]
    if "+" in of:
        view = compat.flatten_mesh(view, "flat")
    if mesh.get_coordinate() is None:
        return {}
    copied = copy.deepcopy(view) if how == "deepcopy" else pickle.loads(pickle.dumps(view))
    first = view.mesh_dim_names[0]
    return {
        "equality": [copied == view, hash(copied) == hash(view)],
        "repr": repr(copied) == repr(view),
        "copy": describe(copied),
        "slice": copied[first] == view[first] if view.ndim > 1 else None,
    }


@view_copies.due
def _(mesh, of, rank: Rank):
    text, dims = of
    if mesh.coord(rank) is None:
        return {}
    view = mesh if text == "none" else flatten_at(mesh, dims, rank) if "+" in text else slice_at(mesh, dims, rank)
    names = ("flat",) if "+" in text else dim_names(mesh, dims or None)
    return {
        "equality": [True, True],
        "repr": Of(True),
        "copy": describe_due(view, names, rank),
        "slice": True if view.ndim > 1 else None,
    }
