"""Laws of ``load_sharded_optimizer_state_dict`` and its planner: a state in chunks of rows, or in chunks of a part.

Fields of a case: ``x`` is a tensor of the state; ``save`` its sharding at the save (see
:mod:`shardlaw.conformance.laws.sharded_tensor.checkpoints`); ``world`` the number of ranks that load; ``part`` the box
of the tensor that these ranks share. With ``axis``, the world is a 2x2 mesh, and the ranks along that axis share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank, WorldSize
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.checkpoint.calls import convert_failures, load, poison
from shardlaw.conformance.laws.checkpoint.fields import Reader, Writer
from shardlaw.conformance.laws.optimizer.act_helpers import from_rows, nested_parameter
from shardlaw.conformance.laws.optimizer.fields import Group, WorldMesh
from shardlaw.conformance.laws.plan.torch_plans import box_slices, to_metadata
from shardlaw.conformance.laws.sharded_tensor import checkpoints
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe_if_sharded
from shardlaw.conformance.laws.sharded_tensor.checkpoints import End, sharded_as
from shardlaw.conformance.laws.sharded_tensor.draws import dtypes
from shardlaw.conformance.laws.sharded_tensor.fields import FullTensor, due_rows, features_of_spec
from shardlaw.conformance.laws.shared.box_fields import BoxesOfX, BoxOfX
from shardlaw.reference.box import Box, format_boxes, parse_box
from shardlaw.reference.checkpoint.optimizer import part_chunks, part_items, shift_box
from shardlaw.reference.notation import Shape
from shardlaw.reference.sharded_tensor import ChunkSpec
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.tilings import tilings

DOCS = "torch.distributed.checkpoint.load_sharded_optimizer_state_dict"


def features(case: Case) -> set[str]:
    """The features of the sharding at the load."""
    shape, world = case.tensor("x").shape, checkpoints.world_sizes(case)[1]
    ranks = (0, 1 if case.get("axis") == "1" else 2) if "axis" in case else tuple(range(world))
    found = features_of_spec(
        parse_box(case.get("part"), len(shape)).size if "part" in case else shape, ChunkSpec(0, ranks), ranks
    )
    found = found | {"part"} if "part" in case else found - {"beyond-the-end"}
    found |= {"group", "mesh-2d", "later-group"} if "axis" in case else set()
    return found | ({"reworld"} if len({*checkpoints.world_sizes(case)}) > 1 else set())


@st.composite
def slab_boxes(draw: st.DrawFn, shape: Shape) -> Box:
    """Boxes that span all dims of a tensor but one."""
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, max(shape[dim] - 1, 0)))
    size = draw(st.integers(min(1, shape[dim]), max(shape[dim] - start, 0)))
    return Box.whole(shape).along(dim, start=start, size=size)


def optimizer_tensor_cases(
    *, saved: bool = False, part: bool = False, groups: bool = False, chunks: bool = False
) -> Callable[[Limits], SearchStrategy[Case]]:
    """Cases of one tensor. ``part``: the ranks share a box of it; ``groups``: sometimes only those of a group do;
    ``saved``: with its sharding at the save; ``chunks``: with its chunks in the metadata."""

    def draw_of(limits: Limits) -> SearchStrategy[Case]:
        sizes = [size for size in (2, 2, 3, 4) if size <= limits.world_size]

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            world = draw(st.sampled_from(sizes))
            shape = draw(shapes(min_dims=1, max_dims=3))
            case_fields: dict[str, Any] = {"world": world}
            if groups and world == 4 and draw(st.integers(0, 1)):
                case_fields["axis"] = draw(st.sampled_from((0, 1)))
            if part:
                case_fields["part"] = format_boxes([draw(slab_boxes(shape))])
            case_fields["x"] = TensorSpec(shape, None, draw(dtypes(limits)))
            if saved:
                count = draw(st.sampled_from([size for size in (2, 3, 1) if size <= limits.world_size]))
                case_fields["save"] = draw(checkpoints.sharding_texts(shape, tuple(range(count))))
                case_fields |= checkpoints.world_fields(count, world)
                case_fields["ids"] = draw(st.sampled_from((None, None, "numbers")))
            if chunks:
                case_fields["chunks"] = format_boxes(draw(tilings(shape))[1])
            return fields(**case_fields, seed=draw(st.integers(0, 9)) or None)

        return case()

    return draw_of


@law(
    "optimizer.offsets",
    source=f"{DOCS}; _ReaderWithOffset",
    control="world=2 x=4x6 part=0:4,2:6 chunks=0:2,0:6;2:4,0:6",
    draw=optimizer_tensor_cases(part=True, chunks=True),
    draws=60,
    needs=("object_collectives",),
    features=features,
)
def offsets(x: FullTensor, part: BoxOfX, chunks: BoxesOfX):
    """For a part of a saved tensor, the planner finds the read items at global offsets, and fills local tensors at
    offsets from the start of the part."""
    state = {"s": from_rows(x[box_slices(*part)]), "p": x}
    planner = compat.ReaderWithOffset({"s": part[0]})
    metadata = to_metadata(dict.fromkeys(state, (x.shape, x.dtype, chunks)))
    metadata.planner_data = {"s": ("s",), "p": ("p",)}
    planner.set_up_planner(state, metadata, True)
    items, translations = {"s": [], "p": []}, set()  # type: ignore[var-annotated]
    looked_up = [(planner.lookup_tensor(MetadataIndex("p", torch.Size([0] * x.ndim))), x)]
    for item in [item for item in planner.create_local_plan().items if 0 not in item.lengths]:
        dest, saved, name = item.dest_index, item.storage_index, item.dest_index.fqn
        read = (dest.offset, saved.offset, item.storage_offsets, item.dest_offsets, item.lengths)
        items[name].append(tuple(map(tuple, read)))
        if name == "s":
            translations.add(
                (tuple(dest.offset), planner.translation[dest].fqn, tuple(planner.translation[dest].offset))
            )
        looked_up.append((planner.lookup_tensor(dest), x if name == "p" else state["s"].local_shards()[0].tensor))
    return {
        "items": {name: sorted(reads) for name, reads in items.items()},
        "translation": sorted(translations),
        "one to one": len({*planner.translation.values()}) == len(planner.translation),
        "looked up": [one.data_ptr() == other.data_ptr() and one.shape == other.shape for one, other in looked_up],
    }


@offsets.due
def _(x, part, chunks, rank: Rank, world: WorldSize):
    own, full_box = part_chunks(part, tuple(range(world)), rank), Box.whole(tuple(x.shape))
    shifted = [shift_box(box, part.offset) for box in own]
    items = {"s": (shifted, part_items(chunks, part, own)), "p": ([full_box], part_items(chunks, full_box, [full_box]))}

    def reads(boxes, items):
        return sorted(
            (boxes[i.box].offset, chunks[i.chunk].offset, i.chunk_offset, i.box_offset, i.lengths) for i in items
        )

    return {
        "items": {name: Of(reads(*expected)) for name, expected in items.items()},
        "translation": Of(
            sorted((box.offset, "s", original.offset) for box, original in zip(shifted, own, strict=True))
        ),
        "one to one": Of(True),
        "looked up": Of([True] * (1 + sum(len(expected) for _, expected in items.values()))),
    }


@law(
    "optimizer.layout",
    source=f"{DOCS}; _get_state_dict_2d_layout: (offset, size) for the current rank",
    control="world=2 x=4x6 part=0:4,2:6",
    draw=optimizer_tensor_cases(part=True, groups=True),
    draws=20,
    needs=("object_collectives",),
    features=features,
)
def layout(x: FullTensor, part: BoxOfX, mesh: WorldMesh, axis: Group | None = None):
    """The 2-D layout of a state has the offset and size of this rank's part of each parameter and the group that shares
    it; tensors that are nested differently are refused."""
    inner = from_rows(x[box_slices(*part)], axis)
    outer = nested_parameter(inner, x.shape, part)
    layouts, group = compat.state_dict_2d_layout({"plain": x, "sharded": inner, "nested": outer})
    (shard,) = outer.local_shards()
    outer.local_shards().append(shard)
    several = caught(lambda: compat.state_dict_2d_layout({"w": outer}))
    outer.local_shards().pop()
    shard.tensor = outer_dtensor = DTensor.from_local(torch.zeros_like(x), mesh, [Replicate()], run_check=False)
    inside = caught(lambda: compat.state_dict_2d_layout({"w": outer}))
    compat.set_local_tensor(outer_dtensor, inner)
    return {
        "layout": {name: (offset and tuple(offset), tuple(size)) for name, (offset, size) in layouts.items()},
        "group": dist.get_process_group_ranks(group),
        "two parts on a rank": several,
        "a DTensor inside": inside,
        "a DTensor around": caught(lambda: compat.state_dict_2d_layout({"w": outer_dtensor})),
    }


@layout.due
def _(x, part, world: WorldSize, axis):
    return {
        "layout": Of(
            {"plain": (None, tuple(x.shape)), "sharded": (None, part.size), "nested": (part.offset, part.size)}
        ),
        "group": Of([*(axis or range(world))]),
        "two parts on a rank": Refused(),
        "a DTensor inside": Refused(),
        "a DTensor around": Refused(),
    }


def save_optimizer(
    x: FullTensor, save: End, rank: Rank, writer: Writer, folder: Folder, ids: Literal["names", "numbers"] = "names"
):
    """Save an optimizer's state (a tensor of the parameter's shape, tensors of one element, values), and a model and
    values with similar names."""
    tensor = sharded_as(x, save, rank, None)
    name, other = (0, 1) if ids == "numbers" else ("layer.w", "b")
    entries = {"exp_avg": tensor, "step": torch.tensor(4.0), "note": "kept"}
    groups = [{"lr": 0.5, "params": [name]}, {"lr": 0.25, "params": [other]}]
    optimizer = {"state": {name: entries, other: {"step": torch.full((1, 1), 3)}}, "param_groups": groups}
    model = {"layer.w": torch.zeros(2), "opt": torch.zeros(3)}
    saved = {"model": model, "opt": optimizer, "opt_schedule": {"rate": 0.5}}
    with convert_failures():
        dcp.save(saved, storage_writer=writer(folder))
    return {}


def load_optimizer(
    x: FullTensor,
    reader: Reader,
    folder: Folder,
    ids: Literal["names", "numbers"] = "names",
    part: BoxOfX | None = None,
    axis: Group | None = None,
):
    """Load it in chunks of rows, of the full tensors or of the part that the ranks share."""
    name, other = ("0", "1") if ids == "numbers" else ("layer.w", "b")
    model = {name: nested_parameter(from_rows(x[box_slices(*part)], axis), x.shape, part)} if part else {}
    with convert_failures():
        loaded = dcp.load_sharded_optimizer_state_dict(model, "opt", reader(folder))
    optimizer = loaded.get("opt", {})
    state = optimizer.get("state", {})
    entries, other_entries = state.get(name, {}), state.get(other, {})
    return {
        "entries": [[*loaded], sorted(optimizer), sorted(state), optimizer.get("param_groups")],
        "step": entries.get("step"),
        "one element": other_entries.get("step"),
        "note": entries.get("note"),
        "loaded": describe_if_sharded(entries.get("exp_avg")),
    }


def due_loaded(x, rank: Rank, world: WorldSize, ids, part, axis):
    name, other = (0, 1) if ids == "numbers" else ("layer.w", "b")
    groups = [{"lr": 0.5, "params": [name]}, {"lr": 0.25, "params": [other]}]
    full = x[part.slices()] if part else x
    return {
        "entries": Of([["opt"], ["param_groups", "state"], sorted(map(str, (name, other))), groups]),
        "step": torch.tensor(4.0),
        "one element": torch.full((1, 1), 3),
        "note": "kept",
        "loaded": x if x.numel() == 1 else due_rows(full, axis or range(world), rank),
    }


def load_law(name: str, clause: str, source: str, control: str, draw: Callable[[Limits], SearchStrategy[Case]]) -> Law:
    needs = ("checkpoint", "object_collectives")
    built = law(
        f"optimizer.{name}", clause=clause, source=f"{DOCS}{source}", control=control, draw=draw, draws=12,
        needs=needs, stages=checkpoints.world_sizes, features=features,
    )(save_optimizer)  # fmt: skip
    built.due(lambda: {})
    built.then(load_optimizer).due(due_loaded)
    return built


LAWS = (
    load_law(
        "loaded",
        "An optimizer's state is loaded in chunks of rows over all ranks; tensors of one element and values in full.",
        ": load a state_dict in conjunction with FSDP sharded optimizer state",
        "world=2 x=4x3 save=S(0)@2",
        optimizer_tensor_cases(saved=True),
    ),
    load_law(
        "loaded-part",
        "If ranks have parts of parameters, the state is loaded in the same parts, in chunks over the group of a part.",
        "; the right slice of the optimizer state",
        "world=2 x=4x6 part=0:4,2:6 save=S(0)@2",
        optimizer_tensor_cases(saved=True, part=True, groups=True),
    ),
)


@law(
    "optimizer.nested",
    source="torch.distributed.checkpoint docs, DefaultLoadPlanner: flatten_sharded_tensors",
    control="world=2 x=4x6 part=0:4,2:6 save=S(0)@2",
    draw=optimizer_tensor_cases(saved=True, part=True, groups=True),
    draws=10,
    needs=("checkpoint", "object_collectives"),
    stages=checkpoints.world_sizes,
    features=features,
)
def save_parameter(x: FullTensor, save: End, rank: Rank, writer: Writer, folder: Folder):
    """A parameter whose local shards are sharded tensors themselves can be loaded, however it was saved."""
    with convert_failures():
        dcp.save({"w": sharded_as(x, save, rank, None)}, storage_writer=writer(folder))
    return {}


save_parameter.due(lambda: {})


@save_parameter.then
def load_parameter(
    x: FullTensor, part: BoxOfX, reader: Reader, folder: Folder, axis: Group | None = None, ids: str = ""
):
    """Load it into the part of this rank."""
    outer = nested_parameter(from_rows(poison(x[box_slices(*part)]), axis), x.shape, part)
    load({"w": outer}, reader(folder))
    return {"loaded": describe_if_sharded(outer.local_shards()[0].tensor)}


@save_parameter.due
def _(x, part, rank: Rank, world: WorldSize, axis):
    return {"loaded": due_rows(x[part.slices()], axis or range(world), rank)}
