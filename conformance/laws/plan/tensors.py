"""Laws of plans for DTensors: what each rank of a mesh says that it holds, and what each reads of what others have
saved."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, as_metadata, caught
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.plan import cases
from shardlaw.conformance.laws.plan.cases import plan_law
from shardlaw.conformance.laws.plan.fields import (
    LoadedStates,
    MeshState,
    SavedTensor,
    States,
    ranks_of,
)
from shardlaw.conformance.laws.plan.torch_plans import (
    cut,
    has_elements,
    load_items,
    local_plan,
    metadata_of,
    numbered,
    plain_item,
)
from shardlaw.reference import simulate
from shardlaw.reference.checkpoint.state_dict import Slot, flatten, format_state
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import placements, shapes, state_dicts

DOCS = "torch.distributed.checkpoint docs"
# what a strided shard may be refused by
REFUSALS = (NotImplementedError, ValueError, RuntimeError)
# Seats cost next to nothing, so meshes may be larger than any world: the plainest first, the odd ones less often.
MESHES = [
    Mesh.parse(text)
    for text in (
        *(
            "2",
            "3",
            "2x2",
            "2x3",
            "4",
            "5",
            "2x2x2",
            "8",
            "1",
            "3x2",
            "2x4",
            "1x3",
            "3x1",
            "2x1x3",
            "7",
            "2x2",
            "2x3",
            "3",
        ),
        *("2@1,0", "2@0,2", "3@2,0,1", "2x2@0,2,1,3", "2x2@4,1,2,0", "3x2@5,0,3,1,4,2", "2x1@3,1", "1@2"),
    )
]


def features(case: Case) -> set[str]:
    """What the seats of a case are: ranks outside the mesh, although one process plays them all."""
    mesh = case.mesh()
    return {"submesh"} if ranks_of(mesh) > mesh.size else set()


# What a rank says that it holds


@st.composite
def drawn_spec(draw: st.DrawFn, limits: Limits, mesh: Mesh, *, strided: bool, plain_too: bool = True) -> TensorSpec:
    shape = draw(shapes(max_size=9))
    kinds = ("R", "S", "_S") if strided else ("R", "S")
    dtype = draw(st.sampled_from([name for name in cases.DTYPES if name in limits.dtypes]))
    if plain_too and draw(st.integers(0, 5)) == 5:
        return TensorSpec(shape, None, dtype)
    return TensorSpec(shape, draw(placements(mesh, len(shape), kinds=kinds, negative=True)), dtype)


def draw_items(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(MESHES))
        specs: dict[str, Any] = {
            "x": draw(drawn_spec(limits, mesh, strided=draw(st.integers(0, 5)) == 5, plain_too=False))
        }
        if draw(st.integers(0, 2)) == 2:
            specs["a"] = draw(drawn_spec(limits, mesh, strided=False))
        state = format_state(draw(state_dicts(tuple(specs), max_entries=2))) if draw(st.integers(0, 3)) == 3 else None
        return fields(world=1, mesh=mesh, **specs, state=state)

    return case()


@plan_law(
    "plan.write-items",
    source=f"{DOCS}, SavePlanner.create_local_plan; torch.distributed.tensor, DTensor.__create_write_items__",
    control="mesh=2x3 x=5x7:S(0),S(-1) a=4:-:int64 state={x:x,d:{a:a,n:1}}",
    draw=draw_items,
    draws=80,
    weight=0.4,
    features=features,
)
def write_items(states: States):
    """A rank's plan has one item for the part of each DTensor that it holds, and one for every plain tensor and
    value."""
    plans = [caught(local_plan, state, rank == 0) for rank, state in enumerate(states)]
    items = [[*map(plain_item, plan.items)] for plan in plans if not isinstance(plan, Exception)]
    begin = {(item[0], item[1][0]) for own in items for item in own if len(item) > 1 and has_elements(item)}
    amid = [item for own in items for item in own if not has_elements(item) and (item[0], item[1][0]) in begin]
    found = {
        f"rank {rank}": plan if isinstance(plan, Exception) else leaves_in(plan) for rank, plan in enumerate(plans)
    }
    return {**found, "empty amid others": amid}


def leaves_in(plan: Any) -> dict[str, Any]:
    """The paths of a plan, and of each leaf how many items there are of it, what they say of the tensor, and which
    elements they name."""
    leaves: dict[str, Any] = {}
    for item in sorted(map(plain_item, plan.items), key=repr):
        name, box, *tensor = (*item, None)[:2] if len(item) == 1 else item
        if has_elements(item) or item[4]:
            leaf = leaves.setdefault(name, {"items": 0, "tensor": tensor, "elements": []})
            leaf["items"] += 1
            leaf["elements"] += numbered(item[2])[cut(*box)].flatten().tolist() if tensor else []
            leaf["elements"].sort()
    return {"paths": dict(sorted(plan.planner_data.items())), "leaves": leaves}


@write_items.due
def _(states):
    due: dict[str, Any] = {f"rank {rank}": due_plan(states, rank) for rank in range(ranks_of(states.mesh))}
    if any(layout.is_strided() for layout in states.layouts):
        due = {rank: Either((plan, Refused(REFUSALS))) for rank, plan in due.items()}
    return {**due, "empty amid others": Of([])}


def due_plan(held: MeshState, rank: int) -> dict[str, Any]:
    leaves, coord = dict(sorted(flatten(held.state).items())), held.mesh.coord(rank)
    found: dict[str, Any] = {}
    for name, (_, leaf) in leaves.items():
        if not isinstance(leaf, Slot):
            found[name] = as_metadata({"items": 1, "tensor": [], "elements": []})
            continue
        spec, layout, own = held.specs[leaf.name], held.layout(leaf.name), numbered(held.specs[leaf.name].shape)
        if layout is not None:
            own = simulate.take(own, layout, coord) if coord is not None else own.flatten()[:0]
        if own.numel() or layout is None:
            tensor, elements = [spec.shape, spec.torch_dtype, layout is None], sorted(own.flatten().tolist())
            found[name] = as_metadata({"items": 1, "tensor": tensor, "elements": elements})
            if layout is not None and coord is not None and layout.box(coord) is None:
                found[name]["items"] = ...
    return {"paths": Of({name: path for name, (path, _) in leaves.items()}), "leaves": found}


# What a rank reads


def draw_reshard(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, load_mesh = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
        spec = draw(drawn_spec(limits, mesh, strided=False))
        to: Any = "-"
        if draw(st.integers(0, 6)) < 6:
            kinds = ("R", "S", "_S") if draw(st.integers(0, 3)) == 3 else ("R", "S")
            to = draw(placements(load_mesh, len(spec.shape), kinds=kinds, negative=True))
        return fields(world=1, mesh=mesh, mesh__load=load_mesh, x=spec, to=to)

    return case()


@plan_law(
    "plan.reshard",
    source=f"{DOCS}, LoadPlanner.create_local_plan; load-time resharding",
    control="mesh=2x2 mesh.load=3 x=5x7:S(0),S(1) to=S(0)",
    draw=draw_reshard,
    draws=80,
    weight=0.4,
    features=features,
)
def reshard(saved: SavedTensor, states: LoadedStates):
    """Of a tensor that any mesh has saved, every rank of any other reads each element of its own part once, to its
    place."""
    plans = [caught(load_items, state, metadata_of(saved)) for state in states]
    return {
        f"rank {rank}": plan if isinstance(plan, Exception) else elements_read(plan, state["x"], saved["x"])
        for rank, (plan, state) in enumerate(zip(plans, states, strict=True))
    }


def elements_read(items: list[Any], tensor: torch.Tensor, saved: Any) -> dict[str, Any]:
    """Which elements, numbered as they lie in the saved tensor, go to the places of a local tensor; how many are read;
    empty reads."""
    shape, _, chunks = saved
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    places, count, pointless = torch.full(local.shape, -1), 0, []
    for item in items:
        offset = tuple(item.storage_index.offset)
        chunk = numbered(shape)[cut(offset, dict(chunks)[offset])]
        places[cut(item.dest_offsets, item.lengths)] = chunk[cut(item.storage_offsets, item.lengths)]
        count += item.lengths.numel()
        pointless += [] if item.lengths.numel() else [item]
    return {"elements": places.tolist(), "count": count, "pointless": pointless}


@reshard.due
def _(states):
    layout, found = states.layout("x"), {}
    for rank in range(ranks_of(states.mesh)):
        full, coord = numbered(states.specs["x"].shape), states.mesh.coord(rank)
        if layout is not None:
            full = simulate.take(full, layout, coord) if coord is not None else full.new_empty(0)
        want = as_metadata({"elements": full.tolist(), "count": full.numel(), "pointless": []})
        found[f"rank {rank}"] = (
            Either((want, Refused(REFUSALS))) if layout is not None and layout.is_strided() else want
        )
    return found
