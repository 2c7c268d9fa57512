"""Laws of what is no redistribution: every rank refuses it, and nothing has been touched."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor, distribute_tensor

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.laws.redistribute.placements import DOC
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.placement import REDUCE_OPS, Partial, Placements, Replicate, Shard
from reference.tensors import scatter_bits

if TYPE_CHECKING:
    import torch

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
    "partial-to-average": ("P(sum)", "P(avg)"),
    "strided-dim-out": ("S(0)", "_S(2,2)"),
    "strided-dim-below": ("R", "_S(-3,2)"),
    "none-inside": ("R", "-"),
    "text-inside": ("S(0)", "-"),
    "number-inside": ("S(1)", "-"),
    "no-placements": ("S(0)", "-"),
    "other-mesh": ("S(0)", "R"),
    "other-mesh-same": ("S(0)", "S(0)"),
}
# targets that are no placements, and how a script writes them
ODD = {"none": None, "none-inside": [None], "text-inside": ["S(0)"], "number-inside": [0], "no-placements": []}
NEW_PARTIALS = (("P(sum),R", "R,P(sum)"), ("S(0),P(sum)", "P(sum),P(sum)"), ("P(max),S(1)", "P(max),P(max)"), ("R,S(0)", "R,P(sum)"))
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
    for mesh in map(Mesh.parse, ("3", "4", "1x2")):  # some ranks hold nothing of it
        rest = ",R" * (mesh.ndim - 1)
        cases.append(Case.of("redistribute.refusals", mesh=mesh, x=f"1x4:S(0){rest}", to=f"S(2){rest}", attempt="dim-out"))
        cases.append(Case.of("redistribute.refusals", mesh=mesh, x=f"1x4:S(0){rest}", to=f"P(sum){rest}", attempt="shard-to-partial"))
        cases.append(Case.of("redistribute.refusals", mesh=mesh, x=f"():R{rest}", to=f"S(0){rest}", attempt="shard-of-0-d"))
    for source, to in (
        ("P(sum),R", "R,P(sum)"),
        ("S(0),P(sum)", "P(sum),P(sum)"),
        ("P(max),S(1)", "P(max),P(max)"),
        ("R,S(0)", "R,P(sum)"),
    ):
        for text in ("2x2", "1x2", "2x1"):
            cases.append(Case.of("redistribute.refusals", mesh=text, x=f"5x4:{source}", to=to, attempt="new-partial"))
    for text, name in (("2", "1x2"), ("2x2", "4"), ("2", "2@0,2"), ("3", "2")):
        ends = ["R", "R,R"] if text == "2x2" else ["S(0)", "S(0),R"]
        to = ends[Mesh.parse(name).ndim - 1]
        source = ends[Mesh.parse(text).ndim - 1]
        cases.append(Case.of("redistribute.refusals", mesh=text, mesh__b=name, x=f"5x4:{source}", to=to, attempt="another-mesh"))
    return [case for case in cases if case.world <= limits.world_size]


def features_refusals(case: Case) -> set[str]:
    return {"few-placements"} if case.get("attempt") == "no-placements" else set()


def granted(case: Case) -> bool:
    """Whether the installed torch documents the move: from 2.14 on a shard may become a contribution to a sum."""
    if case.get("attempt") not in ("shard-to-partial", "new-partial") or compat.torch_release() < (2, 14):
        return False
    moves = zip(case.tensor("x").placements or (), case.placements("to"), strict=True)
    return all(one == other or (isinstance(one, Shard) and other == Partial("sum")) for one, other in moves)


def check_refusals(case: Case, here: Here) -> None:
    """What is no redistribution is refused on every rank, what was to be redistributed is as it was, and the world goes on."""
    x = given(case)
    live, elsewhere = x.dtensor(here), here.mesh(case.mesh("mesh.b")) if "mesh.b" in case else None
    if here.coord(x.layout.mesh) is None:
        return
    to: Any = here.placements(case.placements("to")) if "to" in case else ODD[case.get("attempt")]
    if granted(case):
        here.same_dtensor(live.redistribute(elsewhere, to), x.full, "granted", placements=case.placements("to"))
        return
    here.refused(lambda: live.redistribute(elsewhere, to), case.get("attempt"), f"a redistribution to {case.get('to', 'nothing')}")
    here.same(live.to_local(), x.local(here.coord(x.layout.mesh)), "input", what="what was not redistributed")
    shards = (Shard(0) if x.full.ndim else Replicate(), *draws.replicated(x.layout)[1:])
    here.same(here.dtensor(x.full, x.layout.replace(shards)).full_tensor(), x.full, "afterwards", what="what is gathered afterwards")


def script_refusals(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    body += [f"other = {scripts.mesh(case.mesh('mesh.b'))}"] if "mesh.b" in case else []
    body += ["if mesh.get_coordinate() is None:", "    return None, None"] if x.layout.mesh.size < case.world else []
    to = scripts.placements(case.placements("to")) if "to" in case else ODD[case.get("attempt")]
    if granted(case):
        return scripts.holds(
            case, body, f"x.redistribute(None, {to})", x.full, x.layout.replace(case.placements("to")), constants=constants
        )
    return scripts.refused(case, body, f"x.redistribute({'other' if 'mesh.b' in case else None}, {to})", constants=constants)


MIXED_MESHES = ("1x2", "2x1", "2x2", "1x2x2", "2x1x2")


def sweep_mixed(limits: Limits) -> list[Case]:
    """Every two reductions on two mesh dims, neighbours or not; sums stand beside averages."""
    cases = []
    ways = itertools.product(itertools.permutations(REDUCE_OPS, 2), MIXED_MESHES)
    for number, (ops, text) in enumerate(ways):
        mesh = Mesh.parse(text)
        between = ["R"] if mesh.ndim > 2 and number % 2 else []
        at = [f"P({ops[0]})", *between, f"P({ops[1]})"]
        at += ["S(0)"] * (mesh.ndim - len(at))
        dtype = "int64" if {"band", "bor", "bxor"} & set(ops) else "float32"
        x = f"5x4:{','.join(at)}:{dtype}".removesuffix(":float32")
        cases.append(Case.of("redistribute.mixed-refusals", mesh=mesh, x=x, how=("from_local", "distribute")[number % 3 == 0]))
    usable = [case for case in cases if case.world <= limits.world_size and {"sum", "avg"} != _ops(case)]
    return sorted(usable, key=lambda case: scatter_bits(0, cases.index(case)))


def _ops(case: Case) -> set[str]:
    return {p.op for p in case.tensor("x").placements or () if isinstance(p, Partial)}


def _attempt(case: Case) -> tuple[torch.Tensor, Placements]:
    spec = case.tensor("x")
    return spec.build(case.seed), spec.placements or ()


def check_mixed(case: Case, here: Here) -> None:
    """One tensor has one reduction pending, or sums and averages; any other two are refused by ``ValueError`` before anything is sent."""
    full, at = _attempt(case)
    live, wanted = here.mesh(case.mesh()), here.placements(at)
    with compat.name("CommDebugMode")() as traffic:
        if case.get("how") == "from_local":
            here.refused(lambda: DTensor.from_local(here.tensor(full), live, wanted), "mixed", "mixed reductions", errors=(ValueError,))
        else:
            here.refused(lambda: distribute_tensor(here.tensor(full), live, wanted), "mixed", "mixed reductions", errors=(ValueError,))
    sent = dict(traffic.get_comm_counts())
    here.require(not traffic.get_total_counts(), "wrong-value", "traffic", "collectives before the refusal", 0, sent)


def script_mixed(case: Case) -> Script:
    full, at = _attempt(case)
    made = "DTensor.from_local" if case.get("how") == "from_local" else "distribute_tensor"
    body = [f"mesh = {scripts.mesh(case.mesh())}", f"x = {scripts.tensor(full)}"]
    return scripts.refused(case, body, f"{made}(x, mesh, {scripts.placements(at)})", errors="ValueError")


LAWS = (
    Law(
        id="redistribute.refusals",
        clause="A redistribution to new contributions, too few or many placements, a missing dim or another mesh is refused on every rank.",
        source=f"{DOC} and its notes",
        check=check_refusals,
        script=script_refusals,
        features=features_refusals,
        control="redistribute.refusals mesh=2 x=5x4:R to=P(sum) attempt=to-partial",
        planted="accepts_new_partial",
        sweep=sweep_refusals,
        sweeps=180,
        weight=0.4,
    ),
    Law(
        id="redistribute.mixed-refusals",
        clause="Two different pending reductions on one tensor, other than sums and averages, are refused by ValueError on every rank.",
        source="torch.distributed.tensor docs, DTensor.from_local, Raises; README of the package, placement restrictions",
        check=check_mixed,
        script=script_mixed,
        control="redistribute.mixed-refusals mesh=1x2 x=5x4:P(sum),P(max) how=from_local",
        planted="mixed_partials_accepted",
        sweep=sweep_mixed,
        sweeps=70,
        weight=0.2,
    ),
)
