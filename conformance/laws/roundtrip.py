"""Laws of checkpoints that are saved and loaded: with one layout in a world of one size, with another in a world of another.

Every case runs in two worlds, one after the other, that share a folder and nothing else. The destination is poisoned first, and
what arrives is judged bit by bit on every rank. How a case is read, built and judged is in :mod:`conformance.trip`; the laws
stand in three rooms: from what layout to what other (here), what a state may hold, and how it lies in storage.
"""

from __future__ import annotations

from conformance.law import Law
from conformance.laws import roundtrip_state, roundtrip_store
from conformance.laws.roundtrip_cases import listed, narrow, trips
from conformance.trip import round_trip, worlds

DOCS = "torch.distributed.checkpoint docs"

LAYOUTS = (
    "mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1) a=7:S(0):int64 to.a=S(0) b=():R:float64 to.b=R c=4x3:S(1):bool to.c=R seed=1",
    "mesh=3 mesh.load=2 x=2x5:S(0):int32 to.x=S(1) a=5:S(0):bfloat16 to.a=R b=1:S(0) to.b=S(0) c=0x3:S(1) to.c=S(0) seed=2",
    "mesh=2x2 mesh.load=2 x=5x6:S(0),S(1) to.x=S(0) a=7x3:S(0),S(0):uint8 to.a=S(1) b=6:R,S(0):bool to.b=S(0) seed=3",
    "mesh=2x2@0,2,1,3 mesh.load=3@2,0,1 x=5x7:S(1),R to.x=S(0) a=9:S(0),S(0):float64 to.a=S(0) b=3x3:S(1),S(0) to.b=R seed=4",
    "mesh=2@1,2 mesh.load=2x1@1,0 x=7x2:S(0):int64 to.x=S(0),S(1) a=3:R to.a=S(0),R b=5x3:S(1) to.b=R,S(0) seed=5",
    "mesh=1 mesh.load=2x2 x=6x5:S(0) to.x=S(1),S(0) a=8:R:bfloat16 to.a=S(0),S(0) b=3x2x5:S(2) to.b=S(2),S(1) seed=6",
    "mesh=1x3 mesh.load=2@0,2 x=4x7:R,S(1):float64 to.x=S(1) a=7x3:S(1),S(0):int32 to.a=S(0) b=2:R,S(0):uint8 to.b=R seed=7",
    "mesh=2x2 mesh.load=1 x=9x2:_S(0,2),S(0) to.x=R a=8x3:_S(0,2),S(0):int64 to.a=S(0) b=7:S(0),S(0) to.b=S(0) seed=8",
    "mesh=2 mesh.load=2x2 x=8x3:S(0) to.x=_S(0,2),S(0) a=12:R:int32 to.a=_S(0,2),S(0) seed=9",
    "mesh=4 mesh.load=3@2,0,1 x=13x3:S(0) to.x=S(0) a=3x11:S(1):int32 to.a=S(1) b=2x2:S(0) to.b=S(1)",
)

LAWS = (*roundtrip_state.LAWS, *roundtrip_store.LAWS,
    Law(
        id="roundtrip.dtensor",
        clause="A DTensor that was saved with one layout in one world is the same tensor, bit for bit, when loaded with any other layout in any other world.",
        source=f"{DOCS}: load-time resharding, which enables saving in one cluster topology and loading into another",
        check=round_trip,
        control="roundtrip.dtensor mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1) a=7:S(0):int64 to.a=S(0)",
        planted="overlap_offset_lost",
        sweep=listed("roundtrip.dtensor", *LAYOUTS),
        sweeps=8,
        draw=lambda limits: trips("roundtrip.dtensor", limits),
        draws=14,
        narrow=narrow,
        needs=("checkpoint", "object_collectives"),
        smallest=1,
        weight=3.0,
        stages=worlds,
    ),
)
