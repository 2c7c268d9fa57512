"""Laws of load plans: which parts of the saved chunks are read, and which loads are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, as_metadata, caught
from shardlaw.conformance.law.fields import Shape, Word
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.plan import cases
from shardlaw.conformance.laws.plan.cases import plan_law
from shardlaw.conformance.laws.plan.fields import Boxes, Destination, SavedLeaves, parse_leaves
from shardlaw.conformance.laws.plan.torch_plans import (
    chunk_metadata,
    load_items,
    tensor_metadata,
    to_metadata,
    untiled_elements,
)
from shardlaw.reference.box import format_boxes, parse_boxes, tiling_errors
from shardlaw.reference.checkpoint import load_plan
from shardlaw.reference.notation import format_shape
from shardlaw.strategies.shapes import shapes
from shardlaw.strategies.tilings import damaged_tilings, tilings, wanted_boxes

DOCS = "torch.distributed.checkpoint docs"
REFUSALS = (ValueError, AssertionError, RuntimeError)


# Read items


def draw_reads(limits: Limits) -> SearchStrategy[Case]:
    tiling = tilings(max_boxes=7)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        shape, chunks = draw(tiling)
        boxes = draw(wanted_boxes(shape, max_boxes=5))
        return fields(world=1, shape=format_shape(shape), chunks=format_boxes(chunks), boxes=format_boxes(boxes))

    return case()


# boxes whose starts and ends have different orders along the longest dim
STAGGERED = (
    "world=1 shape=10x3 chunks=0:1,0:3;1:4,0:3;4:10,0:3 boxes=0:1,2:3;0:10,0:1;2:4,1:2",
    "world=1 shape=3x12 chunks=0:3,0:2;0:3,2:5;0:3,5:12 boxes=2:3,0:2;1:2,3:9;0:1,0:12;2:3,4:12",
    "world=1 shape=4x9 chunks=0:4,6:9;0:2,0:6;2:4,0:3;2:4,3:6 boxes=0:1,3:9;1:2,0:4;2:4,1:8;1:2,5:6",
)


@plan_law(
    "plan.read-items",
    source=f"{DOCS}, create_read_items_for_chunk_list; ReadItem",
    control="shape=5x6 chunks=0:2,0:6;2:5,0:4;2:5,4:6 boxes=1:4,0:5",
    cases=STAGGERED,
    draw=draw_reads,
    draws=120,
    features=None,
)
def read_items(shape: Shape, chunks: Boxes, boxes: Boxes):
    """A load plan reads the intersection of each saved chunk with each wanted box once, and nothing else."""
    saved = tensor_metadata(shape, torch.float32, chunks)
    items = create_read_items_for_chunk_list("x", saved, [chunk_metadata(box) for box in boxes])
    reads = [(i.storage_index.offset, i.dest_index.offset, i.storage_offsets, i.dest_offsets, i.lengths) for i in items]
    # an empty chunk or box may have an empty read
    empty = [offset for offset, size in (*chunks, *boxes) if 0 in size]
    return {
        "names": sorted({index.fqn for item in items for index in (item.dest_index, item.storage_index)} - {"x"}),
        "pointless": [read for read in reads if 0 in read[4] and read[0] not in empty and read[1] not in empty],
        "reads": sorted(read for read in reads if 0 not in read[4]),
    }


@read_items.due
def _(chunks, boxes):
    found = load_plan.read_items(chunks, boxes)
    reads = sorted(
        (chunks[i.chunk].offset, boxes[i.box].offset, i.chunk_offset, i.box_offset, i.lengths) for i in found
    )
    return as_metadata({"names": [], "pointless": [], "reads": reads})


def draw_chunks(limits: Limits) -> SearchStrategy[Case]:
    tiling = st.one_of(tilings(max_boxes=5), damaged_tilings(kinds=("gap", "emptied", "shifted", "overlap")))
    return tiling.map(lambda drawn: fields(world=1, shape=format_shape(drawn[0]), chunks=format_boxes(drawn[1])))


def tiling_features(case: Case) -> set[str]:
    """The features of the chunks of a case: whether they overlap or leave a gap, and whether there are several."""
    shape = case.shape()
    chunks = parse_boxes(case.get("chunks"), len(shape))
    errors = tiling_errors(shape, chunks)
    overlap = any(error.endswith("overlap") for error in errors)
    found = {"damaged:overlap" if overlap else "damaged:gap"} if errors else set()
    return found | ({"several-chunks"} if len(chunks) > 1 else set())


@plan_law(
    "plan.read-refuses",
    source=f"{DOCS}, LoadPlan: read items cover what is loaded into",
    control="shape=5 chunks=0:2;2:5",
    draw=draw_chunks,
    draws=60,
    weight=0.2,
    features=tiling_features,
)
def uncovered(shape: Shape, chunks: Boxes):
    """A load is refused where the saved chunks do not cover each element of the tensor exactly once."""
    items = caught(load_items, {"x": torch.zeros(shape)}, to_metadata({"x": (shape, torch.float32, chunks)}))
    if isinstance(items, Exception):
        return {"unread": items}
    return {"unread": untiled_elements(shape, [(item.dest_offsets, item.lengths) for item in items])}


@uncovered.due
def _(shape, chunks):
    nothing = Of([], "wrong-error")
    return {"unread": Either((Refused(REFUSALS), nothing)) if tiling_errors(shape, chunks) else nothing}


# Refusals


@st.composite
def other_shapes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A different shape: a dim added or dropped, dims reversed, or one extent changed."""
    shapes_nearby = {
        (*shape, 1),
        (1, *shape),
        shape[1:],
        shape[:-1],
        shape[::-1],
        (*shape[:-1], shape[-1] + 1) if shape else (1,),
    }
    if shape:
        shapes_nearby |= {(0, *shape[1:]), (shape[0] + 1, *shape[1:]), (max(shape[0] - 1, 0), *shape[1:])}
    return draw(st.sampled_from(sorted(shapes_nearby - {shape})))


def draw_refused(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    def extra(draw: st.DrawFn, ranks: int, leaves: dict[str, Any]) -> dict[str, Any]:
        name = draw(st.sampled_from(sorted(leaves)))
        leaf = leaves[name]
        if kind == "missing":
            return {"culprit": "z", "want": "value" if draw(st.booleans()) else format_shape(draw(shapes(max_dims=2)))}
        if kind == "size":
            if leaf.kind == "value":
                leaf = leaves[name] = draw(cases.tensor_leaves(ranks, Limits()))
            return {"culprit": name, "want": format_shape(draw(other_shapes(leaf.shape)))}
        # a value for a saved tensor, or a tensor for a saved value
        return {"culprit": name, "want": "3" if leaf.kind == "value" else "value"}

    return lambda limits: cases.state_cases(limits, extra=extra)


def refusal_features(case: Case) -> set[str]:
    found = cases.features(case)
    culprit = parse_leaves(case).get(case.get("culprit", "-"))
    if case.law.startswith("plan.refuses[kind]") and culprit is not None and culprit.kind == "value":
        found.add("value-for-tensor")
    return found


def refuses(saved: SavedLeaves, into: Destination):
    return {"plan": caught(load_items, state_to_load(into), to_metadata(saved))}


def state_to_load(into: dict[str, Any]) -> dict[str, Any]:
    return {name: 1 if shape is None else torch.zeros(shape) for name, shape in into.items()}


def due_refuses(culprit: Word):
    return {"plan": Refused(REFUSALS, (f"{culprit}.leaf",))}


def refusal_law(kind: str, clause: str, control: str) -> Law:
    built = plan_law(
        f"plan.refuses[{kind}]",
        clause=clause,
        source=f"{DOCS}, DefaultLoadPlanner; LoadPlanner.create_local_plan",
        control=f"ranks=2 a=4/0:2@0;2:4@1 culprit={control}",
        draw=draw_refused(kind),
        draws=30,
        weight=0.2,
        features=refusal_features,
    )(refuses)
    built.due(due_refuses)
    return built


@plan_law(
    "plan.partial",
    source=f"{DOCS}, DefaultLoadPlanner (allow_partial_load)",
    control="ranks=2 a=4/0:2@0;2:4@1 n=value@0+1 culprit=z want=4",
    draw=draw_refused("missing"),
    draws=30,
    weight=0.2,
)
def partial(saved: SavedLeaves, into: Destination):
    """A partial load skips names that are not in the checkpoint, and reads every other tensor completely."""
    parts: dict[str, Any] = {}
    for item in load_items(state_to_load(into), to_metadata(saved), True):
        parts.setdefault(item.dest_index.fqn, []).append((item.dest_offsets, item.lengths))
    read = sorted(name for name in parts if into[name] is None or 0 not in into[name])
    unread = {name: untiled_elements(into[name], parts[name]) for name in read if into[name] is not None}
    return {"names": read, "unread": {name: elements for name, elements in unread.items() if elements}}


@partial.due
def _(saved, into):
    wanted = {name for name, shape in into.items() if shape is None or 0 not in shape}
    return as_metadata({"names": sorted(wanted & {*saved.entries}), "unread": {}})


LAWS = [
    refusal_law(
        "missing",
        "A load of a name that is not in the checkpoint is refused, and the error contains the name.",
        "z want=4",
    ),
    refusal_law(
        "size", "A load into a tensor of another shape is refused, and the error contains its name.", "a want=4x1"
    ),
    refusal_law(
        "kind",
        "A load of a value from a saved tensor, or the reverse, is refused, and the error contains its name.",
        "a want=value",
    ),
]
