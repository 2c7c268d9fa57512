"""Laws of save plans: how the items of all ranks are deduplicated, described in metadata, and validated.

One process computes the plans of all ranks, without communication, so that a second suffices for thousands of cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, as_metadata, caught
from shardlaw.conformance.law.fields import Ints
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.plan import cases
from shardlaw.conformance.laws.plan.cases import plan_law
from shardlaw.conformance.laws.plan.fields import Leaves, Plans
from shardlaw.conformance.laws.plan.torch_plans import (
    differing_pairs,
    global_plan,
    has_elements,
    leaves_of,
    paths_of,
    plain_item,
    to_save_plans,
    untiled_elements,
)
from shardlaw.reference.checkpoint.sharded_leaf import ShardedLeaf
from shardlaw.reference.shards import Shards
from shardlaw.strategies.sharded_leaves import MANY, empty_box
from shardlaw.strategies.tilings import DAMAGES, assign_boxes, damaged_tilings, single_ranks, tilings

DOCS = "torch.distributed.checkpoint docs"
REFUSALS = (ValueError, AssertionError, RuntimeError)
Dedup = Literal["lowest"] | None


# Deduplication


@plan_law(
    "plan.dedup",
    source=f"{DOCS}, dedup_save_plans: only one plan keeps a duplicate; DefaultSavePlanner (dedup_save_to_lowest_rank)",
    control="ranks=3 a=5x6/0:2,0:6@0+1;2:5,0:6@2 b=4/whole@0+1+2 n=value@0+1+2",
    draw=lambda limits: cases.state_cases(limits, extra=cases.add_empty_box),
    draws=80,
)
def dedup(plans: Plans, dedup: Dedup = None):
    """An item that several ranks hold stays in the plan of exactly one of them, and no item is lost."""
    local = to_save_plans(plans)
    deduped = [[plain_item(item) for item in plan.items] for plan in compat.dedup_save_plans(local, dedup == "lowest")]
    written = [(rank, item) for rank, items in enumerate(deduped) for item in items]
    counts = Counter(item for _, item in written if has_elements(item))
    return {
        "given": differing_pairs(local, to_save_plans(plans)),
        "ranks": len(deduped),
        "not held": [item for rank, item in written if item not in plans[rank]],
        "lost": [item for items in plans for item in items if has_elements(item) and item not in counts],
        "twice": [item for item, count in counts.items() if count > 1],
        "late": [item for rank, item in written if has_elements(item) and any(item in items for items in plans[:rank])],
    }


@dedup.due
def _(ranks: int, dedup):
    once = as_metadata({"given": [], "ranks": ranks, "not held": [], "lost": [], "twice": []})
    return {**once, "late": Of([]) if dedup else ...}


@st.composite
def draw_balance(draw: st.DrawFn, limits: Limits) -> Case:
    """Every rank holds every tensor: of several dtypes, and seldom in several boxes."""
    ranks = draw(st.sampled_from((2, 3, 4)))
    all_ranks = tuple(range(ranks))
    leaves: dict[str, Any] = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        shape, boxes = draw(tilings(max_boxes=5 if draw(st.integers(0, 9)) == 9 else 1))
        dtype = draw(st.sampled_from([name for name in cases.DTYPES if name in limits.dtypes]))
        leaves[name] = ShardedLeaf("boxes", Shards(shape, tuple((box, all_ranks) for box in boxes)), dtype)
    return fields(world=1, ranks=ranks, **leaves)


@plan_law(
    "plan.balance",
    source=f"{DOCS}, dedup_save_plans: the smallest plan in terms of planned storage keeps an entry",
    control="ranks=2 a=4/0:4@0+1 b=4/0:4@0+1 c=5/0:5@0+1",
    draw=draw_balance,
    draws=40,
    tier="advisory",
)
def balance(plans: Plans):
    """Where every rank holds every item, the bytes of two ranks differ by at most the size of the largest item."""
    items = [[item.tensor_data for item in plan.items] for plan in compat.dedup_save_plans(to_save_plans(plans))]
    sizes = [[data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in of_rank] for of_rank in items]
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
    draw=lambda limits: cases.state_cases(limits, extra=cases.draw_dedup),
    draws=80,
)
def describe(plans: Plans, dedup: Dedup = None):
    """The global plan describes every leaf, with each distinct box of a tensor once, and every item's index names its
    chunk."""
    planned, metadata = global_plan(to_save_plans(plans), dedup == "lowest")
    return {
        "ranks": len(planned),
        "paths": paths_of(metadata),
        "leaves": leaves_of(metadata),
        "other chunks": [
            item for plan in planned for item in plan.items if item.tensor_data and not names_its_chunk(item, metadata)
        ],
    }


def names_its_chunk(item: Any, metadata: Any) -> bool:
    chunks, at = metadata.state_dict_metadata[item.index.fqn].chunks, item.index.index
    return at is not None and 0 <= at < len(chunks) and chunks[at] == item.tensor_data.chunk


@describe.due
def _(leaves: Leaves, ranks: int):
    return as_metadata(
        {"ranks": ranks, "paths": {name: (name,) for name in leaves}, "leaves": leaves, "other chunks": []}
    )


@st.composite
def draw_empty_chunks(draw: st.DrawFn, limits: Limits) -> Case:
    ranks = draw(st.sampled_from(cases.RANK_COUNTS))
    leaf = draw(cases.tensor_leaves(ranks, limits).filter(lambda leaf: bool(leaf.shape) and 0 not in leaf.shape))
    where, number = draw(st.sampled_from(cases.EMPTY_PLACES)), draw(st.integers(0, MANY))
    box = empty_box(leaf.shape, leaf.shards.boxes, where, number)
    return fields(world=1, ranks=ranks, a=cases.with_box(leaf, box, (number % ranks,)))


@plan_law(
    "plan.empty-chunks",
    source=f"{DOCS}, SavePlanner.create_global_plan: chunks of a tensor; a rank may hold an empty shard",
    control="ranks=3 a=5x6/0:3,0:6@0;3:5,0:6@1;5:5,0:6@2",
    draw=draw_empty_chunks,
    draws=60,
)
def empty_chunks(plans: Plans):
    """A tensor with an empty chunk can be planned, wherever that chunk lies."""
    return {"leaves": leaves_of(global_plan(to_save_plans(plans))[1])}


@empty_chunks.due
def _(leaves: Leaves):
    return as_metadata({"leaves": leaves})


def untiled_leaves(plans: list[Any]) -> dict[str, Any]:
    """What is wrong with the tensors whose chunks in the global plan do not tile them, by name."""
    leaves = leaves_of(global_plan(to_save_plans(plans))[1])
    wrong = {name: untiled_elements(leaf[0], leaf[2]) for name, leaf in leaves.items() if leaf is not None}
    return {name: places for name, places in wrong.items() if places}


def validates(plans: Plans):
    """A plan whose chunks do not tile their tensor is refused."""
    return {"plan": caught(untiled_leaves, plans)}


def due_validates():
    # deduplication may leave boxes that tile the tensor
    return {"plan": Either((Refused(REFUSALS), {}))}


def draw_damaged(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    """A state with a tensor whose boxes do not tile it, and in one case of three another tensor whose boxes do."""

    def draw_of(limits: Limits) -> SearchStrategy[Case]:
        damaged = damaged_tilings(kinds=(kind,))

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            ranks = draw(st.sampled_from((2, 2, 3, 4, 3, 1, 2, 2, 4, 3, 2, 3)))
            shape, boxes, _ = draw(damaged)
            # one rank holds both copies of a duplicated box
            assigned = assign_boxes(shape, dict.fromkeys(boxes), single_ranks(range(ranks)), draw(st.integers(0, MANY)))
            holders = dict(assigned.parts)
            leaves: dict[str, Any] = {
                "a": ShardedLeaf("boxes", Shards(shape, tuple((box, holders[box]) for box in boxes)))
            }
            if draw(st.integers(0, 2)) == 2:
                leaves["b"] = draw(cases.tensor_leaves(ranks, limits))
            return fields(world=1, ranks=ranks, **leaves)

        return case()

    return draw_of


# a tensor on two ranks whose boxes do not tile it, for each kind of damage
DAMAGED = {
    "gap": "5/0:2@0",
    "overlap": "5/0:3@0;3:5@1;2:4@1",
    "shifted": "5/0:3@0;2:4@1",
    "grown": "5/0:3@0;2:5@1",
    "duplicated": "5/0:3@0;3:5@1;3:5@1",
    "outside": "5/0:3@0;8:10@1",
    "emptied": "5/0:3@0;3:3@1",
}
# the first and the last chunk overlap, and another begins between them; one rank alone is not asked for all elements
APART = {"overlap": ("world=1 ranks=1 a=6x4/0:4,0:2@0;1:2,2:4@0;2:4,0:2@0",)}


def damage_law(kind: str) -> Law:
    cases = (f"ranks=2 a={DAMAGED[kind]}", *APART.get(kind, ()))
    built = plan_law(
        f"plan.validates[{kind}]",
        source=f"{DOCS}, DefaultSavePlanner.create_global_plan validates the plan: in bounds, disjoint, covering",
        control=cases[0],
        draw=draw_damaged(kind),
        draws=30,
        cases=cases,
    )(validates)
    built.due(due_validates)
    return built


BEFORE_START = (
    "ranks=2 a=5/0:3@0;3:5@1",
    "ranks=3 a=4x6/0:4,0:2@0;0:4,2:6@1+2 b=3/0:3@0",
    "ranks=1 a=5x2/0:3,0:2@0;3:5,0:2@0",
    "ranks=2 a=4x6/0:4,0:2@0;0:4,2:6@1 chunk=inverted",
)


@plan_law(
    "plan.validates[before]",
    source=f"{DOCS}, DefaultSavePlanner.create_global_plan validates the plan: in bounds, disjoint, covering",
    control=BEFORE_START[0],
    cases=[f"world=1 {line}" for line in BEFORE_START],
)
def before_start(plans: Plans, chunk: Literal["moved", "inverted"] = "moved"):
    """A plan with a chunk at a negative offset, or of negative sizes, is refused."""
    first = next(box for plan in plans for name, box, *_ in plan if name == "a")

    def damage(item: Any) -> Any:
        name, (offset, size), shape, *rest = item
        if (name, item[1]) != ("a", first):
            return item
        if chunk == "moved":
            return (name, ((offset[0] - shape[0], *offset[1:]), size), shape, *rest)
        # from its last corner back: as many elements, within the tensor
        return (name, (tuple(map(sum, zip(offset, size, strict=True))), tuple(-n for n in size)), shape, *rest)

    damaged = [[*map(damage, plan)] for plan in plans]
    return {"plan": caught(lambda: global_plan(to_save_plans(damaged)))}


@before_start.due
def _():
    return {"plan": Refused(REFUSALS)}


# Invariance


def draw_permuted(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, ranks: int, leaves: dict[str, Any]) -> dict[str, Any]:
        order = draw(st.permutations(range(ranks)))
        return {**cases.draw_dedup(draw, ranks, leaves), "order": ",".join(map(str, order))}

    return cases.state_cases(limits, extra=extra, min_ranks=2)


@plan_law(
    "plan.rank-permutation",
    source=f"{DOCS}, SavePlanner.create_global_plan: metadata describes the whole state",
    control="ranks=2 a=5x6/0:2,0:6@0;2:5,0:6@1 b=4:int64/0:4@1 order=1,0",
    draw=draw_permuted,
    draws=40,
)
def permute_ranks(plans: Plans, order: Ints, dedup: Dedup = None):
    """The metadata do not depend on the order of the ranks: the same leaves and chunks for any permutation of them."""
    metadata = global_plan(to_save_plans(plans), dedup == "lowest")[1]
    permuted = global_plan(to_save_plans([plans[rank] for rank in order]), dedup == "lowest")[1]
    return {
        "paths": differing_pairs(paths_of(metadata).items(), paths_of(permuted).items()),
        "leaves": differing_pairs(leaves_of(metadata).items(), leaves_of(permuted).items()),
    }


@permute_ranks.due
def _():
    return as_metadata({"paths": [], "leaves": []})


@plan_law(
    "plan.deterministic",
    source=f"{DOCS}, SavePlanner.create_global_plan: a function of all local plans",
    control="ranks=2 a=5x6/0:2,0:6@0+1;2:5,0:6@0+1 b=4/whole@0+1",
    draw=lambda limits: cases.state_cases(limits, extra=cases.draw_dedup),
    draws=40,
)
def deterministic(plans: Plans, dedup: Dedup = None):
    """The same local plans give the same global plan, item by item, whatever was planned in between."""
    lowest = dedup == "lowest"
    sent, metadata = global_plan(to_save_plans(plans), lowest)
    global_plan(to_save_plans(plans[::-1]), not lowest)
    sent_again, metadata_again = global_plan(to_save_plans(plans), lowest)
    return {"plans": differing_pairs(sent, sent_again), "metadata": differing_pairs([metadata], [metadata_again])}


@deterministic.due
def _():
    return as_metadata({"plans": [], "metadata": []})


LAWS = [damage_law(kind) for kind in DAMAGES]
