"""Laws of sharding specs: the boxes of a chunk spec for a shape, and the boxes that an enumerable spec refuses. One
process tries all ranks."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, as_metadata, caught
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.sharded_tensor.act_helpers import metadata_boxes
from shardlaw.conformance.laws.sharded_tensor.draws import sharded_law
from shardlaw.conformance.laws.sharded_tensor.fields import SOURCE, AllBoxes, ShardingSpec, Size, due_boxes, spec_of
from shardlaw.reference.box import intersect
from shardlaw.reference.sharded_tensor import ChunkSpec, spec_errors
from shardlaw.reference.shards import Shards
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.shard_specs import chunk_specs
from shardlaw.strategies.tilings import damaged_tilings, tilings

RANKS = 4
LONG_SIZES = (11, 17, 31, 64, 97, 1000, 1023, 4096, 1000003)


def build_metadata(spec: Any, size: torch.Size) -> Any:
    """The metadata of a float32 tensor with a spec."""
    return spec.build_metadata(size, compat.TensorProperties(dtype=torch.float32))


@st.composite
def draw_chunks(draw: st.DrawFn, limits: Limits) -> Case:
    shape = draw(
        st.one_of(shapes(min_dims=1), shapes(min_dims=1, max_dims=2, max_size=LONG_SIZES[-1], sizes=LONG_SIZES))
    )
    ranks = tuple(range(draw(st.integers(1, 9))))
    spec = draw(chunk_specs(shape, ranks, every=False))
    return fields(world=1, x=TensorSpec(shape), spec=ChunkSpec(spec.dim, spec.ranks))


@sharded_law(
    "sharded_tensor.chunks",
    source=f"{SOURCE}, ChunkShardingSpec.build_metadata",
    control="world=1 x=5x2 spec=chunk(0)@0,1,2",
    draw=draw_chunks,
    draws=60,
    needs=(),
    features=None,
)
def chunks(x: Size, spec: ShardingSpec):
    """A chunk spec gives every rank the chunk that torch.chunk would cut for it."""
    metadata = build_metadata(spec, x)
    shards = [(tuple(s.shard_offsets), tuple(s.shard_sizes), s.placement.rank()) for s in metadata.shards_metadata]
    return {
        "shards": [(None if 0 in size else offset, size, rank) for offset, size, rank in shards],
        "size": metadata.size,
    }


@chunks.due
def _(x, spec):
    shards = [(box.offset if box.volume else None, box.size, rank) for box, rank in spec.shards(x).holdings()]
    return as_metadata({"shards": shards, "size": x})


def draw_validated(limits: Limits) -> SearchStrategy[Case]:
    kinds = ("gap", "overlap", "shifted", "grown", "duplicated", "outside")

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        if draw(st.integers(0, 3)) == 3:
            (shape, boxes), damage = draw(tilings(shapes(min_dims=1, min_size=1), max_boxes=7)), None
        else:
            shape, boxes, damage = draw(damaged_tilings(shapes(min_dims=1, min_size=1), kinds=kinds, max_boxes=6))
        spec = Shards(shape, tuple((box, (at % RANKS,)) for at, box in enumerate(boxes)))
        return fields(world=1, x=TensorSpec(shape), spec=str(spec) or None, damage=damage)

    return case().filter(lambda case: "spec" in case)


def tiling_features(case: Case) -> set[str]:
    found = {"explicit-shards"}
    if spec_errors(spec_of(case), case.tensor("x").shape):
        found.add("must-refuse")
    return found | ({f"damaged:{case.get('damage')}"} if "damage" in case else set())


@sharded_law(
    "sharded_tensor.validates",
    source=(
        f"{SOURCE}, EnumerableShardingSpec: none of the shards should overlap; build_metadata checks size and coverage"
    ),
    control="world=1 x=4x3 spec=0:1,0:3@0;0:4,0:3@1 damage=overlap",
    draw=draw_validated,
    draws=100,
    needs=(),
    features=tiling_features,
)
def validates(x: Size, boxes: AllBoxes):
    """An enumerable spec of a tensor is accepted exactly if its boxes tile the tensor."""
    spec = caught(compat.EnumerableShardingSpec, [compat.ShardMetadata(*box) for box in boxes])
    metadata = spec if isinstance(spec, Exception) else caught(build_metadata, spec, x)
    return {"spec": spec, "shards": metadata if isinstance(metadata, Exception) else metadata_boxes(metadata)}


@validates.due
def _(x, boxes, damage: str | None = None):
    overlap = any(intersect(one, other) for (one, _), (other, _) in combinations(boxes.parts, 2))
    return {"spec": Refused() if overlap else ..., "shards": Refused() if boxes.errors() else Of(due_boxes(boxes))}
