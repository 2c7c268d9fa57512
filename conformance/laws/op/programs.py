"""Laws of programs of several ops: chains, histories, ``out=`` arguments, views and their bases."""

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
from shardlaw.conformance.laws.op.forward import DTENSOR, fields_text, list_cases, to_case, to_cases
from shardlaw.conformance.laws.op.results import (
    due_results,
    due_strides,
    has_plain_layouts,
    has_plain_tensors,
    is_replicated,
    layouts,
    refusal_unless,
    result_law,
    strides,
)
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Replicate
from shardlaw.strategies.op_corners import corner_samples
from shardlaw.strategies.op_outs import (
    LISTED,
    OUT_SCENARIOS,
    OUTS,
    alias_samples,
    enumerate_aliases,
    enumerate_out_calls,
    out_samples,
)
from shardlaw.strategies.op_overloads import overload_samples
from shardlaw.strategies.op_programs import (
    enumerate_histories,
    enumerate_programs,
    family_histories,
    op_histories,
    op_programs,
    typed_histories,
)
from shardlaw.strategies.ops import Op

HISTORIES = [*family_histories(), *typed_histories()]
ENUMERATED = 30  # enumerated programs of a smoke run

FreshProgram = Annotated[Any, ProgramField(fresh=True)]


def may_refuse(case: Case, text: str) -> bool:
    """As for any op; besides, a view that would cut uneven shards elsewhere may ask for a redistribution first."""
    uneven = not all(layout.is_even() for layout in layouts(case))
    return refusal_unless(has_plain_tensors)(case, text) or (uneven and "redistribute the tensor before" in text)


program = result_law(
    "op.program",
    exact=False,
    clause="A chain of ops has the dense results, also if a later op takes a result with a pending reduction.",
    source=DTENSOR,
    control="mesh=2 a=4x2:S(0):float32:small steps=x=sum(a,0);mul(x,2)",
    draw=lambda limits: to_cases(op_programs(world_size=limits.world_size)),
    draws=50,
    sweep=lambda limits: list_cases([*corner_samples(), *enumerate_programs(limits.most)], limits),
    sweeps=len(corner_samples()) + ENUMERATED,
    weight=8.0,
    refusal=may_refuse,
)

overloads = result_law(
    "op.overloads",
    exact=False,
    clause="Each overload of an op has the dense results: in place, into an output, on lists, with numbers.",
    source=DTENSOR,
    control="mesh=2 a=5x3:S(0):float32:small steps=a.exp_()",
    sweep=lambda limits: list_cases(overload_samples(), limits),
    sweeps=len(overload_samples()),
    refusal=refusal_unless(has_plain_layouts),
)


@law(
    "op.history",
    source=DTENSOR,
    control="mesh=2 a=4x2:S(0):float32:positive steps=add(a,2);add(a,2.5)",
    draw=lambda limits: to_cases(op_histories(world_size=limits.world_size)),
    draws=40,
    sweep=lambda limits: list_cases([*HISTORIES, *enumerate_histories(limits.most)], limits),
    sweeps=len(HISTORIES) + ENUMERATED,
    weight=5.0,
    refusal="allowed",
)
def history(steps: FreshProgram, operands: Operands):
    """The result of an op does not depend on earlier calls with scalars of another type, other dims, dtypes or
    shapes."""
    values = steps(operands)
    results = {f"step{at}": value for at, value in enumerate(values, 1)}
    after = {f"operand.{name}": tensor for name, tensor in operands.items()}
    return {**results, "strides": [*map(strides, values)], **after}


@history.due
def _(steps, operands, mesh: DeviceMesh, rank: Rank):
    values, after = due_results(steps, operands, cast("Mesh", mesh), rank, exact=False)
    results = {f"step{at}": value for at, value in enumerate(values, 1)}
    return {**results, "strides": [due_strides(value, operands) for value in values], **after}


@law(
    "op.plans-agree",
    source=DTENSOR,
    control="mesh=2 a=4x2:S(0):float32:positive b=2x4:R steps=mm(a,b)",
    draw=lambda limits: to_cases(op_programs(world_size=limits.world_size)),
    draws=60,
    refusal="allowed",
)
def plans_agree(steps: FreshProgram, operands: Operands):
    """All ranks of a mesh plan the ops of a program alike: the placements they require of operands and claim for
    results."""
    plans: list[str] = []
    planner, original = compat.planner, compat.planner.propagate_op_sharding_non_cached

    def record_plan(schema):
        found = original(schema)
        if not found.use_val_from_redistribute_schema:  # else the plan contains local sizes, which differ by rank
            plans.append(f"{schema}: {found.needs_redistribute} {found.redistribute_schema} {found.output_spec!r}")
        return found

    planner.propagate_op_sharding_non_cached = record_plan
    outcome = caught(lambda: steps(operands))  # an error, where a shard is too small, says nothing about plans
    del planner.propagate_op_sharding_non_cached
    gathered: list[Any] = [None] * dist.get_world_size()
    members = [tensor.device_mesh for tensor in operands.values() if isinstance(tensor, DTensor)]
    counts = not isinstance(outcome, Exception) and all(mesh.get_coordinate() is not None for mesh in members)
    dist.all_gather_object(gathered, plans if counts else None)
    return {"alike": len({str(rank_plans) for rank_plans in gathered if rank_plans is not None}) <= 1}


@plans_agree.due
def _(steps, operands, mesh: DeviceMesh, rank: Rank):
    due_results(steps, operands, cast("Mesh", mesh), rank, exact=False)
    return {"alike": True}


def out_law(op: Op) -> Law:
    variant = op.variants[0]
    sizes = variant.fits(dict.fromkeys(variant.symbols, 3))
    sample = variant.sample(Mesh.parse("2"), sizes, {arg.name: (Replicate(),) for arg in variant.args}, "float32")
    return result_law(
        f"op.out[{op.name}]",
        exact=op.exact,
        clause=f"A tensor passed as out= to {op.name} has the result and its old placements afterwards, or is refused.",
        source=f"{DTENSOR}, out= included",
        control=fields_text(to_case(sample)),
        draw=lambda limits: to_cases(out_samples(op, world_size=limits.world_size)),
        draws=1,
        sweep=lambda limits: list_cases(enumerate_out_calls(op, limits.most), limits),
        sweeps=OUT_SCENARIOS,
        refusal=refusal_unless(is_replicated),
    )


alias = result_law(
    "op.alias",
    exact=True,
    clause="A write to a tensor shows in its views, and a write to a view in its base, wherever dense tensors share "
    "memory.",
    source=f"{DTENSOR}; torch docs, Tensor Views: a view shares its data with its base",
    control="mesh=2 a=4x2:S(0) steps=v=t(a);a.add_(1);v",
    draw=lambda limits: to_cases(alias_samples(world_size=limits.world_size)),
    draws=12,
    sweep=lambda limits: list_cases([*corner_samples(LISTED), *enumerate_aliases(limits.most)], limits),
    sweeps=len(corner_samples(LISTED)) + ENUMERATED,
    refusal=refusal_unless(is_replicated),
)

LAWS = [program, overloads, *map(out_law, OUTS), alias]
