"""What an op must refuse: operands that have no meaning together, and what the plain op refuses too."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Meaningless, Refused, caught
from shardlaw.conformance.law.fields import TensorField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.program.fields import Operands, Program
from shardlaw.conformance.laws.op.forward import case_of, listed
from shardlaw.conformance.laws.op.results import plain_of, result, result_due
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Shard
from shardlaw.strategies.op_refusals import (
    invalid_call_samples,
    mixed_samples,
    samples_on_two_meshes,
    stride_call_samples,
    unbind_samples,
)
from shardlaw.strategies.ops import Sample

DTENSOR = "torch.distributed.tensor docs, DTensor"


@law(
    "op.refuses[mixed]",
    source=f"{DTENSOR}: all torch.Tensor arguments must be converted to DTensor before they meet one",
    control="mesh=2 a=4x4:S(0) b=4x4 steps=add(a,b)",
    draw=lambda limits: mixed_samples(world_size=limits.world_size).map(case_of),
    draws=24,
)
def mixed(steps: Program, operands: Operands):
    """An op of a sharded tensor and a plain one that is no scalar is refused on every rank."""
    return {"refusal": caught(lambda: steps(operands)[-1])}


@mixed.due
def _(operands):
    plain = {
        isinstance(tensor, torch.Tensor)
        for tensor in operands.values()
        if not isinstance(tensor, torch.Tensor) or tensor.ndim
    }
    if plain != {True, False}:
        raise Meaningless("no plain tensor meets a sharded one")
    return {"refusal": Refused()}


def on_two_meshes(limits: Limits) -> SearchStrategy[Case]:
    def case(drawn: tuple[Sample, Mesh]) -> Case:
        sample, other = drawn
        tensors: dict[str, Any] = dict(sample.tensors)
        return fields(mesh=sample.mesh, mesh__other=other, **tensors, steps=sample.steps)

    return samples_on_two_meshes(world_size=limits.world_size).map(case)


@law(
    "op.refuses[meshes]",
    source=f"{DTENSOR}: operators need all their tensors on one DeviceMesh; communication across meshes is not "
    "supported",
    control="mesh=2 mesh.other=2@1,0 a=4x4:S(0) b=4x4:S(0) steps=add(a,b)",
    draw=on_two_meshes,
    draws=20,
)
def meshes(steps: Program, a: DTensor, b: Annotated[DTensor, TensorField("mesh.other")]):
    """An op of tensors that live on different meshes is refused on every rank."""
    return {"refusal": caught(lambda: steps({"a": a, "b": b})[-1])}


@meshes.due
def _(a, b):
    if a.mesh == b.mesh:
        raise Meaningless("both tensors live on one mesh")
    return {"refusal": Refused()}


@law(
    "op.refuses[parity]",
    source=f"{DTENSOR}: operators on sharded tensors follow the semantics of torch.Tensor, its errors included",
    control="mesh=2 a=4x6:S(0) steps=sum(a,2)",
    draw=lambda limits: invalid_call_samples(world_size=limits.world_size).map(case_of),
    draws=60,
    weight=2.0,
)
def parity(steps: Program, operands: Operands):
    """What the plain op refuses, such as sizes that do not fit or a dim out of range, the sharded op refuses on every
    rank."""
    return {"refusal": caught(lambda: steps(operands)[-1])}


@parity.due
def _(steps, operands):
    if not isinstance(caught(lambda: steps.run_plain(plain_of(operands))), Exception):
        raise Meaningless("the plain op is not refused")
    return {"refusal": Refused()}


@law(
    "op.refuses[unbind]",
    source="torch.distributed.tensor, the message of unbind: it cannot be performed along a sharded dim without "
    "redistribution",
    control="mesh=2 a=2x3:S(0) steps=unbind(a,0)",
    draw=lambda limits: unbind_samples(world_size=limits.world_size).map(case_of),
    draws=8,
    tier="extended",
)
def unbind(steps: Program, operands: Operands):
    """A tensor is not taken apart along a dim that is sharded: that would need a redistribution that nobody asked
    for."""
    return {"refusal": caught(lambda: steps(operands)[-1])}


@unbind.due
def _(steps, operands):
    (x,), dim = operands.values(), int(steps.text.rstrip(")").rpartition(",")[2])
    if not any(isinstance(placement, Shard) and (placement.dim - dim) % x.full.ndim == 0 for placement in x.placements):
        raise Meaningless("the dim is not sharded")
    return {"refusal": Refused()}


restrided = law(
    "op.restrided",
    clause="as_strided gives what its sizes, strides and offset say of the memory of the whole tensor, or is refused.",
    source=f"{DTENSOR}: operators follow the semantics of torch.Tensor; torch docs, torch.as_strided",
    control="mesh=2 a=4x4:S(0) steps=as_strided(a,(4,4),(4,1))",
    sweep=lambda limits: listed(stride_call_samples(), limits),
    sweeps=len(stride_call_samples()),
    refusal="allowed",
    tier="extended",
)(result)
restrided.due(result_due(exact=True))


LAWS = [restrided]
