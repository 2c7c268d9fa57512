"""Laws of what is no redistribution: every rank refuses it, and nothing has been touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.given import given
from conformance.laws.redistribute import DOC
from conformance.report.reproducer import Script
from reference.mesh import Mesh

if TYPE_CHECKING:
    from conformance.here import Here

# what is asked for, by mesh dims: (source, target); a target of "-" is none at all
ATTEMPTS = {
    "to-partial": ("R", "P(sum)"),
    "partial-to-other": ("P(sum)", "P(max)"),
    "shard-to-partial": ("S(0)", "P(sum)"),
    "strided-to-partial": ("_S(0,2)", "P(sum)"),
    "dim-out": ("R", "S(2)"),
    "dim-far-out": ("S(0)", "S(5)"),
    "dim-far-below": ("R", "S(-3)"),
    "none": ("R", "-"),
    "other-mesh": ("S(0)", "R"),
    "other-mesh-same": ("S(0)", "S(0)"),
}
REFUSAL_MESHES = ("2", "1x2", "2x1", "3", "2@0,2", "1x2@0,2", "2x2")


def sweep_refusals(limits: Limits) -> list[Case]:
    cases = []
    for attempt, (source, to) in ATTEMPTS.items():
        for mesh in map(Mesh.parse, REFUSAL_MESHES):
            rest = ",R" * (mesh.ndim - 1)
            other = Mesh(mesh.shape, mesh.ranks[::-1]) if attempt.startswith("other-mesh") else None
            asked = None if to == "-" else to + rest
            cases.append(Case.of("redistribute.refusals", mesh=mesh, mesh__b=other, x=f"5x4:{source}{rest}", to=asked, attempt=attempt))
    for mesh in map(Mesh.parse, REFUSAL_MESHES):
        cases.append(
            Case.of(
                "redistribute.refusals", mesh=mesh, x="5x4:" + ",".join(["R"] * mesh.ndim), to="S(0)" + ",R" * mesh.ndim, attempt="many"
            )
        )
        if mesh.ndim > 1:
            cases.append(Case.of("redistribute.refusals", mesh=mesh, x="5x4:R,R", to="S(0)", attempt="few"))
            cases.append(Case.of("redistribute.refusals", mesh=mesh, x="5x4:P(sum),R", to="P(sum),P(max)", attempt="mixed-partial"))
    return [case for case in cases if case.world <= limits.world_size]


def check_refusals(case: Case, here: Here) -> None:
    """What is no redistribution is refused on every rank, and what was to be redistributed is as it was."""
    x = given(case)
    live, elsewhere = x.dtensor(here), here.mesh(case.mesh("mesh.b")) if "mesh.b" in case else None
    if here.coord(x.layout.mesh) is None:
        return
    to = here.placements(case.placements("to")) if "to" in case else None
    here.refused(lambda: live.redistribute(elsewhere, to), case.get("attempt"), f"a redistribution to {case.get('to', 'nothing')}")
    here.same(live.to_local(), x.local(here.coord(x.layout.mesh)), "input", what="what was not redistributed")


def script_refusals(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    body += [f"other = {scripts.mesh(case.mesh('mesh.b'))}"] if "mesh.b" in case else []
    body += ["if mesh.get_coordinate() is None:", "    return None, None"] if x.layout.mesh.size < case.world else []
    to = scripts.placements(case.placements("to")) if "to" in case else None
    return scripts.refused(case, body, f"x.redistribute({'other' if 'mesh.b' in case else None}, {to})", constants=constants)


LAWS = (
    Law(
        id="redistribute.refusals",
        clause="A redistribution to new contributions, too few or many placements, a missing dim or another mesh is refused on every rank.",
        source=f"{DOC} and its notes",
        check=check_refusals,
        script=script_refusals,
        control="redistribute.refusals mesh=2 x=5x4:R to=P(sum) attempt=to-partial",
        planted="accepts_new_partial",
        sweep=sweep_refusals,
        sweeps=100,
        weight=0.4,
    ),
)
