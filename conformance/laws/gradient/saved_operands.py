"""Laws of tensors that backward needs and that are changed in place before it runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Either, Global, Refused, caught
from shardlaw.conformance.law.fields import Placements, Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.gradient.conversions import meshes
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import DerivedField, operand
from shardlaw.reference.tensors import dense

WRITTEN_SEED = 83
SOURCE = (
    "torch docs, Autograd mechanics, In-place correctness checks: a tensor that was saved for backward and changed in "
    "place since is refused in backward; without an error the gradients are correct"
)
CHANGED = "modified by an inplace operation"
CHANGED_VIEW = "is a view and is being modified inplace"

# of these, the first saves its operand, the second its result, and the third nothing
USES = {
    "square": lambda x: x * x,
    "exp": lambda x: x.exp(),
    "sum": lambda x: x + x,
}


def step(optimizer, x, w, **options):
    """A step of an optimizer, by name, with the gradient ``w``."""
    x.grad = w
    getattr(torch.optim, optimizer)([x], lr=0.5, **options).step()
    x.grad = None


# writes into the operand x or the result y, with w, which has the layout of x and no zeros
WRITES = {
    "mul": lambda x, y, w: x.mul_(w),
    "add": lambda x, y, w: x.add_(2),
    "copy": lambda x, y, w: x.copy_(w),
    "zero": lambda x, y, w: x.zero_(),
    "item": lambda x, y, w: x.__setitem__(..., w),
    "view": lambda x, y, w: x.t().mul_(w.t()),
    "detached": lambda x, y, w: x.detach().mul_(w),
    "result": lambda x, y, w: y.mul_(w),
    "result-view": lambda x, y, w: y.t().add_(2),
    "foreach-mul": lambda x, y, w: compat.foreach("mul_", [x], [w]),
    "foreach-add": lambda x, y, w: compat.foreach("add_", [x], 2),
    "foreach-zero": lambda x, y, w: compat.foreach("zero_", [x]),
    "foreach-neg": lambda x, y, w: compat.foreach("neg_", [x]),
    "foreach-result": lambda x, y, w: compat.foreach("mul_", [y], [w]),
    "foreach-detached": lambda x, y, w: compat.foreach("mul_", [x.detach()], [w]),
    "sgd": lambda x, y, w: step("SGD", x, w, foreach=False),
    "adam": lambda x, y, w: step("Adam", x, w, foreach=False),
    "sgd-foreach": lambda x, y, w: step("SGD", x, w, foreach=True),
    "adam-foreach": lambda x, y, w: step("Adam", x, w, foreach=True),
    "none": lambda x, y, w: None,
}


def sweep(limits: Limits) -> list[Case]:
    layouts = (("2", "4x3:S(0)"), ("2", "3x2:R"), ("2x2", "4x4:S(0),S(1)"))
    cases = [
        fields(mesh=layouts[at % 3][0], x=f"{layouts[at % 3][1]}:float32:small", use=use, write=write)
        for write in WRITES
        for at, use in enumerate(USES)
    ]
    return [case for case in cases if case.world <= limits.world_size]


@st.composite
def draw(draw: st.DrawFn, limits: Limits) -> Case:
    cases = draws.tensor_cases(limits, on=meshes(limits), kinds=("R", "S"), fills=("small",), dtypes=draws.FLOATS)
    case = draw(cases.filter(lambda case: len(case.tensor("x").shape) == 2))
    return case.with_fields(use=draw(st.sampled_from(list(USES))), write=draw(st.sampled_from(list(WRITES))))


def read_written(case: Case) -> Global:
    x = operand(case)
    return x.holding(dense(x.layout.shape, x.full.dtype, "positive", x.seed + WRITTEN_SEED))


Written = Annotated[DTensor, DerivedField(read_written)]


@law(
    "gradient.saved-operand",
    source=SOURCE,
    control="mesh=2 x=4x3:S(0):float32:small use=square write=mul",
    draw=draw,
    draws=8,
    sweep=sweep,
    sweeps=len(WRITES) * len(USES),
    features=lambda case: {"in-place", f"write:{case.get('write')}"},
    weight=0.4,
)
def saved_operand(
    x: DTensor, w: Written, use: Annotated[str, WordField(USES)], write: Annotated[str, WordField(WRITES)]
):
    """Backward refuses a DTensor that it needs and that was changed in place since; after a change of what it does not
    need the gradient is the dense one."""
    leaf = x.detach().requires_grad_()
    y = USES[use](leaf)
    with torch.no_grad():
        WRITES[write](leaf, y, w)
    error = caught(lambda: y.sum().backward())
    return {"value": leaf.detach(), "refusal": error, "gradient": leaf.grad}


@saved_operand.due
def _(x: Global, w: Global, use, write, rank: Rank):
    full = x.full.clone().requires_grad_()
    y = USES[use](full)
    with torch.no_grad():
        WRITES[write](full, y, w.full.clone())
    error = caught(lambda: y.sum().backward())
    if x.mesh.coord(rank) is None:
        return {"value": ..., "refusal": ..., "gradient": ...}
    value = Claimed(full.detach(), x.mesh, exact=False)
    if error is not None:
        return {"value": value, "refusal": Refused((RuntimeError,), (CHANGED,)), "gradient": ...}
    assert full.grad is not None
    return {"value": value, "refusal": None, "gradient": Claimed(full.grad, x.mesh, exact=False)}


# what is made of a DTensor, and may share its memory
WAYS = {
    "to-local": lambda x, to: x.to_local(),
    "full": lambda x, to: x.full_tensor(),
    "redistributed": lambda x, to: x.redistribute(placements=to),
    "viewed": lambda x, to: x.view_as(x),
    "sliced": lambda x, to: x[:, :],
}
SHARED = tuple(
    f"mesh={mesh} x={shape}:float32:small to={to} way={way} write={write} used={used}"
    for mesh, shape, to, way in (
        ("2", "4x3:S(0)", "S(1)", "redistributed"),
        ("2", "4x3:S(0)", "S(0)", "redistributed"),
        ("1x2", "3x2:R,S(1)", "S(0),S(1)", "redistributed"),
        ("2", "4x3:S(0)", "S(0)", "from-local"),
        ("2", "3x2:R", "R", "to-local"),
        ("2", "3x2:R", "R", "full"),
        ("2", "5x3:S(0)", "S(0)", "viewed"),
        ("2", "5x3:S(0)", "S(0)", "sliced"),
    )
    for write in ("source", "result")
    for used in ("before", "after")
)


@law(
    "gradient.shared-memory",
    source=SOURCE,
    control="mesh=2 x=5x3:S(0):float32:small to=S(0) way=viewed write=source used=before",
    cases=SHARED,
    features=lambda case: {"in-place", f"way:{case.get('way')}"},
    weight=0.3,
)
def shared_memory(
    x: DTensor,
    to: Placements,
    way: Annotated[str, WordField([*WAYS, "from-local"])],
    write: Literal["source", "result"],
    used: Literal["before", "after"],
):
    """Of a tensor and what is made of it without moving anything, which may share its memory, one is written in place:
    the other has the gradient of its elements, or is refused."""
    if way == "from-local":
        leaf = x.to_local().detach().requires_grad_()
        source = leaf * 2
        result = DTensor.from_local(source, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
    else:
        leaf = x.detach().requires_grad_()
        source = leaf * 2
        result = WAYS[way](source, to)
    kept, written = (result, source) if write == "source" else (source, result)

    def use():
        if used == "before":  # backward needs what is kept
            loss = (kept * kept).sum()
            written.mul_(3)
        else:
            written.mul_(3)
            loss = kept.sum()
        loss.backward()
        if used == "before":
            return leaf.grad
        times = kept.detach().sum() / leaf.detach().sum()
        return round(times.full_tensor().item() if isinstance(times, DTensor) else times.item()), leaf.grad

    return {"gradient": caught(use)}


@shared_memory.due
def _(x: Global, way, used, rank: Rank):
    def gradient(factor: int) -> Any:
        return x.local(rank) * factor if way == "from-local" else Claimed(x.full * factor, x.mesh)

    def alike(times: int) -> Any:
        ones = torch.ones_like(x.local(rank)) * times
        return times, ones if way == "from-local" else Claimed(torch.ones_like(x.full) * times, x.mesh)

    refused = Refused((RuntimeError,), (CHANGED, CHANGED_VIEW))
    return {"gradient": Either((gradient(8), refused) if used == "before" else (alike(2), alike(6), refused))}
