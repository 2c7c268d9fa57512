"""Laws of gradients through distribute_tensor, redistribute and the conversions from and to local and full tensors."""

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
EDGE_MOVES = (("S(0)", "S(1)"), ("R", "S(0)"), ("S(1)", "R"), ("S(1)", "S(0)"))


def leaf(x):
    """A local tensor that requires a gradient, and the DTensor of it with the layout of ``x``."""
    local = x.to_local().detach().requires_grad_()
    return local, as_dtensor(local, x)


def as_dtensor(local, x, **options):
    """The DTensor of a local tensor with the layout of ``x``."""
    return DTensor.from_local(local, x.device_mesh, x.placements, shape=x.shape, stride=x.stride(), **options)


def incoming_gradient(case: Case, number: int = 0) -> Global:
    """The gradient of a result, in the layout of ``x``: small integers, or the edges of the dtype if ``x`` has those.
    ``number`` tells the gradients of several results apart."""
    x, fill = operand(case), "edges" if case.tensor("x").fill == "edges" else "small"
    return x.holding(dense(x.layout.shape, x.full.dtype, fill, x.seed + GRAD_SEED + 13 * number))


def without_partials(gradient: Global) -> Global:
    """A gradient as from_local returns it: pending sums become replicas."""
    return gradient.under(tuple(Replicate() if isinstance(p, RefPartial) else p for p in gradient.placements))


def due_gradient(x: Global, gradient: torch.Tensor, rank: int) -> Any:
    """The due gradient of a rank's local tensor, given the global gradient; none outside the mesh."""
    return without_partials(x.holding(gradient)).due_local(rank)


def result_gradient(field: str, number: int) -> DerivedField:
    """The rank's local gradient of a result that has the placements in ``field``."""
    return DerivedField(lambda case: incoming_gradient(case, number).under(case.placements(field)), local=True)


GradOfTo = Annotated[torch.Tensor, result_gradient("to", 0)]
GradOfVia = Annotated[torch.Tensor, result_gradient("via", 1)]
GradOfX = Annotated[torch.Tensor, DerivedField(lambda case: without_partials(incoming_gradient(case, 2)), local=True)]
FullGrad = Annotated[torch.Tensor, DerivedField(lambda case: incoming_gradient(case).full)]


def meshes(limits: Limits) -> list[Mesh]:
    """Meshes over the whole world."""
    return draws.meshes(limits, submeshes=False, permuted=False, min_size=2)


def moved_cases(limits: Limits, kinds: tuple[str, ...] = ("R", "S", "P"), **options: Any) -> st.SearchStrategy[Case]:
    """Cases of a tensor that is redistributed over the whole world."""
    options = {"dtypes": draws.FLOATS, "on": meshes(limits), "targets": ("R", "S"), **options}
    return draws.redistribution_cases(limits, kinds=kinds, reduce_ops=("sum",), **options)


@st.composite
def placement_cases(draw: st.DrawFn, /, limits: Limits, name: str, kinds: tuple[str, ...], **options: Any) -> Case:
    """As :func:`moved_cases`, with further placements in the field ``name``."""
    case = draw(moved_cases(limits, **options))
    ndim = len(case.tensor("x").shape)
    kinds = tuple(kind for kind in kinds if ndim or kind != "S")
    return case.with_fields(**{name: draw(placements(case.mesh(), ndim, kinds=kinds))})


def tensor_cases(
    limits: Limits, kinds: tuple[str, ...] = ("R", "S", "P"), extra: draws.ExtraFields | None = None
) -> st.SearchStrategy[Case]:
    """Cases of a tensor over the whole world."""
    return draws.tensor_cases(limits, on=meshes(limits), kinds=kinds, dtypes=draws.FLOATS, extra=extra)


def draw_redistribute(limits: Limits) -> st.SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False, min_size=2)
    return moved_cases(limits, ("R", "S", "_S", "P"), on=on, targets=("R", "S", "_S"), fills=draws.SELDOM_EDGES)


def sweep_redistribute(limits: Limits) -> list[Case]:
    edges = texts(*(f"mesh=2 x=5x3:{at}:float32:edges to={to}" for at, to in EDGE_MOVES))
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
def redistribute(x: DTensor, to: Placements, gradient: GradOfTo):
    """The gradient of a redistributed tensor has the placements of the source, with replicas for its pending sums."""
    local, d = leaf(x)
    d.redistribute(placements=to).to_local().backward(gradient)
    return local.grad


@redistribute.due
def _(x: Global, gradient, rank: Rank):
    return due_gradient(x, gradient.full, rank)


@law(
    "gradient.leaf",
    source=f"{DOC}, distribute_tensor",
    control="mesh=2x2 x=3x2:S(0),R to=R,S(1)",
    draw=lambda limits: moved_cases(limits, ("R", "S")),
    sweep=draws.permuted_mesh_cases("R", to="S(0)"),
    sweeps=3,
    draws=35,
    weight=0.6,
)
def distribute(x: torch.Tensor, mesh: DeviceMesh, at: PlacementsOf, to: Placements, gradient: GradOfTo):
    """The gradient of a distributed leaf is a DTensor on its mesh with the dense gradient."""
    d = distribute_tensor(x.requires_grad_(), mesh, at, src_data_rank=None)
    d.redistribute(placements=to).to_local().backward(gradient)
    return {"gradient": d.grad, "of the plain tensor": x.grad}


@distribute.due
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
def full(x: DTensor, grads: Literal["replicate", "partial"], gradient: FullGrad, rank: Rank):
    """The gradient of a full tensor counts as a replica, of which each rank keeps its shard; declared partial, the
    ranks' gradients are summed."""
    local, d = leaf(x)
    full_tensor = d.full_tensor(grad_placements=[Partial()] * x.device_mesh.ndim if grads == "partial" else None)
    own = gradient * (rank + 1)
    full_tensor.backward(torch.empty_like(full_tensor) if x.device_mesh.get_coordinate() is None else own)
    return local.grad


@full.due
def _(x: Global, grads, gradient, rank):
    times = sum(member + 1 for member in x.mesh.ranks) if grads == "partial" else rank + 1
    return due_gradient(x, gradient * times, rank)


def draw_to_local(limits: Limits) -> st.SearchStrategy[Case]:
    def declared(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        either = st.sampled_from([Replicate(), RefPartial()])
        free = tuple(draw(either) if isinstance(p, (Replicate, RefPartial)) else p for p in layout.placements)
        return {"declared": draw(st.sampled_from([None, free, free]))}

    return tensor_cases(limits, extra=declared)


@law(
    "gradient.to-local",
    source=f"{DOC}, DTensor.to_local (grad_placements)",
    control="mesh=2x2 x=3x2:S(0),R declared=S(0),P(sum)",
    draw=draw_to_local,
    draws=49,
    weight=0.7,
)
def to_local(x: DTensor, own: GradOfX, rank: Rank, declared: Placements | None = None):
    """The gradient of a local tensor is returned as it is, or summed along the mesh dims where it is declared
    partial."""
    local, d = leaf(x)
    d.to_local(grad_placements=declared).backward(own * (rank + 1))
    return local.grad


@to_local.due
def _(x: Global, own, rank, declared):
    coord, fixed = x.mesh.coord(rank), [dim for dim, p in enumerate(declared or ()) if not is_reduction(p)]
    members = [at for at in x.mesh.coords() if coord and all(at[dim] == coord[dim] for dim in fixed)]
    factor = sum(x.mesh.rank_at(at) + 1 for at in members) if declared else rank + 1
    return due_gradient(x, own.full * factor, rank)


@law(
    "gradient.accumulate",
    source=f"{TABLE}; gradients accumulate",
    control="mesh=2x2 x=3x2:S(0),R via=R,R to=R,S(1)",
    draw=lambda limits: placement_cases(limits, "via", ("R", "S")),
    sweep=draws.permuted_mesh_cases("R", via="R", to="S(0)"),
    sweeps=3,
    draws=28,
    weight=0.6,
)
def accumulated(x: DTensor, to: Placements, via: Placements, gradient: GradOfTo, gradient_via: GradOfVia):
    """A tensor that is redistributed several times gets the sum of the gradients."""
    local, d = leaf(x)
    for goal, arriving in ((to, gradient), (via, gradient_via), (to, gradient)):
        d.redistribute(placements=goal).to_local().backward(arriving.clone(), retain_graph=True)
    return local.grad


@accumulated.due
def _(x: Global, gradient, gradient_via, rank: Rank):
    return due_gradient(x, gradient.full * 2 + gradient_via.full, rank)


@law(
    "gradient.second",
    source=f"{DOC}, DTensor.redistribute, note",
    control="mesh=2x2 x=3x2:S(0),R to=R,S(1)",
    draw=lambda limits: moved_cases(limits, ("R", "S")),
    sweep=draws.permuted_mesh_cases("S(0)", to="R"),
    sweeps=3,
    draws=28,
    weight=0.6,
    tier="extended",
)
def second(x: DTensor, to: Placements, weight: GradOfTo, along: GradOfX):
    """Redistribution is twice differentiable: the gradient of sum(g*x*x) is 2*g*x, and its gradient along h is
    2*g*h."""
    local, d = leaf(x)
    y = d.redistribute(placements=to).to_local()
    (first,) = torch.autograd.grad((y * y * weight).sum(), local, create_graph=True)
    first.backward(along)
    return {"first": first, "second": local.grad}


@second.due
def _(x: Global, weight, along, rank: Rank):
    first, second = (due_gradient(x, 2 * weight.full * factor, rank) for factor in (x.full, along.full))
    return {"first": first, "second": second}
