"""Laws of tensors on views of a mesh, and of what was redistributed before: each tensor goes its own way."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import NAMES, given, target
from conformance.laws.redistribute.placements import DOC, judged, steps
from conformance.report.reproducer import Script
from reference import simulate
from reference.layout import Layout
from reference.mesh import Coord, Mesh
from reference.placement import Partial, Placements
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

# root meshes and the views that are taken of them
VIEWS = {
    "2x2": ("a", "b", "a,b", "a+b"),
    "1x2": ("a", "b", "a+b"),
    "2x1": ("a", "b", "a+b"),
    "1x3": ("b", "a+b"),
    "1x2x2": ("b,c", "a,c", "c", "b+c", "a+b+c"),
    "2x1x2": ("a,c", "a", "b,c", "a+c", "a+b"),
    "2x2x1": ("a,b", "b", "a,c", "a+b"),
    "2x2@0,2,1,3": ("a", "b", "a+b"),
    "2x3": ("a", "b", "a+b"),
    "2x2x2": ("a,b", "a,c", "b,c", "b", "a+c", "b+c", "a+b"),
}
_MADE: dict[tuple[Mesh, str], DeviceMesh] = {}


def _dims(view: str) -> tuple[int, ...]:
    return tuple(NAMES.index(name) for name in view.replace("+", ",").split(","))


def _table(mesh: Mesh, view: str, coord: Coord) -> Mesh:
    """The ranks of the view through a coordinate."""
    return mesh.flatten(_dims(view), coord) if "+" in view else mesh.slice(_dims(view), coord)


def draw_views(limits: Limits) -> SearchStrategy[Case]:
    pairs = [(mesh, view) for mesh in VIEWS if max(Mesh.parse(mesh).ranks) < limits.world_size for view in VIEWS[mesh]]
    pair_drawn, shape_drawn = st.sampled_from(pairs), shapes(min_dims=1, max_dims=2)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        text, view = draw(pair_drawn)
        mesh, shape = Mesh.parse(text), draw(shape_drawn)
        part = _table(mesh, view, (0,) * mesh.ndim)
        at = draw(placements(part, len(shape), kinds=("R", "S", "P"), reduce_ops=("sum", "max")))
        to = draw(placements(part, len(shape), kinds=("R", "S")))
        return Case.of("redistribute.on-view", mesh=mesh, of=view, x=TensorSpec(shape, at), to=to, seed=draw(draws.seeds()))

    return case()


def features_views(case: Case) -> set[str]:
    if "+" not in case.get("of"):
        return set()
    flat = [_table(case.mesh(), case.get("of"), coord).ranks for coord in case.mesh().coords()]
    return {"flattened-dims", *(["unsorted-group"] if any(list(ranks) != sorted(ranks) for ranks in flat) else [])}


def _part(case: Case, rank: int) -> tuple[torch.Tensor, Layout, int]:
    """The tensor on the view through this rank, which differs from view to view, and where it lies."""
    mesh, view, spec = case.mesh(), case.get("of"), case.tensor("x")
    coord = mesh.coord(rank)
    assert coord is not None
    fixed = tuple(position for dim, position in enumerate(coord) if dim not in _dims(view))
    seed = case.seed + 17 * (1 + sum(position * 5**at for at, position in enumerate(fixed)))
    return spec.build(seed), Layout(spec.shape, _table(mesh, view, coord), spec.placements or ()), seed


def _local(case: Case, rank: int) -> torch.Tensor:
    full, layout, seed = _part(case, rank)
    return simulate.distribute(full, layout, seed)[layout.mesh.coord(rank) or ()]


def _live(case: Case, here: Here) -> DeviceMesh:
    mesh, view = case.mesh(), case.get("of")
    if (mesh, view) not in _MADE:
        root = here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim])
        part = root[tuple(NAMES[dim] for dim in _dims(view))]
        _MADE[mesh, view] = part._flatten("flat") if "+" in view else part
    return _MADE[mesh, view]


def check_views(case: Case, here: Here) -> None:
    """A tensor on a slice or on flattened dims is redistributed among the ranks of that view, and among no others."""
    if here.coord(case.mesh()) is None:
        return
    full, layout, seed = _part(case, here.rank)
    to = layout.replace(case.placements("to"))
    x = here.dtensor(full, layout, seed=seed, mesh=_live(case, here))
    got: Any = x.redistribute(placements=here.placements(to.placements))
    here.same_dtensor(got, full, "local", mesh=to.mesh, placements=to.placements)


def script_views(case: Case) -> Script:
    mesh, view = case.mesh(), case.get("of")
    ranks = sorted(mesh.ranks)
    constants = scripts.tensors("X", {rank: _local(case, rank) for rank in ranks})
    want = {}
    for rank in ranks:
        full, layout, _ = _part(case, rank)
        to = layout.replace(case.placements("to"))
        want[rank] = simulate.take(full, to, to.mesh.coord(rank) or ())
    names = tuple(NAMES[dim] for dim in _dims(view))
    full, layout, _ = _part(case, ranks[0])
    made = f"DTensor.from_local(X[rank], view, {scripts.placements(layout.placements)}, "
    body = [
        f"mesh = {scripts.mesh(mesh, NAMES[: mesh.ndim])}",
        f"view = mesh[{names!r}]" + ('._flatten("flat")' if "+" in view else ""),
        f"x = {made}shape=torch.Size({tuple(full.shape)}), stride={full.stride()})",
        f"got = {steps(case, 'to')}",
        "return WANT[rank], got.to_local()",
    ]
    return scripts.script(body, world=case.world, constants=[*constants, *scripts.tensors("WANT", want)])


# in what the tensor that goes first differs
DIFFERS = ("shape", "extents", "dtype", "source", "target", "memory", "nothing")


def draw_caches(limits: Limits) -> SearchStrategy[Case]:
    base = draws.moved("redistribute.after", limits, on=draws.meshes(limits, tables=False), kinds=("R", "S", "P"), targets=("R", "S"))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        drawn = draw(base)
        spec, how = drawn.tensor("x"), draw(st.sampled_from(DIFFERS))
        at, mesh, extents = spec.placements or (), drawn.mesh(), spec.shape
        to: Placements = drawn.placements("to")
        other = spec
        if how == "shape":
            other = TensorSpec((*extents, draw(st.sampled_from((2, 3)))), at)
        elif how == "extents":
            other = TensorSpec(tuple(extent + draw(st.sampled_from((1, 2, 4))) for extent in extents), at)
        elif how == "dtype" and not any(isinstance(p, Partial) for p in at):
            other = TensorSpec(extents, at, draw(st.sampled_from([d for d in ("float64", "int64") if d in limits.dtypes])))
        elif how == "memory":
            other = TensorSpec(extents, at, memory="transposed")
        elif how == "source":
            other = spec.placed(draw(placements(mesh, len(extents), kinds=("R", "S"))))
        elif how == "target":
            to = draw(placements(mesh, len(extents), kinds=("R", "S")))
        return drawn.with_fields(b=other, to__b=to)

    return case()


# two redistributions by one planner, on a mesh that nothing was planned for: x, to, b, to.b
PLANNED = (
    ("8x4:_S(0,2),S(0)", "R,S(1)", "8:_S(0,2),S(0)", "R,R"),
    ("4x8:S(1),R", "_S(0,2),S(0)", "8:S(0),R", "_S(0,2),S(0)"),
)


def sweep_caches(limits: Limits) -> list[Case]:
    """After a tensor of fewer dims, and of other extents, one whose way has to be searched for."""
    cases = [
        Case.of("redistribute.after", mesh=mesh, x=x, to=to, b=b, to__b=to_b, fresh=1)
        for mesh in ("1x2", "2x2")
        for x, to, b, to_b in PLANNED
    ]
    return [case for case in cases if case.world <= limits.world_size]


def _planned_for(case: Case, here: Here) -> Any:
    """The mesh of a case: the one that the world keeps, or one of names that no other case has."""
    names = tuple(f"{name}{zlib.crc32(case.text.encode()):x}" for name in NAMES[: case.mesh().ndim])
    return here.mesh(case.mesh(), fresh=True, names=names) if "fresh" in case else None


def features_caches(case: Case) -> set[str]:
    return {"bystander", "repeated"}


def check_caches(case: Case, here: Here) -> None:
    """Two tensors redistributed one after the other, in either order, each end where they do alone."""
    first, second, live = given(case, "b"), given(case), _planned_for(case, here)
    for one, field, check in ((first, "to.b", "first"), (second, "to", "second"), (first, "to.b", "third")):
        to = target(case, one, field)
        got = one.dtensor(here, mesh=live).redistribute(placements=here.placements(to.placements))
        judged(here, got, one, to.placements, check)


def script_caches(case: Case) -> Script:
    x, other = given(case), given(case, "b")
    constants, body = scripts.source(other, case.world, "b")
    more, lines = scripts.source(x, case.world)
    moved = f"b.redistribute(placements={scripts.placements(case.placements('to.b'))})"
    lines = [*body, *lines[1:], moved]
    return scripts.holds(case, lines, steps(case, "to"), x.full, target(case, x), constants=[*constants, *more])


LAWS = (
    Law(
        id="redistribute.on-view",
        clause="A tensor on a slice or on flattened dims of a mesh is redistributed among the ranks of that view.",
        source="torch.distributed.device_mesh docs, DeviceMesh.__getitem__: a slice is a mesh with the groups of its dims",
        check=check_views,
        script=script_views,
        features=features_views,
        control="redistribute.on-view mesh=2x2 of=b x=5x3:S(0) to=R",
        planted="mesh_slice_takes_leading_groups",
        draw=draw_views,
        draws=49,
        needs=("subgroups",),
        weight=0.9,
    ),
    Law(
        id="redistribute.after",
        clause="A tensor is redistributed as it is alone when another one, of other extents, dtype or placements, went before.",
        source=f"{DOC}: its result depends on the tensor and the placements alone",
        check=check_caches,
        script=script_caches,
        features=features_caches,
        control="redistribute.after mesh=2x2 x=5x6:S(0),S(1) to=R,S(0) b=7x6:S(0),S(1) to.b=R,S(0)",
        planted="plans_are_remembered_by_placements",
        draw=draw_caches,
        draws=42,
        sweep=sweep_caches,
        sweeps=4,
        weight=0.8,
    ),
)
