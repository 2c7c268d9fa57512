"""Laws of autograd with DTensors: inside graphs, of parameters, second derivatives, in-place writes, declared and
incoming placements, dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Either, Global, Meaningless, Of
from shardlaw.conformance.law.features.layout_features import placement_features
from shardlaw.conformance.law.fields import Placements, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.gradient import conversions
from shardlaw.conformance.laws.gradient.conversions import (
    FullGrad,
    GradOfTo,
    GradOfVia,
    GradOfX,
    as_dtensor,
    due_gradient,
    leaf,
)
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import CallField, DerivedField, operand
from shardlaw.conformance.laws.shared.tensor_fields import PlacementsOf
from shardlaw.reference import placement as ref
from shardlaw.reference.layout import Layout
from shardlaw.reference.tensors import DTYPES, TensorSpec, dense
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements


@law(
    "gradient.graph",
    source=f"{conversions.TABLE}; from_local is differentiable",
    control="mesh=2x2 x=3x2:S(0),R via=R,R to=R,S(1)",
    draw=lambda limits: conversions.moved_cases(limits, via=True),
    draws=30,
    weight=0.6,
)
def graph(x: DTensor, to: Placements, via: Placements, g: GradOfTo, h: GradOfVia, own: GradOfX):
    """A tensor inside a graph that is used three times gets the sum of the gradients of its uses."""
    local = x.to_local().detach().requires_grad_()
    inner = local * 2
    inner.retain_grad()
    d = as_dtensor(inner, x)
    uses = [d.to_local(), d.redistribute(placements=to).to_local(), d.redistribute(placements=via).to_local() * 2]
    torch.autograd.backward(uses, [own, g, h])
    return {"inner": inner.grad, "gradient": local.grad}


@graph.due
def _(x: Global, g, h, own, rank: Rank):
    total = own.full + g.full + h.full * 2
    return {"inner": due_gradient(x, total, rank), "gradient": due_gradient(x, total * 2, rank)}


@law(
    "gradient.parameter",
    source=f"{conversions.DOC}, distribute_tensor (nn.Parameter)",
    control="mesh=2x2 x=3x2:S(0),R to=R,S(1)",
    draw=lambda limits: conversions.moved_cases(
        limits, ("R", "S"), extra={"frozen": st.sampled_from([None, None, None, 1])}
    ),
    draws=30,
    weight=0.6,
)
def parameter(
    x: torch.Tensor,
    mesh: DeviceMesh,
    at: PlacementsOf,
    to: Placements,
    g: GradOfTo,
    own: GradOfX,
    frozen: bool = False,
):
    """The gradient of a distributed parameter is the dense one and adds up over passes; a frozen parameter gets
    none."""
    plain = nn.Parameter(x, requires_grad=not frozen)
    p: Any = nn.Parameter(distribute_tensor(plain, mesh, at, src_data_rank=None), requires_grad=not frozen)
    with torch.no_grad():
        locals_ = [p.to_local(), p.detach().to_local()]
    locals_.append(p.to_local())
    results = [p.redistribute(placements=to).to_local() for _ in range(2)]
    got = {
        "requires_grad": [x.requires_grad for x in (p, *results)],
        "parameters": [isinstance(x, nn.Parameter) for x in locals_],
    }
    if frozen:
        return got
    gradients = []
    for result in results:
        result.backward(g.clone(), retain_graph=True)
        gradients.append(p.grad.detach().clone())
    p.grad = None
    p.to_local().backward(own)
    return {**got, "gradient": gradients, "anew": p.grad, "of the plain parameter": plain.grad}


@parameter.due
def _(g, own, frozen):
    promised = compat.torch_release() >= (2, 13)
    got = {"requires_grad": Of([not frozen] * 3), "parameters": Of([True, False, True]) if promised else ...}
    sums = [Claimed(g.full * times, g.mesh) for times in (1, 2)]
    return got if frozen else {**got, "gradient": sums, "anew": own, "of the plain parameter": None}


@law(
    "gradient.second-ways",
    source=f"{conversions.DOC}, DTensor.full_tensor (differentiable) and DTensor.redistribute, note",
    control="mesh=2x2 x=3x2:S(0),R by=full_tensor",
    draw=lambda limits: conversions.tensor_cases(
        limits, ("R", "S"), {"by": st.sampled_from(["full_tensor", "to_local"])}
    ),
    draws=24,
    weight=0.5,
    tier="extended",
)
def second_derivative(x: DTensor, by: Literal["full_tensor", "to_local"], full: FullGrad, own: GradOfX):
    """full_tensor and to_local are twice differentiable."""
    local, d = leaf(x)
    y, weight = (d.full_tensor(), full) if by == "full_tensor" else (d.to_local(), own)
    (first,) = torch.autograd.grad((y * y * weight).sum(), local, create_graph=True)
    first.backward(own)
    return {"first": first, "second": local.grad}


@second_derivative.due
def _(x: Global, by, full, own, rank: Rank):
    weight = 2 * (full if by == "full_tensor" else own.full)
    return {"first": due_gradient(x, weight * x.full, rank), "second": due_gradient(x, weight * own.full, rank)}


# in-place writes into y, which is no leaf, with w, which has the same shape and no zeros
WRITES = {
    "add": "y.add_(w)",
    "sub": "y.sub_(w, alpha=2)",
    "mul": "y.mul_(w)",
    "div": "y.div_(w)",
    "number": "y.mul_(3).add_(1)",
    "relu": "y.relu_()",
    "tanh": "y.tanh_()",
    "neg": "y.neg_()",
    "square": "y.square_()",
    "zero": "y.zero_()",
    "fill": "y.fill_(2)",
    "copy": "y.copy_(w)",
    "masked": "y.masked_fill_(w > 3, 5.0)",
    "addcmul": "y.addcmul_(w, w)",
    "clamp": "y.clamp_(-1.5, 2.5)",
    "whole-view": "y.t().mul_(w.t())",
    "twice": "y.add_(w).mul_(w)",
}


@st.composite
def draw_writes(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(draws.meshes(limits, submeshes=False, min_size=2)))
    call, shape = draw(st.sampled_from(sorted(WRITES))), draw(shapes(min_dims=2, max_dims=2))
    at = draw(placements(mesh, 2, kinds=("R", "S", "S")))
    w_placements = draw(st.sampled_from([at, None])) or draw(placements(mesh, 2, kinds=("R", "S")))
    x, w = TensorSpec(shape, at, "float64", "small"), TensorSpec(shape, w_placements, "float64", "positive")
    return fields(mesh=mesh, x=x, w=w, call=call, seed=draw(draws.seeds()))


def features_writes(case: Case) -> set[str]:
    unlike = {"unlike-placements"} if case.tensor("x").placements != case.tensor("w").placements else set()
    return {"in-place", "backward", f"write:{case.get('call')}"} | unlike


@law(
    "gradient.writes",
    source=f"{conversions.DOC}, DTensor: operators follow the semantics of torch.Tensor, in place and with autograd",
    control="mesh=2 x=4x3:S(0):float64:small w=4x3:S(0):float64:positive call=mul",
    features=features_writes,
    draw=draw_writes,
    draws=10,
    needs=("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
    refusal="allowed",
    weight=0.2,
)
def writes(x: DTensor, w: DTensor, call: Annotated[Callable[..., Any], CallField("y, w", WRITES)], own: GradOfX):
    """The gradient of a tensor written in place is the dense gradient, and the tensor keeps its placements."""
    source, other = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = source * 2
    call(y, other)
    y.backward(as_dtensor(own, x))
    return {"value": y.detach(), "x": source.grad, "w": other.grad}


@writes.due
def _(x: Global, w: Global, call, own):
    full, other = x.full.clone().requires_grad_(), w.full.clone().requires_grad_()
    y = full * 2
    call(y, other)
    y.backward(own.full)
    grads = (None if leaf.grad is None else Claimed(leaf.grad, x.mesh, exact=False) for leaf in (full, other))
    return {"value": x.holding(y.detach()).near(), **dict(zip("xw", grads, strict=True))}


ARRIVING_SEED = 61
# an odd factor that makes integers too large for bfloat16
WIDE_FACTOR = 257


def read_arriving(case: Case) -> Global:
    gradient = conversions.incoming_gradient(case).under(case.placements("arrives"))
    return replace(gradient, seed=case.seed + ARRIVING_SEED)


ArrivingGradient = Annotated[DTensor, DerivedField(read_arriving, reads=("arrives",))]


def draw_from_local(limits: Limits) -> st.SearchStrategy[Case]:
    def declared(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        free = st.sampled_from([ref.Replicate(), ref.Partial()])
        return {"declared": tuple(p if ref.shard_dim(p) is not None else draw(free) for p in layout.placements)}

    return conversions.moved_cases(limits, extra=declared)


@law(
    "gradient.from-local",
    source=f"{conversions.DOC}, DTensor.from_local (grad_placements)",
    control="mesh=2x2 x=3x2:S(0),R to=R,S(1) declared=S(0),P(sum)",
    draw=draw_from_local,
    draws=42,
    weight=0.6,
)
def from_local(x: DTensor, to: Placements, declared: Placements, gradient: GradOfTo):
    """The local gradients of a tensor passed to from_local, placed as grad_placements says, form the global
    gradient."""
    local: Any = x.to_local().detach().requires_grad_()
    d = as_dtensor(local, x, grad_placements=declared)
    d.redistribute(placements=to).to_local().backward(gradient)
    return DTensor.from_local(local.grad, x.device_mesh, declared, shape=x.shape, stride=x.stride())


@from_local.due
def _(x: Global, declared, gradient):
    if "grad_placements" not in inspect.signature(DTensor.from_local).parameters:
        raise Meaningless("this torch's from_local takes no grad_placements")
    full = gradient.under(declared)
    # division by a power of two is exact
    rounds = any(size & (size - 1) for size, p in zip(x.mesh.shape, declared, strict=True) if ref.is_reduction(p))
    return full.near() if rounds else full


def features_arriving(case: Case) -> set[str]:
    return {*placement_features(case.tensor("x").shape, case.get("mesh"), case.get("arrives")), "grad-placements"}


@law(
    "gradient.arriving",
    source=f"{conversions.TABLE}; DTensor.redistribute",
    control="mesh=2x2 x=3x2:S(0),R to=R,S(1) arrives=P(sum),S(0)",
    features=features_arriving,
    draw=lambda limits: conversions.placement_cases(limits, "arrives", ("R", "S", "P")),
    draws=48,
    weight=0.7,
)
def arriving(x: DTensor, to: Placements, arrives: ArrivingGradient):
    """A gradient may arrive in any placements: it is returned in those of the source, with replicas for pending
    sums."""
    local, d = leaf(x)
    d.redistribute(placements=to).backward(arrives)
    return local.grad


@arriving.due
def _(x: Global, arrives, rank: Rank):
    return due_gradient(x, arrives.full, rank)


@law(
    "gradient.adjoint",
    source=f"{conversions.TABLE}: every redistribution is linear and keeps the tensor that is denoted",
    control="mesh=2x2 x=3x2:S(0),P(sum) via=S(1),S(1) to=R,S(1) arrives=S(1),S(0)",
    features=features_arriving,
    draw=lambda limits: conversions.placement_cases(limits, "arrives", ("R", "S"), via=True, dtypes=("float32",)),
    draws=36,
    weight=0.6,
)
def adjoint(x: DTensor, via: Placements, to: Placements, arrives: ArrivingGradient):
    """Redistribution over several placements has its adjoint as gradient: <T x, y> of the global tensors equals <x, T*
    y> of the local ones."""
    local, d = leaf(x)
    d.redistribute(placements=via).redistribute(placements=to).backward(arrives)
    coord = x.device_mesh.get_coordinate() or ()
    # of several replicas only the first counts
    is_copy = any(at for at, placement in zip(coord, x.placements, strict=True) if isinstance(placement, Replicate))
    product = (local.detach() * local.grad).sum() * (not is_copy)
    summed = DTensor.from_local(product, x.device_mesh, [Partial()] * x.device_mesh.ndim)
    return {"shape": local.grad.shape, "products": summed}


@adjoint.due
def _(x: Global, arrives, rank: Rank):
    product = (x.full * arrives.full).sum()
    pending = Layout((), x.mesh, (ref.Partial(),) * x.mesh.ndim)
    return {"shape": Of(x.local(rank).shape, "wrong-layout"), "products": Global(product, pending)}


@st.composite
def draw_dtype(draw: st.DrawFn, limits: Limits) -> Case:
    case = draw(conversions.moved_cases(limits))
    x, names = case.tensor("x"), [name for name in ("bfloat16", "float32", "float64") if name in limits.dtypes]
    plain = f"{'x'.join(map(str, x.shape)) or '()'}:{','.join(map(str, x.placements or ()))}:{x.dtype}"
    summed = any(map(ref.is_reduction, x.placements or ()))
    forward, backward = (draw(st.sampled_from([None, *names])) for _ in range(2))
    return case.with_fields(x=f"{plain}:small" if summed else plain, forward=forward, backward=backward)


def read_wide_gradient(case: Case) -> Global:
    """A gradient in the dtype of the result, most of whose elements bfloat16 cannot represent."""
    x = operand(case)
    full = dense(x.layout.shape, torch.float64, "distinct", x.seed + ARRIVING_SEED) * WIDE_FACTOR
    return x.holding(full.to(DTYPES[case.get("forward", case.tensor("x").dtype)])).under(case.placements("to"))


WideGrad = Annotated[torch.Tensor, DerivedField(read_wide_gradient, local=True)]


@law(
    "gradient.dtype",
    source=f"{conversions.DOC}, DTensor.redistribute (forward_dtype, backward_dtype)",
    control="mesh=2x2 x=3x2:S(0),R to=R,S(1) forward=float64 backward=float64",
    features=lambda case: {"dtype-between"} if {"forward", "backward"} & {*dict(case.fields)} else set(),
    draw=draw_dtype,
    cases=("mesh=3 x=5x4:S(0) to=R forward=bfloat16 summed=1",),
    draws=42,
    weight=0.6,
    tier="extended",
)
def dtypes(
    x: DTensor,
    to: Placements,
    g: WideGrad,
    forward: torch.dtype | None = None,
    backward: torch.dtype | None = None,
    summed: bool = False,
):
    """The result has forward_dtype; its gradient is communicated in backward_dtype, or else in that of the source, and
    has the dtype of the source. ``summed``: the sum over the ranks is pending."""
    local, d = leaf(x)
    y = d.redistribute(placements=to, forward_dtype=forward, backward_dtype=backward)
    y.to_local(grad_placements=[Partial()] * x.device_mesh.ndim if summed else None).backward(g)
    return {"forward": y, "backward": local.grad}


@dtypes.due
def _(x: Global, to, g, rank: Rank, forward, backward, summed):
    if "backward_dtype" not in inspect.signature(DTensor.redistribute).parameters:
        raise Meaningless("this torch's redistribute takes no backward_dtype")
    own, goal = x.full.dtype, x.under(to)
    times = x.mesh.size if summed else 1
    cast, uncast = (due_gradient(x, (g.full.to(dtype) * times).to(own), rank) for dtype in (backward or own, own))
    ends = zip(x.mesh.shape, x.placements, goal.placements, strict=True)
    communicated = summed or any(
        size > 1 and isinstance(after, ref.Shard) and before != after for size, before, after in ends
    )
    # where the gradient is not communicated, it is not documented whether it is cast
    due = cast if communicated else Either((cast, uncast))
    return {"forward": goal.holding(x.full.to(forward or own)), "backward": due}
