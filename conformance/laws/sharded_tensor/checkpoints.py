"""The law of sharded tensors in checkpoints: saved as one kind of tensor, loaded as any other, by different ranks.

The fields ``save`` and ``load`` say how the tensor is sharded at that end: ``-`` for a plain tensor on every rank; a
sharding spec in the notation of :mod:`shardlaw.reference.sharded_tensor`; or placements and their mesh, such as
``S(0),R@2x2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law import literal
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Of
from shardlaw.conformance.law.fields import Field, Folder, Rank, ScriptArgument
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.checkpoint.calls import convert_failures
from shardlaw.conformance.laws.checkpoint.fields import Reader, Writer
from shardlaw.conformance.laws.plan.torch_plans import box_slices
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe_if_sharded, from_boxes
from shardlaw.conformance.laws.sharded_tensor.draws import dtypes, sharded_law
from shardlaw.conformance.laws.sharded_tensor.fields import (
    EqualsField,
    FullTensor,
    Group,
    due_description,
    features_of_spec,
)
from shardlaw.conformance.laws.shared.box_fields import boxes_values
from shardlaw.reference.checkpoint.load_plan import read_items
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import format_placements, parse_placements
from shardlaw.reference.sharded_tensor import ChunkSpec, Spec, parse_spec, shards_of
from shardlaw.reference.shards import Shards
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import exact_meshes, placements, shapes
from shardlaw.strategies.shard_specs import chunk_specs, enumerable_specs

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

VALUES = {"numbers": [1, 2], "text": "saved"}
OTHER_VALUES = {"numbers": [7], "text": "other"}
NAME = "inner.t"


@dataclass(frozen=True)
class Sharding:
    """How a tensor is sharded at one end: by a spec, by a layout, or not at all (plain on each of ``ranks``)."""

    shards: Shards
    ranks: tuple[int, ...]
    spec: Spec | None = None
    layout: Layout | None = None


def sharding_at(case: Case, end: str) -> Sharding:
    """The sharding of the tensor of a case at an end, ``save`` or ``load``."""
    shape, text = case.tensor("x").shape, case.get(end)
    world = world_sizes(case)[end == "load"]
    group = case.get("group" if end == "save" else "group.load", "")
    ranks = tuple(map(int, group.split(","))) if group else tuple(range(world))
    if text == "-":
        return Sharding(Shards.whole(shape, ranks), ranks)
    if text[0] in "SR_":
        placement_text, _, mesh = text.partition("@")
        layout = Layout(shape, Mesh.parse(mesh), parse_placements(placement_text))
        return Sharding(Shards.of_layout(layout), ranks, layout=layout)
    spec = parse_spec(text, shape)
    return Sharding(shards_of(spec, shape), ranks, spec=spec)


def world_sizes(case: Case) -> tuple[int, ...]:
    """The number of ranks that save, and the number that load."""
    return case.integer("world.save", case.world), case.integer("world.load", case.world)


def world_fields(save_ranks: int, load_ranks: int) -> dict[str, int]:
    """The fields of a case that say how many ranks save and how many load."""
    sizes = {"world__save": save_ranks, "world__load": load_ranks} if save_ranks != load_ranks else {}
    return {"world": max(save_ranks, load_ranks), **sizes}


# The fields


class EndField(Field):
    """The sharding of the tensor at an end. The act gets a dict of this rank's ``boxes``, and of the ``mesh`` and
    ``placements`` of a DTensor; the dict is empty for a plain tensor."""

    takes = "- for a plain tensor, a sharding spec, or placements and their mesh such as S(0),R@2x2"

    def fields(self, name: str) -> tuple[str, ...]:
        return name, "x", "group", "group.load", "world.save", "world.load"

    def read(self, case: Case, name: str) -> Sharding:
        return sharding_at(case, name)

    def build(self, value: Sharding, here: RankContext) -> dict[str, Any]:
        boxes = boxes_values(value.shards.boxes_of(here.rank))
        if value.layout is None:
            return {} if value.spec is None else {"boxes": boxes}
        mesh, placements = here.mesh(value.layout.mesh), here.placements(value.layout.placements)
        return {"mesh": mesh, "placements": placements, "boxes": boxes}

    def to_script(self, value: Sharding, name: str, world: int) -> ScriptArgument:
        if value.layout is None and value.spec is None:
            return ScriptArgument("{}")
        by_rank = {rank: boxes_values(value.shards.boxes_of(rank)) for rank in range(world)}
        table = literal.rank_table(f"{name.upper()}_BOXES", by_rank)
        boxes = f'"boxes": {name.upper()}_BOXES[rank]'
        if value.layout is None:
            return ScriptArgument(f"{{{boxes}}}", tuple(table))
        placements = literal.placements_literal(value.layout.placements)
        return ScriptArgument(
            f'{{"mesh": mesh, "placements": {placements}, {boxes}}}',
            tuple(table),
            (f"mesh = {literal.mesh_literal(value.layout.mesh)}",),
        )


End = Annotated[dict[str, Any], EndField()]
Hooked = Annotated[bool, EqualsField("hook", "yes")]


# The cases


def trip_features(case: Case) -> set[str]:
    found = set()
    saved, loaded = sharding_at(case, "save"), sharding_at(case, "load")
    kinds = []
    for at, end in enumerate((saved, loaded)):
        if end.spec is not None:
            found |= features_of_spec(end.shards.shape, end.spec, end.ranks)
            kinds.append("chunks" if isinstance(end.spec, ChunkSpec) else "boxes")
        else:
            kinds.append("plain" if end.layout is None else "dtensor")
        if ("group.load" if at else "group") in case:
            found |= {"group", "submesh"}
    if len({*kinds}) > 1:
        found.add("kinds-crossed")
    if "plain" in kinds:
        found.add("plain-tensor")
    if len({*world_sizes(case)}) > 1:
        found.add("reworld")
    if case.get("save") != case.get("load"):
        found.add("reshard")
    return found | ({"hook"} if "hook" in case else set())


def sharding_texts(shape: Shape, ranks: Sequence[int], *, mesh: Mesh | None = None) -> SearchStrategy[str]:
    """Shardings of a shape on these ranks, as texts; layouts are of ``mesh``, by default a 1-D mesh of the ranks."""
    layout_mesh = mesh or Mesh((len(ranks),), tuple(ranks))
    layout_placements = placements(layout_mesh, len(shape), kinds=("R", "S") if shape else ("R",))
    kinds: list[SearchStrategy[str]] = [
        enumerable_specs(shape, ranks).map(str),
        layout_placements.map(lambda chosen: f"{format_placements(chosen)}@{layout_mesh}"),
        *[chunk_specs(shape, ranks).map(str)] * 2,
        st.just("-"),
    ]
    return st.one_of(kinds)


def draw_trips(limits: Limits) -> SearchStrategy[Case]:
    sizes = [size for size in (2, 2, 3, 1, 4) if size <= limits.world_size]

    @st.composite
    def end(draw: st.DrawFn, shape: Shape, in_group: bool) -> tuple[str, int, str | None]:
        """The sharding at one end, the number of its ranks, and its group."""
        if in_group:
            ranks: tuple[int, ...] = draw(st.sampled_from(((1, 2), (0, 2), (0, 1))))
            return draw(sharding_texts(shape, ranks)), 3, ",".join(map(str, ranks))
        count = draw(st.sampled_from(sizes))
        mesh = draw(exact_meshes(count))
        ascends = mesh.ranks == tuple(range(count))
        return draw(sharding_texts(shape, tuple(range(count)), mesh=mesh if ascends else None)), count, None

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        in_groups = draw(st.integers(0, 7)) == 7 and limits.world_size >= 3
        shape = draw(shapes(min_dims=1))
        load, world_load, group_load = draw(end(shape, in_groups))
        save, world_save, group = draw(end(shape, in_groups))
        case_fields: dict[str, Any] = {**world_fields(world_save, world_load)}
        case_fields |= {"group": group, "group__load": group_load, "x": TensorSpec(shape, None, draw(dtypes(limits)))}
        case_fields |= {"save": save, "load": load, "threads": draw(st.sampled_from((None, None, 2, 4)))}
        if save[0] in "c0123456789" and load[0] in "c0123456789" and draw(st.integers(0, 2)) == 2:
            case_fields["hook"] = "yes"
        return fields(**case_fields, seed=draw(st.integers(0, 9)) or None)

    return case()


TRIPS = (
    "world=2 x=10x20 save=chunk(0)@0,1 load=chunk(0)@0,1 hook=yes",
    "world=2 x=10x20 save=chunk(0)@0,1 load=chunk(1)@0,1 hook=yes threads=2",
    "world=3 world.save=2 world.load=3 x=5x6 save=- load=chunk(0)@0,1,2",
    "world=2 x=5x6 save=chunk(0)@1,0 load=-",
    "world=2 x=5x6:-:int64 save=- load=0:2,0:6@0;2:5,0:3@1;2:5,3:6@0",
    "world=2 x=5x6:-:float64 save=0:2,0:6@1;2:5,0:3@1;2:5,3:6@1 load=-",
    "world=4 world.save=4 world.load=2 x=7x3 save=chunk(0)@0,1,2,3 load=0:1,0:3@1;1:7,0:3@0",
    "world=3 world.save=2 world.load=3 x=4x6 save=0:4,0:1@0;0:4,1:6@1 load=chunk(-1)@2,1,0",
    "world=4 world.save=4 world.load=3 x=5x6 save=S(0),S(1)@2x2 load=chunk(1)@0,1,2",
    "world=4 world.save=3 world.load=4 x=5x6 save=chunk(1)@0,1,2 load=S(1),R@2x2",
    "world=2 x=6x2:-:bool save=S(0)@2 load=0:1,0:2@0;1:6,0:2@1",
    "world=2 x=6x2:-:bfloat16 save=0:1,0:2@0;1:6,0:2@1 load=S(1)@2",
    "world=3 group=1,2 group.load=0,2 x=5x2 save=chunk(0)@1,2 load=chunk(1)@0,2",
    "world=4 x=5x3 save=chunk(0)@0,1,2,3 load=-",
    "world=3 x=4x3 save=chunk(0)@0,1,2 load=chunk(0)@2,0,1",
    "world=2 x=1x2x2 save=S(0)@2 load=-",
    "world=2 x=0 save=chunk(0)@0,1 load=R@2",
    # more shards on a rank than on the ranks before it
    "world=2 x=7x2 save=0:1,0:2@0;1:3,0:2@1;3:5,0:2@1;5:7,0:2@1 load=-",
    "world=3 x=6:-:int64 save=0:1@0;1:2@1;2:3@1;3:4@2;4:5@2;5:6@2 load=5:6@0;0:1@1;1:2@1;2:3@2;3:4@2;4:5@2",
)


# The law


@sharded_law(
    "sharded_tensor.trip",
    source="torch.distributed.checkpoint docs: regular tensors, ShardedTensor and DTensor; load-time resharding",
    control="world=2 x=4x3 save=chunk(0)@0,1 load=chunk(1)@0,1",
    cases=TRIPS,
    draw=draw_trips,
    draws=30,
    needs=("checkpoint", "object_collectives"),
    stages=world_sizes,
    members=lambda case, stage: sharding_at(case, ("save", "load")[stage]).ranks,
    weight=2.0,
    features=trip_features,
)
def trip(x: FullTensor, save: End, hook: Hooked, rank: Rank, folder: Folder, writer: Writer, group: Group = None):
    """A plain tensor, DTensor or ShardedTensor can be loaded as any other of these, bit for bit, and each rank reads
    its elements once."""
    tensor = sharded_as(x, save, rank, group)
    state = {**(module_with_hook(tensor).state_dict() if hook else {NAME: tensor}), **VALUES}
    with convert_failures():
        dcp.save(state, storage_writer=writer(folder), process_group=group)
    return {"names": [*state], "source": describe_if_sharded(tensor)}


def sharded_as(x: torch.Tensor, end: Any, rank: int, group: Any) -> Any:
    """The tensor with the sharding of an end."""
    if "mesh" in end:
        local = [x[box_slices(*box)].contiguous() for box in end["boxes"]] or [x.new_empty((0,) * x.ndim)]
        return DTensor.from_local(
            local[0], end["mesh"], end["placements"], run_check=False, shape=x.shape, stride=x.stride()
        )
    return from_boxes(x, end["boxes"], rank, group) if end else x.clone()


def module_with_hook(tensor: Any) -> Any:
    """A module whose state dict hook adds the sharded tensor to its state dict."""
    model = torch.nn.Module()
    model.inner = torch.nn.Module()
    model.inner.t = tensor
    compat.register_state_dict_hook(model, compat.sharded_tensor.state_dict_hook)
    return model


def due_tensor(end: Sharding, full: torch.Tensor, rank: int) -> Any:
    """The due tensor of a rank with the sharding of an end."""
    if end.spec is not None:
        return due_description(full, end.shards, rank)
    return full if end.layout is None else Global(full, end.layout)


@trip.due
def _(x, save, rank):
    return {"names": Of([NAME, *VALUES]), "source": due_tensor(save, x, rank)}


class RecordingPlanner(DefaultLoadPlanner):
    """Records the read items of the tensor: the offset of the chunk, the offset within it, and the size."""

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        items = [item for item in plan.items if item.dest_index.fqn == NAME and item.storage_index.offset is not None]
        reads = [(item.storage_index.offset, item.storage_offsets, item.lengths) for item in items]
        self.reads = sorted(read for read in reads if 0 not in read[2])
        return plan


@trip.then
def _(x: FullTensor, load: End, hook: Hooked, rank: Rank, folder: Folder, reader: Reader, group__load: Group = None):
    tensor = sharded_as((x == 0).to(x.dtype), load, rank, group__load)
    model = module_with_hook(tensor)
    state = {**(model.state_dict() if hook else {NAME: tensor}), **OTHER_VALUES}
    planner = RecordingPlanner()
    with convert_failures():
        dcp.load(state, storage_reader=reader(folder), planner=planner, process_group=group__load)
    values = {name: state[name] for name in VALUES}
    return {
        "loaded": describe_if_sharded(model.inner.t if hook else state[NAME]),
        "values": values,
        "reads": planner.reads,
    }


@trip.due
def _(x, load, rank, save: Annotated[Sharding, EndField()]):
    boxes = save.shards.without_empty().boxes
    items = read_items(boxes, load.shards.without_empty().boxes_of(rank))
    reads = sorted((boxes[item.chunk].offset, item.chunk_offset, item.lengths) for item in items)
    return {"loaded": due_tensor(load, x, rank), "values": VALUES, "reads": Of(reads)}
