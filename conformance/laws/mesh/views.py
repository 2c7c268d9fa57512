"""Laws of what is made from a mesh: slices, flattened dims, unflattened dims, and of meshes made from groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from conformance.case import Case
from conformance.here import read_mesh
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import NAMES
from conformance.laws.mesh.coordinates import all_meshes
from conformance.report.reproducer import Script
from reference.mesh import Coord, Mesh

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

SLICES = "torch.distributed.device_mesh docs, DeviceMesh.__getitem__"
FLATTEN = "torch.distributed.device_mesh, docstring of DeviceMesh._flatten"


def named_dims(case: Case, name: str) -> tuple[int, ...]:
    """The mesh dims that a field such as ``slice=a,c`` names."""
    return tuple(NAMES.index(letter) for letter in case.get(name).split(","))


def index(dims: tuple[int, ...]) -> str | tuple[str, ...]:
    names = tuple(NAMES[dim] for dim in dims)
    return names[0] if len(names) == 1 else names


def letters(dims: tuple[int, ...]) -> str:
    return ",".join(NAMES[dim] for dim in dims)


def _several_dims(limits: Limits) -> list[Mesh]:
    """The palette, and in larger worlds the larger meshes."""
    return [*draws.meshes(limits, dims=(2, 3)), *(mesh for mesh in all_meshes(limits) if mesh.ndim > 1 and mesh.size > 4)]


def _chosen(mesh: Mesh, draw: st.DrawFn, least: int, most: int) -> tuple[int, ...]:
    """Some mesh dims, in order."""
    subsets = [dims for size in range(least, most + 1) for dims in _ascending(mesh.ndim, size)]
    return draw(st.sampled_from(subsets))


def _ascending(ndim: int, size: int) -> list[tuple[int, ...]]:
    return [()] if size == 0 else [(*head, dim) for head in _ascending(ndim, size - 1) for dim in range(head[-1] + 1 if head else 0, ndim)]


def expect_mesh(here: Here, got: DeviceMesh, want: Mesh, names: tuple[str, ...], check: str) -> None:
    """``got`` is a mesh over this table and with these names, in which this rank sits where it must, among whom it must."""
    if not here.require(read_mesh(got) == want, "wrong-layout", check, "it holds other ranks", want, read_mesh(got)):
        return
    here.require(got.mesh_dim_names == names, "wrong-metadata", check, "its dims have other names", names, got.mesh_dim_names)
    coord = want.coord(here.rank)
    at = got.get_coordinate()
    here.require((None if at is None else tuple(at)) == coord, "wrong-value", check, "this rank sits elsewhere", coord, at)
    for dim, name in enumerate(names if coord is not None else ()):
        members, due = sorted(dist.get_process_group_ranks(got.get_group(dim))), sorted(want.group(dim, coord or ()))
        here.require(members == due, "wrong-value", check, f"the group of dim {name!r} has other members", due, members)


def told(got: str) -> str:
    return f"({got}.mesh.tolist(), {got}.mesh_dim_names, [sorted(dist.get_process_group_ranks(g)) for g in {got}.get_all_groups()])"


def telling(want: Mesh, names: tuple[str, ...], rank: int) -> object:
    coord = want.coord(rank) or ()
    return (torch.tensor(want.ranks).reshape(want.shape).tolist(), names, [sorted(want.group(dim, coord)) for dim in range(want.ndim)])


def draw_slice(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(_several_dims(limits)))
        return Case.of("mesh.slice", mesh=mesh, slice=letters(_chosen(mesh, draw, 1, mesh.ndim)))

    return case()


def check_slice(case: Case, here: Here) -> None:
    """A slice by names is the part of the table through this rank that these dims span; its groups are those of the dims."""
    mesh, dims = case.mesh(), named_dims(case, "slice")
    live = here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim])
    coord = here.coord(mesh)
    if coord is None:
        return
    part, want = live[index(dims)], mesh.slice(dims, coord)
    expect_mesh(here, part, want, tuple(NAMES[dim] for dim in dims), "slice")
    for at, dim in enumerate(dims):
        parts = [here.tensor(torch.empty(1, dtype=torch.int64)) for _ in mesh.group(dim, coord)]
        dist.all_gather(parts, here.tensor(torch.tensor([here.rank])), group=part.get_group(at))
        here.same(
            torch.cat(parts).sort().values, torch.tensor(sorted(mesh.group(dim, coord))), "traffic", what="ranks gathered along the slice"
        )


def script_slice(case: Case) -> Script:
    mesh, dims = case.mesh(), named_dims(case, "slice")
    body = [
        f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}",
        f"part = mesh[{index(dims)!r}] if mesh.get_coordinate() is not None else None",
    ]
    names = tuple(NAMES[dim] for dim in dims)
    want = {rank: telling(mesh.slice(dims, _coord(mesh, rank)), names, rank) for rank in sorted(mesh.ranks)}
    return scripts.compared(case, body, told("part"), want)


def _coord(mesh: Mesh, rank: int) -> Coord:
    coord = mesh.coord(rank)
    assert coord is not None
    return coord


def draw_compose(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(_several_dims(limits)))
        outer = _chosen(mesh, draw, 2, mesh.ndim)
        inner = tuple(outer[at] for at in _chosen(Mesh.of(*[1] * len(outer)), draw, 1, len(outer)))
        return Case.of("mesh.slice-compose", mesh=mesh, slice=letters(outer), of=letters(inner))

    return case()


def check_compose(case: Case, here: Here) -> None:
    """A slice of a slice is the slice: equal, of equal hash, and the same again when it is taken again."""
    mesh, outer, inner = case.mesh(), named_dims(case, "slice"), named_dims(case, "of")
    live = here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim])
    coord = here.coord(mesh)
    if coord is None:
        return
    direct, nested, again = live[index(inner)], live[index(outer)][index(inner)], live[index(inner)]
    names = tuple(NAMES[dim] for dim in inner)
    expect_mesh(here, nested, mesh.slice(inner, coord), names, "nested")
    here.require(direct == nested, "wrong-value", "equality", "a slice of a slice differs from the slice", direct, nested)
    here.require(hash(direct) == hash(nested), "wrong-value", "hash", "a slice of a slice hashes otherwise", hash(direct), hash(nested))
    here.require(direct == again and hash(direct) == hash(again), "wrong-value", "again", "the slice taken again differs", direct, again)
    whole = live[NAMES[: mesh.ndim]] if mesh.ndim > 1 else live
    here.require(
        whole == live and hash(whole) == hash(live), "wrong-value", "whole", "the slice by all names differs from the mesh", live, whole
    )
    for at in range(len(inner)):
        same = dist.get_process_group_ranks(direct.get_group(at)) == dist.get_process_group_ranks(nested.get_group(at))
        here.require(same, "wrong-value", "groups", f"a slice of a slice has another group along {names[at]!r}")


def script_compose(case: Case) -> Script:
    mesh, outer, inner = case.mesh(), named_dims(case, "slice"), named_dims(case, "of")
    body = [
        f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}",
        "if mesh.get_coordinate() is None:",
        "    return None, None",
        f"direct, nested = mesh[{index(inner)!r}], mesh[{index(outer)!r}][{index(inner)!r}]",
    ]
    names = tuple(NAMES[dim] for dim in inner)
    want = {rank: (True, True, telling(mesh.slice(inner, _coord(mesh, rank)), names, rank)) for rank in sorted(mesh.ranks)}
    return scripts.compared(case, body, f"(direct == nested, hash(direct) == hash(nested), {told('nested')})", want)


# field `slice`: names that no ascending slice has
ODD_SLICES = ("z", "a,z", "z,a", "b,z", "z,b", "a,b,z", "a,a", "b,b", "none", "b,a")


def sweep_odd_slices(limits: Limits) -> list[Case]:
    meshes = [Mesh.parse(text) for text in ("1x2", "2x1", "1x3", "2x2", "1x2x2") if Mesh.parse(text).size <= limits.world_size]
    return [Case.of("mesh.slice-refusals", mesh=mesh, slice=odd) for odd in ODD_SLICES for mesh in meshes]


def features_odd_slices(case: Case) -> set[str]:
    names = case.get("slice").split(",")
    return {"must-refuse", *(["name-twice"] if len(set(names)) < len(names) else [])}


def check_odd_slices(case: Case, here: Here) -> None:
    """An unknown name, a name twice, and any name of a mesh without names are refused; names in another order are refused or
    give the dims in this order."""
    mesh, odd = case.mesh(), case.get("slice")
    if odd == "none":
        live = here.mesh(mesh, fresh=True)
        here.refused(lambda: live["a"], "no names", "a slice of a mesh without names", errors=(RuntimeError, KeyError, ValueError))
        return
    live = here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim])
    if odd != "b,a":
        names = tuple(odd.split(","))
        errors = (KeyError, RuntimeError, ValueError)
        here.refused(lambda: live[names if len(names) > 1 else names[0]], "names", f"a slice by {odd}", errors=errors)
        return
    try:
        turned = live["b", "a"]
    except (KeyError, RuntimeError, ValueError, NotImplementedError):
        return
    expect_mesh(here, turned, mesh.slice((1, 0), _coord(mesh, here.rank)), ("b", "a"), "turned")


def script_odd_slices(case: Case) -> Script:
    mesh, odd = case.mesh(), case.get("slice")
    names = () if odd == "none" else NAMES[: mesh.ndim]
    body = [f"mesh = {scripts.mesh(mesh, names)}"]
    if odd == "b,a":
        want = {rank: telling(mesh.slice((1, 0), _coord(mesh, rank)), ("b", "a"), rank) for rank in sorted(mesh.ranks)}
        return scripts.compared(case, [*body, 'part = mesh["b", "a"]'], told("part"), want)
    index = ("a",) if odd == "none" else tuple(odd.split(","))
    return scripts.refused(case, body, f"mesh[{index!r}]")


def draw_flatten(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(_several_dims(limits)))
        whole = mesh.size <= max(mesh.ranks)  # ranks outside cannot name a part of the table that is theirs
        named = draw(st.sampled_from([None, None, None, "default", "default" if whole else "itself"]))
        least, most = (1, 1) if named == "itself" else (mesh.ndim if whole else 2, mesh.ndim)
        return Case.of("mesh.flatten", mesh=mesh, flatten=letters(_chosen(mesh, draw, least, most)), named=named)

    return case()


def check_flatten(case: Case, here: Here) -> None:
    """Flattened dims are one dim over the ranks that they span, read row by row, whether or not the dims are neighbours;
    flattening again gives the same mesh and the same group."""
    mesh, dims = case.mesh(), named_dims(case, "flatten")
    live = here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim])
    part = live if len(dims) == mesh.ndim else live[index(dims)]
    given = None if "named" in case else "flat"
    flat, again = part._flatten(given), part._flatten(given)
    name = given or "_".join(NAMES[dim] for dim in dims)
    here.require(flat == again and hash(flat) == hash(again), "wrong-value", "again", "flattened again it is another mesh", flat, again)
    coord = here.coord(mesh)
    if coord is None:
        here.require(flat.get_coordinate() is None, "wrong-value", "outside", "a rank outside has a place", None, flat.get_coordinate())
        return
    want = mesh.flatten(dims, coord)
    expect_mesh(here, flat, want, (name,), "flatten")
    if len(dims) == 1:
        same = flat is part and part._flatten(name) is part
        here.require(same, "wrong-value", "itself", "one dim flattened under its own name is another mesh", part, flat)
    here.require(flat.get_group() is again.get_group(), "wrong-value", "group", "flattened again it has another group")
    total = here.tensor(torch.tensor([10**here.rank], dtype=torch.int64))
    dist.all_reduce(total, group=flat.get_group())
    here.same(total, torch.tensor([sum(10**rank for rank in want.ranks)]), "traffic", what="sum along the flattened dim")
    here.require(
        live.mesh_dim_names == NAMES[: mesh.ndim] and read_mesh(live) == mesh, "wrong-layout", "origin", "flattening changed the mesh"
    )
    other = next(name for name in NAMES[: mesh.ndim] if len(dims) > 1 or name != NAMES[dims[0]])
    here.refused(lambda: part._flatten(other), "name", "flattening to the name of another dim", errors=(ValueError, RuntimeError, KeyError))


def script_flatten(case: Case) -> Script:
    mesh, dims = case.mesh(), named_dims(case, "flatten")
    part = "mesh" if len(dims) == mesh.ndim else f"mesh[{index(dims)!r}]"
    name = "_".join(NAMES[dim] for dim in dims) if "named" in case else "flat"
    body = [f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}", f"flat = {part}._flatten({'' if 'named' in case else repr(name)})"]
    want = {rank: telling(mesh.flatten(dims, _coord(mesh, rank)), (name,), rank) for rank in sorted(mesh.ranks)}
    return scripts.compared(case, body, told("flat"), want)


UNFLATTENED = {
    "2": ("2x1", "1x2"),
    "3": ("3x1", "1x3"),
    "4": ("2x2", "4x1", "2x1x2"),
    "6": ("2x3", "3x2"),
    "8": ("2x2x2", "4x2"),
    "2@0,2": ("1x2",),
    "3@2,0,1": ("1x3",),
    "4@2,0,3,1": ("2x2",),
}


def sweep_unflatten(limits: Limits) -> list[Case]:
    meshes = {mesh: parts for text, parts in UNFLATTENED.items() if max((mesh := Mesh.parse(text)).ranks) < limits.world_size}
    return [Case.of("mesh.unflatten", mesh=mesh, sizes=sizes) for mesh, parts in meshes.items() for sizes in parts]


def check_unflatten(case: Case, here: Here) -> None:
    """A dim cut into several is the table read row by row; flattening them gives the ranks of the dim back."""
    mesh, sizes = case.mesh(), case.shape("sizes")
    live = here.mesh(mesh, fresh=True, names=("flat",))
    cut = live._unflatten(0, sizes, NAMES[: len(sizes)])
    want = Mesh(sizes, mesh.ranks)
    if here.coord(mesh) is None:
        here.require(cut.get_coordinate() is None, "wrong-value", "outside", "a rank outside has a place", None, cut.get_coordinate())
    else:
        expect_mesh(here, cut, want, NAMES[: len(sizes)], "unflatten")
    back = cut._flatten("back")
    if here.coord(mesh) is not None:
        expect_mesh(here, back, mesh, ("back",), "back")
    here.refused(lambda: live._unflatten(0, (mesh.size + 1, 1), ("p", "q")), "size", "unflattening to another number of ranks")


def script_unflatten(case: Case) -> Script:
    mesh, sizes = case.mesh(), case.shape("sizes")
    body = [f"mesh = {scripts.mesh(mesh, ('flat',))}", f"cut = mesh._unflatten(0, {sizes}, {NAMES[: len(sizes)]})"]
    want = {rank: telling(Mesh(sizes, mesh.ranks), NAMES[: len(sizes)], rank) for rank in sorted(mesh.ranks)}
    return scripts.compared(case, body, told("cut"), want)


LAWS = (
    Law(
        id="mesh.slice",
        clause="A slice by names is the part of the table through this rank that these dims span, with the groups of these dims.",
        source=SLICES,
        check=check_slice,
        script=script_slice,
        control="mesh.slice mesh=2x2 slice=b",
        planted="mesh_slice_takes_leading_groups",
        draw=draw_slice,
        draws=30,
        needs=("all_gather", "subgroups"),
        weight=0.5,
    ),
    Law(
        id="mesh.slice-compose",
        clause="A slice of a slice is the slice of the mesh, equal and of equal hash, however often it is taken.",
        source=SLICES,
        check=check_compose,
        script=script_compose,
        control="mesh.slice-compose mesh=1x2x2 slice=a,c of=c",
        planted="mesh_hash_by_identity",
        draw=draw_compose,
        draws=24,
        needs=("subgroups",),
        weight=0.4,
    ),
    Law(
        id="mesh.slice-refusals",
        clause="A slice by an unknown name, a name twice, or of a mesh without names is refused; other orders are refused or honoured.",
        source=SLICES,
        check=check_odd_slices,
        script=script_odd_slices,
        features=features_odd_slices,
        control="mesh.slice-refusals mesh=2x2 slice=a,z",
        planted="mesh_slice_forgives_names",
        sweep=sweep_odd_slices,
        sweeps=32,
        needs=("subgroups",),
        weight=0.3,
    ),
    Law(
        id="mesh.flatten",
        clause="Flattened dims, neighbours or not, are one dim over their ranks row by row, the same mesh and group each time.",
        source=FLATTEN,
        check=check_flatten,
        script=script_flatten,
        control="mesh.flatten mesh=2x2 flatten=a,b",
        planted="mesh_flatten_by_columns",
        draw=draw_flatten,
        draws=26,
        needs=("all_reduce", "subgroups"),
        weight=0.5,
        tier="extended",
    ),
    Law(
        id="mesh.unflatten",
        clause="A dim cut into several holds its ranks row by row, and flattens back to the dim.",
        source="torch.distributed.device_mesh, docstring of DeviceMesh._unflatten",
        check=check_unflatten,
        script=script_unflatten,
        control="mesh.unflatten mesh=4 sizes=2x2",
        planted="mesh_unflatten_reverses_names",
        sweep=sweep_unflatten,
        sweeps=14,
        needs=("subgroups",),
        weight=0.2,
        tier="extended",
    ),
)
