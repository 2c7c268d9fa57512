"""The cases of the plan laws, and their features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.plan.fields import parse_leaves
from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.sharded_leaf import ShardedLeaf
from shardlaw.reference.notation import NotationError
from shardlaw.reference.shards import Ranks, Shards
from shardlaw.strategies.sharded_leaves import MANY, sharded_leaves

RANK_COUNTS = (2, 2, 3, 2, 4, 3, 2, 1)
DTYPES = ("float32", "float32", "float32", "int64", "bfloat16", "bool")
EMPTY_PLACES = ("end", "inside", "beyond")


def plan_law(id: str, *, control: str, **record: Any) -> Callable[[Callable[..., Any]], Law]:
    """Decorate a law whose cases need one process."""
    return law(id, control=f"world=1 {control}", **{"smallest": 1, "weight": 0.3, "features": features, **record})


def tensor_leaves(ranks: int, limits: Limits) -> SearchStrategy[ShardedLeaf]:
    """A tensor in boxes that tile it, each on some of so many ranks."""
    return sharded_leaves(ranks, tuple(name for name in DTYPES if name in limits.dtypes))


def any_leaves(ranks: int, limits: Limits) -> SearchStrategy[ShardedLeaf]:
    """A leaf of any kind: most often a tensor in boxes, or a plain tensor or a value on every rank."""

    def replicate(tensor: ShardedLeaf) -> ShardedLeaf:
        return ShardedLeaf("whole", Shards.whole(tensor.shape, range(ranks)), tensor.dtype)

    sharded = tensor_leaves(ranks, limits)
    kinds = {"b": sharded, "w": sharded.map(replicate), "v": st.just(ShardedLeaf.value(range(ranks)))}
    return st.sampled_from("bbbbwv").flatmap(lambda kind: kinds[kind])


@st.composite
def state_cases(
    draw: st.DrawFn,
    limits: Limits,
    *,
    extra: Callable[[st.DrawFn, int, dict[str, Any]], dict[str, Any]] | None = None,
    min_ranks: int = 1,
) -> Case:
    """Cases of one to three leaves on one to four ranks. ``extra`` draws further fields from the number of ranks and
    the leaves, which it may replace."""
    ranks = draw(st.sampled_from([count for count in RANK_COUNTS if count >= min_ranks]))
    leaves: dict[str, Any] = {
        name: draw(any_leaves(ranks, limits)) for name in "abc"[: draw(st.sampled_from((1, 2, 3)))]
    }
    more: dict[str, Any] = extra(draw, ranks, leaves) if extra else {}
    return fields(world=1, ranks=ranks, **leaves, **more)


def draw_dedup(draw: st.DrawFn, ranks: int, leaves: dict[str, Any]) -> dict[str, Any]:
    """In one case of three, the lowest rank writes what several hold."""
    return {"dedup": "lowest"} if draw(st.integers(0, 2)) == 2 else {}


def add_empty_box(draw: st.DrawFn, ranks: int, leaves: dict[str, Any]) -> dict[str, Any]:
    """In one case of three, a rank holds an empty box of the first tensor in boxes: at the end of the tensor, or at the
    offset of a box of other ranks. Also draws as :func:`draw_dedup`."""
    name = next((name for name, leaf in leaves.items() if leaf.kind == "boxes" and leaf.shape), None)
    if name is not None and draw(st.integers(0, 2)) == 2:
        leaf, number = leaves[name], draw(st.integers(0, MANY))
        at_another = draw(st.booleans()) and ranks > 1
        number, index = divmod(number, len(leaf.shards.parts))
        box, box_ranks = leaf.shards.parts[index]
        if not at_another:
            empty = Box.whole(leaf.shape).along(0, start=leaf.shape[0], size=0)
            holders: Ranks = (number % ranks,)
        else:
            empty = box.along(0, size=0)
            holders = tuple(rank for rank in range(ranks) if rank not in box_ranks)[:1]
        if holders:
            leaves[name] = with_box(leaf, empty, holders)
    return draw_dedup(draw, ranks, leaves)


def with_box(leaf: ShardedLeaf, box: Box, ranks: Ranks) -> ShardedLeaf:
    """The leaf with a further box on these ranks."""
    return replace(leaf, shards=replace(leaf.shards, parts=(*leaf.shards.parts, (box, ranks))))


def features(case: Case) -> set[str]:
    """The features of the leaves of a case and of the number of its ranks."""
    try:
        parsed = parse_leaves(case)
    except NotationError:
        return set()
    found = set().union(*map(leaf_features, parsed.values()))
    found |= {"one-plan"} if case.get("ranks", "") == "1" else set()
    found |= {"several-tensors"} if len(parsed) > 1 else set()
    variant = case.law.partition("[")[2].removesuffix("]")
    return found | ({f"damaged:{variant}"} if ".validates[" in case.law else set())


def leaf_features(leaf: ShardedLeaf) -> set[str]:
    """The features of one leaf."""
    if leaf.kind == "value":
        return {"other-values"}
    found = {"plain-tensor"} if leaf.kind == "whole" else {"explicit-shards"}
    found |= {f"dtype:{leaf.dtype}"} if leaf.dtype != "float32" else set()
    found |= {"size-0"} if 0 in leaf.shape else {"size-1"} if 1 in leaf.shape else set()
    found |= set() if leaf.shape else {"0-d"}
    found |= {"shared-chunk"} if any(len(by) > 1 for _, by in leaf.shards.parts) else set()
    found |= {"several-chunks"} if len(leaf.shards.without_empty().boxes) > 1 else set()
    empties = [box for box, _ in leaf.shards.parts if not box.volume]
    if empties and 0 not in leaf.shape:
        found |= {"empty-chunk"} | {f"empty-chunk:{empty_box_place(leaf, box)}" for box in empties}
    return found


def empty_box_place(leaf: ShardedLeaf, empty: Box) -> str:
    """Where an empty box lies: ``beyond`` the bounds, ``inside`` a nonempty box, at the offset of one (``shared``), or
    elsewhere (``end``)."""
    if any(end > extent for end, extent in zip(empty.end, leaf.shape, strict=True)):
        return "beyond"
    full = leaf.shards.without_empty().boxes
    if any(box.offset == empty.offset for box in full):
        return "shared"
    within = any(
        all(
            start < other + size and other < start + extent
            for start, extent, other, size in zip(empty.offset, empty.size, box.offset, box.size, strict=True)
        )
        for box in full
    )
    return "inside" if within else "end"
