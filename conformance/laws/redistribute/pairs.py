"""Laws over all pairs of placements: where each ends, what it may communicate, and that it settles."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given, target
from conformance.laws.redistribute.placements import DOC, check_local, judged, moving, script_local, script_traffic
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import Partial, Placement, Replicate, StridedShard, format_placements, shard_dim
from strategies.redistributions import placement_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

# meshes by their number of dims, the shapes that are put on them, and of how many pairs one is kept: (mesh, shapes, one in)
PLAIN = (
    ("2", ("5x3", "4x4", "1x2"), 1),
    ("3", ("5x3", "7x4", "2x1", "0x3"), 1),
    ("4", ("5x3",), 1),
    ("2x2", ("5x3", "4x4", "3x7"), 1),
    ("1x2", ("5x3",), 3),
    ("2x1", ("3x5",), 3),
    ("2x1x2", ("5x3",), 12),
    ("1x2x2", ("3x5",), 12),
    ("2x2x1", ("6x4",), 12),
    ("2x3", ("7x4", "6x6"), 2),
    ("3x2", ("5x7",), 2),
    ("2x2x2", ("9x5",), 5),
    ("6", ("7x4",), 1),
    ("8", ("5x9",), 1),
    ("2x2@0,2,1,3", ("5x3",), 4),
    ("2@0,2", ("5x3",), 2),
    ("1x2@1,3", ("3x5",), 12),
)
STRIDED = (("2", ("5x3", "4x6", "12x1"), 1), ("3", ("7x3",), 1), ("2x2", ("8x5",), 7), ("1x2", ("5x3",), 24))
STEP = 0.6180339887498949


def _cases(mesh_text: str, shape: str, one_in: int, strided: bool) -> Iterator[Case]:
    mesh = Mesh.parse(mesh_text)
    kinds = ("R", "S", "_S", "P") if strided else ("R", "S", "P")
    wanted = (pair for pair in placement_pairs(mesh.ndim, 2, kinds=kinds) if strided == _is_strided(*pair))
    for source, to in itertools.islice(wanted, 0, None, one_in):
        yield Case.of("redistribute.pairs", mesh=mesh, x=f"{shape}:{format_placements(source)}", to=to)


def _is_strided(*placements: Sequence[Placement]) -> bool:
    return any(isinstance(placement, StridedShard) for placed in placements for placement in placed)


def sweep_pairs(limits: Limits) -> list[Case]:
    """Every pair, in an order in which each beginning of the list is an even sample of the whole."""
    cases = [
        case
        for table, strided in ((PLAIN, False), (STRIDED, True))
        for mesh, shapes, one_in in table
        if max(Mesh.parse(mesh).ranks) < limits.world_size
        for shape in shapes
        for case in _cases(mesh, shape, one_in, strided)
    ]
    return [case for _, case in sorted(enumerate(cases), key=lambda numbered: numbered[0] * STEP % 1)]


def draw_idempotent(limits: Limits) -> SearchStrategy[Case]:
    return moving("redistribute.idempotent", plain=("R", "S"), tables=False, one_in=9)(limits)


def check_idempotent(case: Case, here: Here) -> None:
    """What has been redistributed is where it was to go: asked again for the same, it moves nothing and stays what it is."""
    x = given(case)
    to = target(case, x)
    wanted = here.placements(to.placements)
    first = x.dtensor(here).redistribute(placements=wanted)
    before = first.to_local()
    with compat.name("CommDebugMode")() as traffic:
        second = first.redistribute(placements=wanted)
    here.require(traffic.get_total_counts() == 0, "wrong-value", "traffic", "collectives for nothing", 0, dict(traffic.get_comm_counts()))
    judged(here, second, x, to.placements, "again")
    here.same(second.to_local(), before, "same", what="what was redistributed twice")


def script_idempotent(case: Case) -> Script:
    x = given(case)
    to = target(case, x)
    constants, body = scripts.source(x, case.world)
    at = scripts.placements(to.placements)
    body += [f"y = x.redistribute(placements={at})", "with CommDebugMode() as traffic:", f"    y = y.redistribute(placements={at})"]
    body += ["if rank not in WANT:", "    return None, None"] if x.layout.mesh.size < case.world else []
    want = scripts.tensors("WANT", {rank: x.local_of(to, rank) for rank in sorted(x.layout.mesh.ranks)})
    lines = [*body, "return (0, WANT[rank]), (traffic.get_total_counts(), y.to_local())"]
    return scripts.script(lines, world=case.world, constants=[*constants, *want])


# what a sequence of placements may be
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "iterator": iter,
    "generator": lambda placed: (placement for placement in placed),
    "lazy": itertools.chain,
}
SEQUENCE_TEXTS = {"tuple": "tuple({})", "iterator": "iter({})", "generator": "(p for p in {})", "lazy": "map(lambda p: p, {})"}


def draw_sequences(limits: Limits) -> SearchStrategy[Case]:
    def given_as(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"given": draw(st.sampled_from(sorted(SEQUENCES)))}

    on = draws.meshes(limits, tables=False)
    return draws.moved("redistribute.sequences", limits, on=on, kinds=("R", "S", "P"), targets=("R", "S"), extra=given_as)


def check_sequences(case: Case, here: Here) -> None:
    """Placements are a sequence of any kind: what is given once and read twice must not be lost on the way."""
    x = given(case)
    to = target(case, x)
    placed = SEQUENCES[case.get("given")](here.placements(to.placements))
    judged(here, x.dtensor(here).redistribute(placements=placed), x, to.placements, "local")


def script_sequences(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    placed = SEQUENCE_TEXTS[case.get("given")].format(scripts.placements(case.placements("to")))
    return scripts.holds(case, body, f"x.redistribute(placements={placed})", x.full, target(case, x), constants=constants)


def draw_counts(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, dims=(2, 3), tables=False)
    return draws.moved("redistribute.counts", limits, on=on, kinds=("R", "S", "P"), targets=("R", "S"))


# on a 2x2 mesh, what each pair takes at most: (source, target, collectives)
DECLARED = (
    ("S(0),S(0)", "R,R", 2),
    ("S(0),S(0)", "R,S(0)", 2),
    ("S(0),S(0)", "S(0),R", 1),
    ("S(0),S(1)", "S(1),S(0)", 2),
    ("P(sum),P(sum)", "R,R", 2),
    ("P(sum),P(sum)", "S(0),S(0)", 2),
    ("P(sum),S(0)", "S(0),S(0)", 2),
    ("P(sum),P(sum)", "S(0),R", 2),
    ("R,R", "S(0),S(0)", 0),
    ("R,S(0)", "S(1),S(0)", 0),
    ("S(0),R", "S(0),S(1)", 0),
    ("P(sum),R", "R,R", 1),
    ("R,P(sum)", "R,S(1)", 1),
)


def sweep_counts(limits: Limits) -> list[Case]:
    cases = [
        Case.of("redistribute.counts", mesh="2x2", x=f"{shape}:{source}", to=to) for shape in ("5x3", "4x4") for source, to, _ in DECLARED
    ]
    return [case for case in cases if case.world <= limits.world_size]


def due_collectives(source: Layout, to: Layout) -> int:
    """At most so many collectives: one for each mesh dim of several ranks that does not replicate, fewer where the pair has a count of
    its own; none for a mesh dim that keeps its placement while no other mesh dim shards the same tensor dim."""
    declared = {(before, after): count for before, after, count in DECLARED}
    pair = format_placements(source.placements), format_placements(to.placements)
    if pair in declared and source.mesh == Mesh.of(2, 2):
        return declared[pair]
    due = 0
    for at, (before, after) in enumerate(zip(source.placements, to.placements, strict=True)):
        if isinstance(before, Replicate) or source.mesh.shape[at] == 1:
            continue
        others = [p for layout in (source, to) for other, p in enumerate(layout.placements) if other != at]
        alone = shard_dim(before) not in map(shard_dim, others)
        due += not (before == after and (isinstance(before, Partial) or alone))
    return due


def check_counts(case: Case, here: Here) -> None:
    """On a mesh of several dims each of them costs one collective at most."""
    x = given(case)
    to = target(case, x)
    live = x.dtensor(here)
    with compat.name("CommDebugMode")() as traffic:
        got = live.redistribute(placements=here.placements(to.placements))
    due = due_collectives(x.layout, to)
    counts = {str(op): count for op, count in traffic.get_comm_counts().items()}
    here.require(traffic.get_total_counts() <= due, "wrong-value", "traffic", "more collectives than mesh dims that change", due, counts)
    judged(here, got, x, to.placements, "local")


def script_counts(case: Case) -> Script:
    x = given(case)
    return script_traffic(case, due_collectives(x.layout, target(case, x)))


LAWS = (
    Law(
        id="redistribute.pairs",
        clause="From every placement to every other, on meshes of one, two and three dims, each rank ends with its slice.",
        source=DOC,
        check=check_local,
        script=script_local,
        control="redistribute.pairs mesh=2x2 x=5x3:S(0),P(sum) to=S(1),S(0)",
        planted="shard_to_shard_swaps_dims",
        sweep=sweep_pairs,
        sweeps=210,
        narrow=draws.narrowed,
        weight=1.6,
    ),
    Law(
        id="redistribute.idempotent",
        clause="What was redistributed and is asked for the same placements again moves nothing and stays what it is.",
        source=DOC,
        check=check_idempotent,
        script=script_idempotent,
        control="redistribute.idempotent mesh=2x2 x=5x6:S(0),S(1) to=R,S(0)",
        planted="settled_placements_communicate",
        draw=draw_idempotent,
        draws=50,
        weight=0.5,
    ),
    Law(
        id="redistribute.sequences",
        clause="The placements of a redistribution are a sequence of any kind: a tuple, an iterator, a generator.",
        source=f"{DOC} (placements: a sequence)",
        check=check_sequences,
        script=script_sequences,
        control="redistribute.sequences mesh=2 x=5x6:S(0) to=S(1) given=generator",
        planted="placements_are_read_once_too_often",
        draw=draw_sequences,
        draws=30,
        weight=0.3,
        refusal="allowed",
    ),
    Law(
        id="redistribute.counts",
        clause="On a mesh of several dims a redistribution takes one collective at most for each mesh dim that does not replicate.",
        source=f"{DOC}, the list of operations on one mesh dim",
        check=check_counts,
        script=script_counts,
        control="redistribute.counts mesh=2x2 x=5x3:S(0),S(1) to=S(1),S(0)",
        planted="gathers_twice",
        draw=draw_counts,
        sweep=sweep_counts,
        sweeps=26,
        draws=45,
        weight=0.6,
        tier="extended",
    ),
)
