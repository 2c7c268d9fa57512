"""Laws on saves and loads of tensors with any boxes as shards: wrappers of local shards, sharded tensors, and plain
tensors that describe theirs."""

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
from shardlaw.conformance.laws.roundtrip.cases import DOCS, due_refusal, one_world_law, round_trip
from shardlaw.conformance.laws.shared.newer import is_unsupported
from shardlaw.reference.placement import Shard
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import dtypes, shapes


@st.composite
def _cut(draw: st.DrawFn, extent: int, world: int, *, single: bool) -> str:
    """A cut of a dim into pairs of size and rank; with ``single`` no rank has two."""
    ranks = draw(st.permutations(range(world)))[: draw(st.integers(1, min(world, extent)))]
    if not single:
        ranks += [draw(st.sampled_from(ranks)) for _ in range(draw(st.integers(0, min(2, extent - len(ranks)))))]
    parts, rest = [], extent
    for at, rank in enumerate(ranks, 1):
        size = rest if at == len(ranks) else draw(st.integers(1, rest - len(ranks) + at))
        parts.append(f"{size}@{rank}")
        rest -= size
    return ",".join(parts)


def holder_cases(holder: str, limits: Limits) -> SearchStrategy[Case]:
    """Cases of a tensor in a holder with any cut at the save, the load or both, and a DTensor or plain at the other
    end."""
    sizes = [size for size in (2, 2, 3, 4) if size <= limits.world_size] or [1]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=1, max_size=7))
        save, load = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
        dim = draw(st.integers(0, len(shape) - 1))
        # a wrapper concatenates shards along the last dim only
        single = holder == "wrapper" and dim < len(shape) - 1
        values: dict[str, Any] = {"mesh": save, "mesh__load": load if load != save else None}
        values["x"] = TensorSpec(shape, (Shard(dim),), draw(dtypes(limits.dtypes)))
        ends = draw(st.sampled_from(("save", "load", "both")))
        if ends != "load":
            values |= {"held": holder, "cut": draw(_cut(shape[dim], save, single=single))}
        if ends != "save":
            values["held__load"] = holder
            values["cut__load"] = draw(_cut(shape[dim], load, single=single))
        elif draw(st.integers(0, 3)):
            values["to__x"] = draw(st.sampled_from(("R", "-", *(f"S({at})" for at in range(len(shape))))))
        return fields(**values, seed=draw(st.integers(0, 9)) or None)

    return case()


def holder_features(case: Case) -> set[str]:
    """``shardless`` where a rank has no shards of a tensor that is loaded into."""
    trip, names = t.read_trip(case), t.tensor_names(case)
    if not trip.load.holder or any(trip.load.layout(name) is None for name in names):
        return set()
    ranks = range(trip.world_sizes[1])
    return {"shardless"} if any(not trip.load.boxes(name, rank) for name in names for rank in ranks) else set()


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
DESCRIBED = (
    "mesh=2 x=5x6:S(0) held=described to.x=S(1)",
    "mesh=2 x=4x6:S(1) held=described cut=1@0,2@0,1@1,2@1 to.x=S(0)",
    "mesh=4 mesh.load=2 x=8x3:S(0):int64 held=described cut=1@0,3@1,1@2,3@3 to.x=-",
    "mesh=2 mesh.load=3 x=7x3:S(0) to.x=S(0) held.load=described cut.load=3@0,2@2,1@0,1@1",
    "mesh=2 x=5x3:S(0) held=described cut=5@1 to.x=R a=4x2:-",
    "mesh=3 mesh.load=2 x=4x7:S(1):bool held=described to.x=S(1) held.load=described cut.load=2@1,3@0,2@0",
    "mesh=2 x=6:S(0):float64 held=described cut=1@0,2@0,3@1 held.load=described cut.load=4@1,2@0",
)
HOLES = (
    "mesh=2 x=4x2:S(0) held=wrapper cut=1@0,2@1",
    "mesh=2 x=4x2:S(0) held=wrapper cut=2@0,3@1",
    "mesh=3 x=2x6:S(1) held=wrapper cut=2@0,3@2",
    "mesh=2 x=4x3:S(1):int64 held=wrapper cut=1@0,3@0",
    "mesh=4 x=9:S(0) held=wrapper cut=2@3,2@0,2@1,2@2",
    "mesh=1 x=4x2:S(0) held=wrapper cut=3@0",
)


@one_world_law(
    "refuses[hole]",
    source=f"{DOCS}, SavePlanner.create_global_plan; the default planner validates its global plan",
    control="mesh=2 x=4x2:S(0) held=wrapper cut=1@0,2@1",
    texts=HOLES,
    features=lambda case: {"must-refuse"},
)
def hole(state: Saved, writer: Writer, folder: Folder):
    """A save of shards that do not tile their tensor is refused on all ranks."""
    refused = caught(lambda: save(state, writer(folder)))
    return {"save": refused, "save message": "x" in first_line(refused)}


@hole.due
def _():
    return due_refusal("save", "x")


LAWS = (
    round_trip(
        "local-shards",
        clause="A DTensor around a wrapper of local shards, uneven, several on a rank or none, is saved and loaded bit "
        "by bit.",
        source="torch.distributed.tensor, LocalShardsWrapper: __create_write_items__, __create_chunk_list__, "
        "__get_tensor_shard__",
        control="mesh=2 x=4x6:S(1) held=wrapper cut=1@0,2@0,1@1,2@1 to.x=S(0)",
        texts=WRAPPERS,
        draw=lambda limits: holder_cases("wrapper", limits),
        draws=10,
        features=holder_features,
    ),
    round_trip(
        "sharded-tensor",
        clause="A ShardedTensor with chunks or any boxes as shards loads from and into tensors of other layouts bit by "
        "bit.",
        source=f"{DOCS}, save: ShardedTensor and DTensor, each rank saves its local shards",
        control="mesh=2 x=5x6:S(0) held=sharded to.x=S(1)",
        texts=SHARDED,
        draw=lambda limits: holder_cases("sharded", limits),
        draws=10,
        features=holder_features,
    ),
    round_trip(
        "described",
        clause="A plain tensor whose fields say which parts of a global tensor it has is saved and loaded bit by bit "
        "as shards, and keeps what it has beside them.",
        source="torch.distributed.checkpoint docs, CheckpointableTensor: global_shape, global_offsets, local_offsets, "
        "local_sizes",
        control="mesh=2 x=5x6:S(0) to.x=S(1)",
        texts=DESCRIBED,
        draw=lambda limits: holder_cases("described", limits),
        draws=6,
        features=holder_features,
        refusal=is_unsupported,
    ),
)
