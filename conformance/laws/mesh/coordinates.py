"""Laws of device meshes: coordinates, groups, equality, and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from conformance.case import Case
from conformance.here import read_mesh
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import NAMES
from conformance.report.reproducer import Script
from reference.mesh import Mesh

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy
    from torch.distributed.device_mesh import DeviceMesh

    from conformance.here import Here

DOC = "torch.distributed.device_mesh docs, DeviceMesh"


# further meshes: the plain and the outside ones are so many that tables out of order stay few among them
MORE = ("1x1", "2@0,3", "2@1,3", "2@2,3", "1@2", "3@1,2,3", "3@0,2,3", "1x2@1,2", "2x1@0,3", "1x3@0,1,3", "1x4", "4x1", "1x1x2", "1x2x1",
        "2x1x1", "2x3", "3x2", "6", "2x4", "2x2x2", "8", "2x3@1,2,3,4,5,6")  # fmt: skip


def all_meshes(limits: Limits) -> list[Mesh]:
    """Every mesh of the palette and more, each once, the plainest first."""
    further = [mesh for mesh in map(Mesh.parse, MORE) if max(mesh.ranks) < limits.world_size]
    return list(dict.fromkeys([*draws.meshes(limits, outside=False, tables=False), *further, *draws.meshes(limits)]))


_NAMED: dict[Mesh, DeviceMesh] = {}


def named(here: Here, mesh: Mesh) -> DeviceMesh:
    """The live mesh with dims named ``a``, ``b``, ..., made once in a world: for laws that leave it as it is."""
    if mesh not in _NAMED:
        _NAMED[mesh] = here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim])
    return _NAMED[mesh]


def _on(law: str) -> Callable[[Limits], list[Case]]:
    def sweep(limits: Limits) -> list[Case]:
        return [Case.of(law, mesh=mesh) for mesh in all_meshes(limits)]

    return sweep


def _plainer(case: Case) -> SearchStrategy[Case]:
    """The same law on meshes of no more ranks."""
    mesh = case.mesh()
    fewer = [other for other in all_meshes(Limits(max(mesh.ranks) + 1)) if other.size <= mesh.size]
    return st.sampled_from(fewer).map(lambda other: Case.of(case.law, mesh=other))


def check_coordinates(case: Case, here: Here) -> None:
    """Shape, size, table and this rank's place in it are those of the table that the mesh was made from."""
    mesh = case.mesh()
    live = here.mesh(mesh)
    coord = here.coord(mesh)
    here.require(tuple(live.shape) == mesh.shape, "wrong-layout", "shape", "mesh has another shape", mesh.shape, tuple(live.shape))
    here.require(live.ndim == mesh.ndim, "wrong-layout", "ndim", "mesh has another number of dims", mesh.ndim, live.ndim)
    sizes = (live.size(), *map(live.size, range(mesh.ndim)))
    here.require(sizes == (mesh.size, *mesh.shape), "wrong-layout", "size", "mesh has other sizes", (mesh.size, *mesh.shape), sizes)
    here.require(read_mesh(live) == mesh, "wrong-layout", "table", "mesh holds other ranks", mesh, read_mesh(live))
    got = live.get_coordinate()
    here.require((None if got is None else tuple(got)) == coord, "wrong-value", "coordinate", "rank has another coordinate", coord, got)
    here.require(live.get_rank() == here.rank, "wrong-value", "rank", "mesh names another rank", here.rank, live.get_rank())


def script_coordinates(case: Case) -> Script:
    mesh = case.mesh()
    want = {rank: (mesh.shape, mesh.coord(rank)) for rank in range(case.world)}
    body = [f"mesh = {scripts.mesh(mesh)}", "at = mesh.get_coordinate()"]
    return scripts.compared(case, body, "(tuple(mesh.shape), None if at is None else tuple(at))", want)


def check_local_rank(case: Case, here: Here) -> None:
    """A rank's local rank along a mesh dim is its coordinate there."""
    mesh = case.mesh()
    live = here.mesh(mesh)
    coord = here.coord(mesh)
    if coord is None:
        return
    got = tuple(live.get_local_rank(dim) for dim in range(mesh.ndim))
    here.require(got == coord, "wrong-value", "local rank", "local ranks are not the coordinate", coord, got)
    if mesh.ndim == 1:
        here.require(
            live.get_local_rank() == coord[0], "wrong-value", "only dim", "local rank of a 1-D mesh", coord[0], live.get_local_rank()
        )
    else:
        here.refused(live.get_local_rank, "no dim", "local rank of a mesh of several dims, none named")


def script_local_rank(case: Case) -> Script:
    mesh = case.mesh()
    want = {rank: mesh.coord(rank) for rank in sorted(mesh.ranks)}
    return scripts.compared(case, [f"mesh = {scripts.mesh(mesh)}"], "tuple(mesh.get_local_rank(i) for i in range(mesh.ndim))", want)


def check_groups(case: Case, here: Here) -> None:
    """The group of a mesh dim has the ranks along that dim as members, and really reaches them."""
    mesh = case.mesh()
    live = here.mesh(mesh)
    coord = here.coord(mesh)
    if coord is None:
        return
    groups = live.get_all_groups()
    here.require(len(groups) == mesh.ndim, "wrong-metadata", "count", "one group a mesh dim", mesh.ndim, len(groups))
    if mesh.ndim == 1:
        here.require(live.get_group() is live.get_group(0), "wrong-metadata", "only dim", "the group of a 1-D mesh is that of dim 0")
    else:
        here.refused(live.get_group, "no dim", "group of a mesh of several dims, none named")
    for dim in range(mesh.ndim):
        want = sorted(mesh.group(dim, coord))
        got = sorted(dist.get_process_group_ranks(live.get_group(dim)))
        here.require(got == want, "wrong-value", "members", f"group of mesh dim {dim} has other members", want, got)
        here.require(groups[dim] is live.get_group(dim), "wrong-value", "all groups", f"get_all_groups()[{dim}] is another group")
    for dim in range(mesh.ndim):
        want = sorted(mesh.group(dim, coord))
        payload = here.tensor(torch.tensor([10**here.rank, here.rank], dtype=torch.int64))
        dist.all_reduce(payload, group=live.get_group(dim))
        total = torch.tensor([sum(10**rank for rank in want), sum(want)], dtype=torch.int64)
        here.same(payload, total, "traffic", what=f"sum along mesh dim {dim}")


def script_groups(case: Case) -> Script:
    mesh = case.mesh()
    want = {rank: _fibres(mesh, rank, True) for rank in sorted(mesh.ranks)}
    got = "[sorted(dist.get_process_group_ranks(mesh.get_group(i))) for i in range(mesh.ndim)]"
    return scripts.compared(case, [f"mesh = {scripts.mesh(mesh)}"], got, want)


def check_group_order(case: Case, here: Here) -> None:
    """Along a mesh dim, the first rank of the table is the first of the group, in lists and in what a gather returns."""
    mesh = case.mesh()
    live = here.mesh(mesh)
    coord = here.coord(mesh)
    if coord is None:
        return
    for dim in range(mesh.ndim):
        want = list(mesh.group(dim, coord))
        got = list(dist.get_process_group_ranks(live.get_group(dim)))
        here.require(got == want, "wrong-value", "members", f"group of mesh dim {dim} lists its members in another order", want, got)
    for dim in range(mesh.ndim):
        want = list(mesh.group(dim, coord))
        parts = [here.tensor(torch.empty(1, dtype=torch.int64)) for _ in want]
        dist.all_gather(parts, here.tensor(torch.tensor([here.rank], dtype=torch.int64)), group=live.get_group(dim))
        here.same(torch.cat(parts), torch.tensor(want), "gathered", what=f"ranks gathered along mesh dim {dim}")


def script_group_order(case: Case) -> Script:
    mesh = case.mesh()
    want = {rank: _fibres(mesh, rank, False) for rank in sorted(mesh.ranks)}
    got = "[dist.get_process_group_ranks(mesh.get_group(i)) for i in range(mesh.ndim)]"
    return scripts.compared(case, [f"mesh = {scripts.mesh(mesh)}"], got, want)


def _fibres(mesh: Mesh, rank: int, in_order: bool) -> list[list[int]]:
    coord = mesh.coord(rank)
    assert coord is not None
    fibres = [list(mesh.group(dim, coord)) for dim in range(mesh.ndim)]
    return [sorted(fibre) for fibre in fibres] if in_order else fibres


def draw_equality(limits: Limits) -> SearchStrategy[Case]:
    few = st.sampled_from(list(dict.fromkeys(draws.meshes(limits, least=2))))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        one = draw(few)
        alike = [mesh for mesh in dict.fromkeys(draws.meshes(limits)) if mesh.size == one.size and max(mesh.ranks) == max(one.ranks)]
        other = draw(st.sampled_from([one, *alike]))
        return Case.of("mesh.equality", mesh=one, mesh__b=other, names=draw(st.sampled_from(["none", "first", "both", "differ"])))

    return case()


def _named(case: Case) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """The names of the two meshes of an equality case."""
    one, other, how = NAMES[: case.mesh().ndim], NAMES[: case.mesh("mesh.b").ndim], case.get("names")
    return (None if how == "none" else one), {"none": None, "first": None, "both": other, "differ": other[::-1]}[how]


def _equal(case: Case) -> bool:
    one, other = _named(case)
    return case.mesh() == case.mesh("mesh.b") and one == other


def check_equality(case: Case, here: Here) -> None:
    """Two meshes are equal exactly when table, shape, names and device are; equal ones hash alike."""
    names = _named(case)
    one = here.mesh(case.mesh(), fresh=True, names=names[0])
    other = here.mesh(case.mesh("mesh.b"), fresh=True, names=names[1])
    due = _equal(case)
    here.require((one == other) is due, "wrong-value", "equality", "two meshes compare otherwise", due, one == other)
    here.require((one != other) is not due, "wrong-value", "inequality", "two meshes compare otherwise by !=", not due, one != other)
    here.require(not due or hash(one) == hash(other), "wrong-value", "hash", "equal meshes hash otherwise", hash(one), hash(other))
    here.require(len({one, other}) == 2 - due, "wrong-value", "set", "a set keeps another number of meshes", 2 - due, len({one, other}))
    here.require(one != "a mesh", "wrong-value", "other kind", "a mesh equals copies")


def script_equality(case: Case) -> Script:
    names = _named(case)
    body = [f"a = {scripts.mesh(case.mesh(), names[0] or ())}", f"b = {scripts.mesh(case.mesh('mesh.b'), names[1] or ())}"]
    due = _equal(case)
    want = dict.fromkeys(range(case.world), (due, due))
    return scripts.compared(case, body, f"(a == b, {'hash(a) == hash(b)' if due else 'hash(a) == hash(b) and a == b'})", want)


def check_copies(case: Case, here: Here) -> None:
    """A mesh that was pickled and read back, or copied, is equal to the mesh, hashes alike, and has the same groups."""
    mesh = case.mesh()
    live = here.mesh(mesh)
    for how, made in (("pickle", pickle.loads(pickle.dumps(live))), ("copy", copy.copy(live))):
        here.require(made == live and hash(made) == hash(live), "wrong-value", how, "the copy of a mesh is another mesh", live, made)
        here.require(read_mesh(made) == mesh, "wrong-layout", how, "the copy of a mesh holds other ranks", mesh, read_mesh(made))
        if here.coord(mesh) is not None:
            want = [sorted(mesh.group(dim, here.coord(mesh) or ())) for dim in range(mesh.ndim)]
            got = [sorted(dist.get_process_group_ranks(made.get_group(dim))) for dim in range(mesh.ndim)]
            here.require(got == want, "wrong-value", how, "the copy of a mesh has other groups", want, got)


def script_copies(case: Case) -> Script:
    body = [f"mesh = {scripts.mesh(case.mesh())}", "copy = pickle.loads(pickle.dumps(mesh))"]
    want = dict.fromkeys(range(case.world), (True, True))
    made = scripts.compared(case, body, "(copy == mesh, hash(copy) == hash(mesh))", want)
    return Script(made.stages, ("import pickle", *made.imports), made.constants)


LAWS = (
    Law(
        id="mesh.coordinates",
        clause="A mesh has the table that it was made from; a rank's coordinate is its place in the table, and a rank outside has none.",
        source=f"{DOC}.get_coordinate",
        check=check_coordinates,
        script=script_coordinates,
        control="mesh.coordinates mesh=2x2",
        planted="mesh_coordinate_reversed",
        sweep=_on("mesh.coordinates"),
        sweeps=40,
        narrow=_plainer,
        weight=0.2,
    ),
    Law(
        id="mesh.local-rank",
        clause="The local rank along a mesh dim is the coordinate along it.",
        source=f"{DOC}.get_local_rank",
        check=check_local_rank,
        script=script_local_rank,
        control="mesh.local-rank mesh=2x2",
        planted="mesh_local_rank_of_first_dim",
        sweep=_on("mesh.local-rank"),
        sweeps=40,
        narrow=_plainer,
        weight=0.2,
    ),
    Law(
        id="mesh.groups",
        clause="The group of a mesh dim holds exactly the ranks along that dim through this rank, and reaches them.",
        source=f"{DOC}.get_group",
        check=check_groups,
        script=script_groups,
        control="mesh.groups mesh=2x2",
        planted="mesh_groups_reversed",
        sweep=_on("mesh.groups"),
        sweeps=40,
        narrow=_plainer,
        needs=("all_reduce", "subgroups"),
        weight=0.3,
    ),
    Law(
        id="mesh.group-order",
        clause="The group of a mesh dim lists, and gathers from, its ranks in the order of the table.",
        source=f"{DOC}: a mesh's table describes the layout of devices; get_group returns the group of a dim of it",
        check=check_group_order,
        script=script_group_order,
        control="mesh.group-order mesh=2x2",
        planted="mesh_groups_descending",
        sweep=_on("mesh.group-order"),
        sweeps=40,
        narrow=_plainer,
        needs=("all_gather", "subgroups"),
        weight=0.3,
    ),
    Law(
        id="mesh.equality",
        clause="Two meshes are equal exactly when their table, shape, names and device are, and equal meshes hash alike.",
        source="torch.distributed.device_mesh, DeviceMesh.__eq__ and __hash__",
        check=check_equality,
        script=script_equality,
        control="mesh.equality mesh=1x2 mesh.b=1x2@1,0 names=both",
        planted="mesh_equal_by_shape",
        draw=draw_equality,
        draws=28,
        needs=("subgroups",),
        weight=0.4,
    ),
    Law(
        id="mesh.copies",
        clause="A mesh survives pickling and copying: it is equal, hashes alike, and has the same groups.",
        source="torch.distributed.device_mesh, DeviceMesh.__getstate__ and __setstate__",
        check=check_copies,
        script=script_copies,
        control="mesh.copies mesh=2x2",
        planted="mesh_pickle_reverses_ranks",
        sweep=_on("mesh.copies"),
        sweeps=40,
        narrow=_plainer,
        weight=0.1,
        tier="extended",
    ),
)
