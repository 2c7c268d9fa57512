"""The law of the calls that make several groups at once."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Meaningless
from shardlaw.conformance.law.fields import Device, MeshTable, Rank
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import STALE
from shardlaw.conformance.laws.collective.fields import NO_SPLIT, supports_split
from shardlaw.reference.mesh import Mesh

Way = Literal["size", "lists", "split", "split-of-group", "split-of-split"]
# each row of a table is a group
MADE = (
    *("mesh=2x1 way=size", "mesh=2x2 way=size"),
    *("mesh=2x2@0,2,1,3 way=lists", "mesh=1x2@2,0 way=lists", "mesh=2x1@2,1 way=lists"),
)
SPLIT = (
    *("mesh=2x2@0,3,2,1 way=split", "mesh=1x2@2,0 way=split", "mesh=2x1 way=split"),
    *("mesh=2x2@3,0,1,2 way=split-of-split", "mesh=1x2@1,0 way=split-of-split"),
    *("mesh=2x1@0,2 way=split-of-group", "mesh=1x2@3,1 way=split-of-group"),
)
CASES = MADE + (SPLIT if supports_split() else ())


def make_group(table: Any, way: Way) -> Any:
    """The group of this rank, of those of the rows of a table; what the call gives to a rank in no row."""
    if way == "size":
        return dist.new_subgroups(len(table[0]))[0]
    if way == "lists":
        return dist.new_subgroups_by_enumeration(table)[0]
    ranks, parent = [*range(dist.get_world_size())], None
    if way == "split-of-split":
        ranks = ranks[::-1]
        parent = dist.split_group(None, [ranks])
    if way == "split-of-group":
        ranks = sorted(rank for row in table for rank in row)
        parent = dist.new_group(ranks)
        if dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
    return dist.split_group(parent, [[ranks.index(rank) for rank in row] for row in table])


@draws.collective_law(
    "subgroups",
    draws.DOC + "new_subgroups, new_subgroups_by_enumeration, split_group",
    "mesh=2x2 way=size",
    needs=("all_gather",),
    features=lambda case: draws.features_of(case) | {"new-group", f"way:{case.get('way')}"},
    cases=CASES,
    own_world=lambda case: case.get("way") == "split-of-group",  # ranks are left that have made different groups
    weight=0.3,
)
def subgroups(mesh: MeshTable, way: Way, device: Device):
    """Groups of ranks that are made at once, by their size or by lists of ranks, or by splitting a group of all or some
    ranks in a given order, communicate among their members, in a mesh too, and can be made again."""
    turns: list[Any] = []
    for turn in range(2):
        group = make_group(mesh, way)
        if not isinstance(group, dist.ProcessGroup):
            turns.append({"outside": group is None or group is dist.GroupMember.NON_GROUP_MEMBER})
            continue
        row = DeviceMesh.from_group(group, device.type)
        x = torch.tensor([dist.get_rank() + 10 * turn], device=device)
        out = [torch.full_like(x, STALE) for _ in range(dist.get_world_size(group))]
        dist.all_gather(out, x, group=group)
        turns.append(
            {
                "members": dist.get_process_group_ranks(group),
                "place": dist.get_rank(group),
                "gathered": torch.cat(out).tolist(),
                "functional": compat.functional.all_gather_tensor(x, 0, group).tolist(),
                "mesh": row.mesh.tolist(),
                "place in the mesh": row.get_local_rank(),
            }
        )
        dist.destroy_process_group(group)
    return {"turns": turns}


def rows(table: Mesh) -> list[list[int]]:
    """The groups of a table."""
    return [
        [table.ranks[at] for at in range(start, start + table.shape[1])]
        for start in range(0, table.size, table.shape[1])
    ]


@subgroups.due
def _(mesh, way, rank: Rank):
    split = way.startswith("split")
    if split and not supports_split():
        raise Meaningless(NO_SPLIT)
    (row,) = [row for row in rows(mesh) if rank in row] or [[]]
    if not row:
        return {"turns": [{"outside": True}] * 2}
    row = row if split else sorted(row)
    at = row.index(rank)
    return {
        "turns": [
            {
                "members": row,
                "place": at,
                "gathered": gathered,
                "functional": gathered,
                "mesh": row,
                "place in the mesh": at,
            }
            for gathered in (row, [other + 10 for other in row])
        ]
    }
