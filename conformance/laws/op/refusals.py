"""Laws of what ops must refuse: operands that cannot be combined, and calls that the dense op refuses."""

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
from shardlaw.conformance.laws.op.forward import list_cases, to_case
from shardlaw.conformance.laws.op.results import dense_operands, result_law
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
    draw=lambda limits: mixed_samples(world_size=limits.world_size).map(to_case),
    draws=24,
)
def mixed(steps: Program, operands: Operands):
    """Every rank refuses an op of a DTensor and a plain tensor that is no scalar."""
    return {"refusal": caught(lambda: steps(operands)[-1])}


@mixed.due
def _(operands):
    is_plain = {isinstance(x, torch.Tensor) for x in operands.values() if not isinstance(x, torch.Tensor) or x.ndim}
    if is_plain != {True, False}:
        raise Meaningless("no plain tensor meets a sharded one")
    return {"refusal": Refused()}


def draw_two_meshes(limits: Limits) -> SearchStrategy[Case]:
    def case(pair: tuple[Sample, Mesh]) -> Case:
        sample, other = pair
        tensors: dict[str, Any] = dict(sample.tensors)
        return fields(mesh=sample.mesh, mesh__other=other, **tensors, steps=sample.steps)

    return samples_on_two_meshes(world_size=limits.world_size).map(case)


@law(
    "op.refuses[meshes]",
    source=f"{DTENSOR}: operators need all their tensors on one DeviceMesh; communication across meshes is not "
    "supported",
    control="mesh=2 mesh.other=2@1,0 a=4x4:S(0) b=4x4:S(0) steps=add(a,b)",
    draw=draw_two_meshes,
    draws=20,
)
def meshes(steps: Program, a: DTensor, b: Annotated[DTensor, TensorField("mesh.other")]):
    """Every rank refuses an op of tensors on different meshes."""
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
    draw=lambda limits: invalid_call_samples(world_size=limits.world_size).map(to_case),
    draws=60,
    weight=2.0,
)
def parity(steps: Program, operands: Operands):
    """Every rank refuses what the dense op refuses, such as sizes that do not fit or a dim out of range."""
    return {"refusal": caught(lambda: steps(operands)[-1])}


@parity.due
def _(steps, operands):
    if not isinstance(caught(lambda: steps.run_plain(dense_operands(operands))), Exception):
        raise Meaningless("the plain op is not refused")
    return {"refusal": Refused()}


@law(
    "op.refuses[unbind]",
    source="torch.distributed.tensor, the message of unbind: it cannot be performed along a sharded dim without "
    "redistribution",
    control="mesh=2 a=2x3:S(0) steps=unbind(a,0)",
    draw=lambda limits: unbind_samples(world_size=limits.world_size).map(to_case),
    draws=8,
    tier="extended",
)
def unbind(steps: Program, operands: Operands):
    """unbind along a sharded dim is refused: it would need a redistribution that the caller did not ask for."""
    return {"refusal": caught(lambda: steps(operands)[-1])}


@unbind.due
def _(steps, operands):
    (x,), dim = operands.values(), int(steps.text.rstrip(")").rpartition(",")[2])
    if not any(isinstance(placement, Shard) and (placement.dim - dim) % x.full.ndim == 0 for placement in x.placements):
        raise Meaningless("the dim is not sharded")
    return {"refusal": Refused()}


restrided = result_law(
    "op.restrided",
    exact=True,
    clause="as_strided applies its sizes, strides and offset to the memory of the dense tensor, or is refused.",
    source=f"{DTENSOR}: operators follow the semantics of torch.Tensor; torch docs, torch.as_strided",
    control="mesh=2 a=4x4:S(0) steps=as_strided(a,(4,4),(4,1))",
    sweep=lambda limits: list_cases(stride_call_samples(), limits),
    sweeps=len(stride_call_samples()),
    refusal="allowed",
    tier="extended",
)


LAWS = [restrided]
