"""Laws of what must not matter: other views of the mesh, what ran before, and how a redistribution is planned."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import NAMES, Given, given, target, viewed
from conformance.laws.redistribute.placements import DOC, judged, steps
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.placement import shard_dim

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

BEFORE = ("none", "redistribute", "double", "add", "clone", "full", "another")


def draw_bystander(limits: Limits) -> SearchStrategy[Case]:
    on = [mesh for mesh in draws.meshes(limits, dims=(2, 3), outside=False, tables=False) if mesh.size == max(mesh.ranks) + 1]

    def seen(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        dims = [shard_dim(p) for p in layout.placements if shard_dim(p) is not None]
        nested = len(set(dims)) < len(dims) and not layout.is_even()  # flattened, these have the sweep
        pairs = ["a,b", *(["b,c", "a,c", "a,b,c"] if layout.mesh.ndim > 2 else [])]
        return {
            "slice": draw(st.sampled_from([None, None, None, "a", "b"])),
            "flatten": draw(st.sampled_from([None] if nested else [None] * (len(pairs) + 1) + pairs)),
            "before": draw(st.sampled_from(["none", *BEFORE])),
        }

    usual = draws.moved("redistribute.bystander", limits, on=on, kinds=("R", "S", "P"), targets=("R", "S"), extra=seen)
    strided = draws.moved("redistribute.bystander", limits, on=on, kinds=("R", "S", "_S"), targets=("R", "S", "_S"), extra=seen)
    return draws.mostly(usual, strided, 9)


def sweep_bystander(limits: Limits) -> list[Case]:
    """Shards gathered, and reductions done, along two mesh dims that have been flattened."""
    moves = (("S(0),S(0)", "R,R"), ("S(1),S(1)", "R,R"), ("S(0),S(0)", "R,S(0)"), ("S(1),S(1)", "S(0),R"), ("P(sum),P(sum)", "S(0),S(0)"))
    shapes = ("4x4", "5x3")
    cases = [
        Case.of("redistribute.bystander", mesh="2x2", x=f"{shape}:{source}", to=to, flatten="a,b", before="none")
        for shape in shapes
        for source, to in moves
    ]
    # of strided shards the outer mesh dim is gathered first: what is merged is not in the order of the flattened dims
    cases += [
        Case.of("redistribute.bystander", mesh="2x2", x=f"{shape}:_S(0,2),S(0)", to="R,R", flatten="a,b", before="none")
        for shape in ("4x4", "8x3")
    ]
    return [case for case in cases if case.world <= limits.world_size]


def _bystanders(case: Case, here: Here, live: DeviceMesh, x: Given) -> None:
    """Run what the case names; none of it is judged, all of it is legal."""
    before, to = case.get("before", "none"), here.placements(target(case, x).placements)
    other: Any = x.dtensor(here, mesh=live)
    if before == "redistribute":
        other.redistribute(placements=to)
    elif before == "double":
        other.to(torch.float64).redistribute(placements=to)
    elif before == "add":
        (other + other).redistribute(placements=to)
    elif before == "clone":
        other.clone().zero_()
    elif before == "full":
        other.full_tensor()
    elif before == "another":
        plain = here.dtensor(x.full, x.layout.replace(draws.replicated(x.layout)), mesh=live)
        plain.redistribute(placements=to).full_tensor()


def features_bystander(case: Case) -> set[str]:
    return {"flattened-dims"} if "flatten" in case else set()


def check_bystander(case: Case, here: Here) -> None:
    """Slices and flattened dims of the mesh, and what ran on it before, change nothing about a redistribution."""
    x = given(case)
    live = viewed(case, here)
    _bystanders(case, here, live, x)
    to = target(case, x)
    judged(here, x.dtensor(here, mesh=live).redistribute(placements=here.placements(to.placements)), x, to.placements, "local")


def script_bystander(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    to = scripts.placements(target(case, x).placements)
    body[0] = f"mesh = {scripts.mesh(x.layout.mesh, NAMES[: x.layout.mesh.ndim])}"
    views = [f'mesh["{case.get("slice")}"].size()'] if "slice" in case else []
    views += [f'mesh[{tuple(case.get("flatten").split(","))!r}]._flatten("flat")'] if "flatten" in case else []
    whole = scripts.placements(draws.replicated(x.layout))
    before = {
        "none": [],
        "redistribute": [f"x.redistribute(placements={to})"],
        "double": [f"x.to(torch.float64).redistribute(placements={to})"],
        "add": [f"(x + x).redistribute(placements={to})"],
        "clone": ["x.clone().zero_()"],
        "full": ["x.full_tensor()"],
        "another": [
            f"full = {scripts.tensor(x.full)}",
            f"DTensor.from_local(full, mesh, {whole}).redistribute(placements={to}).full_tensor()",
        ],
    }[case.get("before", "none")]
    lines = [body[0], *views, *body[1:], *before]
    return scripts.holds(case, lines, steps(case, "to"), x.full, target(case, x), constants=constants)


PLANS = ("graph", "greedy", "unmerged")


def draw_planned(limits: Limits) -> SearchStrategy[Case]:
    def plan(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"plan": draw(st.sampled_from(PLANS))}

    on = draws.meshes(limits, dims=(2, 3), tables=False)
    return draws.moved("redistribute.planner", limits, on=on, kinds=("R", "S", "P"), targets=("R", "S"), extra=plan)


def check_planned(case: Case, here: Here) -> None:
    """However a redistribution is planned, each rank ends with its slice."""
    x, plan = given(case), case.get("plan")
    to = target(case, x)
    try:
        min_cost, unmerged, cache = compat.name("min_cost_plan"), compat.name("unmerged_plan"), compat.name("plan_cache")
    except compat.TorchMovedError as moved:
        here.reject(str(moved))
        return
    live = x.dtensor(here)
    cache.cache_clear()
    try:
        with unmerged() if plan == "unmerged" else min_cost(plan == "graph"):
            got = live.redistribute(placements=here.placements(to.placements))
    finally:
        cache.cache_clear()
    judged(here, got, x, to.placements, "local")


def script_planned(case: Case) -> Script:
    x, plan = given(case), case.get("plan")
    constants, body = scripts.source(x, case.world)
    name = "disable_redistribute_transform_optimization()" if plan == "unmerged" else f"use_min_cost_redistribution_plan({plan == 'graph'})"
    body += [f"with {name}:", f"    y = {steps(case, 'to')}"]
    return scripts.holds(case, body, "y", x.full, target(case, x), constants=constants)


CASTS = {"float32": ("float64", "bfloat16"), "float64": ("float32",), "bfloat16": ("float32",)}


def draw_cast(limits: Limits) -> SearchStrategy[Case]:
    dtypes = [dtype for dtype in CASTS if dtype in limits.dtypes]
    on = draws.meshes(limits, tables=False)
    drawn = draws.moved("redistribute.forward-dtype", limits, on=on, kinds=("R", "S"), targets=("R", "S"), dtypes=dtypes)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(drawn)
        return base.with_fields(dtype=draw(st.sampled_from(CASTS[base.tensor("x").dtype])))

    return case()


def check_cast(case: Case, here: Here) -> None:
    """With ``forward_dtype`` the result is the tensor in that dtype, placed as asked, from and to the same placements too."""
    x = given(case)
    if "forward_dtype" not in inspect.signature(DTensor.redistribute).parameters:
        here.reject("this version of torch has no forward_dtype")
    to, dtype = target(case, x), getattr(torch, case.get("dtype"))
    got = x.dtensor(here).redistribute(placements=here.placements(to.placements), forward_dtype=dtype)
    here.same_dtensor(got, x.full.to(dtype), "local", mesh=x.layout.mesh, placements=to.placements)


def script_cast(case: Case) -> Script:
    x = given(case)
    dtype = getattr(torch, case.get("dtype"))
    constants, body = scripts.source(x, case.world)
    moved = f"x.redistribute(placements={scripts.placements(case.placements('to'))}, forward_dtype={dtype})"
    return scripts.holds(case, body, moved, x.full.to(dtype), target(case, x), constants=constants)


LAWS = (
    Law(
        id="redistribute.bystander",
        clause="Other views of the mesh, and other tensors redistributed or used on it before, do not change what a redistribution gives.",
        source=f"{DOC}: its result depends on the tensor and the placements alone",
        check=check_bystander,
        script=script_bystander,
        features=features_bystander,
        control="redistribute.bystander mesh=2x2 x=4x6:S(0),S(1) to=R,R slice=a flatten=a,b before=add",
        planted="flattening_drops_a_step",
        draw=draw_bystander,
        draws=84,
        sweep=sweep_bystander,
        sweeps=12,
        narrow=draws.narrowed,
        needs=("subgroups",),
        weight=2.0,
    ),
    Law(
        id="redistribute.planner",
        clause="The planner that is chosen decides how a redistribution moves its elements, not where they end.",
        source="torch.distributed.tensor._redistribute, docstring of use_min_cost_redistribution_plan",
        check=check_planned,
        script=script_planned,
        control="redistribute.planner mesh=2x2 x=5x6:S(0),S(0) to=R,S(1) plan=graph",
        planted="graph_planner_drops_a_step",
        draw=draw_planned,
        draws=42,
        weight=0.8,
        tier="extended",
    ),
    Law(
        id="redistribute.forward-dtype",
        clause="A redistribution with forward_dtype is the redistribution of the tensor in that dtype.",
        source=f"{DOC} (forward_dtype)",
        check=check_cast,
        script=script_cast,
        control="redistribute.forward-dtype mesh=2 x=5x6:S(0) to=R dtype=float64",
        planted="forward_dtype_is_ignored",
        draw=draw_cast,
        sweep=draws.out_of_order("redistribute.forward-dtype", "S(0)", to="R", dtype="float64"),
        sweeps=3,
        draws=28,
        weight=0.4,
        tier="extended",
    ),
)
