"""Laws on tensors that are saved from, and loaded into, shards that are no even chunks: local-shards wrappers and sharded tensors."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Limits
from conformance.laws.roundtrip.cases import law_of
from conformance.laws.roundtrip.scripts import hole
from conformance.laws.roundtrip.state import must_refuse, refuse
from reference.placement import Shard
from reference.tensors import TensorSpec
from strategies import dtypes, shapes

DOCS = "torch.distributed.checkpoint docs"


def check_hole(case: Case, here: Here) -> None:
    """Shards that leave a hole, or reach beyond the tensor, are refused on all ranks when they are saved."""
    trip = t.read_trip(case)
    refuse(here, lambda: t.save(trip, here), "save", "x")


@st.composite
def _cut(draw: st.DrawFn, extent: int, world: int, *, apart: bool, every: bool) -> str:
    """How a dim is handed out: sizes that add up to it, each with a rank; with ``apart``, no rank has two, with ``every``, each has one."""
    ranks = draw(st.permutations(range(world)))
    if not every:
        ranks = ranks[: draw(st.integers(1, world))]
    ranks = ranks[:extent]
    if not apart:
        ranks += [draw(st.sampled_from(ranks)) for _ in range(draw(st.integers(0, min(2, extent - len(ranks)))))]
    parts, left = [], extent
    for at, rank in enumerate(ranks, 1):
        size = left if at == len(ranks) else draw(st.integers(1, left - len(ranks) + at))
        parts.append(f"{size}@{rank}")
        left -= size
    return ",".join(parts)


def _draws(law: str, holder: str, limits: Limits) -> SearchStrategy[Case]:
    """A tensor that a holder has in any cut, at the save, at the load or at both; elsewhere it is a DTensor or plain."""
    sizes = [size for size in (2, 2, 3, 4) if size <= limits.world_size] or [1]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=1, max_size=7))
        save, load = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
        dim = draw(st.integers(0, len(shape) - 1))
        # a wrapper puts shards side by side along the last dim only
        apart = holder == "wrapper" and dim < len(shape) - 1
        fields: dict[str, Any] = {"mesh": save, "mesh__load": load if load != save else None}
        fields["x"] = TensorSpec(shape, (Shard(dim),), draw(dtypes(limits.dtypes)))
        ends = draw(st.sampled_from(("save", "load", "both")))
        if ends != "load":
            fields |= {"held": holder, "cut": draw(_cut(shape[dim], save, apart=apart, every=False))}
        if ends != "save":
            # a rank without shards cannot load into a wrapper: seldom, so that it does not hide the rest
            every = holder == "wrapper" and draw(st.integers(0, 9)) < 9
            load = min(load, shape[dim]) if every else load
            fields |= {"mesh__load": load if load != save else None, "held__load": holder}
            fields["cut__load"] = draw(_cut(shape[dim], load, apart=apart, every=every))
        elif draw(st.integers(0, 3)):
            fields["to__x"] = draw(st.sampled_from(("R", "-", *(f"S({at})" for at in range(len(shape))))))
        return Case.of(law, **fields, seed=draw(st.integers(0, 9)) or None)

    return case()


def without_shards(case: Case) -> set[str]:
    """Whether a rank loads into no shards at all."""
    trip = t.read_trip(case)
    held = trip.load.held and all(layout is not None for layout in map(trip.load.layout, t.tensor_names(case)))
    ranks = range(trip.worlds[1])
    none = held and any(not trip.load.pieces(name, rank) for name in t.tensor_names(case) for rank in ranks)
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
    "mesh=2 x=2:S(0) held.load=wrapper cut.load=2@1",
)
SHARDED = (
    "mesh=2 x=5x6:S(0) held=sharded to.x=S(1)",
    "mesh=3 mesh.load=2 x=7x2:S(0):int64 held=sharded to.x=S(0) held.load=sharded",
    "mesh=2 mesh.load=3 x=4x6:S(1) held=sharded cut=1@0,2@1,3@0 to.x=S(0)",
    "mesh=2 x=6x3:S(0) to.x=S(0) held.load=sharded cut.load=4@1,2@0",
    "mesh=4 mesh.load=2 x=6x2:S(0):bool held=sharded to.x=R",
    "mesh=2 x=5x3:S(0) held=sharded cut=5@1 to.x=- a=4:-",
)
HOLES = (
    "mesh=2 x=4x2:S(0) held=wrapper cut=1@0,2@1",
    "mesh=2 x=4x2:S(0) held=wrapper cut=2@0,3@1",
    "mesh=3 x=2x6:S(1) held=wrapper cut=2@0,3@2",
    "mesh=2 x=4x3:S(1):int64 held=wrapper cut=1@0,3@0",
    "mesh=4 x=9:S(0) held=wrapper cut=2@3,2@0,2@1,2@2",
    "mesh=1 x=4x2:S(0) held=wrapper cut=3@0",
)

LAWS = (
    law_of(
        "local-shards",
        clause="Any shards of a DTensor, uneven, several a rank or none, are saved from and loaded into a wrapper as what they are.",
        source="torch.distributed.tensor, LocalShardsWrapper: __create_write_items__, __create_chunk_list__, __get_tensor_shard__",
        holds="mesh=2 x=4x6:S(1) held=wrapper cut=1@0,2@0,1@1,2@1 to.x=S(0)",
        planted="wrapper_forgets_a_shard",
        texts=WRAPPERS,
        sweeps=len(WRAPPERS),
        draw=lambda limits: _draws("roundtrip.local-shards", "wrapper", limits),
        draws=10,
        stages=t.worlds,
        features=without_shards,
    ),
    law_of(
        "sharded-tensor",
        clause="A ShardedTensor, by chunks or by any shards, is saved and loaded as the boxes that it is, from and into any other tensor.",
        source=f"{DOCS}, save: ShardedTensor and DTensor, each rank saves its local shards",
        holds="mesh=2 x=5x6:S(0) held=sharded to.x=S(1)",
        planted="shards_a_row_short",
        texts=SHARDED,
        sweeps=len(SHARDED),
        draw=lambda limits: _draws("roundtrip.sharded-tensor", "sharded", limits),
        draws=10,
        stages=t.worlds,
        features=without_shards,
    ),
    law_of(
        "refuses[hole]",
        clause="Shards that together do not tile their tensor are refused on all ranks when they are saved.",
        source=f"{DOCS}, SavePlanner.create_global_plan; the default planner validates its global plan",
        check=check_hole,
        holds="mesh=2 x=4x2:S(0) held=wrapper cut=1@0,2@1",
        planted="holes_accepted",
        texts=HOLES,
        sweeps=6,
        features=must_refuse,
        script=hole,
    ),
)
