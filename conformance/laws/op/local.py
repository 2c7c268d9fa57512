"""The law of ops that need no communication."""

from __future__ import annotations

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import AtMost
from shardlaw.conformance.law.fields import Placements
from shardlaw.conformance.law.program.fields import Operands, Program
from shardlaw.conformance.laws.op.forward import to_case
from shardlaw.strategies.op_local import local_samples


@law(
    "op.local",
    source="torch.distributed.tensor: ops run on local shards, and communicate where their semantics ask for it",
    control="mesh=2 a=5x4:S(0) steps=neg(a) to=S(0)",
    sweep=lambda limits: [to_case(sample).with_fields(to=to) for sample, to in local_samples()],
    sweeps=len(local_samples()),
    tier="extended",
    refusal="allowed",
)
def local(steps: Program, operands: Operands):
    """An op that each rank can compute on its own shard calls no collective, and its result keeps the placements that
    follow."""
    with compat.CommDebugMode() as comm:
        value = steps(operands)[-1]
    return {"collectives": comm.get_total_counts(), "placements": [*map(str, value.placements)]}


@local.due
def _(to: Placements):
    return {"collectives": AtMost(0), "placements": [*map(str, to)]}


LAWS = (local,)
