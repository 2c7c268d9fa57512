"""Laws on sharded tensors in checkpoints: saved as one kind of tensor by some ranks, loaded as any other kind by others.

How a tensor is held at an end, in the fields ``save`` and ``load``: ``-`` plain on every rank; a sharding spec in the notation of
:mod:`reference.sharded_tensor`; or placements and the mesh that they are for, such as ``S(0),R@2x2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Limits
from conformance.laws.plan.torch import need
from conformance.laws.scripts import mesh as mesh_text
from conformance.laws.scripts import placements as placements_text
from conformance.laws.scripts import tensor as tensor_text
from conformance.laws.sharded_tensor import given as g
from conformance.laws.sharded_tensor import scripts
from conformance.laws.sharded_tensor.draws import dtypes, law_of
from conformance.report.reproducer import Script, Stage
from conformance.target import storage
from reference import simulate
from reference.box import Box
from reference.checkpoint.load_plan import read_items
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import Shape
from reference.placement import parse_placements
from reference.sharded_tensor import EnumerableSpec, Part, Spec, of_rank, parse_spec
from reference.tensors import TensorSpec
from strategies import exact_meshes, placements, shapes
from strategies.shard_specs import chunk_specs, enumerable_specs

VALUES = {"numbers": [1, 2], "text": "saved"}
OTHER_VALUES = {"numbers": [7], "text": "other"}
NAME = "inner.t"


@dataclass(frozen=True)
class Held:
    """How a tensor of ``shape`` is held at one end: by a spec, under a layout, or plain on each of ``ranks``."""

    shape: Shape
    ranks: tuple[int, ...]
    spec: Spec | None = None
    layout: Layout | None = None

    def boxes(self, rank: int) -> list[Box]:
        """The boxes with elements that a rank holds."""
        if self.spec is not None:
            found = of_rank(self.parts, rank)
        elif self.layout is not None:
            coord = self.layout.mesh.coord(rank)
            box = None if coord is None else self.layout.box(coord)
            found = [] if box is None else [box]
        else:
            found = [Box((0,) * len(self.shape), self.shape)]
        return [box for box in found if box.volume]

    @property
    def parts(self) -> list[Part]:
        return self.spec.parts(self.shape) if self.spec is not None else []


def held(case: Case, end: str) -> Held:
    """How the case holds its tensor at ``save`` or ``load``."""
    shape, text = case.tensor("x").shape, case.get(end)
    world = worlds(case)[end == "load"]
    group = case.get("group" if end == "save" else "group.load", "")
    ranks = tuple(map(int, group.split(","))) if group else tuple(range(world))
    if text == "-":
        return Held(shape, ranks)
    if text[0] in "SR_":
        placed, _, mesh = text.partition("@")
        return Held(shape, ranks, layout=Layout(shape, Mesh.parse(mesh), parse_placements(placed)))
    return Held(shape, ranks, spec=parse_spec(text, len(shape)))


def worlds(case: Case) -> tuple[int, ...]:
    """How many ranks save, and how many load."""
    return case.integer("world.save", case.world), case.integer("world.load", case.world)


def put(here: Here, held: Held, full: torch.Tensor, group: Any) -> Any:
    """The tensor as this rank holds it."""
    if held.spec is not None:
        return g.from_parts(here, full, held.parts, group)
    if held.layout is None:
        return here.tensor(full.clone())
    coord = here.coord(held.layout.mesh)
    local = full.new_empty((0,) * min(full.ndim, 1)) if coord is None else simulate.take(full, held.layout, coord)
    places, stride = here.placements(held.layout.placements), full.contiguous().stride()
    return DTensor.from_local(here.tensor(local), here.mesh(held.layout.mesh), places, run_check=False, shape=full.shape, stride=stride)


def judge(here: Here, held: Held, got: Any, full: torch.Tensor, check: str) -> None:
    if held.spec is not None:
        g.judge(here, got, full, held.parts, check=check, what="the loaded tensor" if check == "loaded" else "the saved tensor")
    else:
        t.judge_tensor(here, got, full, held.layout, place="t", check=check)


class Reader(DefaultLoadPlanner):
    """Notes of what this rank is to read, where it begins in the tensor and how long it is."""

    reads: list[tuple[Shape, Shape, Shape]]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        items = [item for item in plan.items if item.dest_index.fqn == NAME and item.storage_index.offset is not None]
        self.reads = sorted((_offset(item), tuple(item.storage_offsets), tuple(item.lengths)) for item in items if 0 not in item.lengths)
        return plan


def _offset(item: Any) -> Shape:
    return tuple(item.storage_index.offset)


def reads(saved: Held, loaded: Held, rank: int) -> list[tuple[Shape, Shape, Shape]]:
    """What a rank must read: of each saved box what its own have in common with it."""
    boxes = list(dict.fromkeys(box for holder in saved.ranks for box in saved.boxes(holder)))
    items = read_items(boxes, loaded.boxes(rank))
    return sorted((boxes[item.chunk].offset, item.chunk_offset, item.lengths) for item in items)


def check_trip(case: Case, here: Here) -> None:
    """What is loaded is what was saved, whatever held it; each rank reads of every saved box its part, once."""
    first = here.stage == 0
    saved, loaded = held(case, "save"), held(case, "load")
    end, field = (saved, "group") if first else (loaded, "group.load")
    group = g.group_over(here, end.ranks) if field in case else None
    if end.layout is not None:
        here.mesh(end.layout.mesh)
    if here.rank not in end.ranks:
        return
    how = {"process_group": group} if group is not None else {}
    full = g.values_of(case)
    with g.without_warnings():
        tensor = put(here, end, full if first else t.poison(full), group)
        state, holder = _state(here, tensor, OTHER_VALUES if not first else VALUES, hooked="hook" in case)
        if first:
            options = {"thread_count": case.integer("threads")} if "threads" in case else {}
            with t.told_plainly():
                t.dcp.save(state, storage_writer=storage.writer(here.target, here.folder(), **options), **how)
            judge(here, end, tensor, full, "source")
            return
        planner = Reader()
        with t.told_plainly():
            t.dcp.load(state, storage_reader=storage.reader(here.target, here.folder()), planner=planner, **how)
    judge(here, end, holder.inner.t if holder is not None else state[NAME], full, "loaded")
    values = {name: state[name] for name in VALUES}
    here.require(values == VALUES, "wrong-value", "values", "values beside the tensor are not what was saved", VALUES, values)
    due = reads(saved, loaded, here.rank)
    message = "the parts that this rank reads are not what its boxes have in common with the saved ones"
    here.require(planner.reads == due, "wrong-metadata", "reads", message, due, planner.reads)


def _state(here: Here, tensor: Any, values: dict[str, Any], *, hooked: bool) -> tuple[dict[str, Any], Any]:
    """The state, and the module that it is of, where it comes from one through its hook."""
    if not hooked:
        return {NAME: tensor, **values}, None
    (factories,) = need(here, "sharded_tensor")
    model: Any = torch.nn.Module()
    model.inner = torch.nn.Module()
    model.inner.t = tensor
    model._register_state_dict_hook(factories.state_dict_hook)
    state = model.state_dict()
    here.require([*state] == [NAME], "wrong-metadata", "hook", "the state of the module is not its sharded tensor", [NAME], [*state])
    return {**state, **values}, model


def trip_script(case: Case) -> Script:
    saved, loaded = held(case, "save"), held(case, "load")
    stages = []
    for at, end in enumerate((saved, loaded)):
        field = "group.load" if at else "group"
        ranks = [*end.ranks]
        with_group = field in case
        lines = [f"mesh = {mesh_text(end.layout.mesh)}"] if end.layout else []
        lines += [f"group = dist.new_group({ranks})", f"if rank not in {ranks}:", "    return None, None"] if with_group else []
        how = ", process_group=group" if with_group else ""
        lines += made_lines(end, "spoiled(X)" if at else "X", how)
        if at == 0:
            threads = f", thread_count={case.get('threads')}" if "threads" in case else ""
            lines += [f'dcp.save({{"t": t}}, storage_writer=dcp.FileSystemWriter(folder{threads}){how})', "return None, None"]
        else:
            lines += [f'dcp.load({{"t": t}}, storage_reader=dcp.FileSystemReader(folder){how})', *_compared(end)]
        stages.append(Stage(worlds(case)[at], tuple(lines)))
    text = "\n".join(line for stage in stages for line in stage.body)
    imports = ["import torch.distributed.checkpoint as dcp"]
    imports += [scripts.SHARDED] if "st." in text else []
    if "DTensor" in text:
        imports += [
            "from torch.distributed.device_mesh import DeviceMesh",
            "from torch.distributed.tensor import DTensor, Replicate, Shard",
        ]
    other = "~x" if case.tensor("x").dtype == "bool" else "x + 1"
    return Script(tuple(stages), tuple(imports), (f"X = {tensor_text(g.values_of(case))}", f"spoiled = lambda x: {other}"))


def made_lines(end: Held, full: str, how: str) -> list[str]:
    if end.spec is not None:
        table = scripts.held(end.parts, end.ranks)
        spoiled = "x" if full == "X" else "spoiled(x)"
        return [
            f"mine = [st.Shard.from_tensor_and_offsets({spoiled}.contiguous(), [*at], rank) for at, x in {table}[rank]]",
            f"t = st.init_from_local_shards(mine, *X.shape{how})",
        ]
    if end.layout is None:
        return [f"t = {full}.clone()"]
    table = _locals(end)
    local = "own" if full == "X" else "spoiled(own)"
    made = f"t = DTensor.from_local({local}, mesh, {placements_text(end.layout.placements)}, shape=X.shape, stride=X.stride())"
    return [f"own = {table}.get(rank, X.new_empty(0))", made]


def _locals(end: Held) -> str:
    assert end.layout is not None
    mesh = end.layout.mesh
    entries = []
    for coord in mesh.coords():
        box = end.layout.box(coord)
        assert box is not None
        entries.append(f"{mesh.rank_at(coord)}: {scripts.cut(box)}")
    return "{" + ", ".join(entries) + "}"


def _compared(end: Held) -> list[str]:
    if end.spec is not None:
        return [
            "got = [(tuple(s.metadata.shard_offsets), s.tensor) for s in t.local_shards() if s.tensor.numel()]",
            f"return {scripts.held(end.parts, end.ranks)}[rank], sorted(got, key=lambda part: part[0])",
        ]
    if end.layout is None:
        return ["return X, t"]
    members = sorted(end.layout.mesh.ranks)
    return [f"return (own, t.to_local()) if rank in {members} else (None, None)"]


def trip_features(case: Case) -> set[str]:
    found = set()
    saved, loaded = held(case, "save"), held(case, "load")
    kinds = []
    for at, end in enumerate((saved, loaded)):
        if end.spec is not None:
            found |= g.features_of_spec(end.shape, end.spec, end.ranks)
            kinds.append("boxes" if isinstance(end.spec, EnumerableSpec) else "chunks")
        else:
            kinds.append("plain" if end.layout is None else "dtensor")
        if ("group.load" if at else "group") in case:
            found |= {"group", "submesh"}
    if len({*kinds}) > 1:
        found.add("kinds-crossed")
    if "plain" in kinds:
        found.add("plain-tensor")
    if len({*worlds(case)}) > 1:
        found.add("reworld")
    if case.get("save") != case.get("load"):
        found.add("reshard")
    return found | ({"hook"} if "hook" in case else set())


def ends(shape: Shape, ranks: Sequence[int], *, beyond: int, mesh: Mesh | None = None) -> SearchStrategy[tuple[Shape, str]]:
    """A shape and how it is held by these ranks: under a layout of ``mesh``, which names the same ranks, or of a line of them."""
    on = mesh or Mesh((len(ranks),), tuple(ranks))
    layouts = placements(on, len(shape), kinds=("R", "S") if shape else ("R",))
    kinds: list[SearchStrategy[tuple[Shape, str]]] = [
        enumerable_specs(shape, ranks).map(lambda spec: (shape, str(spec))),
        layouts.map(lambda placed: (shape, f"{','.join(map(str, placed))}@{on}")),
        *[chunk_specs(shape, ranks, beyond=beyond).map(lambda drawn: (drawn[0], str(drawn[1])))] * 2,
        st.just((shape, "-")),
    ]
    return st.one_of(kinds)


def _drawn(limits: Limits) -> SearchStrategy[Case]:
    sizes = [size for size in (2, 2, 3, 1, 4) if size <= limits.world_size]

    @st.composite
    def end(draw: st.DrawFn, shape: Shape, in_group: bool, beyond: int) -> tuple[Shape, str, int, str | None]:
        """How one end holds a tensor, the size of its world, and its group."""
        if in_group:
            ranks: tuple[int, ...] = draw(st.sampled_from(((1, 2), (0, 2), (0, 1))))
            return *draw(ends(shape, ranks, beyond=beyond)), 3, ",".join(map(str, ranks))
        count = draw(st.sampled_from(sizes))
        mesh = draw(exact_meshes(count))
        ascends = mesh.ranks == tuple(range(count))
        return *draw(ends(shape, tuple(range(count)), beyond=beyond, mesh=mesh if ascends else None)), count, None

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        groups = draw(st.integers(0, 7)) == 7 and limits.world_size >= 3
        shape, load, world_load, group_load = draw(end(draw(shapes(min_dims=1)), groups, 12))
        # the spec of one end may ask for another extent, which is the one of both; that of the other end may not
        _, save, world_save, group = draw(end(shape, groups, 1))
        fields: dict[str, Any] = {"world": max(world_save, world_load)}
        if world_save != world_load:
            fields |= {"world__save": world_save, "world__load": world_load}
        fields |= {"group": group, "group__load": group_load, "x": TensorSpec(shape, None, draw(dtypes(limits)))}
        fields |= {"save": save, "load": load, "threads": draw(st.sampled_from((None, None, 2, 4)))}
        if save[0] in "c0123456789" and load[0] in "c0123456789" and draw(st.integers(0, 2)) == 2:
            fields["hook"] = "yes"
        return Case.of("sharded_tensor.trip", **fields, seed=draw(st.integers(0, 9)) or None)

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
)


def _sweep(limits: Limits) -> list[Case]:
    found = [Case.parse(f"sharded_tensor.trip {text}") for text in TRIPS]
    return [case for case in found if case.world <= limits.world_size]


LAWS = (
    law_of(
        "trip",
        clause="Plain, by chunks, by boxes or as a DTensor: what one saves another loads, bit for bit, each rank reading its part once.",
        source="torch.distributed.checkpoint docs: regular tensors, ShardedTensor and DTensor; load-time resharding",
        check=check_trip,
        holds="world=2 x=4x3 save=chunk(0)@0,1 load=chunk(1)@0,1",
        planted="every_shard_at_the_beginning",
        sweep=_sweep,
        sweeps=len(TRIPS),
        draw=_drawn,
        draws=30,
        needs=("checkpoint", "object_collectives"),
        stages=worlds,
        weight=2.0,
        features=trip_features,
        script=trip_script,
    ),
)
