"""Laws of states and of what is kept between saves: leaves and their paths, plans that are kept, and hints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws.plan import cases, state_scripts
from conformance.laws.plan import scripts as plan_scripts
from conformance.laws.plan import torch as pt
from conformance.laws.plan.tensors import MESHES, ranks_of, specs_of, state_of
from reference.checkpoint.held import plans_of
from reference.checkpoint.state_dict import FlattenError, Slot, State, flatten, format_state, parse_state, slots, unflatten
from reference.placement import format_placements
from reference.tensors import TensorSpec
from strategies import placements, shapes, state_dicts

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOCS = "torch.distributed.checkpoint docs"


# Leaves and their paths


def check_flatten(case: Case, here: Here) -> None:
    flatten_state, unflatten_state = pt.need(here, "flatten_state_dict", "unflatten_state_dict")
    state = parse_state(case.get("state"))
    tensors = {name: torch.zeros(2) for name in slots(state)}
    made = pt.filled(state, tensors)
    try:
        due = flatten(state)
    except FlattenError:
        here.refused(lambda: flatten_state(made), "collision", "two leaves under one name")
        return
    flat, paths = flatten_state(made)
    wanted = {name: path for name, (path, _) in due.items()}
    here.require({*flat} == {*wanted}, "wrong-metadata", "names", "other leaves", sorted(wanted), sorted(flat))
    here.require(paths == wanted, "wrong-metadata", "paths", "leaves have other paths", wanted, paths)
    for name in {*flat} & {*due}:
        leaf = due[name][1]
        whole = flat[name] is tensors[leaf.name] if isinstance(leaf, Slot) else same(flat[name], pt.filled({"": leaf}, tensors)[""])
        here.require(whole, "wrong-value", "leaf", f"the leaf {name} is not what stands there", leaf, flat[name])
    back = unflatten_state(flat, paths)
    tree = pt.filled(unflatten(due), tensors)
    here.require(same(back, tree), "wrong-value", "back", "put together again it is another state", tree, back)


def same(got: Any, want: Any) -> bool:
    """Whether two states are of one structure and of equal values of the same types; tensors must be the same ones."""
    if isinstance(want, torch.Tensor) or isinstance(got, torch.Tensor):
        return got is want
    if type(got) is not type(want):
        return False
    if isinstance(want, Mapping):
        return got.keys() == want.keys() and all(same(got[key], value) for key, value in want.items())
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(map(same, got, want))
    return bool(got == want)


def draw_flatten(limits: Limits) -> SearchStrategy[Case]:
    whole = state_dicts(("x", "y"), max_entries=3, int_keys=True)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        state = draw(whole)
        if draw(st.integers(0, 3)) == 3:
            state = _colliding(state, draw(st.integers(0, cases.MANY)))
        return Case.of("plan.flatten", world=1, state=format_state(state))

    return case()


def _colliding(state: State, number: int) -> State:
    """The state with a further entry at the top whose key is the path of a leaf within."""
    paths = [path for path, _ in flatten(state).values() if len(path) > 1]
    if not paths:
        return state
    name = ".".join(map(str, paths[number % len(paths)]))
    return state if name in state else {**state, name: 1}


# Plans that are kept


def check_kept(case: Case, here: Here) -> None:
    """Every save of a series gives the plans and the metadata that it gives when it is the first."""
    kinds = [type(f"Seat{rank}", (DefaultSavePlanner,), {}) for rank in range(ranks_of(case.mesh()))]
    compat.forget_kept_plans()
    try:
        for at, which in enumerate(case.get("order")):
            states = [_state(case, here, which, rank) for rank in range(len(kinds))]
            plans, metadata = planned(kinds, states, keep=True)
            due, described = planned(kinds, states, keep=False)
            for rank, (mine, fresh) in enumerate(zip(plans, due, strict=True)):
                message = f"save {at + 1} of {case.get('order')}: rank {rank} is to write other items than were they planned anew"
                here.require(mine.items == fresh.items, "wrong-metadata", "items", message, fresh.items, mine.items)
            got, want = metadata.state_dict_metadata, described.state_dict_metadata
            message = f"save {at + 1} of {case.get('order')}: metadata describes another state"
            here.require(got == want, "wrong-metadata", "metadata", message, want, got)
            got, want = metadata.planner_data, described.planner_data
            message = f"save {at + 1} of {case.get('order')}: metadata holds other paths"
            here.require(got == want, "wrong-metadata", "paths", message, want, got)
    finally:
        compat.forget_kept_plans()


def planned(kinds: list[type[DefaultSavePlanner]], states: list[dict[str, Any]], *, keep: bool) -> tuple[list[SavePlan], Any]:
    """One save, from the states of all ranks to what each is to write and the metadata. Every rank has a planner class of its own,
    since what is kept is kept by class."""
    planners = [kind(enable_plan_caching=keep) for kind in kinds]
    seats = enumerate(zip(planners, states, strict=True))
    plans = [pt.local_plan(state, coordinator=at == 0, planner=planner) for at, (planner, state) in seats]
    sent, metadata = planners[0].create_global_plan(plans)
    return [planner.finish_plan(plan) for planner, plan in zip(planners, sent, strict=True)], metadata


def _state(case: Case, here: Here, which: str, rank: int) -> dict[str, Any]:
    """A state of a case as ``rank`` holds it."""
    state, specs = tree_of(case, which)
    return pt.filled(state, {name: pt.placed(here, spec, case.mesh(), rank) for name, spec in specs.items()})


def tree_of(case: Case, which: str) -> tuple[State, dict[str, TensorSpec]]:
    """State ``a`` of a case, or state ``b``, in which the thing that ``change`` names is another; and its tensors."""
    specs, change = specs_of(case), case.get("change") if which == "b" else "same"
    state: State = {**state_of(case, [*specs]), "n": 1}
    x = specs["x"]
    match change:
        case "shape":
            specs["x"] = replace(x, shape=tuple(size + 1 for size in x.shape))
        case "dtype":
            specs["x"] = replace(x, dtype="int32" if x.dtype != "int32" else "int64")
        case "placed":
            specs["x"] = replace(x, placements=case.placements("to.x"))
        case "dropped":
            del state["n"]
        case "added":
            state["m"] = 2
        case "renamed":
            state = {"w" if name == "x" else name: value for name, value in state.items()}
        case "kind":
            state["x"] = 3
        case "value":
            state["n"] = 2
        case "paths":
            state = {"p": {"q": state.pop("x")}, **state}
    if case.get("change") == "paths" and which == "a":
        state = {"p.q": state.pop("x"), **state}
    return state, specs


CHANGES = (
    *("same", "shape", "dropped", "added", "renamed", "kind", "value", "placed", "shape", "dtype", "paths"),
    *("placed", "shape", "placed"),
)
WITH_OUTSIDERS = [mesh for mesh in MESHES if ranks_of(mesh) > mesh.size]
ORDERS = ("aa", "ab", "aba", "abb", "abba", "aab", "abab")


def draw_kept(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        change = draw(st.sampled_from(CHANGES))
        # where a value comes or goes, a rank outside of the mesh has something to write in one save and nothing in the other
        mesh = draw(st.sampled_from(WITH_OUTSIDERS if change in ("dropped", "added") and draw(st.booleans()) else MESHES))
        shape = draw(shapes(max_dims=2, max_size=5))
        placed = placements(mesh, len(shape), kinds=("R", "S"))
        specs: dict[str, Any] = {"x": TensorSpec(shape, draw(placed))}
        if draw(st.booleans()):
            specs["a"] = TensorSpec(draw(shapes(max_dims=2, max_size=5)), None, draw(st.sampled_from(("float32", "int64"))))
        to = format_placements(draw(placed)) if change == "placed" else None
        if not shape and change == "shape":
            change = "same"
        return Case.of("plan.cached", world=1, mesh=mesh, **specs, order=draw(st.sampled_from(ORDERS)), change=change, to__x=to)

    return case()


# what changes for one rank and not for another: its part keeps its place, or its place and its size, in another whole
KEPT = (
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
)


def sweep_kept(limits: Limits) -> list[Case]:
    return [Case.parse(f"plan.cached world=1 {text}") for text in KEPT]


def kept_features(case: Case) -> set[str]:
    mesh = case.mesh()
    found = {"submesh"} if ranks_of(mesh) > mesh.size else set()
    changed = {"dtype": "cast", "kind": "kinds-crossed", "placed": "reshard", "paths": "other-paths"}.get(case.get("change"))
    if case.get("change") == "renamed" and found:
        changed = "other-paths"  # a rank outside the mesh has no item of what is renamed
    return found | ({changed} if changed and "b" in case.get("order") else set())


# Hints


def check_hints(case: Case, here: Here) -> None:
    """Where a chunk may be found first is a hint: a wrong one changes nothing."""
    given, hints = plans_of(cases.leaves(case), cases.ranks(case)), _hints(case)
    plain = pt.save_plans(given)
    numbers = iter(hints * (sum(map(len, given)) + 1))
    hinted = [replace(plan, items=[pt.item(of, next(numbers)) for of in mine]) for plan, mine in zip(plain, given, strict=True)]
    for one, other in zip((item for plan in plain for item in plan.items), (item for plan in hinted for item in plan.items), strict=True):
        alike = one.index == other.index and hash(one.index) == hash(other.index)
        here.require(alike, "wrong-metadata", "index", f"{other.index} is another place than {one.index}", one.index, other.index)
    (plans, metadata), (others, told) = pt.global_plan(plain), pt.global_plan(hinted)
    here.require(metadata == told, "wrong-metadata", "metadata", "with hints, another state is described", metadata, told)
    here.require(plans == others, "wrong-metadata", "plans", "with hints, other items are written", plans, others)


def _hints(case: Case) -> list[int | None]:
    return [None if hint == "-" else int(hint) for hint in case.get("hints").split(",")]


def draw_hints(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, of: int, drawn: dict[str, Any]) -> dict[str, Any]:
        return {"hints": ",".join(draw(st.lists(st.sampled_from(("0", "1", "2", "-", "7")), min_size=1, max_size=4)))}

    return cases.states("plan.hints", limits, extra=extra)


LAWS: tuple[Law, ...] = (
    Law(
        id="plan.flatten",
        clause="A state is its leaves by their paths, and put together again it is the state; two leaves under one name are refused.",
        source=f"{DOCS}, flatten_state_dict and unflatten_state_dict",
        check=check_flatten,
        script=state_scripts.flattened,
        control="plan.flatten world=1 state={x:x,d:{0:{y:y},l:[x,1]},n:[1,2],t:(1,),e:{}}",
        planted="positions_are_keys",
        draw=draw_flatten,
        draws=120,
        smallest=1,
        weight=0.3,
    ),
    Law(
        id="plan.cached",
        clause="With plan caching, every save of a series is planned as if it were the first.",
        source=f"{DOCS}, DefaultSavePlanner (enable_plan_caching)",
        check=check_kept,
        script=state_scripts.kept,
        control="plan.cached world=1 mesh=2 x=4:S(0) order=ab change=shape",
        planted="first_metadata_for_good",
        sweep=sweep_kept,
        sweeps=len(KEPT),
        draw=draw_kept,
        draws=80,
        smallest=1,
        weight=0.4,
        features=kept_features,
    ),
    Law(
        id="plan.hints",
        clause="The number under which a chunk may be found first is a hint: a wrong one changes no plan.",
        source=f"{DOCS}, MetadataIndex: an index hint, optional, probed before the search",
        check=check_hints,
        script=plan_scripts.described,
        control="plan.hints world=1 ranks=2 a=5/0:2@0;2:5@0+1 hints=1,0",
        planted="hints_make_places",
        draw=draw_hints,
        draws=40,
        smallest=1,
        weight=0.2,
        features=cases.features,
    ),
)
