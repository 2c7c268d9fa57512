"""Laws of ops that a user registers with register_sharding, with every form of arguments and results, and anew."""

from __future__ import annotations

import uuid
from functools import cache
from typing import Annotated, Any, Literal

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Claimed, Global, Of, caught
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
    cases=SWEEP,
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


# what happened to the op before its rule was registered anew
Before = Literal["unused", "refused", "used", "used-elsewhere", "both-used"]
TENSORS = ("mesh=2 x=4x3:S(0):float32:small", "mesh=2 x=5x4:S(1):float32:small", "mesh=2x2 x=4x6:R,S(0):float32:small")
ANEW = (
    *(f"{TENSORS[0]} before={before}" for before in ("unused", "refused", "used", "used-elsewhere", "both-used")),
    *(f"{tensor} before=used" for tensor in TENSORS[1:]),
    "mesh=2 x=4x3:R:float32:small before=used",
    "mesh=2 x=4x3:P(sum):float32:small before=both-used",
)


def running_sum(x: torch.Tensor) -> torch.Tensor:
    """The running sum of each column, which no rank can compute from a shard of the rows."""
    return x.cumsum(0)


def new_ops() -> list[Any]:
    """Two ops of new names, without a rule."""
    names = [f"anew_{uuid.uuid4().hex}" for _ in range(2)]
    for name in names:
        torch.library.define(f"shardlaw::{name}", "(Tensor x) -> Tensor")
        torch.library.impl(f"shardlaw::{name}", "CompositeExplicitAutograd", running_sum)
    return [getattr(torch.ops.shardlaw, name).default for name in names]


def register_dim(ops: list[Any], dim: int) -> None:
    """Register a rule for several ops at once: replicas, or shards of one dim. Of dim 0 it is wrong for these ops."""
    register_sharding(ops)(lambda x: [([at], [at]) for at in (Replicate(), Shard(dim))])


@law(
    "module.registered-anew",
    source="torch.distributed.tensor.experimental docs, register_sharding: what is registered overrides the strategy "
    "that the op has",
    control=f"{TENSORS[0]} before=unused",
    cases=ANEW,
    features=lambda case: {"registered-rule", f"way:{case.get('before')}"},
    needs=("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
    weight=0.1,
)
def anew(x: DTensor, before: Before):
    """A rule that is registered for ops overrides the one that they had, whether they ran before or not: results are
    dense ones, in placements that the new rule allows, and an op that was refused for want of a rule runs."""
    ops, refusals = new_ops(), []
    used = {"used": ops[:1], "both-used": ops}.get(before, [])
    if before == "refused":
        refusals = [caught(lambda: ops[0](x))]
    else:
        register_dim(ops, 0)
    for op in used:
        op(x)
    if before == "used-elsewhere":
        ops[0](DTensor.from_local(torch.ones(2, 2), x.device_mesh, [Shard(0)] * x.device_mesh.ndim))
    register_dim(ops, 1)
    outs = [op(x) for op in ops]
    return {
        "refused": [isinstance(refusal, NotImplementedError) for refusal in refusals],
        "outs": outs,
        "ruled out": [[str(at) for at in out.placements if at not in (Replicate(), Shard(1))] for out in outs],
    }


@anew.due
def _(x: Global, before: str):
    want = Claimed(running_sum(x.full), x.mesh, exact=False)
    return {"refused": [True] * (before == "refused"), "outs": [want, want], "ruled out": Of([[], []], "wrong-layout")}
