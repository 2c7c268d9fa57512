"""Laws of plans for DTensors: the write items of each rank of a mesh, and its read items after a save on any mesh."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, as_metadata, caught
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.plan import cases
from shardlaw.conformance.laws.plan.cases import plan_law
from shardlaw.conformance.laws.plan.fields import LoadedStates, MeshState, SavedTensor, States, rank_count
from shardlaw.conformance.laws.plan.torch_plans import (
    box_slices,
    element_numbers,
    has_elements,
    load_items,
    local_plan,
    plain_item,
    to_metadata,
)
from shardlaw.reference import simulate
from shardlaw.reference.checkpoint.state_dict import Slot, flatten, format_state
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import placements, shapes, state_dicts

DOCS = "torch.distributed.checkpoint docs"
# how strided shards may be refused
REFUSALS = (NotImplementedError, ValueError, RuntimeError)
# One process plans for all ranks, so meshes may be larger than a world. The plainest come first.
MESHES = [
    Mesh.parse(text)
    for text in (
        *("2", "3", "2x2", "2x3", "4", "5", "2x2x2", "8", "1", "3x2", "2x4", "1x3", "3x1", "2x1x3", "7"),
        *("2x2", "2x3", "3"),
        *("2@1,0", "2@0,2", "3@2,0,1", "2x2@0,2,1,3", "2x2@4,1,2,0", "3x2@5,0,3,1,4,2", "2x1@3,1", "1@2"),
    )
]


def features(case: Case) -> set[str]:
    """Whether there are ranks outside the mesh; the world of the case, one process, does not show it."""
    mesh = case.mesh()
    return {"submesh"} if rank_count(mesh) > mesh.size else set()


# Write items


@st.composite
def tensors_on(draw: st.DrawFn, limits: Limits, mesh: Mesh, *, strided: bool, allow_plain: bool = True) -> TensorSpec:
    shape = draw(shapes(max_size=9))
    kinds = ("R", "S", "_S") if strided else ("R", "S")
    dtype = draw(st.sampled_from([name for name in cases.DTYPES if name in limits.dtypes]))
    if allow_plain and draw(st.integers(0, 5)) == 5:
        return TensorSpec(shape, None, dtype)
    return TensorSpec(shape, draw(placements(mesh, len(shape), kinds=kinds, negative=True)), dtype)


@st.composite
def draw_items(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(MESHES))
    specs: dict[str, Any] = {
        "x": draw(tensors_on(limits, mesh, strided=draw(st.integers(0, 5)) == 5, allow_plain=False))
    }
    if draw(st.integers(0, 2)) == 2:
        specs["a"] = draw(tensors_on(limits, mesh, strided=False))
    state = format_state(draw(state_dicts(tuple(specs), max_entries=2))) if draw(st.integers(0, 3)) == 3 else None
    return fields(world=1, mesh=mesh, **specs, state=state)


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
    """A rank's save plan has one item for its local shard of each DTensor, and one for every plain tensor and value."""
    plans = [caught(local_plan, state, rank == 0) for rank, state in enumerate(states)]
    items = [plain_item(item) for plan in plans if not isinstance(plan, Exception) for item in plan.items]
    offsets = {(item[0], item[1][0]) for item in items if len(item) > 1 and has_elements(item)}
    empty_at_others = [item for item in items if not has_elements(item) and (item[0], item[1][0]) in offsets]
    summaries = {
        f"rank {rank}": plan if isinstance(plan, Exception) else plan_summary(plan) for rank, plan in enumerate(plans)
    }
    return {**summaries, "empty amid others": empty_at_others}


def plan_summary(plan: Any) -> dict[str, Any]:
    """The paths of a plan, and for each leaf the number of its items, the tensor that they describe, and the numbers of
    the elements in their boxes."""
    leaves: dict[str, Any] = {}
    for item in sorted(map(plain_item, plan.items), key=repr):
        name, box, *tensor = (*item, None)[:2] if len(item) == 1 else item
        if has_elements(item) or item[4]:
            leaf = leaves.setdefault(name, {"items": 0, "tensor": tensor, "elements": []})
            leaf["items"] += 1
            leaf["elements"] += element_numbers(item[2])[box_slices(*box)].flatten().tolist() if tensor else []
            leaf["elements"].sort()
    return {"paths": dict(sorted(plan.planner_data.items())), "leaves": leaves}


@write_items.due
def _(states):
    due: dict[str, Any] = {f"rank {rank}": due_plan(states, rank) for rank in range(rank_count(states.mesh))}
    if any(layout.is_strided() for layout in states.layouts):
        due = {rank: Either((plan, Refused(REFUSALS))) for rank, plan in due.items()}
    return {**due, "empty amid others": Of([])}


def due_plan(state: MeshState, rank: int) -> dict[str, Any]:
    leaves, coord = dict(sorted(flatten(state.state).items())), state.mesh.coord(rank)
    found: dict[str, Any] = {}
    for name, (_, leaf) in leaves.items():
        if not isinstance(leaf, Slot):
            found[name] = as_metadata({"items": 1, "tensor": [], "elements": []})
            continue
        spec, layout = state.specs[leaf.name], state.layout(leaf.name)
        elements = element_numbers(spec.shape)
        if layout is not None:
            elements = simulate.take(elements, layout, coord) if coord is not None else elements.flatten()[:0]
        if elements.numel() or layout is None:
            tensor, numbers = [spec.shape, spec.torch_dtype, layout is None], sorted(elements.flatten().tolist())
            found[name] = as_metadata({"items": 1, "tensor": tensor, "elements": numbers})
            if layout is not None and coord is not None and layout.box(coord) is None:
                found[name]["items"] = ...
    return {"paths": Of({name: path for name, (path, _) in leaves.items()}), "leaves": found}


# Read items


@st.composite
def draw_reshard(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, load_mesh = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    spec = draw(tensors_on(limits, mesh, strided=False))
    to: Any = "-"
    if draw(st.integers(0, 6)) < 6:
        kinds = ("R", "S", "_S") if draw(st.integers(0, 3)) == 3 else ("R", "S")
        to = draw(placements(load_mesh, len(spec.shape), kinds=kinds, negative=True))
    return fields(world=1, mesh=mesh, mesh__load=load_mesh, x=spec, to=to)


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
    """From a tensor saved on any mesh, every rank of another mesh reads each element of its local shard once, to the
    right place."""
    plans = [caught(load_items, state, to_metadata(saved)) for state in states]
    return {
        f"rank {rank}": plan if isinstance(plan, Exception) else read_summary(plan, state["x"], saved["x"])
        for rank, (plan, state) in enumerate(zip(plans, states, strict=True))
    }


def read_summary(items: list[Any], tensor: torch.Tensor, saved: Any) -> dict[str, Any]:
    """The number, in the saved tensor, of the element read into each place of the local tensor; how many elements are
    read; and the empty read items."""
    shape, _, chunks = saved
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    places, count, empty_reads = torch.full(local.shape, -1), 0, []
    for item in items:
        offset = tuple(item.storage_index.offset)
        chunk = element_numbers(shape)[box_slices(offset, dict(chunks)[offset])]
        places[box_slices(item.dest_offsets, item.lengths)] = chunk[box_slices(item.storage_offsets, item.lengths)]
        count += item.lengths.numel()
        empty_reads += [] if item.lengths.numel() else [item]
    return {"elements": places.tolist(), "count": count, "pointless": empty_reads}


@reshard.due
def _(states):
    layout, found = states.layout("x"), {}
    for rank in range(rank_count(states.mesh)):
        local, coord = element_numbers(states.specs["x"].shape), states.mesh.coord(rank)
        if layout is not None:
            local = simulate.take(local, layout, coord) if coord is not None else local.new_empty(0)
        due = as_metadata({"elements": local.tolist(), "count": local.numel(), "pointless": []})
        found[f"rank {rank}"] = Either((due, Refused(REFUSALS))) if layout is not None and layout.is_strided() else due
    return found
