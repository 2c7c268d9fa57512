"""Laws of load plans: the parts of saved chunks that fill what is wanted, and what cannot be filled."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws.plan import cases
from conformance.laws.plan import scripts as plan_scripts
from conformance.laws.plan import torch as pt
from reference.box import Box, tiling_errors
from reference.checkpoint.held import format_boxes, parse_boxes, plans_of
from reference.checkpoint.load_plan import read_items
from reference.checkpoint.save_plan import Metadata, TensorEntry, dedup, describe
from reference.notation import Shape, format_shape, parse_shape
from strategies.shapes import shapes
from strategies.tilings import damaged, tilings, wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOCS = "torch.distributed.checkpoint docs"
REFUSALS = (ValueError, AssertionError, RuntimeError)
REFUSED = ("missing", "size", "kind")

# chunk, box, place in the chunk, place in the box, lengths
Read = tuple[Shape, Shape, Shape, Shape, Shape]


def chunks_of(case: Case) -> tuple[Shape, tuple[Box, ...]]:
    """A shape, and the chunks that are saved of a tensor of it."""
    shape = case.shape()
    return shape, parse_boxes(case.get("chunks"), len(shape))


def _reads(items: Any) -> list[Read]:
    return [
        (tuple(i.storage_index.offset), tuple(i.dest_index.offset), tuple(i.storage_offsets), tuple(i.dest_offsets), tuple(i.lengths))
        for i in items
    ]


def due_reads(chunks: Sequence[Box], boxes: Sequence[Box]) -> list[Read]:
    """What the wanted boxes have in common with the chunks."""
    return [
        (chunks[item.chunk].offset, boxes[item.box].offset, item.chunk_offset, item.box_offset, item.lengths)
        for item in read_items(chunks, boxes)
    ]


def check_reads(case: Case, here: Here) -> None:
    shape, chunks = chunks_of(case)
    boxes = parse_boxes(case.get("boxes"), len(shape))
    items = create_read_items_for_chunk_list("x", pt.entry(TensorEntry(shape, chunks)), [pt.chunk(box) for box in boxes])
    here.require(all(item.dest_index.fqn == item.storage_index.fqn == "x" for item in items), "wrong-metadata", "name", "another name")
    got, due = Counter(_reads(items)), Counter(due_reads(chunks, boxes))
    # a chunk without elements may be asked for nothing
    empty = {box.offset for box in (*chunks, *boxes) if not box.volume}
    nothing = [read for read in got if 0 in read[4]]
    pointless = [read for read in nothing if read[0] not in empty and read[1] not in empty]
    here.require(not pointless, "wrong-metadata", "nothing", "parts without elements are read", "", pointless)
    for read in nothing:
        del got[read]
    lost, more = due - got, got - due
    here.require(not lost, "wrong-metadata", "unread", "a part that is wanted is not read", sorted(due), sorted(got))
    here.require(not more, "wrong-metadata", "more", "a part is read that is not wanted, or twice", sorted(due), sorted(got))


def draw_reads(limits: Limits) -> SearchStrategy[Case]:
    tiling = tilings(max_boxes=7)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        shape, chunks = draw(tiling)
        boxes = draw(wanted(shape))
        return Case.of("plan.read-items", world=1, shape=format_shape(shape), chunks=format_boxes(chunks), boxes=format_boxes(boxes))

    return case()


def check_covered(case: Case, here: Here) -> None:
    """Every element of what is wanted is read once, or the load is refused."""
    shape, chunks = chunks_of(case)
    metadata = pt.metadata(Metadata({"x": TensorEntry(shape, chunks)}))
    try:
        plan = pt.load_plan({"x": torch.zeros(shape)}, metadata)
    except REFUSALS:
        here.require(bool(tiling_errors(shape, chunks)), "wrong-error", "refused", "chunks that tile their tensor are refused")
        return
    parts = [Box(tuple(item.dest_offsets), tuple(item.lengths)) for item in plan.items]
    wrong = tiling_errors(shape, parts)
    message = f"{wrong[0] if wrong else ''}: must be refused, was accepted"
    here.require(not wrong, "wrong-error", "accepted", message, "an error", parts)


def draw_covered(limits: Limits) -> SearchStrategy[Case]:
    whole, broken = tilings(max_boxes=5), damaged(kinds=("gap", "emptied", "shifted", "overlap"))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        # each hole is taken for what it is not: more of them would hide the rest
        if draw(st.integers(0, 7)) == 7:
            shape, chunks, _ = draw(broken)
        else:
            shape, chunks = draw(whole)
        return Case.of("plan.read-refuses", world=1, shape=format_shape(shape), chunks=format_boxes(chunks))

    return case()


def features(case: Case) -> set[str]:
    """Whether the chunks of a case tile their tensor."""
    shape, chunks = chunks_of(case)
    found = {"untiled"} if tiling_errors(shape, chunks) else set()
    return found | ({"several-chunks"} if len(chunks) > 1 else set())


# What cannot be loaded


def _saved(case: Case) -> Metadata:
    """The metadata of a case's leaves, each under a name of its own."""
    plans = plans_of({f"{name}.leaf": leaf for name, leaf in cases.leaves(case).items()}, cases.ranks(case))
    return describe(dedup(plans))


def _state(case: Case) -> dict[str, Any]:
    """What is loaded into: what was saved, but for the culprit, which is as ``want`` says."""
    state: dict[str, Any] = {}
    for name, leaf in cases.leaves(case).items():
        state[f"{name}.leaf"] = 1 if leaf.kind == "value" else torch.zeros(leaf.shape)
    if "culprit" in case:
        want = case.get("want")
        state[f"{case.get('culprit')}.leaf"] = 1 if want == "value" else torch.zeros(parse_shape(want))
    return state


def check_refused(case: Case, here: Here) -> None:
    culprit = f"{case.get('culprit')}.leaf"
    try:
        pt.load_plan(_state(case), pt.metadata(_saved(case)))
    except REFUSALS as error:
        here.require(culprit in str(error), "wrong-error", "unnamed", f"the error does not name {culprit}: {error}", culprit, str(error))
        return
    here.deviates("wrong-error", "accepted", "a load that cannot be done: must be refused, was accepted", f"an error on {culprit}")


def check_partial(case: Case, here: Here) -> None:
    """What the checkpoint has not is left out, and all else is read."""
    saved, state = _saved(case), _state(case)
    plan = pt.load_plan(state, pt.metadata(saved), partial=True)
    names = {item.dest_index.fqn for item in plan.items}
    hollow = {name for name, value in state.items() if isinstance(value, torch.Tensor) and not value.numel()}
    due, names = ({*state} & {*saved.entries}) - hollow, names - hollow
    here.require(names == due, "wrong-metadata", "names", "not what the checkpoint and the state share", sorted(due), sorted(names))
    for name in names & due:
        entry, value = saved.entries[name], state[name]
        if entry is not None:
            parts = [Box(tuple(item.dest_offsets), tuple(item.lengths)) for item in plan.items if item.dest_index.fqn == name]
            wrong = tiling_errors(tuple(value.shape), parts)
            here.require(not wrong, "wrong-metadata", "cover", f"{name}: {wrong[:1]}", "every element once", parts)


@st.composite
def _other_shape(draw: st.DrawFn, shape: Shape) -> Shape:
    """A shape that is another, if only by a dim of extent 1 or by the order of its dims."""
    near = {(*shape, 1), (1, *shape), shape[1:], shape[:-1], shape[::-1], (*shape[:-1], shape[-1] + 1) if shape else (1,)}
    if shape:
        near |= {(0, *shape[1:]), (shape[0] + 1, *shape[1:]), (max(shape[0] - 1, 0), *shape[1:])}
    return draw(st.sampled_from(sorted(near - {shape})))


def draw_refused(kind: str, law: str) -> Any:
    def extra(draw: st.DrawFn, of: int, drawn: dict[str, Any]) -> dict[str, Any]:
        name = draw(st.sampled_from(sorted(drawn)))
        leaf = drawn[name]
        if kind == "missing":
            return {"culprit": "z", "want": "value" if draw(st.booleans()) else format_shape(draw(shapes(max_dims=2)))}
        if kind == "size":
            if leaf.kind == "value":
                leaf = drawn[name] = draw(cases.held(of, Limits()))
            return {"culprit": name, "want": format_shape(draw(_other_shape(leaf.shape)))}
        # a value where a tensor was saved, or seldom the other way round
        if leaf.kind != "value" and draw(st.integers(0, 9)) == 9:
            leaf = drawn[name] = cases.value(of)
        if leaf.kind == "value":
            drawn[name] = leaf = leaf if draw(st.integers(0, 3)) == 3 else draw(cases.held(of, Limits()))
        return {"culprit": name, "want": "3" if leaf.kind == "value" else "value"}

    return lambda limits: cases.states(law, limits, extra=extra)


def refusal_features(case: Case) -> set[str]:
    found = cases.features(case)
    culprit = cases.leaves(case).get(case.get("culprit", "-"))
    if case.law.startswith("plan.refuses[kind]") and culprit is not None and culprit.kind == "value":
        found.add("value-for-tensor")
    return found


HOLDS = {"missing": "a=4/0:2@0;2:4@1 culprit=z want=4", "size": "a=4/0:2@0;2:4@1 culprit=a want=4x1",
         "kind": "a=4/0:2@0;2:4@1 culprit=a want=value"}  # fmt: skip
CLAUSES = {
    "missing": "A name that the checkpoint has not is refused, by its name.",
    "size": "A tensor of another shape than was saved is refused, by its name.",
    "kind": "A value where a tensor was saved, and a tensor where a value was, are refused, by their name.",
}
PLANTED = {"missing": "never_strict", "size": "sizes_by_volume", "kind": "values_read_as_bytes"}
LAWS: tuple[Law, ...] = (
    Law(
        id="plan.read-items",
        clause="Of every chunk is read what it has in common with the boxes that are wanted: all of it, once, and nothing else.",
        source=f"{DOCS}, create_read_items_for_chunk_list; ReadItem",
        check=check_reads,
        script=plan_scripts.reads,
        control="plan.read-items world=1 shape=5x6 chunks=0:2,0:6;2:5,0:4;2:5,4:6 boxes=1:4,0:5",
        planted="first_chunk_only",
        draw=draw_reads,
        draws=120,
        smallest=1,
        weight=0.3,
    ),
    Law(
        id="plan.read-refuses",
        clause="Where saved chunks do not cover what is wanted, each element once, the load is refused.",
        source=f"{DOCS}, LoadPlan: read items cover what is loaded into",
        check=check_covered,
        script=plan_scripts.uncovered,
        control="plan.read-refuses world=1 shape=5 chunks=0:2;2:5",
        planted="first_chunk_only",
        draw=draw_covered,
        draws=60,
        smallest=1,
        weight=0.2,
        features=features,
    ),
    *(
        Law(
            id=f"plan.refuses[{kind}]",
            clause=CLAUSES[kind],
            source=f"{DOCS}, DefaultLoadPlanner; LoadPlanner.create_local_plan",
            check=check_refused,
            script=plan_scripts.unloadable,
            control=f"plan.refuses[{kind}] world=1 ranks=2 {HOLDS[kind]}",
            planted=PLANTED[kind],
            draw=draw_refused(kind, f"plan.refuses[{kind}]"),
            draws=30,
            smallest=1,
            weight=0.2,
            features=refusal_features,
        )
        for kind in REFUSED
    ),
    Law(
        id="plan.partial",
        clause="A partial load leaves out what the checkpoint has not, and reads all else whole.",
        source=f"{DOCS}, DefaultLoadPlanner (allow_partial_load)",
        check=check_partial,
        script=plan_scripts.partly,
        control="plan.partial world=1 ranks=2 a=4/0:2@0;2:4@1 n=value@0+1 culprit=z want=4",
        planted="always_strict",
        draw=draw_refused("missing", "plan.partial"),
        draws=30,
        smallest=1,
        weight=0.2,
        features=cases.features,
    ),
)
