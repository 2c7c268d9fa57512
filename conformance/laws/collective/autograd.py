"""Laws of ``torch.distributed.nn.functional``: collectives that return new tensors through which gradients flow.

The gradient of a member's input is that of the sum over all members of what their outputs and the incoming gradients
give, as autograd computes it through the collectives of the reference.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.nn import functional

from shardlaw.conformance.law import act
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Device, Rank
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import prepare
from shardlaw.conformance.laws.collective.fields import ROOT_OPTIONS, Group, GroupCall, RankDataField
from shardlaw.conformance.laws.collective.specs import REDUCING, CollectiveSpec, Row, member_data, one_each
from shardlaw.reference import collective
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.tensors import lay_out

CALLS = {
    "all_reduce": lambda xs, outs, **options: functional.all_reduce(xs[0], **options),
    "reduce": lambda xs, outs, **options: functional.reduce(xs[0], **options),
    "broadcast": lambda xs, outs, **options: functional.broadcast(xs[0], **options),
    "all_gather": lambda xs, outs, **options: functional.all_gather(xs[0], **options),
    "gather": lambda xs, outs, **options: functional.gather(xs[0], **options),
    "scatter": lambda xs, outs, **options: functional.scatter(xs, **options),
    "reduce_scatter": lambda xs, outs, **options: functional.reduce_scatter(outs[0], xs, **options),
    "all_to_all": lambda xs, outs, **options: functional.all_to_all(outs, xs, **options),
    "all_to_all_single": lambda xs, outs, **options: functional.all_to_all_single(outs[0], xs[0], **options),
}


def call_reference(spec: CollectiveSpec, rows: list[Row]) -> list[Row | None]:
    """The outputs of each member; ``None`` where nothing is promised of them."""
    first = [row[0] for row in rows]
    match spec.name:
        case "all_reduce":
            return [*one_each(collective.all_reduce(first, spec.op))]
        case "reduce":
            return [None if out is None else [out] for out in collective.reduce(first, spec.op, spec.root)]
        case "broadcast":
            return [*one_each(collective.broadcast(first, spec.root))]
        case "all_gather":
            return [*collective.all_gather(first)]
        case "gather":
            return collective.gather(first, spec.root)
        case "scatter":
            return [*one_each(collective.scatter(rows, spec.root))]
        case "reduce_scatter":
            return [*one_each(collective.reduce_scatter(rows, spec.op))]
        case "all_to_all":
            return [*collective.all_to_all(rows)]
        case _:
            return [*one_each(collective.all_to_all_single(first, spec.splits or None))]


def distinct(spec: CollectiveSpec, number: int, x: torch.Tensor) -> torch.Tensor:
    """A tensor like ``x`` whose elements differ from those of other members, so that a maximum has one place."""
    values = (torch.arange(math.prod(x.shape)) + number) % spec.size - 1
    return lay_out(values.to(x.dtype).reshape(x.shape), spec.memory)


def input_rows(spec: CollectiveSpec) -> list[Row]:
    """The inputs of each member."""
    rows = [data.inputs for data in member_data(spec)]
    if spec.name in REDUCING and spec.op in ("max", "min"):
        return [[distinct(spec, at + part, x) for part, x in enumerate(row)] for at, row in enumerate(rows)]
    # of what the other members give to a scatter nothing is sent
    return [row or [torch.zeros_like(x) for x in rows[spec.root]] for row in rows]


def read_case(case: Case) -> tuple[dict[int, Any], dict[int, Any]]:
    """By rank: the call and the gradients of its outputs, for acts; inputs, due outputs (``...`` where nothing is
    promised), and gradients of the inputs, for due functions."""
    call = GroupCall.from_case(case, case.law.partition("[")[2].removesuffix("]"))
    spec = call.spec
    rows = input_rows(spec)
    leaves = [[x.clone().requires_grad_() for x in row] for row in rows]
    outputs = call_reference(spec, leaves)
    promised = next(row for row in outputs if row is not None)
    incoming = [
        [spec.contribution(at, part, tuple(out.shape)).contiguous() for part, out in enumerate(row or promised)]
        for at, row in enumerate(outputs)
    ]
    pairs = [pair for row, grads in zip(outputs, incoming, strict=True) for pair in zip(row or (), grads, strict=False)]
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    for_act, due = {}, {}
    for rank, xs, grads, row, own in zip(call.ranks, rows, incoming, outputs, leaves, strict=True):
        name, _, outs, options = call.for_act(rank)
        for_act[rank] = (name, xs, outs, options), grads
        results = ... if row is None else [spec.due_value(out.detach()) for out in row]
        due[rank] = xs, results, [spec.due_value(torch.zeros_like(x) if x.grad is None else x.grad) for x in own]
    return for_act, due


MemberData = Annotated[Any, RankDataField(read_case)]


def call_and_differentiate(x: MemberData, group: Group, device: Device):
    call, gradients = x
    name, xs, outs, options = prepare(call, device)
    xs = [tensor.requires_grad_() for tensor in xs]
    result = CALLS[name](xs, outs, **options, group=group or dist.group.WORLD)
    results = [*result] if isinstance(result, tuple) else [result]
    torch.autograd.backward(results, gradients)
    return {
        "result": [tensor.detach() for tensor in results],
        "input": [tensor.detach() for tensor in xs],
        "gradient": [tensor.grad for tensor in xs],
    }


def autograd_law(name: str) -> Law:
    """The law of one collective through which gradients flow."""
    rooted, splits = name in ROOT_OPTIONS, name == "all_to_all_single"
    corners = [f"mesh=2 x=5x3 op={op}" for op in ("max", "product", "avg") if name in REDUCING]
    corners += ["mesh=2 x=5x3 root=1"] * rooted + ["mesh=2 x=3x2 splits=1.2/0.3"] * splits

    def draw_root(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        return {"root": draw(st.integers(0, mesh.size - 1)) or None} if rooted else {}

    def draw(limits: Limits) -> SearchStrategy[Case]:
        return draws.calls(limits, reduces=name in REDUCING, extra=draw_root, **(SPLIT if splits else {}), **PLAIN)

    law = act.law(
        f"collective.autograd[{name}]",
        clause=f"{name} of torch.distributed.nn.functional gives an input the gradient of what all members got of it.",
        source=f"torch.distributed.nn.functional, docstring of {name}",
        control="mesh=2 x=5x3",
        features=lambda case: draws.features_of(case) | {"functional", "backward", "requires-grad"},
        sweep=act.texts("mesh=2 x=5x3", *corners),
        sweeps=1 + len(corners),
        draw=draw,
        draws=10,
        members=True,
        needs=NEEDS[name],
        weight=0.2,
    )(call_and_differentiate)

    @law.due
    def _(x, rank: Rank):
        inputs, results, gradients = x[rank]
        return {"result": results, "input": inputs, "gradient": gradients}

    return law


PLAIN: dict[str, Any] = {"timing": False, "outputs": False, "expanded": False, "floats": True}
# of tensors that are not contiguous, which all_to_all_single refuses, the documents promise nothing
SPLIT: dict[str, Any] = {"forms": ("joined",), "uneven": ("joined",), "splits": True, "min_dims": 1, "memories": False}
# gradients take the way back
WAY_BACK = {
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
    "all_gather": "all_to_all",
    "reduce_scatter": "all_gather",
}
NEEDS = {
    name: tuple(dict.fromkeys((name.removesuffix("_single"), WAY_BACK.get(name, "subgroups"), "subgroups")))
    for name in CALLS
}
LAWS = [autograd_law(name) for name in CALLS]
