"""Ops: what a sharded op does is what the plain op does, on every rank, or it is refused by all of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws
from conformance.laws.op.check import RULES_KNOWN_FROM, check_program, operands, registered_everywhere, without_pending
from conformance.laws.op.refusals import REFUSALS
from conformance.laws.op.scripts import script_of
from strategies.op_catalogue import OPS
from strategies.op_corners import corner_samples
from strategies.op_draws import no_larger, op_samples
from strategies.op_programs import family_histories, op_histories, op_programs
from strategies.op_sweep import Sweep, plainest
from strategies.ops import Op, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DTENSOR = "torch.distributed.tensor docs, DTensor: operators on sharded tensors follow the semantics of torch.Tensor"
# cases of one op in a smoke run
LIGHT_SWEEPS = 6
MORE_SWEEPS = 9
MOST_SWEEPS = 34
LIGHT_DRAWS = 1
DRAWS = 2
UNREFUSED = {"never": registered_everywhere, "pending": without_pending, "any": None}


# what a planted fault must break to be seen: most ops' results; the operands of those whose results stay where they are
PLANTED = {
    **dict.fromkeys(("argmax", "argmin"), "local_indices_returned"),
    **{"item": "item_doubled", "to": "pending_sums_cast", "median.ties": "operands_claimed_whole"},
}
CONVOLUTIONS = tuple(f"nn.functional.conv{dims}d{variant}" for dims in (1, 2) for variant in ("", ".options", ".layouts"))
REPLICATING = ("diagonal", "tril", "triu", "diag", "diag_embed", "rot90", "triangles")


def planted(op: Op) -> str:
    """The fault in ``tests/planted`` that the law of ``op`` must catch."""
    if op.name in CONVOLUTIONS:
        return "convolutions_shifted"
    followed = op.name in REPLICATING or "in-place" in op.name
    return PLANTED.get(op.name) or ("operands_claimed_whole" if followed else "results_claimed_whole")


def case_of(law: str, sample: Sample, seed: int = 0) -> Case:
    """The case that a sample makes; seed 0 is not printed. ``sample`` names the one of OpInfo that it was made of."""
    tensors: dict[str, Any] = dict(sample.tensors)
    return Case.of(law, mesh=sample.mesh, **tensors, steps=sample.steps, sample=sample.origin or None, seed=seed or None)


def cases_of(law: str, samples: SearchStrategy[Sample]) -> SearchStrategy[Case]:
    """Cases of samples, with seeds."""
    return st.tuples(samples, st.integers(0, 3)).map(lambda drawn: case_of(law, *drawn))


def listed(law: str, samples: Sequence[Sample], limits: Limits) -> draws.Listed[Sample]:
    """The cases of those ``samples`` that have ranks enough."""
    return draws.Listed([sample for sample in samples if max(sample.mesh.ranks) < limits.world_size], lambda sample: case_of(law, sample))


def _forward(op: Op) -> Law:
    law = f"op.forward[{op.name}]"

    def check(case: Case, here: Here) -> None:
        check_program(case, here, exact=op.exact, unrefused=UNREFUSED[op.refuses])

    def narrow(case: Case) -> SearchStrategy[Case]:
        sample = Sample(case.mesh(), tuple((name, x.spec) for name, x in operands(case).items()), case.get("steps"))
        smaller = no_larger(op, sample)
        if smaller is None:
            return st.just(case)
        return st.tuples(smaller, st.integers(0, case.seed)).map(lambda drawn: case_of(law, *drawn))

    return Law(
        id=law,
        clause=f"{op.name} of sharded tensors has the value, shape and dtype that it has of the full tensors, under the placements "
        "that its result claims.",
        source=op.source or DTENSOR,
        check=check,
        control=case_of(law, plainest(op)).text,
        planted=planted(op),
        draw=lambda limits: cases_of(law, op_samples(op, world_size=limits.world_size, dtypes=limits.dtypes)),
        draws=LIGHT_DRAWS if op.light else DRAWS,
        sweep=lambda limits: draws.Listed(Sweep(op, limits.world_size), lambda sample: case_of(law, sample)),
        sweeps=min(LIGHT_SWEEPS if op.light else 2 * len(op.variants) + MORE_SWEEPS, MOST_SWEEPS),
        narrow=narrow,
        refusal="allowed",
        script=lambda case: script_of(case, exact=op.exact),
    )


@cache
def _carried_out() -> frozenset[str]:
    """The programs of the tables, which torch carries out from 2.13 on."""
    return frozenset(case_of("op.program", sample).text for sample in corner_samples())


def _program(case: Case, here: Here) -> None:
    listed = compat.torch_release() >= RULES_KNOWN_FROM and case.text in _carried_out()
    check_program(case, here, exact=False, unrefused=registered_everywhere if listed else None)


def _history(case: Case, here: Here) -> None:
    check_program(case, here, exact=False, every_step=True)


PROGRAM = Law(
    id="op.program",
    clause="A chain of ops gives what it gives on full tensors, also where a later op takes a result whose reduction is still pending.",
    source=DTENSOR,
    check=_program,
    control="op.program mesh=2 a=4x2:S(0):float32:small steps=x=sum(a,0);mul(x,2)",
    planted="pending_sums_kept",
    draw=lambda limits: cases_of("op.program", op_programs(world_size=limits.world_size)),
    draws=100,
    sweep=lambda limits: listed("op.program", corner_samples(), limits),
    sweeps=len(corner_samples()),
    weight=8.0,
    refusal="allowed",
    script=lambda case: script_of(case, exact=False),
)

HISTORY = Law(
    id="op.history",
    clause="An op gives the same result whatever it was called with before: scalars of another kind, other dims, dtypes and shapes.",
    source=DTENSOR,
    check=_history,
    control="op.history mesh=2 a=4x2:S(0):float32:positive steps=add(a,2);add(a,2.5)",
    planted="cache_ignores_arguments",
    draw=lambda limits: cases_of("op.history", op_histories(world_size=limits.world_size)),
    draws=70,
    sweep=lambda limits: listed("op.history", family_histories(), limits),
    sweeps=len(family_histories()),
    weight=5.0,
    refusal="allowed",
    script=lambda case: script_of(case, exact=False, every_step=True),
)

LAWS = [*map(_forward, OPS.values()), PROGRAM, HISTORY, *REFUSALS]
