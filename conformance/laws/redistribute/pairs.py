"""Laws over all pairs of placements, and of the number of collectives that a redistribution runs."""

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
from shardlaw.conformance.laws.redistribute.placements import (
    DOC,
    draw_moves,
    draw_moves_to_values,
    moving_law,
    under_target,
)
from shardlaw.conformance.laws.redistribute.views import OnViewsField
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import CallField
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Replicate, StridedShard, format_placements, shard_dim
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements
from shardlaw.strategies.redistributions import placement_pairs

# (mesh, shapes, step): every step-th pair of placements is tried
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
GOLDEN_RATIO = 0.6180339887498949


def _pair_cases(text: str, shape: str, step: int, strided: bool) -> Iterator[Case]:
    mesh, kinds = Mesh.parse(text), ("R", "S", "_S", "P") if strided else ("R", "S", "P")
    pairs = placement_pairs(mesh.ndim, 2, kinds=kinds)
    chosen = (pair for pair in pairs if strided == any(isinstance(p, StridedShard) for at in pair for p in at))
    for source, to in itertools.islice(chosen, 0, None, step):
        yield fields(mesh=mesh, x=f"{shape}:{format_placements(source)}", to=to)


def sweep_pairs(limits: Limits) -> list[Case]:
    """Every pair, in an order in which the first cases, however many, are spread evenly over all."""
    cases = [
        case
        for table, strided in ((PLAIN, False), (STRIDED, True))
        for mesh, mesh_shapes, step in table
        if max(Mesh.parse(mesh).ranks) < limits.world_size
        for shape in mesh_shapes
        for case in _pair_cases(mesh, shape, step, strided)
    ]
    return [case for _, case in sorted(enumerate(cases), key=lambda numbered: numbered[0] * GOLDEN_RATIO % 1)]


@law(
    "redistribute.idempotent",
    source=DOC,
    control="mesh=2x2 x=5x6:S(0),S(1) to=R,S(0)",
    draw=draw_moves(kinds=("R", "S", "_S"), permuted=False),
    draws=50,
    weight=0.5,
)
def idempotent(x: DTensor, to: Placements):
    """A second redistribution to the same placements runs no collective and changes nothing."""
    first = x.redistribute(placements=to)
    with compat.CommDebugMode() as traffic:
        second = first.redistribute(placements=to)
    unchanged = torch.equal(first.to_local(), second.to_local())
    return {"collectives": traffic.get_total_counts(), "again": second, "unchanged": unchanged}


@idempotent.due
def _(x: Global, to):
    return {"collectives": 0, "again": x.under(to), "unchanged": True}


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
    draw=draw_moves_to_values(extra={"given": st.sampled_from(sorted(SEQUENCES))}),
    draws=30,
    weight=0.3,
    refusal="allowed",
)
def sequences(x: DTensor, to: Placements, given: Annotated[Callable[..., Any], CallField("placements", SEQUENCES)]):
    """The placements of a redistribution may be a tuple, an iterator, a generator or a map."""
    return x.redistribute(placements=given(to))


sequences.due(under_target)

# the most collectives of a pair on a 2x2 mesh: (source, target, collectives)
MOST_COLLECTIVES = (
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


def most_collectives(source: Layout, to: Layout) -> int:
    """The most collectives of a redistribution: that of :data:`MOST_COLLECTIVES`, or one for each mesh dim of several
    ranks that does not replicate, unless it keeps its placement and no other mesh dim shards the same tensor dim."""
    known = {(before, after): count for before, after, count in MOST_COLLECTIVES}
    pair = format_placements(source.placements), format_placements(to.placements)
    if pair in known and source.mesh == Mesh.of(2, 2):
        return known[pair]
    count = 0
    for at, (before, after) in enumerate(zip(source.placements, to.placements, strict=True)):
        if isinstance(before, Replicate) or source.mesh.shape[at] == 1:
            continue
        others = [p for layout in (source, to) for other, p in enumerate(layout.placements) if other != at]
        is_only_shard = shard_dim(before) not in map(shard_dim, others)
        count += not (before == after and (isinstance(before, Partial) or is_only_shard))
    return count


@st.composite
def draw_quiet(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes(min_dims=1))
    free = draw(placements(mesh, len(shape), kinds=("R", "S", "P")))
    source = tuple(p if size == 1 else Replicate() for p, size in zip(free, mesh.shape, strict=True))
    to = draw(placements(mesh, len(shape), kinds=("R", "S", "_S")))
    return fields(mesh=mesh, x=TensorSpec(shape, source), to=to, seed=draw(draws.seeds()))


def count_collectives(x: DTensor, to: Placements):
    with compat.CommDebugMode() as traffic:
        moved = x.redistribute(placements=to)
    return {"collectives": traffic.get_total_counts(), "local": moved}


def count_due(x: Global, to):
    moved = x.under(to)
    return {"collectives": AtMost(most_collectives(x.layout, moved.layout)), "local": moved}


def counting_law(id: str, clause: str, **record: Any) -> Law:
    """A law of the most collectives that a redistribution runs."""
    made = law(id, clause=clause, **record)(count_collectives)
    made.due(count_due)
    return made


MERGED = (
    "mesh=2x2 x=8x4:S(0),S(0) to=R,R flatten=a,b",
    "mesh=2x2 x=5x4:P(sum),P(sum) to=R,R flatten=a,b",
    "mesh=2x2 x=5x4:P(max),P(max) to=R,R flatten=a,b",
    "mesh=2x2 x=4x4:P(avg),P(sum) to=R,R flatten=a,b",
    "mesh=2x2 x=4x6:P(sum),P(sum) to=S(0),S(0) flatten=a,b",
    "mesh=1x2x2 x=8x4:R,S(0),S(0) to=R,R,R flatten=b,c",
    "mesh=2x2x1 x=4x4:P(sum),P(sum),R to=R,R,R flatten=a,b",
    "mesh=2x2 x=4x8:S(1),S(1) to=R,R flatten=a,b",
)


@law(
    "redistribute.merged-counts",
    source="torch.distributed.tensor._redistribute, docstring of _optimize_transform_infos",
    control=MERGED[0],
    cases=MERGED,
    needs=("subgroups",),
    tier="extended",
)
def merged_counts(x: Annotated[DTensor, OnViewsField()], to: Placements):
    """A gather of one tensor dim, or a reduction, over several mesh dims runs one collective if these are flattened."""
    return count_collectives(x, to)


@merged_counts.due
def _(x: Global, to):
    return {"collectives": AtMost(1), "local": x.under(to)}


LAWS = (
    moving_law(
        "redistribute.pairs",
        "A redistribution between any placements, on meshes of one to three dims, gives each rank its slice.",
        control="mesh=2x2 x=5x3:S(0),P(sum) to=S(1),S(0)",
        sweep=sweep_pairs,
        sweeps=210,
        narrow=draws.with_smaller_tensor,
        weight=1.6,
    ),
    counting_law(
        "redistribute.counts",
        "A redistribution runs at most one collective for each mesh dim that does not replicate.",
        source=f"{DOC}, the list of operations on one mesh dim",
        control="mesh=2x2 x=5x3:S(0),S(1) to=S(1),S(0)",
        draw=draw_moves_to_values(dims=(2, 3)),
        sweep=texts(
            *(f"mesh=2x2 x={shape}:{move[0]} to={move[1]}" for shape in ("5x3", "4x4") for move in MOST_COLLECTIVES)
        ),
        sweeps=26,
        draws=45,
        weight=0.6,
        tier="extended",
    ),
    counting_law(
        "redistribute.quiet",
        "Replicate to Shard, and any change of placement on a mesh dim of one rank, runs no collective.",
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
        "On a 1-D mesh a redistribution runs at most the one collective that is documented for its two placements.",
        source=f"{DOC}, the list of operations on one mesh dim",
        control="mesh=2 x=5x6:P(sum) to=S(0)",
        draw=draw_moves_to_values(dims=(1,)),
        draws=60,
        sweep=draws.permuted_mesh_cases("S(0)", dims=1, to="S(1)"),
        sweeps=2,
        weight=0.5,
        tier="extended",
    ),
)
