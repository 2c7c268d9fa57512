"""Laws over all pairs of placements: where each ends, what it may communicate, and that it settles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import AtMost, Global
from shardlaw.conformance.law.fields import Placements
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.redistribute.placements import DOC, moving, moving_law, to_elements, under_target
from shardlaw.conformance.laws.redistribute.views import OnViews
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import CallField
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Replicate, StridedShard, format_placements, shard_dim
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements
from shardlaw.strategies.redistributions import placement_pairs

# meshes, the shapes that are put on them, and of how many pairs of placements one is kept: (mesh, shapes, one in)
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


def _cases(text: str, shape: str, one_in: int, strided: bool) -> Iterator[Case]:
    mesh, kinds = Mesh.parse(text), ("R", "S", "_S", "P") if strided else ("R", "S", "P")
    pairs = placement_pairs(mesh.ndim, 2, kinds=kinds)
    wanted = (pair for pair in pairs if strided == any(isinstance(p, StridedShard) for at in pair for p in at))
    for source, to in itertools.islice(wanted, 0, None, one_in):
        yield fields(mesh=mesh, x=f"{shape}:{format_placements(source)}", to=to)


def sweep_pairs(limits: Limits) -> list[Case]:
    """Every pair, in an order in which each beginning of the list is an even sample of the whole."""
    cases = [
        case
        for table, strided in ((PLAIN, False), (STRIDED, True))
        for mesh, extents, one_in in table
        if max(Mesh.parse(mesh).ranks) < limits.world_size
        for shape in extents
        for case in _cases(mesh, shape, one_in, strided)
    ]
    return [case for _, case in sorted(enumerate(cases), key=lambda numbered: numbered[0] * STEP % 1)]


@law(
    "redistribute.idempotent",
    source=DOC,
    control="mesh=2x2 x=5x6:S(0),S(1) to=R,S(0)",
    draw=moving(kinds=("R", "S", "_S"), tables=False),
    draws=50,
    weight=0.5,
)
def idempotent(x: DTensor, to: Placements):
    """What was redistributed and is asked for the same placements again moves nothing and stays what it is."""
    first = x.redistribute(placements=to)
    with compat.CommDebugMode() as traffic:
        second = first.redistribute(placements=to)
    unchanged = torch.equal(first.to_local(), second.to_local())
    return {"collectives": traffic.get_total_counts(), "again": second, "unchanged": unchanged}


@idempotent.due
def _(x: Global, to):
    return {"collectives": 0, "again": x.under(to), "unchanged": True}


# what a sequence of placements may be
SEQUENCES = {
    "tuple": "tuple(placements)",
    "iterator": "iter(placements)",
    "generator": "(placement for placement in placements)",
    "lazy": "map(lambda placement: placement, placements)",
}


@law(
    "redistribute.sequences",
    source=f"{DOC} (placements: a sequence)",
    control="mesh=2 x=5x6:S(0) to=S(1) given=generator",
    draw=to_elements(extra={"given": st.sampled_from(sorted(SEQUENCES))}),
    draws=30,
    weight=0.3,
    refusal="allowed",
)
def sequences(x: DTensor, to: Placements, given: Annotated[Callable[..., Any], CallField("placements", SEQUENCES)]):
    """The placements of a redistribution are a sequence of any kind: a tuple, an iterator, a generator."""
    return x.redistribute(placements=given(to))


sequences.due(under_target)

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


def due_collectives(source: Layout, to: Layout) -> int:
    """At most so many collectives: one for each mesh dim of several ranks that does not replicate, fewer where the pair
    has a count of its own; none for a mesh dim that keeps its placement while no other shards the same tensor dim."""
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


@st.composite
def draw_quiet(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes(min_dims=1))
    free = draw(placements(mesh, len(shape), kinds=("R", "S", "P")))
    source = tuple(p if size == 1 else Replicate() for p, size in zip(free, mesh.shape, strict=True))
    to = draw(placements(mesh, len(shape), kinds=("R", "S", "_S")))
    return fields(mesh=mesh, x=TensorSpec(shape, source), to=to, seed=draw(draws.seeds()))


def counted(x: DTensor, to: Placements):
    with compat.CommDebugMode() as traffic:
        moved = x.redistribute(placements=to)
    return {"collectives": traffic.get_total_counts(), "local": moved}


def at_most(x: Global, to):
    goal = x.under(to)
    return {"collectives": AtMost(due_collectives(x.layout, goal.layout)), "local": goal}


def counting_law(id: str, clause: str, **record: Any) -> Law:
    """A law of how many collectives a redistribution takes at most."""
    of = law(id, clause=clause, **record)(counted)
    of.due(at_most)
    return of


MERGED = (
    "mesh=2x2 x=8x4:S(0),S(0) to=R,R flatten=a,b",
    "mesh=2x2 x=5x4:P(sum),P(sum) to=R,R flatten=a,b",
    "mesh=2x2 x=5x4:P(max),P(max) to=R,R flatten=a,b",
    "mesh=2x2 x=4x4:P(avg),P(sum) to=R,R flatten=a,b",
    "mesh=2x2 x=4x6:P(sum),P(sum) to=S(0),S(0) flatten=a,b",
    "mesh=1x2x2 x=8x4:R,S(0),S(0) to=R,R,R flatten=b,c",
    "mesh=2x2x1 x=4x4:P(sum),P(sum),R to=R,R,R flatten=a,b",
)


@law(
    "redistribute.merged-counts",
    source="torch.distributed.tensor._redistribute, docstring of _optimize_transform_infos",
    control=MERGED[0],
    sweep=texts(*MERGED),
    sweeps=len(MERGED),
    needs=("subgroups",),
    tier="extended",
)
def merged_counted(x: Annotated[DTensor, OnViews()], to: Placements):
    """Shards of one tensor dim and reductions over several mesh dims take one collective where these are flattened."""
    return counted(x, to)


@merged_counted.due
def _(x: Global, to):
    return {"collectives": AtMost(1), "local": x.under(to)}


LAWS = (
    moving_law(
        "redistribute.pairs",
        "From every placement to every other, on meshes of one, two and three dims, each rank ends with its slice.",
        control="mesh=2x2 x=5x3:S(0),P(sum) to=S(1),S(0)",
        sweep=sweep_pairs,
        sweeps=210,
        narrow=draws.with_smaller_tensor,
        weight=1.6,
    ),
    counting_law(
        "redistribute.counts",
        "A redistribution takes at most one collective for each mesh dim that does not replicate.",
        source=f"{DOC}, the list of operations on one mesh dim",
        control="mesh=2x2 x=5x3:S(0),S(1) to=S(1),S(0)",
        draw=to_elements(dims=(2, 3)),
        sweep=texts(*(f"mesh=2x2 x={shape}:{move[0]} to={move[1]}" for shape in ("5x3", "4x4") for move in DECLARED)),
        sweeps=26,
        draws=45,
        weight=0.6,
        tier="extended",
    ),
    counting_law(
        "redistribute.quiet",
        "Replicas are cut into shards, and mesh dims of one rank change their placement, without any collective.",
        source=f"{DOC}: Replicate to Shard is local chunking",
        control="mesh=2x2 x=5x6:R,R to=S(0),S(0)",
        draw=draw_quiet,
        draws=80,
        sweep=draws.permuted_mesh_cases("R", to="S(0)"),
        sweeps=3,
        weight=0.5,
    ),
    counting_law(
        "redistribute.budget",
        "On a 1-D mesh a redistribution is the one collective that is documented for its two placements, or none.",
        source=f"{DOC}, the list of operations on one mesh dim",
        control="mesh=2 x=5x6:P(sum) to=S(0)",
        draw=to_elements(dims=(1,)),
        draws=60,
        sweep=draws.permuted_mesh_cases("S(0)", dims=1, to="S(1)"),
        sweeps=2,
        weight=0.5,
        tier="extended",
    ),
)
