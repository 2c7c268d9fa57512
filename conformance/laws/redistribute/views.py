"""Laws of redistributions on views of a mesh, and of what must not change a redistribution: other views of the mesh,
earlier calls, the planner."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Meaningless
from shardlaw.conformance.law.fields import (
    DIM_NAMES,
    Placements,
    ScriptArgument,
    TensorField,
    assemble_dtensor,
    dtensor_expression,
    mesh_line,
)
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import rank_table
from shardlaw.conformance.laws.redistribute.placements import DOC, draw_moves_to_values, under_target
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import CallField
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Coord, Mesh
from shardlaw.reference.placement import Partial
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements

# views by root mesh: slices ``a,b`` and flattened dims ``a+b``
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
# device meshes, by root mesh, its views, and whether the device mesh is the last view and not the root
_DEVICE_MESHES: dict[tuple[Mesh, tuple[str, ...], bool], DeviceMesh] = {}


def _dim_names(view: str) -> tuple[str, ...]:
    return tuple(view.replace("+", ",").split(","))


def _view_at(mesh: Mesh, view: str, coord: Coord) -> Mesh:
    """The view of a mesh that contains a coordinate."""
    dims = tuple(map(DIM_NAMES.index, _dim_names(view)))
    return mesh.flatten(dims, coord) if "+" in view else mesh.slice(dims, coord)


class OnViewsField(TensorField):
    """A DTensor on a mesh with named dims, after the slice in the field ``slice`` and the flattened dims in ``flatten``
    were created; or, with the field ``of``, another DTensor on each view ``of`` the mesh."""

    def fields(self, name: str) -> tuple[str, ...]:
        return name, "mesh", "slice", "flatten", "of"

    def read(self, case: Case, name: str) -> Any:
        mesh, of, by_rank = case.mesh(), case.get("of", ""), dict[int, Global]()
        for coord in mesh.coords():
            on = _view_at(mesh, of, coord) if of else mesh
            by_rank[mesh.rank_at(coord)] = Global.of(case.tensor(name), on, case.seed + 17 * min(on.ranks))
        views = (of,) if of else (case.get("slice", ""), case.get("flatten", "").replace(",", "+"))
        return mesh, tuple(filter(None, views)), bool(of), by_rank

    def build(self, value: Any, here: Any) -> DTensor | None:
        mesh, views, on_view, by_rank = value
        x, key = by_rank.get(here.rank), value[:3]
        if key not in _DEVICE_MESHES:
            device_mesh = here.mesh(mesh, fresh=True, names=DIM_NAMES[: mesh.ndim])
            for name in views if x else ():
                view = device_mesh[_dim_names(name)]
                view = compat.flatten_mesh(view, "flat") if "+" in name else view
                device_mesh = view if on_view else device_mesh
            _DEVICE_MESHES[key] = device_mesh
        return assemble_dtensor(x, here.tensor(x.local(here.rank)), here, _DEVICE_MESHES[key]) if x else None

    def due(self, value: Any, rank: int, world: int) -> Any:
        return value[3].get(rank)

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        mesh, views, on_view, by_rank = value
        table, lines = name.upper(), [mesh_line(mesh, names=DIM_NAMES[: mesh.ndim])]
        for view in views:
            lines.append(f"view = mesh[{_dim_names(view)!r}]")
            lines += ['view = flatten_mesh(view, "flat")'] if "+" in view else []
        expression = dtensor_expression(by_rank[mesh.ranks[0]], f"{table}[rank]", "view" if on_view else "mesh")
        constants = rank_table(table, {rank: x.local(rank) for rank, x in sorted(by_rank.items())})
        uses = (compat.flatten_mesh,) if "+" in "".join(views) else ()
        return ScriptArgument(name, tuple(constants), (*lines, f"{name} = {expression}"), uses=uses)


@st.composite
def draw_on_view(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = [mesh for mesh in map(Mesh.parse, VIEWS) if max(mesh.ranks) < limits.world_size]
    mesh, of = draw(st.sampled_from([(mesh, view) for mesh in meshes for view in VIEWS[str(mesh)]]))
    shape, view = draw(shapes(min_dims=1, max_dims=2)), _view_at(mesh, of, (0,) * mesh.ndim)
    at = draw(placements(view, len(shape), kinds=("R", "S", "P"), reduce_ops=("sum", "max")))
    to = draw(placements(view, len(shape), kinds=("R", "S")))
    return fields(mesh=mesh, of=of, x=TensorSpec(shape, at), to=to, seed=draw(draws.seeds()))


def features_on_view(case: Case) -> set[str]:
    if "+" not in case.get("of"):
        return set()
    flat = [_view_at(case.mesh(), case.get("of"), coord).ranks for coord in case.mesh().coords()]
    return {"flattened-dims", *(["unsorted-group"] if any(list(ranks) != sorted(ranks) for ranks in flat) else [])}


@law(
    "redistribute.on-view",
    source="torch.distributed.device_mesh docs, DeviceMesh.__getitem__: a slice is a mesh with the groups of its dims",
    control="mesh=2x2 of=b x=5x3:S(0) to=R",
    features=features_on_view,
    draw=draw_on_view,
    draws=49,
    needs=("subgroups",),
    weight=0.9,
    members=True,
)
def on_view(x: Annotated[DTensor, OnViewsField()], to: Placements):
    """A tensor on a slice or on flattened dims of a mesh is redistributed among the ranks of this view."""
    return x.redistribute(placements=to)


on_view.due(under_target)

# how the tensor that is redistributed first differs
DIFFERENCES = ("shape", "extents", "dtype", "source", "target", "memory", "nothing")


@st.composite
def draw_after(draw: st.DrawFn, limits: Limits) -> Case:
    case = draw(draw_moves_to_values()(limits))
    x, to, difference = case.tensor("x"), case.placements("to"), draw(st.sampled_from(DIFFERENCES))
    shape, at, any_placements = x.shape, x.placements or (), placements(case.mesh(), len(x.shape), kinds=("R", "S"))
    first = x
    if difference == "shape":
        first = TensorSpec((*shape, draw(st.sampled_from((2, 3)))), at)
    elif difference == "extents":
        first = TensorSpec(tuple(extent + draw(st.sampled_from((1, 2, 4))) for extent in shape), at)
    elif difference == "dtype" and not any(isinstance(p, Partial) for p in at):
        first = TensorSpec(shape, at, draw(st.sampled_from([d for d in ("float64", "int64") if d in limits.dtypes])))
    elif difference == "memory":
        first = TensorSpec(shape, at, memory="transposed")
    elif difference == "source":
        first = x.with_placements(draw(any_placements))
    elif difference == "target":
        to = draw(any_placements)
    return case.with_fields(b=first, to__b=to)


# with empty caches of plans: the planner searches for the plan of the second redistribution; the first one has fewer
# dims
PLANNED = (
    "x=8x4:_S(0,2),S(0) to=R,S(1) b=8:_S(0,2),S(0) to.b=R,R fresh=1",
    "x=4x8:S(1),R to=_S(0,2),S(0) b=8:S(0),R to.b=_S(0,2),S(0) fresh=1",
)


@law(
    "redistribute.after",
    source=f"{DOC}: its result depends on the tensor and the placements alone",
    control="mesh=2x2 x=5x6:S(0),S(1) to=R,S(0) b=7x6:S(0),S(1) to.b=R,S(0)",
    features=lambda case: {"bystander", "repeated"},
    draw=draw_after,
    draws=42,
    cases=[f"mesh={mesh} {line}" for mesh in ("1x2", "2x2") for line in PLANNED],
    weight=0.8,
)
def after(b: DTensor, x: DTensor, to: Placements, to__b: Placements, fresh: bool = False):
    """An earlier redistribution of a tensor with another shape, dtype or placements does not change a
    redistribution."""
    if fresh:
        compat.clear_redistribution_plans()
    first = b.redistribute(placements=to__b)
    return {"first": first, "second": x.redistribute(placements=to), "third": b.redistribute(placements=to__b)}


@after.due
def _(b: Global, x: Global, to, to__b):
    return {"first": b.under(to__b), "second": x.under(to), "third": b.under(to__b)}


# valid calls before the redistribution, whose results are not compared
BEFORE = {
    "none": "None",
    "redistribute": "x.redistribute(placements=to)",
    "double": "x.to(torch.float64).redistribute(placements=to)",
    "add": "(x + x).redistribute(placements=to)",
    "clone": "x.clone().zero_()",
    "full": "x.full_tensor()",
    "another": "DTensor.from_local(x.to_local().new_ones(x.shape), x.device_mesh).redistribute(None, to).full_tensor()",
}


def draw_bystander(limits: Limits) -> st.SearchStrategy[Case]:
    on = draws.meshes(limits, dims=(2, 3), submeshes=False, permuted=False)

    def bystanders(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        dims = ["a,b", *(["b,c", "a,c", "a,b,c"] if layout.mesh.ndim > 2 else [])]
        return {
            "slice": draw(st.sampled_from([None, None, None, "a", "b"])),
            "flatten": draw(st.sampled_from([None] * (len(dims) + 1) + dims)),
            "before": draw(st.sampled_from(["none", *BEFORE])),
        }

    return draws.redistribution_cases(limits, on=on, targets=("R", "S", "_S"), extra=bystanders)


# gathers and reductions along two mesh dims that are flattened
FLATTENED = ("S(0),S(0) to=R,R", "S(1),S(1) to=R,R", "S(0),S(0) to=R,S(0)", "S(1),S(1) to=S(0),R",
             "P(sum),P(sum) to=S(0),S(0)")  # fmt: skip
# strided shards are gathered along the outer mesh dim first, not in the order of the flattened dims
STRIDED = ("4x4:_S(0,2),S(0) to=R,R", "8x3:_S(0,2),S(0) to=R,R")
MOVES = (*(f"{shape}:{move}" for shape in ("4x4", "5x3") for move in FLATTENED), *STRIDED)


@law(
    "redistribute.bystander",
    source=f"{DOC}: its result depends on the tensor and the placements alone",
    control="mesh=2x2 x=4x6:S(0),S(1) to=R,R slice=a flatten=a,b before=add",
    features=lambda case: {"flattened-dims"} if "flatten" in case else set(),
    draw=draw_bystander,
    draws=84,
    cases=[f"mesh=2x2 x={move} flatten=a,b before=none" for move in MOVES],
    narrow=draws.with_smaller_tensor,
    needs=("subgroups",),
    weight=2.0,
)
def bystander(
    x: Annotated[DTensor, OnViewsField()],
    to: Placements,
    before: Annotated[Callable[..., Any], CallField("x, to", BEFORE)],
):
    """Views of the mesh and earlier calls on its tensors do not change a redistribution."""
    before(x, to)
    return x.redistribute(placements=to)


bystander.due(under_target)


@law(
    "redistribute.planner",
    source="torch.distributed.tensor._redistribute, docstring of use_min_cost_redistribution_plan",
    control="mesh=2x2 x=5x6:S(0),S(0) to=R,S(1) plan=graph",
    draw=draw_moves_to_values(dims=(2, 3), extra={"plan": st.sampled_from(["graph", "greedy", "unmerged"])}),
    draws=42,
    weight=0.8,
    tier="extended",
)
def planner(x: DTensor, to: Placements, plan: Literal["graph", "greedy", "unmerged"]):
    """Every planner of redistributions gives the same result."""
    compat.clear_redistribution_plans()
    try:
        with compat.unmerged_plan() if plan == "unmerged" else compat.min_cost_plan(plan == "graph"):
            return x.redistribute(placements=to)
    finally:
        compat.clear_redistribution_plans()


@planner.due
def _(x: Global, to):
    try:
        compat.name("min_cost_plan"), compat.name("unmerged_plan")
    except compat.TorchMovedError as moved:
        raise Meaningless(str(moved)) from None
    return x.under(to)


# sums of thirds, which bfloat16 rounds: each before they are added
THIRDS = texts(
    "mesh=2 x=5x6:P(sum) to=R dtype=bfloat16 divided=3",
    "mesh=2 x=4x6:P(sum) to=S(0) dtype=bfloat16 divided=3",
)
CASTS = {"float32": ("float64", "bfloat16"), "float64": ("float32",), "bfloat16": ("float32",)}


@st.composite
def draw_cast(draw: st.DrawFn, limits: Limits) -> Case:
    case = draw(draw_moves_to_values(kinds=("R", "S"), dtypes=CASTS)(limits))
    return case.with_fields(dtype=draw(st.sampled_from(CASTS[case.tensor("x").dtype])))


@law(
    "redistribute.forward-dtype",
    source=f"{DOC} (forward_dtype)",
    control="mesh=2 x=5x6:S(0) to=R dtype=float64",
    draw=draw_cast,
    sweep=lambda limits: draws.permuted_mesh_cases("S(0)", to="R", dtype="float64")(limits) + THIRDS(limits),
    sweeps=5,
    draws=28,
    weight=0.4,
    tier="extended",
)
def forward_dtype(x: DTensor, to: Placements, dtype: torch.dtype, divided: int = 1):
    """A redistribution with forward_dtype gives that of the tensor cast to this dtype: what is pending is cast before
    it is reduced."""
    if divided > 1:
        x = DTensor.from_local(x.to_local() / divided, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
    return x.redistribute(placements=to, forward_dtype=dtype)


@forward_dtype.due
def _(x: Global, to, dtype, divided):
    if "forward_dtype" not in inspect.signature(DTensor.redistribute).parameters:
        raise Meaningless("this version of torch has no forward_dtype")
    if divided > 1:
        if len(x.mesh.ranks) != 2 or x.placements != (Partial("sum"),):
            raise Meaningless("what is divided is a pending sum of two ranks: that of more depends on the order")
        first, second = ((x.local(rank) / divided).to(dtype) for rank in x.mesh.ranks)
        return x.holding(first + second).under(to)
    return x.holding(x.full.to(dtype)).under(to)
