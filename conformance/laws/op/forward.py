"""Ops: what a sharded op does is what the plain op does, on every rank, or it is refused by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.op.results import (
    registered_everywhere,
    result,
    result_due,
    specs,
    unless,
    without_pending,
)
from shardlaw.conformance.laws.shared.draws import Chained, LazyCases
from shardlaw.strategies.op_catalogue import OPS
from shardlaw.strategies.op_draws import op_samples, samples_no_larger, unusual_samples
from shardlaw.strategies.op_sweep import Sweep, plainest
from shardlaw.strategies.ops import Op, Sample

DTENSOR = "torch.distributed.tensor docs, DTensor: operators on sharded tensors follow the semantics of torch.Tensor"
# cases of one op in a smoke run
LIGHT_SWEEPS = 6
MORE_SWEEPS = 9
MOST_SWEEPS = 34
LIGHT_DRAWS = 0.25  # the first draw of all is the plainest, which the control is like
DRAWS = 0.5
LIGHT_ODDS, ODDS = 1, 2  # in a dtype or a memory that no table names
REFUSAL: dict[str, Any] = {"never": unless(registered_everywhere), "pending": unless(without_pending), "any": "allowed"}
VALUE = (
    "of sharded tensors has the value, shape and dtype that it has of the full tensors, under the "
    "placements that its result claims."
)


def case_of(sample: Sample, seed: int = 0) -> Case:
    """The case that a sample makes; seed 0 is not printed. ``sample`` names the one of OpInfo that it was made of."""
    tensors: dict[str, Any] = dict(sample.tensors)
    return fields(mesh=sample.mesh, **tensors, steps=sample.steps, sample=sample.origin or None, seed=seed or None)


def text_of(case: Case) -> str:
    """The fields of a case alone."""
    return case.text.partition(" ")[2]


def cases_of(samples: SearchStrategy[Sample]) -> SearchStrategy[Case]:
    """Cases of samples, with seeds."""
    return st.tuples(samples, st.integers(0, 3)).map(lambda drawn: case_of(*drawn))


def listed(samples: Sequence[Sample], limits: Limits) -> LazyCases[Sample]:
    """The cases of those ``samples`` that have ranks enough."""
    return LazyCases([sample for sample in samples if max(sample.mesh.ranks) < limits.most], case_of)


def narrowed(op: Op, case: Case) -> SearchStrategy[Case]:
    """Cases of the op that are no larger."""
    smaller = samples_no_larger(op, Sample(case.mesh(), tuple(specs(case).items()), case.get("steps")))
    return (
        st.just(case)
        if smaller is None
        else st.tuples(smaller, st.integers(0, case.seed)).map(lambda drawn: case_of(*drawn))
    )


def forward(op: Op) -> Law:
    odds = LIGHT_ODDS if op.light else ODDS
    made = law(
        f"op.forward[{op.name}]",
        clause=f"{op.name} {VALUE}",
        source=op.source or DTENSOR,
        control=text_of(case_of(plainest(op))),
        draw=lambda limits: cases_of(op_samples(op, world_size=limits.world_size, dtypes=limits.dtypes)),
        draws=LIGHT_DRAWS if op.light else DRAWS,
        sweep=lambda limits: LazyCases(
            Chained(unusual_samples(op, odds, limits.world_size, limits.dtypes), Sweep(op, limits.world_size)), case_of
        ),
        sweeps=odds + min(LIGHT_SWEEPS if op.light else 2 * len(op.variants) + MORE_SWEEPS, MOST_SWEEPS),
        narrow=lambda case: narrowed(op, case),
        refusal=REFUSAL[op.refuses],
    )(result)
    made.due(result_due(exact=op.exact))
    return made


LAWS = [*map(forward, OPS.values())]
