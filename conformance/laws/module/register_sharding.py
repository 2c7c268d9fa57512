"""Laws of ops that a user registers with register_sharding, with every form of arguments and results."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.due import Claimed, Global
from shardlaw.conformance.law.fields import WordField

# schema and kernel of each op
FORMS: dict[str, Any] = {
    "two": ("(Tensor x, Tensor y) -> Tensor", lambda x, y: x + 2 * y),
    "keyword": ("(Tensor x, *, Tensor y) -> Tensor", lambda x, *, y: x + 2 * y),
    "optional": ("(Tensor x, Tensor? y) -> Tensor", lambda x, y: x + 2 * y),
    "list": ("(Tensor[] both) -> Tensor", lambda both: both[0] + 2 * both[1]),
    "pair": ("(Tensor x, Tensor y) -> (Tensor, Tensor)", lambda x, y: (x + 2 * y, x - y)),
    "parts": ("(Tensor x, Tensor y) -> Tensor[]", lambda x, y: [x + 2 * y, x - y]),
}


def call_with_pair(op, form, x, y):
    """The result of an op, or of its kernel, for two tensors."""
    if form == "list":
        return op([x, y])
    return op(x, y=y) if form == "keyword" else op(x, y)


@cache
def registered_op(form):
    """The op, registered once in a process. Its rule: both tensors are replicated, or both are sharded along the first
    dim."""
    schema, kernel = FORMS[form]
    torch.library.define(f"shardlaw::of_{form}", schema)
    torch.library.impl(f"shardlaw::of_{form}", "CompositeExplicitAutograd", kernel)
    outs = 2 if form in ("pair", "parts") else 1
    overload = getattr(torch.ops.shardlaw, f"of_{form}").default
    register_sharding(overload)(lambda *_, **__: [([at] * outs, [at] * 2) for at in (Replicate(), Shard(0))])
    return overload


LAYOUTS = (("4x3:S(0)", "4x3:S(0)"), ("4x3:S(0)", "4x3:R"), ("4x3:R", "4x3:P(sum)"), ("4x3:S(1)", "4x3:S(0)"))


SWEEP = tuple(f"mesh=2 x={x}:float32:small y={y}:float32:small form={form}" for form in FORMS for x, y in LAYOUTS)


@law(
    "module.registered-forms",
    source="torch.distributed.tensor.experimental docs, register_sharding: placements of each output and each input",
    control="mesh=2 x=4x3:S(1):float32:small y=4x3:P(sum):float32:small form=two",
    sweep=texts(*SWEEP),
    sweeps=len(SWEEP),
    features=lambda case: {"registered-rule"},
    needs=("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
    weight=0.2,
)
def forms(x: DTensor, y: DTensor, form: Annotated[str, WordField(FORMS)]):
    """An op with a registered rule has the dense results, whether it takes tensors by position, by name or in a list,
    and whether it has one result or several."""
    out = call_with_pair(registered_op(form), form, x, y)
    return {"outs": [out] if isinstance(out, torch.Tensor) else [*out]}


@forms.due
def _(x: Global, y: Global, form):
    out = call_with_pair(FORMS[form][1], form, x.full, y.full)
    outs = [out] if isinstance(out, torch.Tensor) else [*out]
    return {"outs": [Claimed(full, x.mesh, exact=False) for full in outs]}
