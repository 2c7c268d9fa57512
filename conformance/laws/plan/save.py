"""Laws of save plans: what ranks say that they hold, how it is shared out, described, and refused where it is no tensor.

One process plays all ranks of a case (:mod:`conformance.laws.plan.torch`): nothing communicates, so thousands of cases are tried in
a second.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws.plan import cases
from conformance.laws.plan import load as plan_load
from conformance.laws.plan import scripts as plan_scripts
from conformance.laws.plan import state as plan_state
from conformance.laws.plan import tensors as plan_tensors
from conformance.laws.plan import torch as pt
from reference.checkpoint.held import Held, plans_of
from reference.checkpoint.save_plan import Metadata, Plan, WriteItem, errors
from reference.tensors import DTYPES
from strategies.tilings import DAMAGES, damaged, tilings

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOCS = "torch.distributed.checkpoint docs"
REFUSALS = (ValueError, AssertionError, RuntimeError)


def due_plans(case: Case) -> list[Plan]:
    """What every rank of a case says that it holds."""
    return plans_of(cases.leaves(case), cases.ranks(case))


def _full(items: Any) -> list[WriteItem]:
    """The items that have elements, or are no tensors."""
    return [item for item in items if item.box is None or item.box.volume]


# Sharing out


def check_dedup(case: Case, here: Here) -> None:
    (dedup,) = pt.need(here, "dedup_save_plans")
    given, lowest = due_plans(case), case.get("dedup", "") == "lowest"
    plans = pt.save_plans(given)
    before = [list(plan.items) for plan in plans]
    shared = dedup(plans, lowest)
    here.require([plan.items for plan in plans] == before, "wrong-metadata", "given", "the plans that were given have changed")
    if not here.require(len(shared) == len(given), "wrong-metadata", "ranks", "there are not as many plans as ranks", len(given), shared):
        return
    got = [[pt.read(item) for item in plan.items] for plan in shared]
    for rank, (mine, held) in enumerate(zip(got, given, strict=True)):
        strange = [item for item in mine if item not in held]
        here.require(not strange, "wrong-metadata", "holder", f"rank {rank} is to write what it does not hold", "", strange)
    kept = Counter(item for mine in got for item in _full(mine))
    lost = [item for item in dict.fromkeys(item for held in given for item in _full(held)) if item not in kept]
    here.require(not lost, "wrong-metadata", "lost", f"nobody is to write {named(lost)}", "every item once", "")
    twice = [item for item, times in kept.items() if times > 1]
    here.require(not twice, "wrong-metadata", "once", f"several ranks are to write {named(twice)}", "every item once", twice)
    if lowest:
        for rank, mine in enumerate(got):
            late = [item for item in _full(mine) if any(item in held for held in given[:rank])]
            message = f"rank {rank} is to write {named(late)}, which a lower one holds too"
            here.require(not late, "wrong-metadata", "lowest", message, "the lowest rank that holds it", late)


def named(items: list[WriteItem]) -> str:
    """Items for a message."""
    return ", ".join(item.name if item.box is None else f"{item.name}{item.box}" for item in items)


def check_balance(case: Case, here: Here) -> None:
    (dedup,) = pt.need(here, "dedup_save_plans")
    shared = dedup(pt.save_plans(due_plans(case)))
    sizes = [[_bytes(pt.read(item)) for item in plan.items] for plan in shared]
    most, least = max(map(sum, sizes)), min(map(sum, sizes))
    largest = max((size for mine in sizes for size in mine), default=0)
    message = f"one rank is to write {most} bytes and another {least}, though no item has more than {largest} and every rank holds all"
    here.require(most - least <= largest, "wrong-metadata", "balance", message, f"a difference of at most {largest}", sizes)


def _bytes(item: WriteItem) -> int:
    return item.box.volume * DTYPES[item.dtype].itemsize if item.box is not None else 0


# The global plan


def check_global(case: Case, here: Here) -> None:
    given = due_plans(case)
    plans, metadata = pt.global_plan(pt.save_plans(given), lowest=case.get("dedup", "") == "lowest")
    here.require(len(plans) == len(given), "wrong-metadata", "ranks", "there are not as many plans as ranks", len(given), len(plans))
    names = {item.name for held in given for item in held}
    here.require(metadata.planner_data == {name: (name,) for name in names}, "wrong-metadata", "paths",
                 "the paths of the leaves are not those that the ranks sent", sorted(names), metadata.planner_data)  # fmt: skip
    judge_metadata(here, pt.read_metadata(metadata), cases.leaves(case))
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            entry: Any = metadata.state_dict_metadata[item.index.fqn]
            at = item.index.index
            held = at is not None and 0 <= at < len(entry.chunks) and entry.chunks[at] == item.tensor_data.chunk
            message = f"rank {rank} writes {item.index.fqn}{pt.box(item.tensor_data.chunk)} as chunk number {at}, which is another"
            here.require(held, "wrong-metadata", "hint", message, item.tensor_data.chunk, at)


def judge_metadata(here: Here, got: Metadata, leaves: dict[str, Held]) -> None:
    """Every leaf is described: tensors by shape, dtype and each different box with elements once."""
    here.require({*got.entries} == {*leaves}, "wrong-metadata", "names", "metadata has other leaves", sorted(leaves), sorted(got.entries))
    for name, leaf in leaves.items():
        entry = got.entries.get(name)
        if leaf.kind == "value" or entry is None:
            kinds = entry is None and leaf.kind == "value"
            here.require(kinds or name not in got.entries, "wrong-metadata", "kind", f"{name} is not what it was", leaf.kind, entry)
            continue
        here.require(entry.shape == leaf.shape, "wrong-metadata", "shape", f"{name} has another shape", leaf.shape, entry.shape)
        here.require(entry.dtype == leaf.dtype, "wrong-metadata", "dtype", f"{name} has another dtype", leaf.dtype, entry.dtype)
        due, chunks = chunk_set(leaf.boxes), chunk_set(entry.chunks)
        here.require(chunks == due, "wrong-metadata", "chunks", f"the chunks of {name} are not what ranks hold", due, chunks)


def chunk_set(boxes: Any) -> list[str]:
    """The boxes that have elements, in an order that does not depend on theirs."""
    return sorted(str(box) for box in boxes if box.volume)


def check_refused(case: Case, here: Here) -> None:
    """What does not tile its tensor is refused; or what comes out tiles it, as it may where two ranks hold one box."""
    try:
        _, metadata = pt.global_plan(pt.save_plans(due_plans(case)))
    except REFUSALS as error:
        here.require(bool(str(error).strip()), "wrong-error", "silent", f"refused by {type(error).__name__} without a word")
        return
    wrong = errors(pt.read_metadata(metadata))
    here.require(not wrong, "wrong-error", "accepted", f"{wrong[0] if wrong else ''}: must be refused, was accepted", "an error", wrong)


def check_empties(case: Case, here: Here) -> None:
    """Boxes without elements cover nothing and disturb nothing."""
    _, metadata = pt.global_plan(pt.save_plans(due_plans(case)))
    judge_metadata(here, pt.read_metadata(metadata), cases.leaves(case))


# What must not matter


def check_permuted(case: Case, here: Here) -> None:
    plans = pt.save_plans(due_plans(case))
    order = tuple(map(int, case.get("order").split(",")))
    lowest = case.get("dedup", "") == "lowest"
    (_, one), (_, other) = pt.global_plan(plans, lowest=lowest), pt.global_plan([plans[rank] for rank in order], lowest=lowest)
    here.require(one.planner_data == other.planner_data, "wrong-metadata", "paths", "other ranks first: other paths")
    first, second = pt.read_metadata(one).entries, pt.read_metadata(other).entries
    here.require({*first} == {*second}, "wrong-metadata", "names", "other ranks first: other leaves", sorted(first), sorted(second))
    for name in {*first} & {*second}:
        a, b = first[name], second[name]
        told = [None if entry is None else (entry.shape, entry.dtype, chunk_set(entry.chunks)) for entry in (a, b)]
        here.require(told[0] == told[1], "wrong-metadata", "entry", f"other ranks first: {name} is described otherwise", *told)


def check_deterministic(case: Case, here: Here) -> None:
    """The same plans give the same outcome, also after others have been planned."""
    lowest = case.get("dedup", "") == "lowest"
    first = pt.global_plan(pt.save_plans(due_plans(case)), lowest=lowest)
    pt.global_plan(pt.save_plans(reversed(due_plans(case))), lowest=not lowest)
    again = pt.global_plan(pt.save_plans(due_plans(case)), lowest=lowest)
    here.require(first[0] == again[0], "wrong-metadata", "plans", "the same plans are shared out otherwise", first[0], again[0])
    here.require(first[1] == again[1], "wrong-metadata", "metadata", "the same plans are described otherwise", first[1], again[1])


# The cases


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
            drawn[name] = Held("boxes", shape, dtype, tuple((box, every) for box in boxes))
        return Case.of("plan.balance", world=1, ranks=of, **drawn)

    return case()


def draw_damaged(kind: str) -> Any:
    """One tensor of a state is damaged; the other, if there is one, is whole."""

    def drawing(limits: Limits) -> SearchStrategy[Case]:
        broken = damaged(kinds=(kind,))

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            of = draw(st.sampled_from((2, 2, 3, 4, 3, 1, 2, 2, 4, 3, 2, 3)))
            shape, boxes, _ = draw(broken)
            by = dict(cases.hand_out(dict.fromkeys(boxes), of, draw(st.integers(0, cases.MANY)), single=True))
            drawn: dict[str, Any] = {"a": Held("boxes", shape, "float32", tuple((box, by[box]) for box in boxes))}
            if draw(st.integers(0, 2)) == 2:
                drawn["b"] = draw(cases.held(of, limits))
            return Case.of(f"plan.validates[{kind}]", world=1, ranks=of, **drawn)

        return case()

    return drawing


def draw_empties(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        of = draw(st.sampled_from(cases.RANKS))
        drawn = draw(cases.held(of, limits).filter(lambda leaf: bool(leaf.shape) and 0 not in leaf.shape))
        where, number = draw(st.sampled_from(cases.EMPTY_PLACES)), draw(st.integers(0, cases.MANY))
        box = cases.empty_box(drawn.shape, drawn.boxes, where, number)
        parts = (*drawn.parts, (box, (number % of,)))
        return Case.of("plan.empty-chunks", world=1, ranks=of, a=Held("boxes", drawn.shape, drawn.dtype, parts))

    return case()


def draw_permuted(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, of: int, drawn: dict[str, Any]) -> dict[str, Any]:
        order = draw(st.permutations(range(of)))
        return {**cases.lowest(draw, of, drawn), "order": ",".join(map(str, order))}

    return cases.states("plan.rank-permutation", limits, extra=extra, least=2)


def _text(kind: str) -> str:
    """A damaged tensor on two ranks, for each way of damaging one."""
    damage = {
        "gap": "5/0:2@0",
        "overlap": "5/0:3@0;3:5@1;2:4@1",
        "shifted": "5/0:3@0;2:4@1",
        "grown": "5/0:3@0;2:5@1",
        "duplicated": "5/0:3@0;3:5@1;3:5@1",
        "outside": "5/0:3@0;8:10@1",
        "emptied": "5/0:3@0;3:3@1",
    }
    return f"plan.validates[{kind}] world=1 ranks=2 a={damage[kind]}"


def law(name: str, **fields: Any) -> Law:
    """The law ``plan.NAME``: served by one process."""
    control = f"plan.{name} world=1 {fields.pop('holds')}"
    return Law(id=f"plan.{name}", control=control, smallest=1, **{"features": cases.features, "weight": 0.3, **fields})


LAWS: tuple[Law, ...] = (
    law(
        "dedup",
        clause="What several ranks hold is left in the plan of exactly one of those that hold it, and nothing gets lost.",
        source=f"{DOCS}, dedup_save_plans: only one plan keeps a duplicate; DefaultSavePlanner (dedup_save_to_lowest_rank)",
        check=check_dedup,
        script=plan_scripts.dedup,
        holds="ranks=3 a=5x6/0:2,0:6@0+1;2:5,0:6@2 b=4/whole@0+1+2 n=value@0+1+2",
        planted="duplicates_dropped",
        draw=lambda limits: cases.states("plan.dedup", limits, extra=cases.with_empties),
        draws=80,
    ),
    law(
        "balance",
        clause="Where every rank holds everything, the bytes that two ranks write differ by no more than the largest item has.",
        source=f"{DOCS}, dedup_save_plans: the smallest plan in terms of planned storage keeps an entry",
        check=check_balance,
        script=plan_scripts.balanced,
        holds="ranks=2 a=4/0:4@0+1 b=4/0:4@0+1 c=5/0:5@0+1",
        planted="first_rank_writes_all",
        draw=draw_balance,
        draws=40,
        tier="advisory",
    ),
    law(
        "global",
        clause="The global plan describes every leaf, each different box of a tensor once, and every item names its chunk.",
        source=f"{DOCS}, SavePlanner.create_global_plan; Metadata; DefaultSavePlanner",
        check=check_global,
        script=plan_scripts.described,
        holds="ranks=2 a=5x6:int64/0:2,0:6@0;2:5,0:6@0+1 b=()/whole@0+1 n=value@0+1",
        planted="first_dtype_for_all",
        draw=lambda limits: cases.states("plan.global", limits, extra=cases.lowest),
        draws=80,
    ),
    law(
        "empty-chunks",
        clause="A chunk without elements does not keep a tensor from being planned, wherever it lies.",
        source=f"{DOCS}, SavePlanner.create_global_plan: chunks of a tensor; a rank may hold an empty shard",
        check=check_empties,
        script=plan_scripts.accepted,
        holds="ranks=3 a=5x6/0:3,0:6@0;3:5,0:6@1;5:5,0:6@2",
        planted="touching_is_overlap",
        draw=draw_empties,
        draws=60,
    ),
    *(
        law(
            f"validates[{kind}]",
            clause="A plan whose chunks do not tile their tensor is refused.",
            source=f"{DOCS}, DefaultSavePlanner.create_global_plan validates the plan: in bounds, disjoint, covering",
            check=check_refused,
            script=plan_scripts.refused,
            holds=_text(kind).partition(" world=1 ")[2],
            planted="any_plan_is_valid",
            draw=draw_damaged(kind),
            draws=30,
        )
        for kind in DAMAGES
    ),
    law(
        "rank-permutation",
        clause="Which rank holds what does not matter to what is described: other ranks first, the same leaves and chunks.",
        source=f"{DOCS}, SavePlanner.create_global_plan: metadata describes the whole state",
        check=check_permuted,
        script=plan_scripts.again,
        holds="ranks=2 a=5x6/0:2,0:6@0;2:5,0:6@1 b=4:int64/0:4@1 order=1,0",
        planted="paths_of_rank_zero",
        draw=draw_permuted,
        draws=40,
    ),
    law(
        "deterministic",
        clause="The same local plans give the same global plan, item for item, whatever was planned before.",
        source=f"{DOCS}, SavePlanner.create_global_plan: a function of all local plans",
        check=check_deterministic,
        script=plan_scripts.again,
        holds="ranks=2 a=5x6/0:2,0:6@0+1;2:5,0:6@0+1 b=4/whole@0+1",
        planted="shared_out_in_turn",
        draw=lambda limits: cases.states("plan.deterministic", limits, extra=cases.lowest),
        draws=40,
    ),
    *plan_tensors.LAWS,
    *plan_load.LAWS,
    *plan_state.LAWS,
)
