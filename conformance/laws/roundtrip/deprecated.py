"""The law on deprecated calls of a save or a load, which must still work."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shardlaw.conformance.law.fields import Folder
from shardlaw.conformance.laws.checkpoint.calls import convert_failures, load, save
from shardlaw.conformance.laws.checkpoint.fields import Destination, Reader, Saved, Writer
from shardlaw.conformance.laws.roundtrip.cases import trip_law

# deprecated names, a deprecated order of arguments, a planner that takes no metadata of the storage
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


class OldPlanner(DefaultSavePlanner):
    """A planner with the older signature of ``set_up_planner``."""

    def set_up_planner(self, state_dict, is_coordinator):  # type: ignore[override]
        super().set_up_planner(state_dict, None, is_coordinator)


def deprecation_warnings(call: Any) -> list[str]:
    """The :data:`WARNINGS` of ``call``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with convert_failures():
            call()
    return sorted({part for part in WARNINGS.values() for warning in caught if part in str(warning.message)})


@trip_law(
    "deprecated",
    source="torch.distributed.checkpoint docs, save_state_dict and load_state_dict: coordinator_rank; "
    "SavePlanner.set_up_planner",
    control="mesh=2 x=5x2:S(0) a=4:R call=names lead=1",
    texts=DEPRECATED,
)
def deprecated(state: Saved, writer: Writer, folder: Folder, call: Call, lead: int = 0):
    """Deprecated calls warn, and save and load a state with any rank as the coordinator."""
    to = writer(folder)
    calls = {
        "names": lambda: dcp.save_state_dict(state, to, coordinator_rank=lead),
        "order": lambda: dcp.save(state, to),
        "planner": lambda: save(state, to, OldPlanner()),
    }
    return {"warned": deprecation_warnings(calls[call])}


@deprecated.due
def _(call):
    return {"warned": [WARNINGS[call]]}


@deprecated.then
def _(state: Destination, reader: Reader, folder: Folder, call: Call, lead: int = 0):
    source = reader(folder)
    calls = {
        "names": lambda: dcp.load_state_dict(state, source, coordinator_rank=lead),
        "order": lambda: dcp.load(state, source),
        "planner": lambda: load(state, source),
    }
    return {"warned": deprecation_warnings(calls[call]), "loaded": state}


@deprecated.due
def _(state, call):
    return {"warned": [] if call == "planner" else [WARNINGS[call]], "loaded": state}
