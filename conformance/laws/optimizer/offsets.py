"""Laws on ``load_sharded_optimizer_state_dict`` and its planner: the state of an optimizer in chunks of rows, or in chunks of a part.

Fields of a case: ``x`` is a tensor of the state, ``save`` how it is held when it is saved (as in
:mod:`conformance.laws.sharded_tensor.trips`), ``world`` the ranks that load, and ``part`` the box of it that they share. With ``axis``,
the world is a mesh of two by two, and those ranks share the part that differ along that axis.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Law, Limits
from conformance.laws.optimizer import scripts
from conformance.laws.optimizer import state as optimizer_state
from conformance.laws.optimizer import whole as optimizer_whole
from conformance.laws.plan.torch import need
from conformance.laws.sharded_tensor import given as g
from conformance.laws.sharded_tensor import trips
from conformance.laws.sharded_tensor.draws import dtypes
from conformance.target import storage
from reference.box import Box
from reference.checkpoint.held import format_boxes, parse_box, parse_boxes
from reference.checkpoint.optimizer import around, part_items, shares, shifted, shifted_back
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import Shape
from reference.placement import Replicate
from reference.sharded_tensor import ChunkSpec, Part
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.tilings import tilings

DOCS = "torch.distributed.checkpoint.load_sharded_optimizer_state_dict"
NAME = "layer.w"


def members(case: Case, rank: int = 0) -> tuple[int, ...]:
    """The ranks that share the state with ``rank`` when it is loaded."""
    world = trips.worlds(case)[1]
    if "axis" not in case:
        return tuple(range(world))
    # a model on two axes of two ranks: those that share a part differ along this one
    apart = 2 if case.get("axis") == "0" else 1
    return tuple(sorted((rank, rank ^ apart)))


def group_of(case: Case, here: Here) -> Any:
    """The process group of the ranks that share the state with this one, or ``None`` where all do."""
    return here.mesh(Mesh((2, 2), (0, 1, 2, 3))).get_group(case.integer("axis")) if "axis" in case else None


def part_of(case: Case) -> Box:
    """The part of the tensor that the ranks share: a box, or all of it."""
    shape = case.tensor("x").shape
    return parse_box(case.get("part"), len(shape)) if "part" in case else Box((0,) * len(shape), shape)


def shared(part: Box, ranks: tuple[int, ...]) -> list[Part]:
    """The chunks of a part, counted from its beginning, with their ranks."""
    return ChunkSpec(0, ranks).parts(part.size)


def part_tensor(case: Case, here: Here, values: torch.Tensor, group: Any) -> Any:
    """The part as a sharded tensor of its own, in chunks on the members of the group."""
    return g.from_parts(here, values, shared(part_of(case), members(case, here.rank)), group)


def nested(case: Case, here: Here, values: torch.Tensor, group: Any) -> Any:
    """A parameter of which this rank holds the part, which is a sharded tensor itself, as fully sharded models on two axes have it."""
    make, described, props, shard, about = need(
        here, "init_from_local_shards_and_metadata", "ShardedTensorMetadata", "TensorProperties", "ShardOfTensor", "ShardMetadata"
    )
    part, shape, other = part_of(case), case.tensor("x").shape, (here.rank + 1) % here.world
    inner = part_tensor(case, here, values[part.slices()], group)
    place = f"rank:{here.rank}/{g.device_of(here, here.rank)}"
    own = about([*part.offset], [*part.size], place)
    rest = [about([*box.offset], [*box.size], f"rank:{other}/{g.device_of(here, other)}") for box in around(part, shape)]
    told = props(dtype=values.dtype, layout=torch.strided, requires_grad=False, memory_format=torch.contiguous_format, pin_memory=False)
    return make([shard(inner, own)], described([own, *rest], torch.Size(shape), told))


def check_offsets(case: Case, here: Here) -> None:
    """The planner asks for the boxes of the part where they lie in what was saved, and puts what it gets where they lie in the part."""
    (planner_class,) = need(here, "ReaderWithOffset")
    full, part = g.values_of(case), part_of(case)
    chunks = parse_boxes(case.get("chunks"), full.ndim)
    entry = TensorStorageMetadata(
        TensorProperties(dtype=full.dtype),
        torch.Size(full.shape),
        [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.size)) for b in chunks],
    )
    with g.without_warnings():
        parted, whole = part_tensor(case, here, full[part.slices()], None), here.tensor(full.clone())
    planner = planner_class({"s": part.offset})
    state = {"s": parted, "p": whole}
    planner.set_up_planner(state, TorchMetadata({"s": entry, "p": entry}, planner_data={"s": ("s",), "p": ("p",)}), True)
    items = planner.create_local_plan().items
    wanted = shares(part, members(case, here.rank), here.rank)
    everything = Box((0,) * full.ndim, tuple(full.shape))
    for name, boxes, due_items in (
        ("s", [shifted(box, part.offset) for box in wanted], part_items(chunks, part, wanted)),
        ("p", [everything], part_items(chunks, everything, [everything])),
    ):
        due = sorted((boxes[i.box].offset, chunks[i.chunk].offset, i.chunk_offset, i.box_offset, i.lengths) for i in due_items)
        got = sorted(
            (tuple(i.dest_index.offset), tuple(i.storage_index.offset), tuple(i.storage_offsets), tuple(i.dest_offsets), tuple(i.lengths))
            for i in items
            if i.dest_index.fqn == name and 0 not in i.lengths
        )
        what = "the part" if name == "s" else "a plain tensor beside it"
        here.require(got == due, "wrong-metadata", f"items of {name}", f"what is read for {what} is not what its boxes meet", due, got)
    _judge_translation(here, planner, items, parted, whole, part)


def _judge_translation(here: Here, planner: Any, items: Any, parted: Any, whole: torch.Tensor, part: Box) -> None:
    """Each way to name a box leads to the other, and both to the tensor that is filled."""
    wanted = {item.dest_index for item in items if item.dest_index.fqn == "s"}
    due = {}
    for index in wanted:
        back = shifted_back(Box(tuple(index.offset), part.size), part.offset)
        due["s", tuple(index.offset)] = ("s", back.offset)
    got = {(a.fqn, tuple(a.offset)): (b.fqn, tuple(b.offset)) for a, b in planner.translation.items()}
    one_to_one = len({*got.values()}) == len(got)
    here.require(got == due and one_to_one, "wrong-metadata", "translation", "displaced names lead elsewhere than back", due, got)
    for item in items:
        if 0 in item.lengths:
            continue
        found = planner.lookup_tensor(item.dest_index)
        want = whole if item.dest_index.fqn == "p" else parted.local_shards()[0].tensor
        same = found.data_ptr() == want.data_ptr() and found.shape == want.shape
        here.require(same, "wrong-metadata", "lookup", f"the tensor at {item.dest_index} is not the one that is to be filled")
    beside = MetadataIndex("p", torch.Size((0,) * whole.ndim))
    here.require(planner.lookup_tensor(beside) is not None, "wrong-metadata", "lookup", "a plain tensor is not found")


def check_layout(case: Case, here: Here) -> None:
    """Of a parameter in two steps, the layout is the outer part and its group the inner one; of any other, its size alone."""
    (ask,) = need(here, "state_dict_2d_layout")
    full, part, group = g.values_of(case), part_of(case), group_of(case, here)
    with g.without_warnings():
        inner = part_tensor(case, here, full[part.slices()], group)
        state = {"plain": here.tensor(full), "sharded": inner, "nested": nested(case, here, full, group)}
        found, of = ask(state)
    due = {"plain": (None, tuple(full.shape)), "sharded": (None, part.size), "nested": (part.offset, part.size)}
    got = {name: (None if offset is None else tuple(offset), tuple(size)) for name, (offset, size) in found.items()}
    here.require(got == due, "wrong-metadata", "layout", "the layout of the model is another", due, got)
    ranks = tuple(torch.distributed.get_process_group_ranks(of))
    here.require(
        ranks == members(case, here.rank),
        "wrong-metadata",
        "group",
        "the group is not that of the inner tensor",
        members(case, here.rank),
        ranks,
    )
    _refuse_nested(case, here, state["nested"], inner)


def _refuse_nested(case: Case, here: Here, outer: Any, inner: Any) -> None:
    """What is nested in another way has no layout: DTensors inside or around sharded tensors, and several parts on a rank."""
    (ask,) = need(here, "state_dict_2d_layout")
    shape = case.tensor("x").shape
    line = Layout(shape, Mesh((here.world,), tuple(range(here.world))), (Replicate(),))
    (shard,) = outer.local_shards()
    with g.without_warnings():
        outer.local_shards().append(shard)
        here.refused(lambda: ask({"w": outer}), "parts", "the layout of a parameter of which a rank holds two parts")
        outer.local_shards().pop()
        shard.tensor = here.dtensor(torch.zeros(shape), line)
        here.refused(lambda: ask({"w": outer}), "inside", "the layout of a DTensor inside a sharded tensor")
        around_it: Any = here.dtensor(torch.zeros(shape), line)
        around_it._local_tensor = inner
        here.refused(lambda: ask({"w": around_it}), "around", "the layout of a DTensor around a sharded tensor")


def state_of(case: Case, tensor: Any, *, other: bool = False) -> dict[str, Any]:
    """What is saved: a model and rates beside an optimizer with a tensor of the parameter's shape, one of one element, and values."""
    names = (0, 1) if case.get("ids", "names") == "numbers" else (NAME, "b")
    first = {"exp_avg": tensor, "step": torch.tensor(4.0), "note": "kept"}
    groups = [{"lr": 0.5, "params": [names[0]]}, {"lr": 0.25, "params": [names[1]]}]
    return {
        "model": {NAME: torch.zeros(2)},
        "opt": {"state": {names[0]: first, names[1]: {"step": torch.full((1, 1), 3)}}, "param_groups": groups},
        "schedule": {"rate": 0.5},
    }


def check_loaded(case: Case, here: Here) -> None:
    """Saved in one world, the state is loaded in another in chunks: of rows of each tensor, or of rows of the part that the ranks share."""
    full, part = g.values_of(case), part_of(case)
    if here.stage == 0:
        end = trips.held(case, "save")
        if end.layout is not None:
            here.mesh(end.layout.mesh)
        if here.rank in end.ranks:
            with g.without_warnings(), t.told_plainly():
                t.dcp.save(state_of(case, trips.put(here, end, full, None)), storage_writer=storage.writer(here.target, here.folder()))
        return
    group = group_of(case, here)
    name = "0" if case.get("ids", "names") == "numbers" else NAME
    reader = storage.reader(here.target, here.folder())
    with g.without_warnings(), t.told_plainly():
        model = {name: nested(case, here, full, group)} if "part" in case else {}
        found = t.dcp.load_sharded_optimizer_state_dict(model, "opt", reader)
    tree = {key: sorted(value) if key == "state" else value for key, value in found.get("opt", {}).items()}
    second = "1" if name == "0" else "b"
    ids: list[Any] = [0, 1] if name == "0" else [NAME, "b"]
    groups = [{"lr": 0.5, "params": [ids[0]]}, {"lr": 0.25, "params": [ids[1]]}]
    due: dict[str, Any] = {"state": sorted((name, second)), "param_groups": groups}
    if not here.require(
        [*found] == ["opt"] and tree == due, "wrong-metadata", "tree", "other entries are loaded than those of the key", due, tree
    ):
        return
    held = found["opt"]["state"][name]
    here.same(held["step"], torch.tensor(4.0), "step", what="the step, a tensor without dims")
    here.same(found["opt"]["state"][second]["step"], torch.full((1, 1), 3), "one element", what="a tensor of one element")
    here.require(held["note"] == "kept", "wrong-value", "values", "a value that is no tensor", "kept", held["note"])
    if full.numel() == 1:
        here.same(held["exp_avg"], full, "loaded", what="the average, a tensor of one element")
        return
    g.judge(here, held["exp_avg"], full[part.slices()], shared(part, members(case, here.rank)), check="loaded", what="the average")


def check_nested(case: Case, here: Here) -> None:
    """A parameter in two steps is loaded as the chunk of the part that this rank holds, where that lies in what was saved."""
    full, part = g.values_of(case), part_of(case)
    if here.stage == 0:
        end = trips.held(case, "save")
        if here.rank in end.ranks:
            with g.without_warnings(), t.told_plainly():
                t.dcp.save({"w": trips.put(here, end, full, None)}, storage_writer=storage.writer(here.target, here.folder()))
        return
    group = group_of(case, here)
    with g.without_warnings(), t.told_plainly():
        outer = nested(case, here, t.poison(full), group)
        (shard,) = outer.local_shards()
        t.dcp.load({"w": outer}, storage_reader=storage.reader(here.target, here.folder()))
        ranks = members(case, here.rank)
        g.judge(here, shard.tensor, full[part.slices()], shared(part, ranks), check="loaded", what="the part")


def features(case: Case) -> set[str]:
    """Features of what the ranks hold when they have loaded."""
    part, ranks = part_of(case), members(case)
    found = g.features_of_spec(part.size, ChunkSpec(0, ranks), ranks)
    if "part" not in case:
        found.discard("beyond-the-end")
    found |= {"part"} if "part" in case else set()
    found |= {"group", "mesh-2d", "later-group"} if "axis" in case else set()
    found |= {"int-keys"} if case.get("ids", "names") == "numbers" else set()
    return found | ({"reworld"} if len({*trips.worlds(case)}) > 1 else set())


def slabs(shape: Shape) -> SearchStrategy[Box]:
    """Parts of a tensor that span all of its dims but one."""

    @st.composite
    def slab(draw: st.DrawFn) -> Box:
        dim = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, max(shape[dim] - 1, 0)))
        size = draw(st.integers(min(1, shape[dim]), max(shape[dim] - start, 0)))
        offset = tuple(start if at == dim else 0 for at in range(len(shape)))
        return Box(offset, tuple(size if at == dim else extent for at, extent in enumerate(shape)))

    return slab()


def _cases(law: str, limits: Limits, *, saved: bool, part: bool, groups: bool = False) -> SearchStrategy[Case]:
    sizes = [size for size in (2, 2, 3, 4) if size <= limits.world_size]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        world = draw(st.sampled_from(sizes))
        # fewer rows than ranks leave some rank without any: seldom in a part, where it is not to hide the rest
        least = 0 if not part or draw(st.integers(0, 9)) == 9 else world
        shape = draw(shapes(min_dims=1, min_size=min(least, 1), max_dims=3))
        fields: dict[str, Any] = {"world": world}
        if groups and world == 4 and draw(st.integers(0, 1)):
            fields["axis"] = draw(st.sampled_from((0, 1)))
        if part:
            shape = (max(shape[0], least), *shape[1:])
            fields["part"] = draw(slabs(shape))
            short = fields["part"].size[0] < least
            if short and least:
                fields["part"] = Box((0,) * len(shape), shape)
        fields["x"] = TensorSpec(shape, None, draw(dtypes(limits)))
        if saved:
            count = draw(st.sampled_from([size for size in (2, 3, 1) if size <= limits.world_size]))
            _, fields["save"] = draw(trips.ends(shape, tuple(range(count)), beyond=1))
            if count != world:
                fields |= {"world__save": count, "world__load": world, "world": max(count, world)}
            fields["ids"] = draw(st.sampled_from((None, None, "numbers")))
        elif law.endswith("offsets"):
            fields["chunks"] = format_boxes(draw(tilings(shape))[1])
        if "part" in fields:
            fields["part"] = format_boxes([fields["part"]])
        return Case.of(law, **fields, seed=draw(st.integers(0, 9)) or None)

    return case()


def law_of(name: str, **fields: Any) -> Law:
    law = f"optimizer.{name}"
    return Law(id=law, control=f"{law} {fields.pop('holds')}", **{"smallest": 2, "needs": ("object_collectives",), **fields})


LAWS = (
    law_of(
        "offsets",
        clause="For a part of a saved tensor, the planner reads what its boxes meet where they lie, and fills them where they count from.",
        source=f"{DOCS}; _ReaderWithOffset",
        check=check_offsets,
        holds="world=2 x=4x6 part=0:4,2:6 chunks=0:2,0:6;2:4,0:6",
        planted="offset_of_the_part_forgotten",
        draw=lambda limits: _cases("optimizer.offsets", limits, saved=False, part=True),
        draws=60,
        features=features,
        script=scripts.offsets,
    ),
    law_of(
        "layout",
        clause="Of a model on two axes, the layout names for each parameter the part that this rank holds, and the group that shares it.",
        source=f"{DOCS}; _get_state_dict_2d_layout: (offset, size) for the current rank",
        check=check_layout,
        holds="world=2 x=4x6 part=0:4,2:6",
        planted="parts_begin_at_zero",
        draw=lambda limits: _cases("optimizer.layout", limits, saved=False, part=True, groups=True),
        draws=20,
        features=features,
    ),
    law_of(
        "loaded",
        clause="The state of an optimizer is loaded in chunks of rows over all ranks, with tensors of one element and values whole.",
        source=f"{DOCS}: load a state_dict in conjunction with FSDP sharded optimizer state",
        check=check_loaded,
        holds="world=2 x=4x3 save=S(0)@2",
        planted="state_in_the_default_dtype",
        draw=lambda limits: _cases("optimizer.loaded", limits, saved=True, part=False),
        draws=12,
        needs=("checkpoint", "object_collectives"),
        stages=trips.worlds,
        features=features,
        script=lambda case: scripts.loaded(case, members),
    ),
    law_of(
        "loaded-part",
        clause="Where a rank's parameters are parts, the state of the optimizer is loaded as the same parts, in chunks over their group.",
        source=f"{DOCS}; the right slice of the optimizer state",
        check=check_loaded,
        holds="world=2 x=4x6 part=0:4,2:6 save=S(0)@2",
        planted="offset_of_the_part_forgotten",
        draw=lambda limits: _cases("optimizer.loaded-part", limits, saved=True, part=True, groups=True),
        draws=12,
        needs=("checkpoint", "object_collectives"),
        stages=trips.worlds,
        features=features,
        script=lambda case: scripts.loaded(case, members),
    ),
    law_of(
        "nested",
        clause="A parameter of which each rank holds a part, itself in chunks over a group, is loaded from whatever was saved of it.",
        source="torch.distributed.checkpoint docs, DefaultLoadPlanner: flatten_sharded_tensors",
        check=check_nested,
        holds="world=2 x=4x6 part=0:4,2:6 save=S(0)@2",
        planted="nested_offsets_not_added",
        draw=lambda limits: _cases("optimizer.nested", limits, saved=True, part=True, groups=True),
        draws=10,
        needs=("checkpoint", "object_collectives"),
        stages=trips.worlds,
        features=features,
    ),
    *optimizer_state.LAWS,
    *optimizer_whole.LAWS,
)
