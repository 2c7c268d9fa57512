"""Laws of save plans: what ranks say that they hold, how it is shared out, described, and refused where it is no
tensor.

One process plays all ranks of a case: nothing communicates, so thousands of cases are tried in a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, as_metadata, caught
from shardlaw.conformance.law.fields import Ints
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.plan import cases
from shardlaw.conformance.laws.plan.cases import plan_law
from shardlaw.conformance.laws.plan.fields import Leaves, Plans
from shardlaw.conformance.laws.plan.torch_plans import (
    differing,
    global_plan,
    has_elements,
    leaves_of,
    paths_of,
    plain_item,
    save_plans,
    untiled,
)
from shardlaw.reference.checkpoint.sharded_leaf import ShardedLeaf
from shardlaw.reference.shards import Shards
from shardlaw.strategies.sharded_leaves import MANY, empty_box
from shardlaw.strategies.tilings import DAMAGES, assign_boxes, damaged_tilings, single_ranks, tilings

DOCS = "torch.distributed.checkpoint docs"
REFUSALS = (ValueError, AssertionError, RuntimeError)
Dedup = Literal["lowest"] | None


# Sharing out


@plan_law(
    "plan.dedup",
    source=f"{DOCS}, dedup_save_plans: only one plan keeps a duplicate; DefaultSavePlanner (dedup_save_to_lowest_rank)",
    control="ranks=3 a=5x6/0:2,0:6@0+1;2:5,0:6@2 b=4/whole@0+1+2 n=value@0+1+2",
    draw=lambda limits: cases.states(limits, extra=cases.with_empties),
    draws=80,
)
def dedup(plans: Plans, dedup: Dedup = None):
    """What several ranks hold is left in the plan of exactly one of those that hold it, and nothing gets lost."""
    given = save_plans(plans)
    shared = [[plain_item(item) for item in plan.items] for plan in compat.dedup_save_plans(given, dedup == "lowest")]
    written = [(rank, item) for rank, items in enumerate(shared) for item in items]
    times = Counter(item for _, item in written if has_elements(item))
    return {
        "given": differing(given, save_plans(plans)),
        "ranks": len(shared),
        "not held": [item for rank, item in written if item not in plans[rank]],
        "lost": [item for items in plans for item in items if has_elements(item) and item not in times],
        "twice": [item for item, count in times.items() if count > 1],
        "late": [item for rank, item in written if has_elements(item) and any(item in items for items in plans[:rank])],
    }


@dedup.due
def _(ranks: int, dedup):
    once = as_metadata({"given": [], "ranks": ranks, "not held": [], "lost": [], "twice": []})
    return {**once, "late": Of([]) if dedup else ...}


def draw_balance(limits: Limits) -> SearchStrategy[Case]:
    """Every rank holds everything: tensors of several dtypes, now and then one that is cut up."""

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        of = draw(st.sampled_from((2, 3, 4)))
        every = tuple(range(of))
        drawn: dict[str, Any] = {}
        for name in "abcd"[: draw(st.integers(1, 4))]:
            shape, boxes = draw(tilings(max_boxes=5 if draw(st.integers(0, 9)) == 9 else 1))
            dtype = draw(st.sampled_from([name for name in cases.DTYPES if name in limits.dtypes]))
            drawn[name] = ShardedLeaf("boxes", Shards(shape, tuple((box, every) for box in boxes)), dtype)
        return fields(world=1, ranks=of, **drawn)

    return case()


@plan_law(
    "plan.balance",
    source=f"{DOCS}, dedup_save_plans: the smallest plan in terms of planned storage keeps an entry",
    control="ranks=2 a=4/0:4@0+1 b=4/0:4@0+1 c=5/0:5@0+1",
    draw=draw_balance,
    draws=40,
    tier="advisory",
)
def balance(plans: Plans):
    """Where every rank holds everything, the bytes that two ranks write differ by no more than the largest item has."""
    items = [[item.tensor_data for item in plan.items] for plan in compat.dedup_save_plans(save_plans(plans))]
    sizes = [[data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in mine] for mine in items]
    totals = [*map(sum, sizes)]
    return {"unbalanced": totals if max(totals) - min(totals) > max(map(max, filter(None, sizes)), default=0) else []}


@balance.due
def _():
    return as_metadata({"unbalanced": []})


# The global plan


@plan_law(
    "plan.global",
    source=f"{DOCS}, SavePlanner.create_global_plan; Metadata; DefaultSavePlanner",
    control="ranks=2 a=5x6:int64/0:2,0:6@0;2:5,0:6@0+1 b=()/whole@0+1 n=value@0+1",
    draw=lambda limits: cases.states(limits, extra=cases.lowest),
    draws=80,
)
def described(plans: Plans, dedup: Dedup = None):
    """The global plan describes every leaf, each different box of a tensor once, and every item names its chunk."""
    sent, metadata = global_plan(save_plans(plans), dedup == "lowest")
    return {
        "ranks": len(sent),
        "paths": paths_of(metadata),
        "leaves": leaves_of(metadata),
        "other chunks": [
            item for plan in sent for item in plan.items if item.tensor_data and not names_its_chunk(item, metadata)
        ],
    }


def names_its_chunk(item: Any, metadata: Any) -> bool:
    chunks, at = metadata.state_dict_metadata[item.index.fqn].chunks, item.index.index
    return at is not None and 0 <= at < len(chunks) and chunks[at] == item.tensor_data.chunk


@described.due
def _(leaves: Leaves, ranks: int):
    return as_metadata(
        {"ranks": ranks, "paths": {name: (name,) for name in leaves}, "leaves": leaves, "other chunks": []}
    )


def draw_empties(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        of = draw(st.sampled_from(cases.RANKS))
        drawn = draw(cases.held(of, limits).filter(lambda leaf: bool(leaf.shape) and 0 not in leaf.shape))
        where, number = draw(st.sampled_from(cases.EMPTY_PLACES)), draw(st.integers(0, MANY))
        box = empty_box(drawn.shape, drawn.shards.boxes, where, number)
        return fields(world=1, ranks=of, a=cases.beside(drawn, box, (number % of,)))

    return case()


@plan_law(
    "plan.empty-chunks",
    source=f"{DOCS}, SavePlanner.create_global_plan: chunks of a tensor; a rank may hold an empty shard",
    control="ranks=3 a=5x6/0:3,0:6@0;3:5,0:6@1;5:5,0:6@2",
    draw=draw_empties,
    draws=60,
)
def empty_chunks(plans: Plans):
    """A chunk without elements does not keep a tensor from being planned, wherever it lies."""
    return {"leaves": leaves_of(global_plan(save_plans(plans))[1])}


@empty_chunks.due
def _(leaves: Leaves):
    return as_metadata({"leaves": leaves})


def untiled_leaves(plans: list[Any]) -> dict[str, Any]:
    """The tensors that the global plan describes by chunks that do not tile them."""
    leaves = leaves_of(global_plan(save_plans(plans))[1])
    wrong = {name: untiled(leaf[0], leaf[2]) for name, leaf in leaves.items() if leaf is not None}
    return {name: places for name, places in wrong.items() if places}


def validates(plans: Plans):
    """A plan whose chunks do not tile their tensor is refused."""
    return {"plan": caught(untiled_leaves, plans)}


def due_validates():
    # where two ranks hold one box, what is shared out may tile
    return {"plan": Either((Refused(REFUSALS), {}))}


def draw_damaged(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    """One tensor of a state is damaged; the other, if there is one, is whole."""

    def drawing(limits: Limits) -> SearchStrategy[Case]:
        broken = damaged_tilings(kinds=(kind,))

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            of = draw(st.sampled_from((2, 2, 3, 4, 3, 1, 2, 2, 4, 3, 2, 3)))
            shape, boxes, _ = draw(broken)
            # what is there twice is held by one rank
            each = assign_boxes(shape, dict.fromkeys(boxes), single_ranks(range(of)), draw(st.integers(0, MANY)))
            by = dict(each.parts)
            drawn: dict[str, Any] = {"a": ShardedLeaf("boxes", Shards(shape, tuple((box, by[box]) for box in boxes)))}
            if draw(st.integers(0, 2)) == 2:
                drawn["b"] = draw(cases.held(of, limits))
            return fields(world=1, ranks=of, **drawn)

        return case()

    return drawing


# a tensor on two ranks, damaged in each way
DAMAGED = {
    "gap": "5/0:2@0",
    "overlap": "5/0:3@0;3:5@1;2:4@1",
    "shifted": "5/0:3@0;2:4@1",
    "grown": "5/0:3@0;2:5@1",
    "duplicated": "5/0:3@0;3:5@1;3:5@1",
    "outside": "5/0:3@0;8:10@1",
    "emptied": "5/0:3@0;3:3@1",
}


def law_of_damage(kind: str) -> Law:
    made = plan_law(
        f"plan.validates[{kind}]",
        source=f"{DOCS}, DefaultSavePlanner.create_global_plan validates the plan: in bounds, disjoint, covering",
        control=f"ranks=2 a={DAMAGED[kind]}",
        draw=draw_damaged(kind),
        draws=30,
    )(validates)
    made.due(due_validates)
    return made


BEFORE = (
    "ranks=2 a=5/0:3@0;3:5@1",
    "ranks=3 a=4x6/0:4,0:2@0;0:4,2:6@1+2 b=3/0:3@0",
    "ranks=1 a=5x2/0:3,0:2@0;3:5,0:2@0",
)


@plan_law(
    "plan.validates[before]",
    source=f"{DOCS}, DefaultSavePlanner.create_global_plan validates the plan: in bounds, disjoint, covering",
    control=BEFORE[0],
    sweep=texts(*(f"world=1 {line}" for line in BEFORE)),
    sweeps=len(BEFORE),
)
def before(plans: Plans):
    """A plan with a chunk that lies before the beginning of its tensor is refused."""
    first = next(box for plan in plans for name, box, *_ in plan if name == "a")

    def moved(item: Any) -> Any:
        name, (offset, size), shape, *more = item
        if (name, item[1]) != ("a", first):
            return item
        return (name, ((offset[0] - shape[0], *offset[1:]), size), shape, *more)

    damaged = [[moved(item) for item in plan] for plan in plans]
    return {"plan": caught(lambda: global_plan(save_plans(damaged)))}


@before.due
def _():
    return {"plan": Refused(REFUSALS)}


# What must not matter


def draw_permuted(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, of: int, drawn: dict[str, Any]) -> dict[str, Any]:
        order = draw(st.permutations(range(of)))
        return {**cases.lowest(draw, of, drawn), "order": ",".join(map(str, order))}

    return cases.states(limits, extra=extra, least=2)


@plan_law(
    "plan.rank-permutation",
    source=f"{DOCS}, SavePlanner.create_global_plan: metadata describes the whole state",
    control="ranks=2 a=5x6/0:2,0:6@0;2:5,0:6@1 b=4:int64/0:4@1 order=1,0",
    draw=draw_permuted,
    draws=40,
)
def permuted(plans: Plans, order: Ints, dedup: Dedup = None):
    """Which rank holds what does not matter to what is described: other ranks first, the same leaves and chunks."""
    one = global_plan(save_plans(plans), dedup == "lowest")[1]
    other = global_plan(save_plans([plans[rank] for rank in order]), dedup == "lowest")[1]
    return {
        "paths": differing(paths_of(one).items(), paths_of(other).items()),
        "leaves": differing(leaves_of(one).items(), leaves_of(other).items()),
    }


@permuted.due
def _():
    return as_metadata({"paths": [], "leaves": []})


@plan_law(
    "plan.deterministic",
    source=f"{DOCS}, SavePlanner.create_global_plan: a function of all local plans",
    control="ranks=2 a=5x6/0:2,0:6@0+1;2:5,0:6@0+1 b=4/whole@0+1",
    draw=lambda limits: cases.states(limits, extra=cases.lowest),
    draws=40,
)
def deterministic(plans: Plans, dedup: Dedup = None):
    """The same local plans give the same global plan, item for item, whatever was planned before."""
    lowest = dedup == "lowest"
    sent, metadata = global_plan(save_plans(plans), lowest)
    global_plan(save_plans(plans[::-1]), not lowest)
    again, metadata_again = global_plan(save_plans(plans), lowest)
    return {"plans": differing(sent, again), "metadata": differing([metadata], [metadata_again])}


@deterministic.due
def _():
    return as_metadata({"plans": [], "metadata": []})


LAWS = [law_of_damage(kind) for kind in DAMAGES]
