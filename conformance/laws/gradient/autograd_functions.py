"""Laws of autograd functions with a backward of their own (torch.autograd.Function)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global
from shardlaw.conformance.law.fields import Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.gradient.conversions import DOC
from shardlaw.conformance.laws.shared import draws


class Square(torch.autograd.Function):
    """The square, whose backward needs the input."""

    @staticmethod
    def forward(ctx: Any, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class TwoResults(torch.autograd.Function):
    """Twice and three times the input."""

    @staticmethod
    def forward(ctx: Any, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, g, h):
        return g * 2 + h * 3


class ResultAndSum(torch.autograd.Function):
    """Twice the input, and its sum, which has another shape."""

    @staticmethod
    def forward(ctx: Any, x):
        return x * 2, x.sum()

    @staticmethod
    def backward(ctx: Any, g, h):
        return g * 2 + h


class UnmaterializedGrads(torch.autograd.Function):
    """As :class:`TwoResults`, but backward gets ``None`` for a result that is not used."""

    @staticmethod
    def forward(ctx: Any, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, g, h):
        return sum(part * by for part, by in ((g, 2), (h, 3)) if part is not None)


class InPlace(torch.autograd.Function):
    """Three times the input, in place."""

    @staticmethod
    def forward(ctx: Any, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, g):
        return g * 3


class ReturnsInput(torch.autograd.Function):
    """The input itself, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x):
        return x

    @staticmethod
    def backward(ctx: Any, g):
        return g * 2


USES = {
    "saved": lambda x: Square.apply(x),
    "again": lambda x: Square.apply(Square.apply(x)),
    "both": lambda x: torch.add(*TwoResults.apply(x)),
    "first": lambda x: TwoResults.apply(x)[0],
    "second": lambda x: TwoResults.apply(x)[1],
    "beside-sum": lambda x: ResultAndSum.apply(x)[0],
    "told": lambda x: UnmaterializedGrads.apply(x)[1],
    "in-place": lambda x: InPlace.apply(x * 1),
    "given": lambda x: ReturnsInput.apply(x),
}


def sweep_functions(limits: Limits) -> list[Case]:
    layouts = (("2", "4x3:S(0)"), ("2", "3x2:R"), ("2x2", "4x4:S(0),S(1)"), ("3", "5:S(0)"))
    cases = [fields(mesh=mesh, x=x, use=use) for use in USES for mesh, x in layouts]
    return [case for case in cases if case.world <= limits.world_size]


@st.composite
def draw_functions(draw: st.DrawFn, limits: Limits) -> Case:
    cases = draws.tensor_cases(limits, kinds=("R", "S"), fills=("small",), dtypes=draws.FLOATS)
    return draw(cases).with_fields(use=draw(st.sampled_from(list(USES))))


@law(
    "gradient.function",
    source="torch.autograd docs, Function: backward gets as many gradients as there were outputs; "
    f"{DOC}, DTensor: works with autograd",
    control="mesh=2 x=4x3:S(0):float32:small use=both",
    draw=draw_functions,
    draws=8,
    sweep=sweep_functions,
    sweeps=len(USES) * 4,
    features=lambda case: {f"way:{case.get('use')}"},
    weight=0.4,
)
def function(x: DTensor, use: Annotated[str, WordField(USES)]):
    """An autograd function with a backward of its own gives a DTensor the dense gradient, whichever of its results are
    used."""
    leaf = x.detach().requires_grad_()
    y = USES[use](leaf)
    (y * y).sum().backward()
    return {"value": y.detach(), "gradient": leaf.grad}


@function.due
def _(x: Global, use, rank: Rank):
    if x.mesh.coord(rank) is None:
        return {"value": ..., "gradient": ...}
    full = x.full.clone().requires_grad_()
    y = USES[use](full)
    (y * y).sum().backward()
    gradient = Claimed(full.grad, x.mesh, exact=False)  # type: ignore[arg-type]
    return {"value": Claimed(y.detach(), x.mesh, exact=False), "gradient": gradient}
