"""Laws of barriers, of new groups, and of collectives that equal a sequence of others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Meaningless
from shardlaw.conformance.law.fields import Device, Folder, MeshTable, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import LATE_SECONDS, STALE, prepare, start
from shardlaw.conformance.laws.collective.fields import (
    NO_RANK_ORDER,
    NO_SPLIT,
    Call,
    Group,
    RankDataField,
    group_ranks,
    supports_rank_order,
    supports_split,
)
from shardlaw.conformance.laws.collective.specs import CollectiveSpec
from shardlaw.reference import collective
from shardlaw.strategies.collectives import groups


@st.composite
def draw_barrier(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(groups(world_size=limits.world_size, tables=False))
    late = draw(st.sampled_from(mesh.ranks))
    return fields(mesh=mesh, late=late, work="async" if draw(draws.one_in(3)) else None)


@draws.collective_law(
    "barrier", draws.DOC + "barrier", "mesh=2 late=1", draw=draw_barrier, draws=20, members=True, weight=0.3
)
def barrier(group: Group, late: int, folder: Folder, work: Literal["async"] | None = None):
    """No rank leaves a barrier before all members of its group have entered it, twice in a row."""
    rank, missing = dist.get_rank(), []
    for turn in range(2):
        if late == rank:
            time.sleep(LATE_SECONDS)
        Path(folder, f"{turn}-{rank}").touch()
        if work:
            dist.barrier(group=group, async_op=True).wait()
        else:
            dist.barrier(group=group)
        missing += [
            other for other in dist.get_process_group_ranks(group) if not Path(folder, f"{turn}-{other}").exists()
        ]
    return {"missing marks": missing}


@barrier.due
def _():
    return {"missing marks": []}


COMPOSED = Literal["reduce-broadcast", "reduce-scatter", "scatter-gather", "there-and-back"]


def draw_composed(limits: Limits) -> SearchStrategy[Case]:
    how = {"how": st.sampled_from(get_args(COMPOSED))}
    return draws.calls(limits, root=True, reduces=True, memories=False, timing=False, min_dims=1, extra=how)


def read_composed(case: Case) -> tuple[dict[int, Any], Any]:
    """The input and the due output of every member, by rank."""
    how, ranks = case.get("how"), group_ranks(case)
    spec = CollectiveSpec.from_case(case, "all_reduce", len(ranks))
    members = range(spec.size)
    if how == "reduce-broadcast":
        inputs = [spec.contribution(at) for at in members]
        expected = collective.all_reduce(inputs, spec.op)
    elif how == "reduce-scatter":
        rows = [[spec.contribution(at, part) for part in members] for at in members]
        inputs, expected = [collective.stack(row) for row in rows], collective.reduce_scatter(rows, spec.op)
    else:
        inputs = [collective.stack([spec.payload(spec.size * at + part) for part in members]) for at in members]
        expected = [inputs[spec.root]] * spec.size if how == "scatter-gather" else inputs
    return dict(zip(ranks, inputs, strict=True)), dict(zip(ranks, map(spec.due_value, expected), strict=True))


@draws.collective_law(
    "composed",
    "MPI standard, collective communication; torch.distributed docs, collective functions",
    "mesh=2 x=5x3 how=reduce-scatter",
    needs=("all_gather", "all_to_all", "broadcast", "reduce", "scatter"),
    draw=draw_composed,
    draws=40,
    members=True,
    weight=0.3,
)
def composed(
    x: Annotated[Any, RankDataField(read_composed)], group: Group, how: COMPOSED, root: int = 0, op: str = "sum"
):
    """reduce and broadcast give what all_reduce gives; reduce and scatter what reduce_scatter gives; all_gather undoes
    scatter, a second all_to_all the first."""
    root = dist.get_process_group_ranks(group)[root]
    if how in ("reduce-broadcast", "reduce-scatter"):
        dist.reduce(x, root, getattr(dist.ReduceOp, op.upper()), group=group)
    if how == "reduce-broadcast":
        dist.broadcast(x, root, group=group)
        return {how: x}
    if how == "there-and-back":
        there, back = torch.zeros_like(x), torch.zeros_like(x)
        dist.all_to_all_single(there, x, group=group)
        dist.all_to_all_single(back, there, group=group)
        return {how: back}
    part, parts = torch.full_like(x[0], STALE), [torch.full_like(part, STALE) for part in x]
    dist.scatter(part, list(x) if dist.get_rank() == root else None, root, group=group)
    if how == "reduce-scatter":
        return {how: part}
    dist.all_gather(parts, part, group=group)
    return {how: torch.stack(parts)}


@composed.due
def _(x, how, rank: Rank):
    return {how: x[rank]}


def sweep_again(limits: Limits) -> list[Case]:
    """Bool tensors, whose sums and products are idempotent too."""
    ops = ("sum", "product", "max", "min")
    return [fields(mesh=size, x="5x4:-:bool", op=op if op != "sum" else None) for op in ops for size in (2, 3)]


@draws.collective_law(
    "again",
    "torch.distributed docs, ReduceOp; a sum of bools is true where any is",
    "mesh=2 x=5x3 op=max",
    needs=("all_reduce",),
    features=lambda case: draws.features_of(case) | {"repeated"},
    sweep=sweep_again,
    sweeps=4,
    draw=lambda limits: draws.calls(limits, reduces=True, memories=False, timing=False, idempotent=True),
    draws=40,
    members=True,
    weight=0.2,
)
def again(call: Call, group: Group, device: Device):
    """An idempotent reduction of its own result changes nothing."""
    call = prepare(call, device)
    for _ in range(8):  # a byte that is doubled eight times is 0
        start(call, group)
    return {"again": call[1]}


@again.due
def _(call, rank: Rank):
    return {"again": call.due(rank)}


@st.composite
def draw_new_group(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(groups(world_size=limits.world_size))
    order = "kept" if list(mesh.ranks) != sorted(mesh.ranks) and draw(st.booleans()) else None
    world = max(mesh.ranks) + 2
    return fields(mesh=mesh, ranks=order, world=world if world <= limits.world_size and draw(draws.one_in(4)) else None)


@draws.collective_law(
    "new-group",
    draws.DOC + "new_group, destroy_process_group",
    "mesh=2",
    needs=("all_gather",),
    features=lambda case: draws.features_of(case) | {"new-group"},
    draw=draw_new_group,
    draws=12,
    weight=0.3,
)
def new_group(mesh: MeshTable, device: Device, ranks: Literal["kept"] | None = None):
    """A new group lists its members in order, communicates among them, and can be destroyed and created again."""
    found: dict[str, list[Any]] = {"outside": [], "members": [], "places": [], "gathered": []}
    for turn in range(2):
        group = dist.new_group(mesh, sort_ranks=False) if ranks else dist.new_group(mesh)
        if dist.get_rank() not in mesh:
            found["outside"].append(group is dist.GroupMember.NON_GROUP_MEMBER)
            continue
        listed = dist.get_process_group_ranks(group)
        found["members"].append((listed, dist.get_world_size(group), dist.get_rank(group)))
        places = [dist.get_global_rank(group, at) for at in range(len(mesh))]
        found["places"].append(([dist.get_group_rank(group, rank) for rank in listed], places))
        out = [torch.full((1,), STALE, device=device) for _ in mesh]
        dist.all_gather(out, torch.tensor([dist.get_rank() + 10 * turn], device=device), group=group)
        found["gathered"].append(torch.cat(out).tolist())
        dist.destroy_process_group(group)
    return found


@new_group.due
def _(mesh, ranks, rank: Rank):
    if ranks and not supports_rank_order():
        raise Meaningless(NO_RANK_ORDER)
    listed = list(mesh.ranks) if ranks else sorted(mesh.ranks)
    if rank not in listed:
        return {"outside": [True, True], "members": [], "places": [], "gathered": []}
    return {
        "outside": [],
        "members": [(listed, len(listed), listed.index(rank))] * 2,
        "places": [(list(range(len(listed))), listed)] * 2,
        "gathered": [listed, [other + 10 for other in listed]],
    }


# two groups, and who creates each of them
PAIRS = (
    ("2@0,1", "2@2,3", "local-local"),
    ("2@0,1", "2@0,1", "local-local"),
    ("2@0,1", "2@1,2", "local-local"),
    ("2@0,1", "2@1,2", "all-local"),
    ("2@0,1", "2@1,2", "local-all"),
    ("2@0,1", "2@1,2", "local-mesh"),
    *((("2@0,1", "2@2,3", "split-split"), ("2@0,1", "2@1,2", "split-all")) if supports_split() else ()),
)


def features_of_pair(case: Case) -> set[str]:
    first, second = (set(mesh.ranks) for mesh in case.meshes)
    found = draws.features_of(case) | {"new-group", f"way:{case.get('way')}"}
    return found | ({"overlapping-groups"} if first & second and first != second else set())


@draws.collective_law(
    "local-groups",
    draws.DOC + "new_group, use_local_synchronization",
    "mesh=2@0,1 mesh.b=2@2,3 way=local-local",
    needs=("all_gather",),
    features=features_of_pair,
    cases=[f"mesh={mesh} mesh.b={other} way={way}" for mesh, other, way in PAIRS],
    own_world=lambda case: True,
    weight=0.3,
)
def local_groups(
    mesh: MeshTable,
    mesh__b: MeshTable,
    way: Literal["local-local", "all-local", "local-all", "local-mesh", "split-split", "split-all"],
    device: Device,
):
    """Members alone create a group with ``use_local_synchronization``, or split one, before or after another that its
    members, all ranks, or a mesh create, in one order everywhere; each group communicates among its members."""
    rank, found, group = dist.get_rank(), list[Any](), None
    turns = [*zip((mesh, mesh__b), way.split("-"), strict=True)]
    parents = [dist.new_group(ranks) if how == "split" else None for ranks, how in turns]
    for (ranks, how), parent in zip(turns, parents, strict=True):
        if how == "all":
            group = dist.new_group(ranks)
        elif how == "split" and rank in ranks:
            group = dist.split_group(parent, [[*range(len(ranks))]])
        elif how == "mesh":
            own = DeviceMesh(device.type, ranks)
            group = own.get_group() if rank in ranks else None
        elif rank in ranks:
            group = dist.new_group(ranks, use_local_synchronization=True)
        if rank in ranks:
            out = [torch.full((1,), STALE, device=device) for _ in ranks]
            dist.all_gather(out, torch.tensor([rank], device=device), group=group)
            found.append(torch.cat(out).tolist())
    return {"members": found}


@local_groups.due
def _(mesh, mesh__b, way, rank: Rank):
    if "split" in way and not supports_split():
        raise Meaningless(NO_SPLIT)
    return {"members": [list(table.ranks) for table in (mesh, mesh__b) if rank in table.ranks]}
