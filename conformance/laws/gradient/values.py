"""Laws of gradients: through distribution, redistribution and the ways in and out of a DTensor, on each rank's part."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global
from shardlaw.conformance.law.fields import Placements, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import DerivedField, operand
from shardlaw.conformance.laws.shared.tensor_fields import PlacementsOf
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial as RefPartial
from shardlaw.reference.placement import Replicate, is_reduction
from shardlaw.reference.tensors import dense
from shardlaw.strategies.placements import placements

DOC = "torch.distributed.tensor docs"
TABLE = f"{DOC}, DTensor.from_local, the table of gradient placements"
GRAD_SEED = 977
ARROWS = (("S(0)", "S(1)"), ("R", "S(0)"), ("S(1)", "R"), ("S(1)", "S(0)"))


def leaf(x):
    """A local tensor that requires a gradient, and the DTensor of it that is placed as ``x`` is."""
    local = x.to_local().detach().requires_grad_()
    return local, placed(local, x)


def placed(local, x, **options):
    """The DTensor of a local tensor that is placed as ``x`` is."""
    return DTensor.from_local(local, x.device_mesh, x.placements, shape=x.shape, stride=x.stride(), **options)


def incoming(case: Case, number: int = 0) -> Global:
    """The gradient that arrives, placed as ``x``: small integers, or the edges of its dtype where ``x`` holds those;
    ``number`` tells several apart."""
    x, fill = operand(case), "edges" if case.tensor("x").fill == "edges" else "small"
    return x.holding(dense(x.layout.shape, x.full.dtype, fill, x.seed + GRAD_SEED + 13 * number))


def at_source(gradient: Global) -> Global:
    """A gradient as it leaves for local tensors: shards as shards, replicas and contributions as replicas."""
    return gradient.under(tuple(Replicate() if isinstance(p, RefPartial) else p for p in gradient.placements))


def returned(x: Global, gradient: torch.Tensor, rank: int) -> Any:
    """What the local tensor of a rank must have got of a global gradient; nothing is due outside the mesh."""
    return at_source(x.holding(gradient)).due_local(rank)


def of_result(field: str, number: int) -> DerivedField:
    """The rank's slice of the gradient of a result that is placed as ``field`` says."""
    return DerivedField(lambda case: incoming(case, number).under(case.placements(field)), local=True)


GradOfTo = Annotated[torch.Tensor, of_result("to", 0)]
GradOfVia = Annotated[torch.Tensor, of_result("via", 1)]
GradOfX = Annotated[torch.Tensor, DerivedField(lambda case: at_source(incoming(case, 2)), local=True)]
WholeGrad = Annotated[torch.Tensor, DerivedField(lambda case: incoming(case).full)]


def inside(limits: Limits) -> list[Mesh]:
    """Meshes over the whole world."""
    return draws.meshes(limits, submeshes=False, permuted=False, min_size=2)


def moved(limits: Limits, kinds: tuple[str, ...] = ("R", "S", "P"), **options: Any) -> st.SearchStrategy[Case]:
    """Cases of a tensor that is redistributed over the whole world."""
    options = {"dtypes": draws.FLOATS, "on": inside(limits), "targets": ("R", "S"), **options}
    return draws.redistribution_cases(limits, kinds=kinds, reduce_ops=("sum",), **options)


@st.composite
def moved_and_placed(draw: st.DrawFn, /, limits: Limits, name: str, kinds: tuple[str, ...], **options: Any) -> Case:
    """The same with further placements in a field."""
    case = draw(moved(limits, **options))
    ndim = len(case.tensor("x").shape)
    kept = tuple(kind for kind in kinds if ndim or kind != "S")
    return case.with_fields(**{name: draw(placements(case.mesh(), ndim, kinds=kept))})


def over_world(
    limits: Limits, kinds: tuple[str, ...] = ("R", "S", "P"), extra: draws.ExtraFields | None = None
) -> st.SearchStrategy[Case]:
    """Cases of a tensor over the whole world."""
    return draws.tensor_cases(limits, on=inside(limits), kinds=kinds, dtypes=draws.FLOATS, extra=extra)


def draw_redistribute(limits: Limits) -> st.SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False, min_size=2)
    return moved(limits, ("R", "S", "_S", "P"), on=on, targets=("R", "S", "_S"), fills=draws.SELDOM_EDGES)


def sweep_redistribute(limits: Limits) -> list[Case]:
    edges = texts(*(f"mesh=2 x=5x3:{at}:float32:edges to={to}" for at, to in ARROWS))
    return [*draws.permuted_mesh_cases("R", to="S(0)")(limits), *edges(limits)]


@law(
    "gradient.redistribute",
    source=f"{TABLE}; DTensor.redistribute",
    control="mesh=2x2 x=3x2:S(0),P(sum) to=R,S(1)",
    draw=draw_redistribute,
    sweep=sweep_redistribute,
    sweeps=7,
    draws=98,
    weight=1.5,
)
def redistributed(x: DTensor, to: Placements, gradient: GradOfTo):
    """A gradient returns through a redistribution as its source was placed, whole to replicas and contributions."""
    local, d = leaf(x)
    d.redistribute(placements=to).to_local().backward(gradient)
    return local.grad


@redistributed.due
def _(x: Global, gradient, rank: Rank):
    return returned(x, gradient.full, rank)


@law(
    "gradient.leaf",
    source=f"{DOC}, distribute_tensor",
    control="mesh=2x2 x=3x2:S(0),R to=R,S(1)",
    draw=lambda limits: moved(limits, ("R", "S")),
    sweep=draws.permuted_mesh_cases("R", to="S(0)"),
    sweeps=3,
    draws=35,
    weight=0.6,
)
def distributed(x: torch.Tensor, mesh: DeviceMesh, at: PlacementsOf, to: Placements, gradient: GradOfTo):
    """The gradient of a distributed leaf is a DTensor on its mesh that denotes the dense gradient."""
    d = distribute_tensor(x.requires_grad_(), mesh, at, src_data_rank=None)
    d.redistribute(placements=to).to_local().backward(gradient)
    return {"gradient": d.grad, "of the plain tensor": x.grad}


@distributed.due
def _(gradient):
    return {"gradient": Claimed(gradient.full, gradient.mesh), "of the plain tensor": None}


def draw_full(limits: Limits) -> st.SearchStrategy[Case]:
    extra = {"grads": st.sampled_from(["replicate", "partial"])}
    on = draws.meshes(limits, permuted=False, min_size=2)
    return draws.tensor_cases(limits, on=on, kinds=("R", "S", "_S", "P"), dtypes=draws.FLOATS, extra=extra)


@law(
    "gradient.full-tensor",
    source=f"{DOC}, DTensor.full_tensor (grad_placements)",
    control="mesh=2x2 x=3x2:S(0),R grads=partial",
    draw=draw_full,
    sweep=draws.permuted_mesh_cases("S(0)", grads="partial"),
    sweeps=3,
    draws=56,
    weight=0.8,
)
def full(x: DTensor, grads: Literal["replicate", "partial"], gradient: WholeGrad, rank: Rank):
    """A rank's gradient of the full tensor is a replica, of which it keeps its slice; declared partial, all add up."""
    local, d = leaf(x)
    whole = d.full_tensor(grad_placements=[Partial()] * x.device_mesh.ndim if grads == "partial" else None)
    own = gradient * (rank + 1)
    whole.backward(torch.empty_like(whole) if x.device_mesh.get_coordinate() is None else own)
    return local.grad


@full.due
def _(x: Global, grads, gradient, rank):
    times = sum(member + 1 for member in x.mesh.ranks) if grads == "partial" else rank + 1
    return returned(x, gradient * times, rank)


def draw_to_local(limits: Limits) -> st.SearchStrategy[Case]:
    def declared(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        either = st.sampled_from([Replicate(), RefPartial()])
        free = tuple(draw(either) if isinstance(p, (Replicate, RefPartial)) else p for p in layout.placements)
        return {"declared": draw(st.sampled_from([None, free, free]))}

    return over_world(limits, extra=declared)


@law(
    "gradient.to-local",
    source=f"{DOC}, DTensor.to_local (grad_placements)",
    control="mesh=2x2 x=3x2:S(0),R declared=S(0),P(sum)",
    draw=draw_to_local,
    draws=49,
    weight=0.7,
)
def to_local(x: DTensor, own: GradOfX, rank: Rank, declared: Placements | None = None):
    """A local tensor's gradient returns as it is, or summed along the mesh dims that are declared partial."""
    local, d = leaf(x)
    d.to_local(grad_placements=declared).backward(own * (rank + 1))
    return local.grad


@to_local.due
def _(x: Global, own, rank, declared):
    seat, fixed = x.mesh.coord(rank), [dim for dim, p in enumerate(declared or ()) if not is_reduction(p)]
    others = [at for at in x.mesh.coords() if seat and all(at[dim] == seat[dim] for dim in fixed)]
    added = sum(x.mesh.rank_at(at) + 1 for at in others) if declared else rank + 1
    return returned(x, own.full * added, rank)


@law(
    "gradient.accumulate",
    source=f"{TABLE}; gradients accumulate",
    control="mesh=2x2 x=3x2:S(0),R via=R,R to=R,S(1)",
    draw=lambda limits: moved_and_placed(limits, "via", ("R", "S")),
    sweep=draws.permuted_mesh_cases("R", via="R", to="S(0)"),
    sweeps=3,
    draws=28,
    weight=0.6,
)
def accumulated(x: DTensor, to: Placements, via: Placements, gradient: GradOfTo, gradient_via: GradOfVia):
    """A tensor that several redistributions use gets the sum of their gradients."""
    local, d = leaf(x)
    for goal, arriving in ((to, gradient), (via, gradient_via), (to, gradient)):
        d.redistribute(placements=goal).to_local().backward(arriving.clone(), retain_graph=True)
    return local.grad


@accumulated.due
def _(x: Global, gradient, gradient_via, rank: Rank):
    return returned(x, gradient.full * 2 + gradient_via.full, rank)


@law(
    "gradient.second",
    source=f"{DOC}, DTensor.redistribute, note",
    control="mesh=2x2 x=3x2:S(0),R to=R,S(1)",
    draw=lambda limits: moved(limits, ("R", "S")),
    sweep=draws.permuted_mesh_cases("S(0)", to="R"),
    sweeps=3,
    draws=28,
    weight=0.6,
    tier="extended",
)
def second(x: DTensor, to: Placements, weight: GradOfTo, along: GradOfX):
    """A redistribution is twice differentiable: sum(g*x*x) has the gradient 2*g*x, and that has 2*g*h along h."""
    local, d = leaf(x)
    y = d.redistribute(placements=to).to_local()
    (first,) = torch.autograd.grad((y * y * weight).sum(), local, create_graph=True)
    first.backward(along)
    return {"first": first, "second": local.grad}


@second.due
def _(x: Global, weight, along, rank: Rank):
    return {name: returned(x, 2 * weight.full * one, rank) for name, one in (("first", x.full), ("second", along.full))}
