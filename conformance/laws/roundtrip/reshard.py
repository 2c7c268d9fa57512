"""Laws of checkpoints that are saved and loaded: with one layout in a world of one size, with another in a world of another.

Every case runs in two worlds, one after the other, that share a folder and nothing else. The destination is poisoned first, and
what arrives is judged bit by bit on every rank. How a case is read, built and judged is in :mod:`conformance.trip`. Here stand the
laws on layouts; those on shards of any kind, models, states, storage, saves that follow one another, and other ways in and out
have rooms of their own beside this one.
"""

from __future__ import annotations

import os

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import DTensor

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Limits
from conformance.laws.roundtrip import model as roundtrip_model
from conformance.laws.roundtrip import saves as roundtrip_saves
from conformance.laws.roundtrip import scripts as roundtrip_scripts
from conformance.laws.roundtrip import shards as roundtrip_shards
from conformance.laws.roundtrip import state as roundtrip_state
from conformance.laws.roundtrip import store as roundtrip_store
from conformance.laws.roundtrip import ways as roundtrip_ways
from conformance.laws.roundtrip.cases import law_of, trips
from reference.checkpoint.state_dict import slots

DOCS = "torch.distributed.checkpoint docs"


def check_strided(case: Case, here: Here) -> None:
    """A layout whose shards are no boxes is either refused when it is saved or loaded, by all ranks, or comes back exactly."""
    trip = t.read_trip(case)
    refused = os.path.join(here.folder(), "refused")
    if here.stage == 0:
        try:
            t.save(trip, here)
        except t.CheckpointFailed:
            with open(refused, "w"):
                return
    if os.path.exists(refused):
        return
    if here.stage == 1:
        try:
            state = t.load(here, t.destination(trip, here))
        except t.CheckpointFailed:
            return
        t.judge(trip, here, state)


def check_views(case: Case, here: Here) -> None:
    """Only what a tensor shows of its memory is saved, and only that is loaded into: what lies between its elements stays."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.round_trip(case, here)
        return
    state = t.destination(trip, here)
    held = {name: state[name] for name in slots(trip.load.state)}
    before = {name: _between(tensor) for name, tensor in held.items()}
    t.judge(trip, here, t.load(here, state))
    for name, tensor in held.items():
        here.require(state[name] is tensor, "wrong-metadata", "in place", f"{name} is another tensor after the load")
        here.same(_between(tensor), before[name], "between", what=f"the memory between the elements of {name}")


def _between(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that lie in the memory of the (local) tensor and are none of its own."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    memory = torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage())
    own = torch.arange(len(memory)).as_strided(local.shape, local.stride(), local.storage_offset()).flatten()
    hidden = torch.ones(len(memory), dtype=torch.bool)
    hidden[own] = False
    return memory[hidden.to(local.device)]


def check_meta(case: Case, here: Here) -> None:
    """A destination without memory, on the meta device, is given memory and filled."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
    else:
        end = trip.load
        state = t.build(end, lambda name: t.placed(here, end, name, trip.due(end, name), lambda local: local.to("meta")))
        t.judge(trip, here, t.load(here, state))


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
PLAIN = (
    "mesh=2 mesh.load=3 x=5x2:- to.x=S(0) a=4:R:int64 to.a=- b=3x3:S(1):bool to.b=- c=():-:float64 to.c=R",
    "mesh=3 mesh.load=2 x=7:S(0) to.x=- a=2x5:-:int32 to.a=S(1) b=0x2:- to.b=S(1) c=6:-:bfloat16 to.c=-",
    "mesh=2x2 mesh.load=1 x=5x3:S(0),S(1) to.x=- a=7:S(0),S(0):uint8 to.a=- b=3:- to.b=R",
    "mesh=2@0,2 mesh.load=2@1,2 x=5:- to.x=S(0) a=4x3:S(1) to.a=- b=():R to.b=-",
)
STRIDED = (
    "mesh=2 x=5:R to.x=_S(0,2)",
    "mesh=2 x=8x3:S(0) to.x=_S(0,2)",
    "mesh=2 x=8:_S(0,2) to.x=R",
    "mesh=2x2 mesh.load=2 x=12:_S(0,2),S(0) to.x=_S(0,3)",
    "mesh=2x2 mesh.load=2 x=7:_S(0,2),S(0) to.x=S(0)",
    "mesh=2x2 mesh.load=1 x=5x6:_S(1,2),S(0) to.x=R",
)
DTYPES = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R dtype=int64",
    "mesh=2 x=5x2:S(0):int64 a=4:-:int32 dtype=float32 to.x=S(1)",
    "mesh=3 mesh.load=2 x=7:S(0) a=3x3:S(1):float64 dtype=bfloat16",
    "mesh=2 x=5:S(0):bfloat16 a=6:R:uint8 dtype=float64 to.x=R",
    "mesh=2 x=5:S(0):bool a=6:R:bool dtype=int32",
)
VIEWS = (
    "mesh=2 mesh.load=3 x=5x6:S(0):float32:distinct:sliced a=4x3:-:int64:distinct:transposed memory=sliced",
    "mesh=2 x=4x6:S(1):int32:distinct:transposed to.x=S(0) a=7:S(0):bool:distinct:sliced memory=transposed",
    "mesh=3 mesh.load=2 x=5x4:R:float64:distinct:expanded a=3x2x4:S(2):float32:distinct:sliced memory=sliced",
    "mesh=2 x=5x6:-:float32:distinct:sliced to.x=S(0) a=6:S(0):float32:distinct:expanded to.a=- memory=sliced",
)
META = (
    "mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1) a=7:S(0):int64 to.a=S(0) b=():R:float64 to.b=R",
    "mesh=2x2 mesh.load=2 x=5x3:S(0),S(1) to.x=S(0) a=4:-:bool to.a=- b=3:R,R:bfloat16 to.b=S(0)",
    "mesh=3 mesh.load=2x2 x=7x3:S(0) to.x=S(0),S(0) a=5:R to.a=R,S(0) state={d:{x:x,l:[a,1]}}",
    "mesh=2 mesh.load=2@0,2 x=5:S(0) to.x=S(0)",
)


def _strided_draws(limits: Limits) -> SearchStrategy[Case]:
    return trips("roundtrip.strided", limits, tensors=1, kinds=("R", "S", "_S"), plain=False)


def _view_draws(limits: Limits) -> SearchStrategy[Case]:
    memories = ("sliced", "transposed", "expanded", "plain")

    def extra(draw: st.DrawFn, names: list[str]) -> dict[str, object]:
        return {"memory": draw(st.sampled_from(("sliced", "transposed")))}

    return trips("roundtrip.views", limits, tensors=2, memories=memories, extra=extra)


LAWS = (
    law_of(
        "dtensor",
        clause="A DTensor saved with one layout in one world is the same, bit for bit, loaded with any other layout in any other world.",
        source=f"{DOCS}: load-time resharding, which enables saving in one cluster topology and loading into another",
        holds="mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1) a=7:S(0):int64 to.a=S(0)",
        planted="overlap_offset_lost",
        texts=LAYOUTS,
        sweeps=8,
        draw=lambda limits: trips("roundtrip.dtensor", limits, plain=False),
        draws=24,
        weight=3.0,
        stages=t.worlds,
    ),
    law_of(
        "plain",
        clause="What was saved as a plain tensor loads as a DTensor of any layout, and the other way round.",
        source=f"{DOCS}, load: regular tensors, DTensor, ShardedTensor",
        holds="mesh=2 x=5x2:- to.x=S(0) a=4:S(0) to.a=-",
        planted="plain_tensor_offset_one",
        texts=PLAIN,
        sweeps=4,
        draw=lambda limits: trips("roundtrip.plain", limits),
        draws=6,
        stages=t.worlds,
    ),
    law_of(
        "strided",
        clause="A strided shard either comes back with exactly the elements that it owns, or is refused on all ranks.",
        source="torch.distributed.tensor docs, _StridedShard; LoadPlan: read items cover the destination",
        check=check_strided,
        holds="mesh=2x2 mesh.load=2 x=8:_S(0,2),S(0) to.x=S(0)",
        planted="strided_taken_for_shard",
        texts=STRIDED,
        sweeps=6,
        draw=_strided_draws,
        draws=4,
        stages=t.worlds,
    ),
    law_of(
        "dtype",
        clause="The dtype of the destination decides: what is loaded is the saved value converted to it.",
        source=f"{DOCS}, LoadPlanner.commit_tensor: the loaded tensor is copied into the destination",
        holds="mesh=2 x=5:S(0) dtype=int64",
        planted="reinterpreted_dtype",
        texts=DTYPES,
        sweeps=4,
        stages=t.worlds,
    ),
    law_of(
        "views",
        clause="Tensors that are not contiguous are saved and loaded by their elements, in place; the memory between these stays as it is.",
        source=f"{DOCS}, StorageWriter.write_data: of a view only the projection is saved; tensors need not be contiguous",
        check=check_views,
        holds="mesh=2 x=5x6:S(0):float32:distinct:sliced memory=sliced",
        planted="memory_order_saved",
        texts=VIEWS,
        sweeps=4,
        draw=_view_draws,
        draws=6,
        stages=t.worlds,
    ),
    law_of(
        "meta",
        clause="A destination on the meta device is given memory of its layout and filled.",
        source=f"{DOCS}, load; DefaultLoadPlanner.set_up_planner initialises meta tensors",
        check=check_meta,
        holds="mesh=2 x=5x2:S(0)",
        planted="meta_shape_inferred",
        texts=META,
        sweeps=4,
        stages=t.worlds,
        script=roundtrip_scripts.meta,
    ),
    *roundtrip_shards.LAWS,
    *roundtrip_model.LAWS,
    *roundtrip_state.LAWS,
    *roundtrip_store.LAWS,
    *roundtrip_saves.LAWS,
    *roundtrip_ways.LAWS,
)
