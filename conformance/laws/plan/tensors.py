"""Laws of plans for DTensors: what each rank of a mesh says that it holds, and what each reads of what others have saved."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws.plan import cases
from conformance.laws.plan import scripts as plan_scripts
from conformance.laws.plan import torch as pt
from reference.box import Box
from reference.checkpoint.save_plan import Metadata, WriteItem, dedup, describe, plain, sharded
from reference.checkpoint.state_dict import Slot, State, flatten, format_state, parse_state
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import Shape
from reference.tensors import TensorSpec
from strategies import placements, shapes, state_dicts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOCS = "torch.distributed.checkpoint docs"
# Seats cost next to nothing, so meshes may be larger than any world: the plainest first, the odd ones less often.
MESHES = [
    Mesh.parse(text)
    for text in (
        *("2", "3", "2x2", "2x3", "4", "5", "2x2x2", "8", "1", "3x2", "2x4", "1x3", "3x1", "2x1x3", "7", "2x2", "2x3", "3"),
        *("2@1,0", "2@0,2", "3@2,0,1", "2x2@0,2,1,3", "2x2@4,1,2,0", "3x2@5,0,3,1,4,2", "2x1@3,1", "1@2"),
    )
]


def ranks_of(*meshes: Mesh) -> int:
    return max(rank + 1 for mesh in meshes for rank in mesh.ranks)


def state_of(case: Case, names: list[str]) -> State:
    """What is saved: the field ``state``, or every tensor under its name."""
    return parse_state(case.get("state")) if "state" in case else {name: Slot(name) for name in names}


def specs_of(case: Case) -> dict[str, TensorSpec]:
    return {name: case.tensor(name) for name in ("x", "a") if name in case}


# What a rank says that it holds


def check_items(case: Case, here: Here) -> None:
    mesh, specs = case.mesh(), specs_of(case)
    state = state_of(case, [*specs])
    leaves = flatten(state)
    strided = any(spec.placements is not None and Layout(spec.shape, mesh, spec.placements).is_strided() for spec in specs.values())
    for rank in range(ranks_of(mesh)):
        made = pt.filled(state, {name: pt.placed(here, spec, mesh, rank) for name, spec in specs.items()})
        try:
            plan = pt.local_plan(made, coordinator=rank == 0)
        except (NotImplementedError, ValueError, RuntimeError):
            if not strided:
                raise
            return
        paths = {name: path for name, (path, _) in leaves.items()}
        here.require(plan.planner_data == paths, "wrong-metadata", "paths", f"rank {rank}: other paths", paths, plan.planner_data)
        items = [pt.read(item) for item in plan.items]
        strange = sorted({item.name for item in items} - {*leaves})
        here.require(not strange, "wrong-metadata", "names", f"rank {rank} writes {strange}, which the state has not", "", strange)
        for name, (_, leaf) in leaves.items():
            spec = specs[leaf.name] if isinstance(leaf, Slot) else None
            _judge_leaf(here, [item for item in items if item.name == name], name, spec, mesh, rank)


def _judge_leaf(here: Here, got: list[WriteItem], name: str, spec: TensorSpec | None, mesh: Mesh, rank: int) -> None:
    if spec is None or spec.placements is None:
        due = [WriteItem(name, replica=True)] if spec is None else [*plain(name, spec.shape, spec.dtype)]
        here.require(got == due, "wrong-metadata", "items", f"rank {rank}: what every rank holds whole is one item", due, got)
        return
    layout, coord = Layout(spec.shape, mesh, spec.placements), mesh.coord(rank)
    if coord is None:
        here.require(not got, "wrong-metadata", "outside", f"rank {rank} is outside the mesh and writes {name}", [], got)
        return
    for item in got:
        told = (item.shape, item.dtype, item.replica)
        message = f"rank {rank}: {name} is described otherwise than it is"
        here.require(told == (spec.shape, spec.dtype, False), "wrong-metadata", "properties", message, (spec.shape, spec.dtype), told)
    empties = [item.box for item in got if item.box is not None and not item.box.volume]
    full = [item.box for item in got if item.box is not None and item.box.volume]
    for box in empties:
        others = [layout.offset(at) for at in mesh.coords() if 0 not in layout.local_shape(at)]
        message = f"rank {rank} holds nothing of {name} and says so where another rank's part begins"
        here.require(box.offset not in others, "wrong-metadata", "empty", message, spec.shape, box)
    whole = layout.box(coord)
    if whole is not None:
        due_boxes = [whole] if whole.volume else []
        here.require(full == due_boxes, "wrong-metadata", "box", f"rank {rank}: not its part of {name}", due_boxes, full)
        return
    owned = {*itertools.product(*layout.owned(coord))}
    told_of = [index for box in full for index in _indices(box)]
    here.require({*told_of} == owned and len(told_of) == len(owned), "wrong-metadata", "strided",
                 f"rank {rank}: its boxes of {name} are not what it owns", sorted(owned), list(map(str, full)))  # fmt: skip


def _indices(box: Box) -> Iterator[Shape]:
    return itertools.product(*(range(start, end) for start, end in zip(box.offset, box.end, strict=True)))


@st.composite
def _spec(draw: st.DrawFn, limits: Limits, mesh: Mesh, *, strided: bool, plain_too: bool = True) -> TensorSpec:
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
        specs: dict[str, Any] = {"x": draw(_spec(limits, mesh, strided=draw(st.integers(0, 5)) == 5, plain_too=False))}
        if draw(st.integers(0, 2)) == 2:
            specs["a"] = draw(_spec(limits, mesh, strided=False))
        state = format_state(draw(state_dicts(tuple(specs), max_entries=2))) if draw(st.integers(0, 3)) == 3 else None
        return Case.of("plan.write-items", world=1, mesh=mesh, **specs, state=state)

    return case()


def features(case: Case) -> set[str]:
    """What the seats of a case are: ranks outside the mesh, although one process plays them all."""
    mesh = case.mesh()
    found = {"submesh"} if ranks_of(mesh) > mesh.size else set()
    specs = [(spec, mesh) for spec in specs_of(case).values()]
    if "to" in case and case.get("to") != "-":
        specs.append((TensorSpec(case.tensor("x").shape, case.placements("to")), Mesh.parse(case.get("mesh.load", str(mesh)))))
    boxless = any(
        spec.placements is not None and any(layout.box(at) is None for at in layout.mesh.coords())
        for spec, on in specs
        if spec.placements is not None
        for layout in (Layout(spec.shape, on, spec.placements),)
    )
    return found | ({"no-box"} if boxless else set())


# What a rank reads


def saved_by(spec: TensorSpec, mesh: Mesh) -> Metadata:
    """The metadata of a checkpoint of one tensor ``x``, saved by all ranks of a mesh."""
    if spec.placements is None:
        return describe([plain("x", spec.shape, spec.dtype)])
    layout = Layout(spec.shape, mesh, spec.placements)
    return describe(dedup([sharded("x", layout, mesh.coord(rank), spec.dtype) for rank in range(ranks_of(mesh))]))


def check_reshard(case: Case, here: Here) -> None:
    spec, mesh = case.tensor("x"), case.mesh()
    load_mesh = case.mesh("mesh.load") if "mesh.load" in case else mesh
    saved = saved_by(spec, mesh)
    wanted = TensorSpec(spec.shape, None if case.get("to") == "-" else case.placements("to"), spec.dtype)
    layout = None if wanted.placements is None else Layout(spec.shape, load_mesh, wanted.placements)
    for rank in range(ranks_of(load_mesh)):
        coord = load_mesh.coord(rank)
        try:
            plan = pt.load_plan({"x": pt.placed(here, wanted, load_mesh, rank)}, pt.metadata(saved))
        except (NotImplementedError, ValueError, RuntimeError):
            if layout is None or not layout.is_strided():
                raise
            return
        if layout is not None and coord is None:
            here.require(not plan.items, "wrong-metadata", "outside", f"rank {rank} is outside the mesh and reads", [], plan.items)
            continue
        lists = tuple(tuple(range(size)) for size in spec.shape) if layout is None or coord is None else layout.owned(coord)
        _judge_reads(here, plan, saved, lists, rank)


def _judge_reads(here: Here, plan: LoadPlan, saved: Metadata, lists: tuple[tuple[int, ...], ...], rank: int) -> None:
    """Every place of the local tensor gets, once, the element that belongs there."""
    filled: dict[Shape, Shape] = {}
    for item in plan.items:
        index: MetadataIndex = item.storage_index
        if index.offset is None:
            here.deviates("wrong-metadata", "chunk", f"rank {rank} reads of no chunk", "", item)
            return
        try:
            chunk = saved.chunk("x", tuple(index.offset), index.index)
        except KeyError:
            here.deviates("wrong-metadata", "chunk", f"rank {rank} reads a chunk that is not saved", saved, item)
            return
        part = Box(tuple(a + b for a, b in zip(item.storage_offsets, chunk.offset, strict=True)), tuple(item.lengths))
        if not here.require(part.volume > 0 and chunk.contains(part), "wrong-metadata", "part",
                            f"rank {rank} reads {part}, which is no part of the chunk {chunk}", chunk, item):  # fmt: skip
            return
        places = _indices(Box(tuple(item.dest_offsets), tuple(item.lengths)))
        for place, source in zip(places, _indices(part), strict=True):
            if not here.require(place not in filled, "wrong-metadata", "twice", f"rank {rank} reads its element {place} twice", "", item):
                return
            filled[place] = source
    due = dict(zip(itertools.product(*(range(len(owned)) for owned in lists)), itertools.product(*lists), strict=True))
    missing = [place for place in due if place not in filled]
    here.require(not missing, "wrong-metadata", "unread", f"rank {rank} leaves {len(missing)} of {len(due)} elements", due, filled)
    wrong = [place for place, source in filled.items() if place in due and due[place] != source]
    message = f"rank {rank}: what goes to {wrong[:1]} of its tensor belongs elsewhere"
    here.require(not wrong and len(filled) <= len(due), "wrong-metadata", "place", message, due, filled)


def draw_reshard(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, load_mesh = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
        spec = draw(_spec(limits, mesh, strided=False))
        to: Any = "-"
        if draw(st.integers(0, 6)) < 6:
            kinds = ("R", "S", "_S") if draw(st.integers(0, 3)) == 3 else ("R", "S")
            to = draw(placements(load_mesh, len(spec.shape), kinds=kinds, negative=True))
        return Case.of("plan.reshard", world=1, mesh=mesh, mesh__load=load_mesh, x=spec, to=to)

    return case()


LAWS: tuple[Law, ...] = (
    Law(
        id="plan.write-items",
        clause="A rank's plan has one item for the part of each DTensor that it holds, and one for every plain tensor and value.",
        source=f"{DOCS}, SavePlanner.create_local_plan; torch.distributed.tensor, DTensor.__create_write_items__",
        check=check_items,
        script=plan_scripts.items,
        control="plan.write-items world=1 mesh=2x3 x=5x7:S(0),S(-1) a=4:-:int64 state={x:x,d:{a:a,n:1}}",
        planted="part_of_first_mesh_dim",
        draw=draw_items,
        draws=80,
        smallest=1,
        weight=0.4,
        features=features,
    ),
    Law(
        id="plan.reshard",
        clause="Of a tensor that any mesh has saved, every rank of any other reads each element of its own part once, to its place.",
        source=f"{DOCS}, LoadPlanner.create_local_plan; load-time resharding",
        check=check_reshard,
        script=plan_scripts.reshard,
        control="plan.reshard world=1 mesh=2x2 mesh.load=3 x=5x7:S(0),S(1) to=S(0)",
        planted="saved_offset_ignored",
        draw=draw_reshard,
        draws=80,
        smallest=1,
        weight=0.4,
        features=features,
    ),
)
