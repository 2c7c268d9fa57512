"""Laws of a mesh whose dims have names: a name means what its number does, and a copy of a mesh or of its views keeps both."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from conformance.case import Case
from conformance.here import read_mesh
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.given import NAMES
from conformance.laws.mesh.algebra import DOC, coord_of, named_mesh, several_dims
from conformance.laws.mesh.coordinates import all_meshes
from conformance.laws.mesh.views import FLATTEN, index, named_dims
from conformance.report.reproducer import Script

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


def draw_names(limits: Limits) -> SearchStrategy[Case]:
    cases = []
    for mesh in [mesh for mesh in all_meshes(limits) if mesh.ndim < 4]:
        whole = mesh.size == max(mesh.ranks) + 1
        pairs = [None] if mesh.ndim == 1 else ["a,b"] if mesh.ndim == 2 else ["a,b", "a,c", "b,c", "a,b,c"]
        cases += [Case.of("mesh.names", mesh=mesh, flatten=pair if whole else None) for pair in pairs]
    return st.sampled_from(cases)


def check_names(case: Case, here: Here) -> None:
    """A mesh dim is meant by its name as by its number, from the mesh and from a slice; a name that no dim has is refused."""
    mesh = case.mesh()
    live = named_mesh(here, mesh)
    coord = here.coord(mesh)
    got_names = live.mesh_dim_names
    here.require(got_names == NAMES[: mesh.ndim], "wrong-metadata", "names", "mesh dims have other names", NAMES[: mesh.ndim], got_names)
    if "flatten" in case:
        dims = named_dims(case, "flatten")
        live[index(dims)]._flatten("flat")
    if coord is None:
        return
    for dim, name in enumerate(NAMES[: mesh.ndim]):
        here.require(live.get_group(name) is live.get_group(dim), "wrong-value", "group", f"the group of {name!r} is not that of dim {dim}")
        at = live.get_local_rank(name), live.get_local_rank(dim)
        here.require(
            at[0] == at[1], "wrong-value", "local rank", f"the local rank along {name!r} is not that along dim {dim}", at[1], at[0]
        )
        part = live[name]
        here.require(part.get_group() is live.get_group(dim), "wrong-value", "slice group", f"the slice {name!r} has another group")
        here.require(
            part.size() == live.size(dim), "wrong-value", "size", f"the slice {name!r} has another size", live.size(dim), part.size()
        )
    for what, attempt in (("group", live.get_group), ("local rank", live.get_local_rank), ("slice", live.__getitem__)):
        here.refused(lambda attempt=attempt: attempt("z"), what, f"the {what} of a dim that is not there")  # type: ignore[misc]
    if "flatten" in case:
        want = sorted(mesh.flatten(dims, coord).ranks)
        got = sorted(dist.get_process_group_ranks(live.get_group("flat")))
        here.require(got == want, "wrong-value", "flat group", "the group of the flattened dims has other members", want, got)


def script_names(case: Case) -> Script:
    mesh = case.mesh()
    names = NAMES[: mesh.ndim]
    body = [f"mesh = {scripts.mesh(mesh, names)}"]
    got = f"[mesh.get_group(n) is mesh.get_group(i) is mesh[n].get_group() for i, n in enumerate({names})]"
    if "flatten" in case:
        dims = named_dims(case, "flatten")
        body += [f'mesh[{index(dims)!r}]._flatten("flat")']
        members = {rank: sorted(mesh.flatten(dims, coord_of(mesh, rank)).ranks) for rank in sorted(mesh.ranks)}
        got = f'({got}, sorted(dist.get_process_group_ranks(mesh.get_group("flat"))))'
        return scripts.compared(case, body, got, {rank: ([True] * mesh.ndim, due) for rank, due in members.items()})
    return scripts.compared(case, body, got, dict.fromkeys(sorted(mesh.ranks), [True] * mesh.ndim))


COPIED = {"pickle": lambda live: pickle.loads(pickle.dumps(live)), "deepcopy": copy.deepcopy}


def draw_view_copies(limits: Limits) -> SearchStrategy[Case]:
    cases = []
    for mesh in several_dims(limits, outside=False):
        views = ("none", "a", "b", "a+b") if mesh.ndim == 2 else ("none", "a", "b,c", "a,c", "a+c", "b+c", "a+b+c")
        cases += [Case.of("mesh.view-copies", mesh=mesh, of=view, how=how) for view in views for how in COPIED]
    return st.sampled_from(cases)


def _view(live: DeviceMesh, view: str) -> DeviceMesh:
    if view == "none":
        return live
    part = live[tuple(view.replace("+", ",").split(","))]
    return part._flatten("flat") if "+" in view else part


def check_view_copies(case: Case, here: Here) -> None:
    """A copy of a named mesh, of a slice or of flattened dims is equal to it, hashes alike, reads alike, and has its groups."""
    mesh, view = case.mesh(), case.get("of")
    live = _view(named_mesh(here, mesh), view)
    if here.coord(mesh) is None:
        return
    made = COPIED[case.get("how")](live)
    here.require(made == live and hash(made) == hash(live), "wrong-value", "equality", "the copy of a view is another mesh", live, made)
    here.require(repr(made) == repr(live), "wrong-metadata", "repr", "the copy of a view reads otherwise", repr(live), repr(made))
    here.require(read_mesh(made) == read_mesh(live), "wrong-layout", "table", "the copy of a view holds other ranks", live, made)
    here.require(made.get_coordinate() == live.get_coordinate(), "wrong-value", "coordinate", "a rank sits elsewhere in the copy of a view")
    for dim, name in enumerate(live.mesh_dim_names or ()):
        got = sorted(dist.get_process_group_ranks(made.get_group(dim)))
        want = sorted(dist.get_process_group_ranks(live.get_group(dim)))
        here.require(got == want, "wrong-value", "groups", f"the copy of a view has another group along {name!r}", want, got)
    if live.ndim > 1:
        first = (live.mesh_dim_names or ("",))[0]
        here.require(made[first] == live[first], "wrong-value", "slice", "a slice of the copy is another mesh", live[first], made[first])


def script_view_copies(case: Case) -> Script:
    mesh, view, how = case.mesh(), case.get("of"), case.get("how")
    text = "mesh" if view == "none" else f"mesh[{tuple(view.replace('+', ',').split(','))!r}]"
    text += '._flatten("flat")' if "+" in view else ""
    body = [f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}", f"view = {text}"]
    body += [f"made = {'copy.deepcopy(view)' if how == 'deepcopy' else 'pickle.loads(pickle.dumps(view))'}"]
    got = "(made == view, hash(made) == hash(view), made.mesh.tolist() == view.mesh.tolist())"
    made = scripts.compared(case, body, got, dict.fromkeys(range(case.world), (True, True, True)))
    return Script(made.stages, (f"import {'copy' if how == 'deepcopy' else 'pickle'}", *made.imports), made.constants)


LAWS = (
    Law(
        id="mesh.names",
        clause="A mesh dim is meant by its name as by its number, flattened dims by theirs; a name that no dim has is refused.",
        source=f"{DOC}.get_group, get_local_rank; {FLATTEN}",
        check=check_names,
        script=script_names,
        control="mesh.names mesh=2x2 flatten=a,b",
        planted="mesh_names_mean_the_first_dim",
        draw=draw_names,
        draws=25,
        needs=("subgroups",),
        weight=0.4,
    ),
    Law(
        id="mesh.view-copies",
        clause="A named mesh, a slice and flattened dims survive pickling and deep copying: equal, hashed and read alike, groups kept.",
        source="torch.distributed.device_mesh, DeviceMesh.__getstate__ and __setstate__",
        check=check_view_copies,
        script=script_view_copies,
        control="mesh.view-copies mesh=2x2 of=b how=pickle",
        planted="mesh_pickle_reverses_ranks",
        draw=draw_view_copies,
        draws=25,
        needs=("subgroups",),
        weight=0.4,
        tier="extended",
    ),
)
