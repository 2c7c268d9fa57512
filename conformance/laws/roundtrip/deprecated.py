"""The law on ways of calling a save or a load that are deprecated: they still do what they did."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shardlaw.conformance.law.fields import Folder
from shardlaw.conformance.laws.checkpoint.calls import convert_failures, load, save
from shardlaw.conformance.laws.checkpoint.fields import Destination, Reader, Saved, Writer
from shardlaw.conformance.laws.checkpoint.trip import world_sizes
from shardlaw.conformance.laws.roundtrip.cases import trip_law

# by names that are deprecated, with arguments in an order that is, by a planner that is not told of the storage
Call = Literal["names", "order", "planner"]
WARNINGS = {
    "names": "is deprecated and will be removed",
    "order": "argument order of",
    "planner": "set_up_planner has been updated",
}

DEPRECATED = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R:int64 state={x:x,d:{a:a},n:1} to.x=S(1) call=names lead=1",
    "mesh=3 mesh.load=4 x=7:S(0) a=3:- state={x:x,l:[a,1]} to.x=R call=names lead=2",
    "mesh=1 mesh.load=2 x=5x2:R a=4:R:bool state={x:x,a:a,n:1} to.x=S(0) call=names",
    "mesh=2 x=5x2:S(0) a=4:- state={x:x,a:a,n:1} call=order",
    "mesh=2 mesh.load=1 x=5x2:S(1) a=4:R:bfloat16 state={x:x,d:{a:a,n:1}} to.x=R call=planner",
)


class Unaware(DefaultSavePlanner):
    """A planner as planners were before they were told of the storage."""

    def set_up_planner(self, state_dict, is_coordinator):  # type: ignore[override]
        super().set_up_planner(state_dict, None, is_coordinator)


def warned_of(call: Any) -> list[str]:
    """What ``call`` warns of, of those things that are about how it is called."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with convert_failures():
            call()
    return sorted({part for part in WARNINGS.values() for one in caught if part in str(one.message)})


@trip_law(
    "deprecated",
    source="torch.distributed.checkpoint docs, save_state_dict and load_state_dict: coordinator_rank; "
    "SavePlanner.set_up_planner",
    control="mesh=2 x=5x2:S(0) a=4:R call=names lead=1",
    texts=DEPRECATED,
    stages=world_sizes,
)
def deprecated(state: Saved, writer: Writer, folder: Folder, call: Call, lead: int = 0):
    """Saved and loaded by calls that are deprecated, whichever rank coordinates, a state is what it was, and each call
    warns."""
    to = writer(folder)
    calls = {
        "names": lambda: dcp.save_state_dict(state, to, coordinator_rank=lead),
        "order": lambda: dcp.save(state, to),
        "planner": lambda: save(state, to, Unaware()),
    }
    return {"warned": warned_of(calls[call])}


@deprecated.due
def _(call):
    return {"warned": [WARNINGS[call]]}


@deprecated.then
def _(state: Destination, reader: Reader, folder: Folder, call: Call, lead: int = 0):
    of = reader(folder)
    calls = {
        "names": lambda: dcp.load_state_dict(state, of, coordinator_rank=lead),
        "order": lambda: dcp.load(state, of),
        "planner": lambda: load(state, of),
    }
    return {"warned": warned_of(calls[call]), "loaded": state}


@deprecated.due
def _(state, call):
    return {"warned": [] if call == "planner" else [WARNINGS[call]], "loaded": state}
