"""Laws on sharding specs alone: the boxes that they name for a shape, and the boxes that they refuse. One process asks for all ranks."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.here import Here
from conformance.law import Limits
from conformance.laws.plan.torch import need
from conformance.laws.sharded_tensor import given as g
from conformance.laws.sharded_tensor import scripts
from conformance.laws.sharded_tensor.draws import law_of
from conformance.report.reproducer import Script, Stage
from reference.box import intersect
from reference.notation import format_shape
from reference.sharded_tensor import ChunkSpec, EnumerableSpec, parse_spec
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.shard_specs import chunk_specs
from strategies.tilings import damaged, tilings

RANKS = 4
LONG = (11, 17, 31, 64, 97, 1000, 1023, 4096, 1000003)


def properties(here: Here) -> Any:
    """What metadata says of a plain float32 tensor."""
    (made,) = need(here, "TensorProperties")
    return made(dtype=torch.float32, layout=torch.strided, requires_grad=False, memory_format=torch.contiguous_format, pin_memory=False)


def check_chunks(case: Case, here: Here) -> None:
    """The shards of a chunk spec are the chunks of the dim, in order, one for each placement."""
    shape, spec = case.tensor("x").shape, g.spec_of(case)
    found = g.to_torch(here, spec).build_metadata(torch.Size(shape), properties(here))
    told, due = ([(box.offset if box.volume else None, box.size, rank) for box, rank in parts] for parts in
                 (g.read_parts(found), spec.parts(shape)))  # fmt: skip
    here.require(told == due, "wrong-metadata", "shards", "the shards are not the chunks of the dim, in order", due, told)
    here.require(tuple(found.size) == shape, "wrong-metadata", "size", "the metadata names another shape", shape, tuple(found.size))


def chunks_script(case: Case) -> Script:
    spec, shape = g.spec_of(case), case.tensor("x").shape
    due = [(*box.size, rank) for box, rank in spec.parts(shape)]
    lines = [
        f"found = {scripts.spec(spec)}.build_metadata(torch.Size({shape}), None).shards_metadata",
        f"return {due}, [(*s.shard_sizes, s.placement.rank()) for s in found]",
    ]
    return Script((Stage(1, tuple(lines)),), (scripts.SPECS,))


def overlap(spec: EnumerableSpec) -> bool:
    """Whether two boxes share an element."""
    return any(intersect(one, other) for (one, _), (other, _) in combinations(spec.boxes, 2))


def check_validates(case: Case, here: Here) -> None:
    """Boxes are a spec of a tensor where they tile it, and are refused where they do not: by the spec, or for the shape."""
    shape = case.tensor("x").shape
    spec = parse_spec(case.get("spec"), len(shape))
    assert isinstance(spec, EnumerableSpec)

    def attempt() -> Any:
        return g.to_torch(here, spec).build_metadata(torch.Size(shape), properties(here))

    if overlap(spec):
        here.refused(lambda: g.to_torch(here, spec), "overlap", "boxes that overlap, whatever the shape")
    if spec.errors(shape):
        here.refused(attempt, "refused", f"boxes that do not tile {format_shape(shape)} ({spec.errors(shape)[0]})")
        return
    told, due = g.described(g.read_parts(attempt())), g.described(spec.parts(shape))
    here.require(told == due, "wrong-metadata", "shards", "the metadata names other boxes than the spec", due, told)


def validates_script(case: Case) -> Script:
    shape, spec = case.tensor("x").shape, g.spec_of(case)
    assert isinstance(spec, EnumerableSpec)
    wrong, overlaps = bool(spec.errors(shape)), overlap(spec)
    asked = "" if overlaps else f".build_metadata(torch.Size({shape}), None)"
    lines = [
        "try:",
        f"    {scripts.spec(spec)}{asked}",
        '    got = "accepted"',
        "except ValueError:",
        '    got = "refused"',
        f'return "{"refused" if wrong else "accepted"}", got',
    ]
    return Script((Stage(1, tuple(lines)),), (scripts.SPECS,))


def validates_features(case: Case) -> set[str]:
    shape, spec = case.tensor("x").shape, g.spec_of(case)
    found = {"explicit-shards"}
    if spec.errors(shape):
        found |= {"must-refuse", "untiled"}
    return found | ({f"damaged:{case.get('damage')}"} if "damage" in case else set())


def _chunks(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        shape = draw(st.one_of(shapes(min_dims=1), shapes(min_dims=1, max_dims=2, max_size=LONG[-1], sizes=LONG)))
        ranks = tuple(range(draw(st.integers(1, 9))))
        shape, spec = draw(chunk_specs(shape, ranks, every=False, beyond=2))
        return Case.of("sharded_tensor.chunks", world=1, x=TensorSpec(shape), spec=ChunkSpec(spec.dim, spec.ranks))

    return case()


def _validated(limits: Limits) -> SearchStrategy[Case]:
    kinds = ("gap", "overlap", "shifted", "grown", "duplicated", "outside")

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        if draw(st.integers(0, 3)) == 3:
            (shape, boxes), damage = draw(tilings(shapes(min_dims=1, min_size=1), max_boxes=7)), None
        else:
            shape, boxes, damage = draw(damaged(shapes(min_dims=1, min_size=1), kinds=kinds, max_boxes=6))
        spec = EnumerableSpec(tuple((box, at % RANKS) for at, box in enumerate(boxes)))
        return Case.of("sharded_tensor.validates", world=1, x=TensorSpec(shape), spec=str(spec) or None, damage=damage)

    return case().filter(lambda case: "spec" in case)


LAWS = (
    law_of(
        "chunks",
        clause="A chunk spec names, for every placement, the size and rank of its chunk, as torch.chunk cuts any number of rows.",
        source=f"{g.SOURCE}, ChunkShardingSpec.build_metadata",
        check=check_chunks,
        holds="world=1 x=5x2 spec=chunk(0)@0,1,2",
        planted="chunks_of_the_floor",
        draw=_chunks,
        draws=60,
        needs=(),
        script=chunks_script,
    ),
    law_of(
        "validates",
        clause="Boxes are accepted as a spec of a tensor exactly where they tile it.",
        source=f"{g.SOURCE}, EnumerableShardingSpec: none of the shards should overlap; build_metadata checks size and coverage",
        check=check_validates,
        holds="world=1 x=4x3 spec=0:1,0:3@0;0:4,0:3@1 damage=overlap",
        planted="overlaps_accepted",
        draw=_validated,
        draws=100,
        needs=(),
        features=validates_features,
        script=validates_script,
    ),
)
