"""Laws of the transforms of torch.func and torch.autograd.functional, of forward mode, and of derivatives by a local
tensor that from_local took."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import func
from torch.autograd import forward_ad, functional
from torch.distributed.tensor import DTensor, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global
from shardlaw.conformance.law.fields import Rank, WordField
from shardlaw.conformance.laws.gradient.conversions import DOC, as_dtensor, due_gradient


def curve(x, w):
    """A function that is not linear in any of its operands."""
    return torch.nn.functional.linear(x, w).sin()


def loss(x, w):
    return curve(x, w).sum()


def row_loss(row, w):
    return (row * w).sin().sum()


def gather(x):
    """The whole of a DTensor; another tensor as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def distributed_dual(x, w):
    """A dual tensor that is distributed, doubled and taken apart again."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(gather(x), gather(x) * 3)
        if isinstance(x, DTensor):
            dual = distribute_tensor(dual, x.device_mesh, x.placements, src_data_rank=None)
        return tuple(forward_ad.unpack_dual(dual * 2))


def dual_product(x, w):
    """The square of a dual tensor and its tangent."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x * 3)
        return tuple(forward_ad.unpack_dual(dual * dual))


# of a matrix and another one with as many columns
REVERSE = {
    "grad": lambda x, w: func.grad(loss, (0, 1))(x, w),
    "value": lambda x, w: func.grad_and_value(loss)(x, w),
    "grad-of-grad": lambda x, w: func.grad(lambda u: func.grad(loss)(u, w).square().sum())(x),
    "vjp": lambda x, w: func.vjp(curve, x, w)[1](curve(x, w)),
    "jacrev": lambda x, w: func.jacrev(lambda u: curve(u, w).sum(0))(x),
    "jacrev-twice": lambda x, w: func.jacrev(func.jacrev(lambda u: loss(u, w)))(x),
    "jacobian": lambda x, w: functional.jacobian(lambda u: curve(u, w).sum(0), x, vectorize=True),
    "hvp": lambda x, w: functional.hvp(lambda u: loss(u, w), x, x * 2),
    "vhp": lambda x, w: functional.vhp(lambda u: loss(x, u), w, w * 2),
    "rows": lambda x, w: func.vmap(lambda row: row.softmax(0) * row.sum())(x),
    "columns": lambda x, w: func.vmap(lambda column: column * column.amax(), 1, 1)(x),
    "chunks": lambda x, w: func.vmap(torch.cumsum, (0, None), chunk_size=2)(x, 0),
    "pairs": lambda x, w: func.vmap(lambda row: func.vmap(lambda other: (row * other).sum())(w))(x),
    "rows-linear": lambda x, w: func.vmap(curve, (0, None))(x, w),
    "per-sample": lambda x, w: func.vmap(func.grad(row_loss, 1), (0, None))(x, w),
    "stacked": lambda x, w: func.vmap(curve, (None, 0))(x, torch.stack([w, w * 2])),
    "rows-added": lambda x, w: func.vmap(lambda row: (row * 1).add_(row))(x),
    "rows-clamped": lambda x, w: func.vmap(lambda row: (row * 1).clamp_(0))(x),
    "rows-squared": lambda x, w: func.vmap(lambda row: (row * 1).square_())(x),
}
FORWARD = {
    "jvp": lambda x, w: func.jvp(curve, (x, w), (x * 2, w * 3)),
    "jacfwd": lambda x, w: func.jacfwd(lambda u: curve(u, w).sum(0))(x),
    "dual": dual_product,
    "distributed": distributed_dual,
    "hessian": lambda x, w: func.hessian(lambda u: (u**3).sum())(x),
}
TRANSFORMS = {**REVERSE, **FORWARD}
LAYOUTS = (
    "mesh=2 x=5x6:S(0):float32:small a=3x6:S(0):float32:small",
    "mesh=2 x=4x6:S(1):float32:small a=3x6:S(1):float32:small",
    "mesh=2x2 x=4x6:S(0),S(1):float32:small a=2x6:R,S(0):float32:small",
)
CASES = (
    *(f"{LAYOUTS[0]} does={does}" for does in TRANSFORMS),
    *(f"{LAYOUTS[1 + at % 2]} does={does}" for at, does in enumerate(TRANSFORMS)),
)


def is_refusal(case: Case, text: str) -> bool:
    """In forward mode; torch 2.11 also refuses a view and ``squeeze_``, of which batches are made."""
    return case.get("does") in FORWARD or compat.torch_release() < (2, 13)


@law(
    "gradient.transforms",
    source=f"torch.func docs: transforms of functions of tensors; torch.autograd.forward_ad docs; {DOC}, DTensor: a "
    "torch.Tensor subclass that works with autograd",
    control=CASES[0],
    cases=CASES,
    features=lambda case: {f"way:{case.get('does')}"},
    refusal=is_refusal,
    weight=0.4,
)
def transforms(x: DTensor, a: DTensor, does: Annotated[str, WordField(TRANSFORMS)]):
    """Derivatives and batches by torch.func and torch.autograd.functional of a function of DTensors are those of dense
    tensors; in forward mode DTensors may be refused, and no tangent is lost."""
    results = TRANSFORMS[does](x, a)
    return list(results) if isinstance(results, tuple) else [results]


@transforms.due
def _(x: Global, a: Global, does):
    results = TRANSFORMS[does](x.full, a.full)
    return [Claimed(r.detach(), x.mesh, exact=False) for r in (results if isinstance(results, tuple) else [results])]


ENTERED = (
    "mesh=2 x=5x6:S(0):float32:small a=3x6:R:float32:small by=penalty",
    "mesh=2 x=5x6:R:float32:small a=3x6:R:float32:small by=penalty",
    "mesh=2 x=4x6:S(1):float32:small a=3x6:S(1):float32:small by=hvp",
    "mesh=2x2 x=4x6:S(0),R:float32:small a=4x6:R,R:float32:small by=penalty",
    "mesh=2 x=4x6:R:float32:small a=4x6:S(0):float32:small by=penalty",
    "mesh=3 x=4x6:R:float32:small a=3x6:S(1):float32:small by=hvp",
    "mesh=2 x=4x6:S(1):float32:small a=4x6:S(0):float32:small by=penalty",
    "mesh=2x2 x=4x6:S(0),R:float32:small a=4x6:R,S(0):float32:small by=hvp",
    "mesh=2 x=4x6:S(0):float32:small a=3x6:R:float32:small by=func",
    "mesh=2 x=4x6:R:float32:small a=4x6:S(0):float32:small by=func",
)


def derive(value, local, weight, by):
    """The first derivative of ``value`` by ``local``, and what is made of it: by torch.func none, the product of the
    second derivative and the tensor itself, or the gradients after the square of the first was added."""
    if by == "func":
        return {"first": func.grad(value)(local)}
    leaf = local.detach().requires_grad_()
    if by == "hvp":
        return {"second": functional.hvp(value, leaf, local)[1]}
    (first,) = torch.autograd.grad(value(leaf), leaf, create_graph=True)
    (value(leaf) + (first * first).sum()).backward()
    return {"first": first.detach(), "second": leaf.grad, "weight": weight.grad}


@law(
    "gradient.entered",
    source=f"torch.autograd.grad docs, create_graph: the graph of the derivative is constructed; torch.func docs; {DOC}"
    ", DTensor.from_local: differentiable",
    control=ENTERED[0],
    cases=ENTERED,
    features=lambda case: {f"way:{case.get('by')}"},
    weight=0.4,
)
def entered(x: DTensor, a: DTensor, by: Literal["penalty", "hvp", "func"]):
    """A function that begins with from_local has the dense derivatives by its local tensor, the second ones too, also
    where the gradient arrives in another layout: in a loss with the square of its gradient, in the product of a Hessian
    and a vector, by torch.func."""
    weight = a.detach().requires_grad_()
    return derive(lambda local: loss(as_dtensor(local, x), weight).full_tensor(), x.to_local(), weight, by)


@entered.due
def _(x: Global, a: Global, by, rank: Rank):
    weight = a.full.clone().requires_grad_()
    derived = derive(lambda full: loss(full, weight), x.full, weight, by)
    due: dict[str, Any] = {
        name: due_gradient(x.near(), full, rank) for name, full in derived.items() if name != "weight"
    }
    return {**due, "weight": Claimed(derived["weight"], a.mesh, exact=False)} if by == "penalty" else due
