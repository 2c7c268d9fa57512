"""Laws on tensors that are saved from, and loaded into, shards that are no even chunks: local-shards wrappers and sharded tensors."""

from __future__ import annotations

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip.cases import law_of
from conformance.laws.roundtrip.scripts import hole
from conformance.laws.roundtrip.state import must_refuse, refuse

DOCS = "torch.distributed.checkpoint docs"


def check_hole(case: Case, here: Here) -> None:
    """Shards that leave a hole, or reach beyond the tensor, are refused on all ranks when they are saved."""
    trip = t.read_trip(case)
    refuse(here, lambda: t.save(trip, here), "save", "x")


WRAPPERS = (
    "mesh=2 x=4x6:S(0) held=wrapper cut=1@0,3@1 to.x=S(1)",
    "mesh=2 x=4x6:S(1) held=wrapper cut=1@0,2@0,1@1,2@1 to.x=S(0)",
    "mesh=4 mesh.load=2 x=8x3:S(0):int64 held=wrapper cut=1@0,3@1,1@2,3@3 to.x=S(0)",
    "mesh=2 mesh.load=3 x=7x3:S(0) to.x=S(0) held.load=wrapper cut.load=3@0,2@2,2@1",
    "mesh=2 x=5x3:S(0) held=wrapper cut=5@1 to.x=R a=4x2:-",
    "mesh=2 x=6:S(0):float64 held=wrapper cut=1@0,2@0,3@1 held.load=wrapper cut.load=4@1,2@0",
    "mesh=3 mesh.load=2 x=4x7:S(1) held=wrapper to.x=S(1) held.load=wrapper cut.load=2@1,3@0,2@0",
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
        sweeps=7,
        stages=t.worlds,
    ),
    law_of(
        "sharded-tensor",
        clause="A ShardedTensor, by chunks or by any shards, is saved and loaded as the boxes that it is, from and into any other tensor.",
        source=f"{DOCS}, save: ShardedTensor and DTensor, each rank saves its local shards",
        holds="mesh=2 x=5x6:S(0) held=sharded to.x=S(1)",
        planted="shards_a_row_short",
        texts=SHARDED,
        sweeps=6,
        stages=t.worlds,
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
