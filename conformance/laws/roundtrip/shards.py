"""Laws on tensors that are saved from, and loaded into, shards that are no even chunks: local-shards wrappers and
sharded tensors."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import caught
from shardlaw.conformance.law.fields import Folder
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.calls import first_line, save
from shardlaw.conformance.laws.checkpoint.fields import Saved, Writer
from shardlaw.conformance.laws.roundtrip.cases import due_refusal, round_trip, trip_law
from shardlaw.reference.placement import Shard
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import dtypes, shapes

DOCS = "torch.distributed.checkpoint docs"


@st.composite
def _cut(draw: st.DrawFn, extent: int, world: int, *, apart: bool) -> str:
    """How a dim is handed out: sizes that add up to it, each with a rank; with ``apart``, no rank has two."""
    ranks = draw(st.permutations(range(world)))[: draw(st.integers(1, min(world, extent)))]
    if not apart:
        ranks += [draw(st.sampled_from(ranks)) for _ in range(draw(st.integers(0, min(2, extent - len(ranks)))))]
    parts, left = [], extent
    for at, rank in enumerate(ranks, 1):
        size = left if at == len(ranks) else draw(st.integers(1, left - len(ranks) + at))
        parts.append(f"{size}@{rank}")
        left -= size
    return ",".join(parts)


def _draws(holder: str, limits: Limits) -> SearchStrategy[Case]:
    """A tensor that a holder has in any cut, at the save, at the load or at both; elsewhere it is a DTensor or
    plain."""
    sizes = [size for size in (2, 2, 3, 4) if size <= limits.world_size] or [1]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=1, max_size=7))
        save, load = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
        dim = draw(st.integers(0, len(shape) - 1))
        # a wrapper puts shards side by side along the last dim only
        apart = holder == "wrapper" and dim < len(shape) - 1
        found: dict[str, Any] = {"mesh": save, "mesh__load": load if load != save else None}
        found["x"] = TensorSpec(shape, (Shard(dim),), draw(dtypes(limits.dtypes)))
        ends = draw(st.sampled_from(("save", "load", "both")))
        if ends != "load":
            found |= {"held": holder, "cut": draw(_cut(shape[dim], save, apart=apart))}
        if ends != "save":
            found["held__load"] = holder
            found["cut__load"] = draw(_cut(shape[dim], load, apart=apart))
        elif draw(st.integers(0, 3)):
            found["to__x"] = draw(st.sampled_from(("R", "-", *(f"S({at})" for at in range(len(shape))))))
        return fields(**found, seed=draw(st.integers(0, 9)) or None)

    return case()


def without_shards(case: Case) -> set[str]:
    """Whether a rank loads into no shards at all."""
    trip = t.read_trip(case)
    held = trip.load.holder and all(layout is not None for layout in map(trip.load.layout, t.tensor_names(case)))
    ranks = range(trip.world_sizes[1])
    none = held and any(not trip.load.boxes(name, rank) for name in t.tensor_names(case) for rank in ranks)
    return {"shardless"} if none else set()


WRAPPERS = (
    "mesh=2 x=4x6:S(0) held=wrapper cut=1@0,3@1 to.x=S(1)",
    "mesh=2 x=4x6:S(1) held=wrapper cut=1@0,2@0,1@1,2@1 to.x=S(0)",
    "mesh=4 mesh.load=2 x=8x3:S(0):int64 held=wrapper cut=1@0,3@1,1@2,3@3 to.x=S(0)",
    "mesh=2 mesh.load=3 x=7x3:S(0) to.x=S(0) held.load=wrapper cut.load=3@0,2@2,2@1",
    "mesh=2 x=5x3:S(0) held=wrapper cut=5@1 to.x=R a=4x2:-",
    "mesh=2 x=6:S(0):float64 held=wrapper cut=1@0,2@0,3@1 held.load=wrapper cut.load=4@1,2@0",
    "mesh=3 mesh.load=2 x=4x7:S(1) held=wrapper to.x=S(1) held.load=wrapper cut.load=2@1,3@0,2@0",
    "mesh=2 x=3x6:S(1) held=wrapper cut=1@0,3@1,2@1",
    "mesh=2 x=3x7:S(1) held=wrapper cut=1@0,2@1,2@1,2@1 to.x=R",
    "mesh=2 x=2:S(0) held.load=wrapper cut.load=2@1",
)
SHARDED = (
    "mesh=2 x=5x6:S(0) held=sharded to.x=S(1)",
    "mesh=3 mesh.load=2 x=7x2:S(0):int64 held=sharded to.x=S(0) held.load=sharded",
    "mesh=2 mesh.load=3 x=4x6:S(1) held=sharded cut=1@0,2@1,3@0 to.x=S(0)",
    "mesh=2 x=6x3:S(0) to.x=S(0) held.load=sharded cut.load=4@1,2@0",
    "mesh=4 mesh.load=2 x=6x2:S(0):bool held=sharded to.x=R",
    "mesh=2 x=5x3:S(0) held=sharded cut=5@1 to.x=- a=4:-",
    "mesh=2 x=7x2:S(0) held=sharded cut=1@0,2@1,2@1,2@1 to.x=R",
)
HOLES = (
    "mesh=2 x=4x2:S(0) held=wrapper cut=1@0,2@1",
    "mesh=2 x=4x2:S(0) held=wrapper cut=2@0,3@1",
    "mesh=3 x=2x6:S(1) held=wrapper cut=2@0,3@2",
    "mesh=2 x=4x3:S(1):int64 held=wrapper cut=1@0,3@0",
    "mesh=4 x=9:S(0) held=wrapper cut=2@3,2@0,2@1,2@2",
    "mesh=1 x=4x2:S(0) held=wrapper cut=3@0",
)


@trip_law(
    "refuses[hole]",
    source=f"{DOCS}, SavePlanner.create_global_plan; the default planner validates its global plan",
    control="mesh=2 x=4x2:S(0) held=wrapper cut=1@0,2@1",
    texts=HOLES,
    features=lambda case: {"must-refuse"},
)
def hole(state: Saved, writer: Writer, folder: Folder):
    """Shards that together do not tile their tensor are refused on all ranks when they are saved."""
    refused = caught(lambda: save(state, writer(folder)))
    return {"save": refused, "save message": "x" in first_line(refused)}


@hole.due
def _():
    return due_refusal("save", "x")


LAWS = (
    round_trip(
        "local-shards",
        clause="Any shards of a DTensor, uneven, several a rank or none, are saved from and loaded into a wrapper "
        "as what they are.",
        source="torch.distributed.tensor, LocalShardsWrapper: __create_write_items__, __create_chunk_list__, "
        "__get_tensor_shard__",
        control="mesh=2 x=4x6:S(1) held=wrapper cut=1@0,2@0,1@1,2@1 to.x=S(0)",
        texts=WRAPPERS,
        draw=lambda limits: _draws("wrapper", limits),
        draws=10,
        features=without_shards,
    ),
    round_trip(
        "sharded-tensor",
        clause="A ShardedTensor, by chunks or by any shards, is saved and loaded as the boxes that it is, from and "
        "into any other tensor.",
        source=f"{DOCS}, save: ShardedTensor and DTensor, each rank saves its local shards",
        control="mesh=2 x=5x6:S(0) held=sharded to.x=S(1)",
        texts=SHARDED,
        draw=lambda limits: _draws("sharded", limits),
        draws=10,
        features=without_shards,
    ),
)
