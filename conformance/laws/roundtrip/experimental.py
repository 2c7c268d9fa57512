"""The law on the experimental checkpointer, which writes a file for each rank.

``value`` names a further value of the state in :data:`shardlaw.conformance.laws.roundtrip.staging.VALUES`; ``asked`` is
the argument of the load.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Folder, Word
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import Destination, Saved
from shardlaw.conformance.laws.roundtrip.cases import NEEDS_FILES, one_world_law
from shardlaw.conformance.laws.roundtrip.staging import VALUES

TENSORS = ("transposed", "offset", "expanded", "conjugated", "negated")
OWN_FILES = (
    "mesh=2 x=5x2:- a=4:-:int64 state={x:x,d:{a:a,l:[a,1]},n:1} value=0-d asked=state",
    "mesh=3 x=7x3:-:bfloat16 a=3x4:-:bool:distinct:sliced value=list asked=nothing",
    "mesh=2 x=5x6:-:float64:distinct:sliced value=0-d asked=state",
    "mesh=1 x=5:- a=0x3:- value=0-d asked=names",
    "mesh=1 x=0:-:int32 value=list asked=state",
    *(f"mesh=1 x=5:- value={value} asked={asked}" for value in TENSORS for asked in ("nothing", "names", "state")),
    *(f"mesh=1 x=5:- value={value} asked={asked}" for value in ("tuple", "size") for asked in ("nothing", "names")),
)


@one_world_law(
    "own-file",
    source="torch.distributed.checkpoint._experimental, docstrings of Checkpointer.save and load, "
    "CheckpointReader.read and its partial reads",
    control="mesh=2 x=5x2:- a=4:-:int64 value=0-d asked=state",
    texts=OWN_FILES,
    needs=NEEDS_FILES,
    features=lambda case: {f"staged:{case.get('value')}"},
)
def own_file(
    state: Saved, destination: Destination, folder: Folder, value: Word, asked: Literal["nothing", "names", "state"]
):
    """A load of a rank's own file gives what the rank saved: as a new state, for given names, or into a given state."""
    entry: Any = VALUES[value]()
    state["value"] = entry
    destination["value"] = torch.zeros(entry.shape, dtype=entry.dtype) if isinstance(entry, torch.Tensor) else None
    checkpointer = compat.make_sync_checkpointer()
    checkpointer.save(folder, state)
    into = {"nothing": None, "names": dict.fromkeys(state), "state": destination}[asked]
    loaded = checkpointer.load(folder, into, strict=True)
    got = loaded.pop("value")
    checkpointer.close()
    return {"loaded": loaded, "value": got if isinstance(got, torch.Tensor) else [got], "type": type(got).__name__}


@own_file.due
def _(state: Contents, value):
    want = VALUES[value]()
    due = want.detach().clone() if isinstance(want, torch.Tensor) else [want]
    return {"loaded": state, "value": due, "type": Of(type(want).__name__)}
