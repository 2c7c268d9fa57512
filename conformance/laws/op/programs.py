"""Programs of several ops: chains, histories, results that are written into a tensor that is given, and views beside
what they look at."""

from __future__ import annotations

from typing import Annotated, Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import caught
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.program.fields import Operands, ProgramField
from shardlaw.conformance.laws.op.forward import DTENSOR, case_of, cases_of, listed, text_of
from shardlaw.conformance.laws.op.results import (
    due_strides,
    layouts,
    plain_run,
    registered_everywhere,
    replicated,
    result,
    result_due,
    strides,
    unless,
)
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Replicate
from shardlaw.strategies.op_corners import corner_samples
from shardlaw.strategies.op_outs import (
    OUT_SCENARIOS,
    OUTS,
    alias_samples,
    enumerate_aliases,
    enumerate_out_calls,
    out_samples,
)
from shardlaw.strategies.op_programs import (
    enumerate_histories,
    enumerate_programs,
    family_histories,
    op_histories,
    op_programs,
    typed_histories,
)
from shardlaw.strategies.ops import Op

SCENES = [*family_histories(), *typed_histories()]
GROUNDS = 30  # that programs of a kind are tried on in a smoke run

FreshProgram = Annotated[Any, ProgramField(fresh=True)]


def may_refuse(case: Case, text: str) -> bool:
    """As for any op, and a view that would cut uneven shards elsewhere may ask for a redistribution first."""
    uneven = not all(layout.is_even() for layout in layouts(case))
    return unless(registered_everywhere)(case, text) or (uneven and "redistribute the tensor before" in text)


program = law(
    "op.program",
    clause="A chain of ops gives what it gives on full tensors, also where a later op takes a result whose "
    "reduction is still pending.",
    source=DTENSOR,
    control="mesh=2 a=4x2:S(0):float32:small steps=x=sum(a,0);mul(x,2)",
    draw=lambda limits: cases_of(op_programs(world_size=limits.world_size)),
    draws=50,
    sweep=lambda limits: listed([*corner_samples(), *enumerate_programs(limits.most)], limits),
    sweeps=len(corner_samples()) + GROUNDS,
    weight=8.0,
    refusal=may_refuse,
)(result)
program.due(result_due(exact=False))


@law(
    "op.history",
    source=DTENSOR,
    control="mesh=2 a=4x2:S(0):float32:positive steps=add(a,2);add(a,2.5)",
    draw=lambda limits: cases_of(op_histories(world_size=limits.world_size)),
    draws=40,
    sweep=lambda limits: listed([*SCENES, *enumerate_histories(limits.most)], limits),
    sweeps=len(SCENES) + GROUNDS,
    weight=5.0,
    refusal="allowed",
)
def history(steps: FreshProgram, operands: Operands):
    """An op gives the same result whatever it was called with before: scalars of another kind, other dims, dtypes and
    shapes."""
    values = steps(operands)
    results = {f"step{at}": value for at, value in enumerate(values, 1)}
    after = {f"operand.{name}": tensor for name, tensor in operands.items()}
    return {**results, "strides": [*map(strides, values)], **after}


@history.due
def _(steps, operands, mesh: DeviceMesh, rank: Rank):
    values, after = plain_run(steps, operands, cast("Mesh", mesh), rank, exact=False)
    results = {f"step{at}": value for at, value in enumerate(values, 1)}
    return {**results, "strides": [due_strides(value, operands) for value in values], **after}


@law(
    "op.plans-agree",
    source=DTENSOR,
    control="mesh=2 a=4x2:S(0):float32:positive b=2x4:R steps=mm(a,b)",
    draw=lambda limits: cases_of(op_programs(world_size=limits.world_size)),
    draws=60,
    refusal="allowed",
)
def plans_agree(steps: FreshProgram, operands: Operands):
    """All ranks of a mesh plan the ops of a program alike: what they ask of operands and what they claim of results."""
    told: list[str] = []
    planner, true = compat.planner, compat.planner.propagate_op_sharding_non_cached

    def plan(schema):
        found = true(schema)
        if not found.use_val_from_redistribute_schema:  # local sizes are of a rank
            told.append(f"{schema}: {found.needs_redistribute} {found.redistribute_schema} {found.output_spec!r}")
        return found

    planner.propagate_op_sharding_non_cached = plan
    ended = caught(lambda: steps(operands))  # by an error where a shard is too small: that is not about plans
    del planner.propagate_op_sharding_non_cached
    every: list[Any] = [None] * dist.get_world_size()
    members = [tensor.device_mesh for tensor in operands.values() if isinstance(tensor, DTensor)]
    counts = not isinstance(ended, Exception) and all(mesh.get_coordinate() is not None for mesh in members)
    dist.all_gather_object(every, told if counts else None)
    return {"alike": len({str(one) for one in every if one is not None}) <= 1}


@plans_agree.due
def _(steps, operands, mesh: DeviceMesh, rank: Rank):
    plain_run(steps, operands, cast("Mesh", mesh), rank, exact=False)
    return {"alike": True}


def out(op: Op) -> Law:
    variant = op.variants[0]
    sizes = variant.fits(dict.fromkeys(variant.symbols, 3))
    sample = variant.sample(Mesh.parse("2"), sizes, {arg.name: (Replicate(),) for arg in variant.args}, "float32")
    made = law(
        f"op.out[{op.name}]",
        clause=f"A tensor that is given for the result of {op.name} holds it afterwards, where it was placed before, "
        "or is refused.",
        source=f"{DTENSOR}, out= included",
        control=text_of(case_of(sample)),
        draw=lambda limits: cases_of(out_samples(op, world_size=limits.world_size)),
        draws=1,
        sweep=lambda limits: listed(enumerate_out_calls(op, limits.most), limits),
        sweeps=OUT_SCENARIOS,
        refusal=unless(replicated),
    )(result)
    made.due(result_due(exact=op.exact))
    return made


alias = law(
    "op.alias",
    clause="What is written to a tensor is seen in a view of it, and the other way round, wherever plain ones "
    "share memory.",
    source=f"{DTENSOR}; torch docs, Tensor Views: a view shares its data with its base",
    control="mesh=2 a=4x2:S(0) steps=v=t(a);a.add_(1);v",
    draw=lambda limits: cases_of(alias_samples(world_size=limits.world_size)),
    draws=12,
    sweep=lambda limits: listed(enumerate_aliases(limits.most), limits),
    sweeps=GROUNDS,
    refusal=unless(replicated),
)(result)
alias.due(result_due(exact=True))

LAWS = [program, *map(out, OUTS), alias]
