"""Laws of nested states, of cached plans, and of index hints."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, as_metadata, caught
from shardlaw.conformance.law.fields import Word
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.plan import cases
from shardlaw.conformance.laws.plan.cases import plan_law
from shardlaw.conformance.laws.plan.fields import Hints, Plans, Saves, Tree, rank_count, with_tensors
from shardlaw.conformance.laws.plan.tensors import MESHES
from shardlaw.conformance.laws.plan.torch_plans import differing_pairs, global_plan, local_plan, to_save_plans
from shardlaw.reference.checkpoint.state_dict import FlattenError, State, flatten, format_state, unflatten
from shardlaw.reference.placement import format_placements
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import placements, shapes, state_dicts
from shardlaw.strategies.sharded_leaves import MANY

DOCS = "torch.distributed.checkpoint docs"


# Leaves and their paths


def draw_flatten(limits: Limits) -> SearchStrategy[Case]:
    any_state = state_dicts(("x", "y"), max_entries=3, int_keys=True)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        state = draw(any_state)
        if draw(st.integers(0, 3)) == 3:
            state = with_colliding_key(state, draw(st.integers(0, MANY)))
        return fields(world=1, state=format_state(state))

    return case()


def with_colliding_key(state: State, number: int) -> State:
    """The state with a further top-level entry whose key is the path of a nested leaf."""
    paths = [path for path, _ in flatten(state).values() if len(path) > 1]
    if not paths:
        return state
    name = ".".join(map(str, paths[number % len(paths)]))
    return state if name in state else {**state, name: 1}


@plan_law(
    "plan.flatten",
    source=f"{DOCS}, flatten_state_dict and unflatten_state_dict",
    control="state={x:x,d:{0:{y:y},l:[x,1]},n:[1,2],t:(1,),e:{}}",
    draw=draw_flatten,
    draws=120,
    features=None,
)
def flatten_state(state: Tree):
    """A state flattens into its leaves by path and unflattens to the same state; two leaves of one name are refused."""
    return {"state": caught(flatten_and_unflatten, state)}


def flatten_and_unflatten(state: dict[str, Any]) -> dict[str, Any]:
    flat, paths = compat.flatten_state_dict(state)
    back = compat.unflatten_state_dict(flat, paths)
    own = tensors_in(state)
    return {
        "paths": dict(sorted(paths.items())),
        "leaves": {name: typed_repr(leaf) for name, leaf in sorted(flat.items())},
        "back": typed_repr(back),
        "copies": [tensor for tensor in tensors_in([flat, back]) if not any(tensor is one for one in own)],
    }


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict | list | tuple):
        return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in tensors_in(part)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def typed_repr(tree: Any) -> str:
    """A text of a tree that shows the types of its values; dicts and sets are sorted."""
    match tree:
        case dict():
            return "{" + ", ".join(sorted(f"{key!r}: {typed_repr(value)}" for key, value in tree.items())) + "}"
        case list() | tuple():
            return f"{type(tree).__name__}({', '.join(map(typed_repr, tree))})"
        case set():
            return f"set({', '.join(sorted(map(repr, tree)))})"
    return repr(tree)


@flatten_state.due
def _(state):
    try:
        leaves = dict(sorted(flatten(state).items()))
    except FlattenError:
        return {"state": Refused()}
    paths = {name: path for name, (path, _) in leaves.items()}
    texts = {name: typed_repr(with_tensors(leaf, state)) for name, (_, leaf) in leaves.items()}
    return {
        "state": {
            "paths": Of(paths),
            "leaves": texts,
            "back": typed_repr(with_tensors(unflatten(leaves), state)),
            "copies": [],
        }
    }


ELEMENTS = (
    "world=1 state={x:x,d:{l:[1,{k:2}]}} path=d/l/1/k",
    "world=1 state={x:x,d:{l:[1,2]}} path=d/l/5",
    "world=1 state={x:x,d:{l:[1,2]}} path=d/l/2",
    "world=1 state={x:x,l:[1,2]} path=d/l",
    "world=1 state={x:x,n:1} path=n/0",
    "world=1 state={x:x,n:None} path=x/k",
)


@plan_law(
    "plan.element",
    source="torch.distributed.checkpoint._traverse, docstring of get_element: default_value if not found",
    control="state={x:x,d:{l:[1,2]}} path=d/l/1",
    cases=ELEMENTS,
    features=None,
)
def element(state: Tree, path: Word):
    """get_element returns the element at a path of a state, or the default where there is none."""
    parts = tuple(int(part) if part.isdecimal() else part for part in path.split("/"))
    return {"element": caught(lambda: typed_repr(compat.get_element(state, parts, "absent")))}


def element_at(tree: Any, path: list[str]) -> Any:
    """The element at a path of a state whose dicts have string keys, or ``absent``."""
    for part in path:
        entries = dict(enumerate(tree)) if isinstance(tree, list) else tree
        key = int(part) if isinstance(tree, list) else part
        if not isinstance(entries, dict) or key not in entries:
            return "absent"
        tree = entries[key]
    return tree


@element.due
def _(state, path):
    return {"element": typed_repr(with_tensors(element_at(state, path.split("/")), state))}


# Cached plans


CHANGES = (
    *("same", "shape", "dropped", "added", "renamed", "kind", "value", "placed", "shape", "dtype", "paths"),
    *("placed", "shape", "placed"),
)
SUBMESHES = [mesh for mesh in MESHES if rank_count(mesh) > mesh.size]
ORDERS = ("aa", "ab", "aba", "abb", "abba", "aab", "abab", "abc", "abca", "bcab")


@st.composite
def draw_saves(draw: st.DrawFn, limits: Limits) -> Case:
    change = draw(st.sampled_from(CHANGES))
    # a rank outside the mesh then has something to write in one save and nothing in the other
    mesh = draw(st.sampled_from(SUBMESHES if change in ("dropped", "added") and draw(st.booleans()) else MESHES))
    shape = draw(shapes(max_dims=2, max_size=5))
    any_placements = placements(mesh, len(shape), kinds=("R", "S"))
    specs: dict[str, Any] = {"x": TensorSpec(shape, draw(any_placements))}
    if draw(st.booleans()):
        specs["a"] = TensorSpec(draw(shapes(max_dims=2, max_size=5)), None, draw(st.sampled_from(("float32", "int64"))))
    to = format_placements(draw(any_placements)) if change == "placed" else None
    if not shape and change == "shape":
        change = "same"
    return fields(world=1, mesh=mesh, **specs, order=draw(st.sampled_from(ORDERS)), change=change, to__x=to)


# changes after which some ranks keep the offset, or the offset and the size, of their shard
CACHED = (
    "mesh=2 x=3:S(0) order=ab change=shape",
    "mesh=2 x=3:S(0) a=2:- order=abba change=shape",
    "mesh=4 x=5:S(0) order=aba change=shape",
    "mesh=2@1,0 x=3:S(0) order=abab change=shape",
    "mesh=2 x=4:S(0) order=ab change=placed to.x=R",
    "mesh=2 x=4:R order=aba change=placed to.x=S(0)",
    "mesh=2x2 x=4x4:S(0),S(1) order=ab change=placed to.x=S(0),R",
    "mesh=2x2@0,2,1,3 x=4x4:S(0),R order=abab change=placed to.x=S(1),R",
    "mesh=3@2,0,1 x=7x3:S(0) a=2:- order=abba change=placed to.x=S(1)",
    "mesh=2@0,2 x=4:S(0) order=ab change=dropped",
    "mesh=2@1,2 x=4:R order=aba change=added",
    "mesh=1@2 x=4:R order=abab change=dropped",
    "mesh=2 x=4:S(0) a=3:- order=abb change=renamed",
    "mesh=3 x=2:S(0) order=aba change=kind",
    # ranks that do not change while others do
    "mesh=2 x=3:S(0) order=abc change=shape",
    "mesh=3 x=5:S(0) a=2:- order=abca change=renamed",
    "mesh=2x2 x=4x4:S(0),S(1) order=abcb change=placed to.x=S(0),R",
)


def caching_features(case: Case) -> set[str]:
    mesh = case.mesh()
    found = {"submesh"} if rank_count(mesh) > mesh.size else set()
    feature = {"dtype": "cast", "kind": "kinds-crossed", "placed": "reshard"}.get(case.get("change"))
    return found | ({feature} if feature and {*"bc"} & {*case.get("order")} else set())


@plan_law(
    "plan.cached",
    source=f"{DOCS}, DefaultSavePlanner (enable_plan_caching)",
    control="mesh=2 x=4:S(0) order=ab change=shape",
    cases=[f"world=1 {line}" for line in CACHED],
    draw=draw_saves,
    draws=80,
    weight=0.4,
    features=caching_features,
)
def cached(saves: Saves):
    """With plan caching, every save of a series has the plan that it would have without."""
    kinds = [type(f"Planner{rank}", (DefaultSavePlanner,), {}) for rank in range(len(saves[0]))]
    compat.clear_save_plans()
    found = [(plan_save(kinds, states, True), plan_save(kinds, states, False)) for states in saves]
    compat.clear_save_plans()
    return {
        what: [
            (save, *pair)
            for save, (cached_plan, plan) in enumerate(found, 1)
            for pair in differing_pairs(cached_plan[what], plan[what])
        ]
        for what in ("items", "metadata", "paths")
    }


def plan_save(kinds: list[Any], states: list[Any], caching: bool) -> dict[str, list[Any]]:
    """Plan one save of the states of all ranks: the items of each rank, the entries of the metadata, and the paths.

    Plans are cached by planner class, so that every rank needs its own, from ``kinds``."""
    planners = [kind(enable_plan_caching=caching) for kind in kinds]
    plans = [local_plan(state, rank == 0, planners[rank]) for rank, state in enumerate(states)]
    sent, metadata = planners[0].create_global_plan(plans)
    items = [planner.finish_plan(plan).items for planner, plan in zip(planners, sent, strict=True)]
    return {
        "items": items,
        "metadata": sorted(metadata.state_dict_metadata.items()),
        "paths": sorted(metadata.planner_data.items()),
    }


@cached.due
def _():
    return as_metadata({"items": [], "metadata": [], "paths": []})


# Hints


def draw_hints(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, ranks: int, leaves: dict[str, Any]) -> dict[str, Any]:
        return {"hints": ",".join(draw(st.lists(st.sampled_from(("0", "1", "2", "-", "7")), min_size=1, max_size=4)))}

    return cases.state_cases(limits, extra=extra)


@plan_law(
    "plan.hints",
    source=f"{DOCS}, MetadataIndex: an index hint, optional, probed before the search",
    control="ranks=2 a=5/0:2@0;2:5@0+1 hints=1,0",
    draw=draw_hints,
    draws=40,
    weight=0.2,
)
def ignore_hints(plans: Plans, hints: Hints):
    """The index of a MetadataIndex is a hint only: a wrong one changes no plan and no metadata."""
    unhinted, hinted = to_save_plans(plans), to_save_plans(plans, hints)
    indices = [[item.index for plan in one for item in plan.items] for one in (unhinted, hinted)]
    (planned, metadata), (planned_hinted, metadata_hinted) = global_plan(unhinted), global_plan(hinted)
    return {
        "indices": differing_pairs(*indices) + differing_pairs(map(hash, indices[0]), map(hash, indices[1])),
        "metadata": differing_pairs([metadata], [metadata_hinted]),
        "plans": differing_pairs(planned, planned_hinted),
    }


@ignore_hints.due
def _():
    return as_metadata({"indices": [], "metadata": [], "plans": []})
