"""Laws on states that ranks send each other without storage: through a process group, and as replicas.

``value`` names a further value of the state in :data:`shardlaw.conformance.laws.roundtrip.staging.VALUES`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Device, Folder, Rank, Word
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import Destination, Saved
from shardlaw.conformance.laws.roundtrip.cases import one_world_law
from shardlaw.conformance.laws.roundtrip.staging import VALUES
from shardlaw.reference.checkpoint.state_dict import Slot

TIMEOUT = timedelta(seconds=30)

# all is replicated along the first mesh dim, so that a rank receives what it has itself
SENT = (
    "mesh=2 x=5x2:R a=4:-:int64 state={x:x,d:{a:a,l:[1,(a,None)]},n:1}",
    "mesh=3 x=7:R:bfloat16 a=3x4:-:float64:distinct:transposed b=():-:bool source=1",
    "mesh=2x2 x=5x4:R,S(0) a=1:R,S(0) b=6:-:int32 source=1 in_place=yes",
    "mesh=3 x=7x2:R a=4:R:float64 state={x:x,a:a,n:1} source=2 in_place=yes",
    "mesh=2 x=5x4:R:float32:distinct:sliced a=6:-:uint8:distinct:offset",
    "mesh=2 x=0x3:- a=4:R",
    "mesh=2 x=3x4:-:float32:distinct:transposed in_place=yes",
    *(f"mesh=2 x=5:- value={value}" for value in ("offset", "set", "named-tuple", "conjugated", "negated", "size")),
)
REPLICAS = (
    "mesh=2 x=5x2:R a=4:-:int64 state={x:x,d:{a:a,l:[1,None]},n:1}",
    "mesh=2x2 x=5x4:R,S(0) a=3:R,S(0):bfloat16 b=6:-:bool",
    "mesh=4 x=7:R:float64 a=3x4:-:float32:distinct:transposed",
)


@one_world_law(
    "sent",
    source="torch.distributed.checkpoint._pg_transport, docstring of PGTransport",
    control="mesh=2 x=5x2:R a=4:- state={x:x,d:{a:a},n:1}",
    texts=SENT,
    needs=("checkpoint", "p2p", "p2p_tags"),
    smallest=2,
)
def sent(
    state: Saved,
    destination: Destination,
    mesh: DeviceMesh,
    device: Device,
    source: int = 0,
    in_place: bool = False,
    value: Word = "",
):
    """A state that one rank of a group sends to the others arrives bit by bit, in new tensors or in place, and does not
    change."""
    group = mesh.get_group(0)
    group_rank = dist.get_rank(group)
    transport = compat.PGTransport(group, TIMEOUT, device, (lambda: destination) if in_place else None)
    if group_rank == source:
        others = [rank for rank in range(dist.get_world_size(group)) if rank != source]
        transport.send_checkpoint(others, {**state, "value": VALUES[value]()} if value else state)
        return {"source": state}
    received: Any = transport.recv_checkpoint(source)
    got = received.pop("value", None)
    tensors = [key for key, value in destination.items() if isinstance(value, torch.Tensor)]
    return {
        "received": received,
        "in place": {key: destination[key] for key in tensors} if in_place else {},
        "value": got if isinstance(got, torch.Tensor) else repr(got),
        "type": type(got).__name__,
    }


@sent.due
def _(state: Contents, rank: Rank, source, in_place, value):
    coord = state.end.mesh.coord(rank)
    if coord is None or coord[0] == source:
        return {"source": state}
    tensors = {key: value for key, value in state.tree.items() if isinstance(value, Slot)}
    want = VALUES[value]() if value else None
    return {
        "received": state,
        "in place": state.with_tree(tensors) if in_place else {},
        "value": want.clone() if isinstance(want, torch.Tensor) else repr(want),
        "type": Of(type(want).__name__),
    }


@one_world_law(
    "replica",
    source="torch.distributed.checkpoint.staging, docstrings of _ReplicationStager and its stage",
    control="mesh=2 x=5x2:R a=4:-",
    texts=REPLICAS,
    needs=("checkpoint", "p2p", "p2p_tags"),
    smallest=2,
)
def replica(state: Saved, device: Device, rank: Rank, folder: Folder):
    """A replicating stager gives each rank the state of the rank half the world size away, and stores it in a file; the
    own state does not change."""
    stager = compat.ReplicationStager(dist.group.WORLD, TIMEOUT, device, f"{folder}/{rank}")
    staged = stager.stage(state)
    stager.close()
    files = os.listdir(f"{folder}/{rank}")
    stored = [torch.load(f"{folder}/{rank}/{file}", weights_only=False) for file in files]
    return {"staged": staged, "files": len(files), "kept": stored[0], "source": state}


@replica.due
def _(state: Contents):
    return {"staged": state, "files": Of(1), "kept": state, "source": state}
