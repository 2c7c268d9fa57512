"""Ops: what a sharded op does is what the plain op does, on every rank, or it is refused by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws.op_check import check_program, evenly
from strategies.op_catalogue import OPS
from strategies.op_sweep import Sweep
from strategies.ops import Op, Sample

if TYPE_CHECKING:
    from conformance.here import Here

SOURCE = "torch.distributed.tensor docs, DTensor: operators on DTensor follow the semantics of the same operator on the full torch.Tensor"


def case_of(law: str, sample: Sample, seed: int = 0) -> Case:
    """The case that a sample makes."""
    return Case.of(law, mesh=sample.mesh, **dict(sample.tensors), steps=sample.steps, seed=seed or None)


class Cases(Sequence[Case]):
    """The samples of a sweep as cases of one law."""

    def __init__(self, law: str, sweep: Sweep) -> None:
        self.law = law
        self.sweep = sweep

    def __len__(self) -> int:
        return len(self.sweep)

    def __getitem__(self, at: int) -> Case:  # type: ignore[override]
        return case_of(self.law, self.sweep[at])


def _forward(op: Op) -> Law:
    law_id = f"op.forward[{op.name}]"

    def check(case: Case, here: Here) -> None:
        check_program(case, here, exact=op.exact)

    sample = Sweep(op).chosen[0]
    return Law(
        id=law_id,
        clause=f"{op.name} of sharded tensors has the value, shape and dtype that it has of the full tensors, under the placements that its result claims.",
        source=SOURCE,
        check=check,
        control=case_of(law_id, sample).text,
        planted="",
        sweep=lambda limits: Cases(law_id, Sweep(op, limits.world_size)),
        sweeps=min(40, len(Sweep(op).chosen)),
        refusal="allowed",
    )


LAWS = [_forward(op) for op in OPS.values()]
