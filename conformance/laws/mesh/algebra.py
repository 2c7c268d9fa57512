"""Laws of how views of a mesh go together: concatenated, overlapping, flattened beside dims of size 1, and cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from conformance.case import Case
from conformance.here import read_mesh
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.given import NAMES
from conformance.laws.mesh.coordinates import all_meshes, named
from conformance.laws.mesh.views import FLATTEN, SLICES, expect_mesh, index, telling, told
from conformance.report.reproducer import Script
from reference.mesh import Coord, Mesh

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.device_mesh docs, DeviceMesh"
CONCATENATE = "torch.distributed.device_mesh, DeviceMesh._concatenate: meshes of one root, side by side"


def several_dims(limits: Limits, *, outside: bool = True) -> list[Mesh]:
    """Meshes of two dims and more, those with ranks outside too."""
    found = [mesh for mesh in all_meshes(limits) if mesh.ndim > 1]
    return found if outside else [mesh for mesh in found if mesh.size == max(mesh.ranks) + 1]


def named_mesh(here: Here, mesh: Mesh) -> DeviceMesh:
    return here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim])


def coord_of(mesh: Mesh, rank: int) -> Coord:
    coord = mesh.coord(rank)
    assert coord is not None
    return coord


def _parts(case: Case) -> list[tuple[int, ...]]:
    """``parts=a+b,c``: the dims of each mesh that is put beside the others."""
    return [tuple(NAMES.index(name) for name in part.split("+")) for part in case.get("parts").split(",")]


def draw_concatenate(limits: Limits) -> SearchStrategy[Case]:
    cases = []
    for mesh in several_dims(limits, outside=False):
        parts = ("a,b",) if mesh.ndim == 2 else ("a,b", "a,c", "b,c", "a+b,c", "a,b+c", "a,b,c")
        cases += [Case.of("mesh.concatenate", mesh=mesh, parts=part) for part in parts]
    return st.sampled_from(cases)


def check_concatenate(case: Case, here: Here) -> None:
    """Disjoint slices put side by side are the slice by all their names: the same table, names, groups, equal and of equal hash."""
    mesh, parts = case.mesh(), _parts(case)
    if not hasattr(DeviceMesh, "_concatenate"):
        here.reject("this version of torch has no DeviceMesh._concatenate")
    live = named(here, mesh)
    if here.coord(mesh) is None:
        return
    dims = tuple(dim for part in parts for dim in part)
    joined = DeviceMesh._concatenate([live[index(part)] for part in parts])
    expect_mesh(here, joined, mesh.slice(dims, coord_of(mesh, here.rank)), tuple(NAMES[dim] for dim in dims), "joined")
    whole = live[index(dims)]
    here.require(joined == whole and hash(joined) == hash(whole), "wrong-value", "equality", "it differs from the slice", whole, joined)
    total = here.tensor(torch.tensor([10**here.rank], dtype=torch.int64))
    dist.all_reduce(total, group=joined.get_group(len(dims) - 1))
    due = sum(10**rank for rank in mesh.group(dims[-1], coord_of(mesh, here.rank)))
    here.same(total, torch.tensor([due]), "traffic", what="sum along the last dim")


def script_concatenate(case: Case) -> Script:
    mesh, parts = case.mesh(), _parts(case)
    dims = tuple(dim for part in parts for dim in part)
    slices = ", ".join(f"mesh[{index(part)!r}]" for part in parts)
    body = [f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}", f"joined = DeviceMesh._concatenate([{slices}])"]
    names = tuple(NAMES[dim] for dim in dims)
    want = {rank: telling(mesh.slice(dims, coord_of(mesh, rank)), names, rank) for rank in sorted(mesh.ranks)}
    return scripts.compared(case, body, told("joined"), want)


OVERLAPS = {
    "slice-flat-first": ("flat", "a"),
    "slice-flat-last": ("a", "flat"),
    "slice-flat-second": ("b", "flat"),
    "join-twice": ("a", "a"),
    "join-flat": ("a", "flat"),
    "join-part": ("b", "a+b"),
}


def sweep_overlaps(limits: Limits) -> list[Case]:
    meshes = [mesh for mesh in several_dims(limits, outside=False) if 1 not in mesh.shape[:2]]
    cases = [Case.of("mesh.overlap-refusals", mesh=mesh, attempt=attempt) for attempt in OVERLAPS for mesh in meshes]
    return [case for case in cases if case.world <= limits.world_size]


def check_overlaps(case: Case, here: Here) -> None:
    """A mesh that would hold one dim of its root twice is refused, with the names of what overlaps."""
    mesh, attempt = case.mesh(), case.get("attempt")
    live = named_mesh(here, mesh)
    names = OVERLAPS[attempt]
    flat = live["a", "b"]._flatten("flat") if mesh.ndim > 2 else live._flatten("flat")
    views: dict[str, DeviceMesh] = {"flat": flat, "a+b": live["a", "b"], "a": live["a"], "b": live["b"]}
    if attempt.startswith("join") and not hasattr(DeviceMesh, "_concatenate"):
        here.reject("this version of torch has no DeviceMesh._concatenate")
    if here.coord(mesh) is None:
        return

    def overlapping() -> Any:
        return live[names] if attempt.startswith("slice") else DeviceMesh._concatenate([views[name] for name in names])

    try:
        got = overlapping()
    except (KeyError, RuntimeError, ValueError) as error:
        missing = [name for name in names for part in name.split("+") if part not in str(error)]
        here.require(not missing, "wrong-error", "names", f"overlapping {names}: refused without naming {missing}: {error}")
        return
    here.deviates("wrong-error", "overlap", f"overlapping {names}: must be refused, was accepted", "an error", got)


def script_overlaps(case: Case) -> Script:
    mesh, attempt = case.mesh(), case.get("attempt")
    names = OVERLAPS[attempt]
    body = [f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}", 'flat = mesh["a", "b"]._flatten("flat")']
    views = {"flat": "flat", "a+b": 'mesh["a", "b"]'}
    joined = ", ".join(views.get(name, f'mesh["{name}"]') for name in names)
    return scripts.refused(case, body, f"mesh[{names!r}]" if attempt.startswith("slice") else f"DeviceMesh._concatenate([{joined}])")


def sweep_units(limits: Limits) -> list[Case]:
    meshes = [mesh for mesh in several_dims(limits, outside=False) if 1 in mesh.shape and mesh.size > 1]
    pairs = [(mesh, unit, other) for mesh in meshes for unit in range(mesh.ndim) for other in range(mesh.ndim)]
    return [
        Case.of("mesh.unit-dims", mesh=mesh, of="+".join(NAMES[dim] for dim in sorted((unit, other))))
        for mesh, unit, other in pairs
        if mesh.shape[unit] == 1 and mesh.shape[other] > 1
    ]


def check_units(case: Case, here: Here) -> None:
    """With a mesh dim of size 1 or without it, a slice has the same ranks, flattened dims are the same ranks, and groups stay."""
    mesh = case.mesh()
    dims = tuple(NAMES.index(name) for name in case.get("of").split("+"))
    wide = next(dim for dim in dims if mesh.shape[dim] > 1)
    live = named_mesh(here, mesh)
    part, bare = live[index(dims)], live[NAMES[wide]]
    flat = part._flatten("flat")
    coord = here.coord(mesh)
    if coord is None:
        return
    due = mesh.group(wide, coord)
    for what, got in (("slice", part), ("bare slice", bare), ("flattened", flat)):
        ranks = read_mesh(got).ranks
        here.require(ranks == due, "wrong-layout", what, f"the {what} has other ranks than its one dim of several", due, ranks)
    for what, group in (("slice", part.get_group(dims.index(wide))), ("flattened", flat.get_group())):
        members = sorted(dist.get_process_group_ranks(group))
        here.require(members == sorted(due), "wrong-value", "members", f"the group of the {what} has other members", sorted(due), members)
    here.require(flat.get_local_rank() == bare.get_local_rank(), "wrong-value", "local rank", "flattened, this rank sits elsewhere")
    rest = tuple(dim for dim in range(mesh.ndim) if dim not in dims and dim > max(dims))
    if rest:
        try:
            mixed = live[("flat", *(NAMES[dim] for dim in rest))]
        except KeyError:  # torch gives up slices by flattened names
            return
        want = mesh.slice((wide, *rest), coord)
        here.require(read_mesh(mixed) == want, "wrong-layout", "mixed", "flattened dims beside others hold other ranks", want, mixed)


def script_units(case: Case) -> Script:
    mesh = case.mesh()
    dims = tuple(NAMES.index(name) for name in case.get("of").split("+"))
    wide = next(dim for dim in dims if mesh.shape[dim] > 1)
    body = [f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}", f"part = mesh[{index(dims)!r}]", 'flat = part._flatten("flat")']
    want = {rank: [list(mesh.group(wide, coord_of(mesh, rank)))] * 3 for rank in sorted(mesh.ranks)}
    got = f'[part.mesh.flatten().tolist(), mesh["{NAMES[wide]}"].mesh.tolist(), flat.mesh.tolist()]'
    return scripts.compared(case, body, got, want)


# a mesh, the dim of it that is cut, and into what
CUT = (("1x4", "b", "2x2"), ("4x1", "a", "2x2"), ("2x2", "b", "2x1"), ("2x2", "a", "1x2"), ("2x2@0,2,1,3", "b", "1x2"),
       ("2x1x2", "c", "2x1"), ("1x2", "b", "2x1"), ("2x1", "a", "1x2"), ("1x3", "b", "1x3"), ("2x1", "b", "1x1"), ("1x2@0,2", "b", "1x2"),
       ("2x4", "b", "2x2"), ("4x2", "a", "2x2"), ("2x3", "b", "3x1"), ("2x2x2", "b", "1x2"))  # fmt: skip


def sweep_cut(limits: Limits) -> list[Case]:
    parsed = [(Mesh.parse(mesh), dim, sizes) for mesh, dim, sizes in CUT]
    cases = [(mesh, dim, sizes, by) for mesh, dim, sizes in parsed for by in ("name", "number") if max(mesh.ranks) < limits.world_size]
    return [Case.of("mesh.unflatten-one", mesh=mesh, of=dim, sizes=sizes, by=by) for mesh, dim, sizes, by in cases]


def _cut(case: Case) -> tuple[int, Mesh, tuple[str, ...]]:
    """Which dim is cut, the mesh that comes of it, and its names."""
    mesh, at, sizes = case.mesh(), NAMES.index(case.get("of")), case.shape("sizes")
    names = (*NAMES[:at], *"pq"[: len(sizes)], *NAMES[at + 1 : mesh.ndim])
    return at, Mesh((*mesh.shape[:at], *sizes, *mesh.shape[at + 1 :]), mesh.ranks), names


def check_cut(case: Case, here: Here) -> None:
    """One of several dims, cut into two, leaves the others where they are; the new dims are slices with groups of their own."""
    mesh = case.mesh()
    at, want, names = _cut(case)
    live = named_mesh(here, mesh)
    cut = live._unflatten(case.get("of") if case.get("by") == "name" else at, case.shape("sizes"), ("p", "q"))
    coord = here.coord(mesh)
    if coord is None:
        here.require(cut.get_coordinate() is None, "wrong-value", "outside", "a rank outside has a place", None, cut.get_coordinate())
        return
    expect_mesh(here, cut, want, names, "cut")
    for dim, name in enumerate(names):
        part = cut[name]
        expect_mesh(here, part, want.slice((dim,), coord_of(want, here.rank)), (name,), "slice")
        total = here.tensor(torch.tensor([10**here.rank], dtype=torch.int64))
        dist.all_reduce(total, group=part.get_group())
        due = sum(10**rank for rank in want.group(dim, coord_of(want, here.rank)))
        here.same(total, torch.tensor([due]), "traffic", what=f"sum along {name!r}")


def script_cut(case: Case) -> Script:
    mesh = case.mesh()
    at, want, names = _cut(case)
    dim = repr(case.get("of")) if case.get("by") == "name" else at
    body = [f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}", f'cut = mesh._unflatten({dim}, {case.shape("sizes")}, ("p", "q"))']
    return scripts.compared(case, body, told("cut"), {rank: telling(want, names, rank) for rank in sorted(mesh.ranks)})


LAWS = (
    Law(
        id="mesh.concatenate",
        clause="Disjoint slices of a mesh put side by side are the slice by all their names.",
        source=CONCATENATE,
        check=check_concatenate,
        script=script_concatenate,
        control="mesh.concatenate mesh=2x2 parts=a,b",
        planted="mesh_concatenate_in_reverse",
        draw=draw_concatenate,
        draws=18,
        needs=("all_reduce", "subgroups"),
        weight=0.3,
        tier="extended",
    ),
    Law(
        id="mesh.overlap-refusals",
        clause="Slices and concatenations in which one dim would stand twice are refused, with the names of what overlaps.",
        source=f"{SLICES}; {CONCATENATE}",
        check=check_overlaps,
        script=script_overlaps,
        control="mesh.overlap-refusals mesh=2x2 attempt=slice-flat-last",
        planted="mesh_slice_forgives_names",
        sweep=sweep_overlaps,
        sweeps=24,
        needs=("subgroups",),
        weight=0.3,
        tier="extended",
    ),
    Law(
        id="mesh.unit-dims",
        clause="A mesh dim of size 1 is transparent to slices, flattened dims and groups.",
        source=f"{SLICES}; {FLATTEN}",
        check=check_units,
        script=script_units,
        control="mesh.unit-dims mesh=2x1 of=a+b",
        planted="mesh_flatten_drops_the_first_rank",
        sweep=sweep_units,
        sweeps=24,
        needs=("subgroups",),
        weight=0.2,
    ),
    Law(
        id="mesh.unflatten-one",
        clause="One of several mesh dims, cut into two, leaves the others as they are; all of them are slices with groups of their own.",
        source="torch.distributed.device_mesh, docstring of DeviceMesh._unflatten",
        check=check_cut,
        script=script_cut,
        control="mesh.unflatten-one mesh=2x2 of=b sizes=2x1 by=name",
        planted="mesh_unflatten_reverses_names",
        sweep=sweep_cut,
        sweeps=30,
        needs=("all_reduce", "subgroups"),
        weight=0.3,
        tier="extended",
    ),
)
