"""Laws of ops on sharded tensors: the result is that of the dense op on every rank, or every rank refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.op.results import (
    has_plain_layouts,
    has_plain_tensors,
    refusal_unless,
    result_law,
    specs,
)
from shardlaw.conformance.laws.shared.draws import Chained, LazyCases
from shardlaw.strategies.op_catalogue import OPS
from shardlaw.strategies.op_draws import op_samples, samples_no_larger, unusual_samples
from shardlaw.strategies.op_sweep import Sweep, plainest
from shardlaw.strategies.ops import Op, Sample

DTENSOR = "torch.distributed.tensor docs, DTensor: operators on sharded tensors follow the semantics of torch.Tensor"
# cases of one op in a smoke run
LIGHT_SWEEPS = 7
MORE_SWEEPS = 9
MOST_SWEEPS = 34
LIGHT_DRAWS = 0.25  # the very first draw is the plainest sample, as the control is
DRAWS = 0.5
LIGHT_UNUSUAL, UNUSUAL = 1, 2  # samples with a dtype or memory layout that is in no table
REFUSAL: dict[str, Any] = {
    "never": refusal_unless(has_plain_tensors),
    "pending": refusal_unless(has_plain_layouts),
    "any": "allowed",
}
CLAUSE = "of sharded tensors has the dense value, shape and dtype, under the placements that the result claims."


def to_case(sample: Sample, seed: int = 0) -> Case:
    """The case of a sample; seed 0 is left out. ``sample`` names the OpInfo sample that it comes from."""
    tensors: dict[str, Any] = dict(sample.tensors)
    return fields(mesh=sample.mesh, **tensors, steps=sample.steps, sample=sample.origin or None, seed=seed or None)


def fields_text(case: Case) -> str:
    """The text of a case without its law."""
    return case.text.partition(" ")[2]


def to_cases(samples: SearchStrategy[Sample]) -> SearchStrategy[Case]:
    """The cases of samples, with seeds."""
    return st.tuples(samples, st.integers(0, 3)).map(lambda pair: to_case(*pair))


def list_cases(samples: Sequence[Sample], limits: Limits) -> LazyCases[Sample]:
    """The cases of the ``samples`` for which there are enough ranks."""
    return LazyCases([sample for sample in samples if max(sample.mesh.ranks) < limits.most], to_case)


def narrow(op: Op, case: Case) -> SearchStrategy[Case]:
    """Cases of the op that are no larger."""
    smaller = samples_no_larger(op, Sample(case.mesh(), tuple(specs(case).items()), case.get("steps")))
    if smaller is None:
        return st.just(case)
    return st.tuples(smaller, st.integers(0, case.seed)).map(lambda pair: to_case(*pair))


def forward_law(op: Op) -> Law:
    unusual = LIGHT_UNUSUAL if op.light else UNUSUAL
    return result_law(
        f"op.forward[{op.name}]",
        exact=op.exact,
        clause=f"{op.name} {CLAUSE}",
        source=op.source or DTENSOR,
        control=fields_text(to_case(plainest(op))),
        draw=lambda limits: to_cases(op_samples(op, world_size=limits.world_size, dtypes=limits.dtypes)),
        draws=LIGHT_DRAWS if op.light else DRAWS,
        sweep=lambda limits: LazyCases(
            Chained(unusual_samples(op, unusual, limits.world_size, limits.dtypes), Sweep(op, limits.world_size)),
            to_case,
        ),
        sweeps=unusual + min(LIGHT_SWEEPS if op.light else 2 * len(op.variants) + MORE_SWEEPS, MOST_SWEEPS),
        narrow=lambda case: narrow(op, case),
        refusal=REFUSAL[op.refuses],
    )


LAWS = [*map(forward_law, OPS.values())]
