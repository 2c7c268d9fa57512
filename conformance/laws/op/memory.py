"""Where results lie: in the tensor that is given for them, and, for views, in the memory of what they look at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from conformance.case import Case
from conformance.law import Law
from conformance.laws import scripts
from conformance.laws.op.check import check_program, plans_of_its_own
from conformance.laws.op.forward import case_of, cases_of
from conformance.laws.op.scripts import script_of
from reference.mesh import Mesh
from reference.placement import Replicate
from strategies.op_outs import OUTS, alias_samples, out_samples
from strategies.ops import Op

if TYPE_CHECKING:
    from conformance.here import Here
    from conformance.report.reproducer import Script


def _out(op: Op) -> Law:
    law = f"op.out[{op.name}]"

    def check(case: Case, here: Here) -> None:
        with plans_of_its_own():  # a plan for one placement of the tensor that takes the result in is used for others
            check_program(case, here, exact=op.exact)

    return Law(
        id=law,
        clause=f"A tensor that is given for the result of {op.name} holds it afterwards, where it was placed before, or is refused.",
        source="torch.distributed.tensor docs, DTensor: operators on sharded tensors follow the semantics of torch.Tensor, out= included",
        check=check,
        control=_control(op, law),
        planted="given_tensors_not_written",
        draw=lambda limits: cases_of(law, out_samples(op, world_size=limits.world_size)),
        draws=3,
        refusal="allowed",
        script=lambda case: _out_script(case, exact=op.exact),
    )


def _out_script(case: Case, *, exact: bool) -> Script:
    """As :func:`script_of`, with the placements of the tensors that take results in."""
    made, returned = script_of(case, exact=exact), "return expected, "
    (stage,) = made.stages
    *body, last = stage.body
    if not last.startswith(returned):
        return made
    taking = [name for name in ("o", "p") if case.get(name, "")]
    kept = ", ".join(scripts.placements(case.tensor(name).placements or ()) for name in taking)
    seen = ", ".join(f"list({name}.placements)" for name in taking)
    body.append(f"return [expected, {kept}], [{last.removeprefix(returned)}, {seen}]")
    return replace(scripts.script(body, world=stage.world, constants=made.constants), tolerance=made.tolerance)


def _control(op: Op, law: str) -> str:
    """All on the mesh ``2``, replicated."""
    variant = op.variants[0]
    sizes = variant.fits(dict.fromkeys(variant.symbols, 3))
    sample = variant.sample(Mesh.parse("2"), sizes, {arg.name: (Replicate(),) for arg in variant.args}, "float32")
    return case_of(law, sample).text


def _alias(case: Case, here: Here) -> None:
    check_program(case, here, exact=True)


ALIAS = Law(
    id="op.alias",
    clause="What is written to a tensor is seen in a view of it, and the other way round, wherever plain ones share memory.",
    source="torch.distributed.tensor docs, DTensor: operators on sharded tensors follow the semantics of torch.Tensor; "
    "torch docs, Tensor Views: a view shares its data with its base",
    check=_alias,
    control="op.alias mesh=2 a=4x2:S(0) steps=v=t(a);a.add_(1);v",
    planted="views_are_copies",
    draw=lambda limits: cases_of("op.alias", alias_samples(world_size=limits.world_size)),
    draws=40,
    refusal="allowed",
    script=lambda case: script_of(case, exact=True),
)

LAWS = [*map(_out, OUTS), ALIAS]
