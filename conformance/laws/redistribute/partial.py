"""Laws of pending reductions: what contributions reduce to, whole and in shards, one mesh dim at a time and merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import NAMES, given, target, viewed
from conformance.laws.redistribute.placements import check_local, judged, script_local, steps
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.placement import REDUCE_OPS, Partial, Placement, Placements, Replicate, Shard
from reference.simulate import can_reduce
from reference.tensors import DTYPES, TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor docs, Partial and DTensor.redistribute"
REDUCED = ("float32", "int64", "float64", "int32", "bfloat16", "uint8")

# one in eight: contributions that cancel to nothing, which a lost or doubled one shows at once
FILLS_DRAWN = st.sampled_from(("distinct",) * 7 + ("zeros",))


def _beside(draw: st.DrawFn, mesh: Mesh, ndim: int, op: str) -> Placements:
    """Placements with the contribution ``P(op)`` on at least one mesh dim."""
    free = draw(placements(mesh, ndim, kinds=("P", "S", "R"), reduce_ops=(op,)))
    at = draw(st.integers(0, mesh.ndim - 1))
    return (*free[:at], Partial(op), *free[at + 1 :])


def draw_reduce(limits: Limits) -> SearchStrategy[Case]:
    mesh_drawn, shape_drawn = st.sampled_from(draws.meshes(limits, tables=False)), shapes()
    by_op = {op: [dtype for dtype in REDUCED if dtype in limits.dtypes and can_reduce(DTYPES[dtype], op)] for op in REDUCE_OPS}

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape, op = draw(mesh_drawn), draw(shape_drawn), draw(st.sampled_from([op for op in REDUCE_OPS if by_op[op]]))
        at, dtype = _beside(draw, mesh, len(shape), op), draw(st.sampled_from(by_op[op]))
        to: Placements = tuple(Replicate() if isinstance(p, Partial) else p for p in at)
        fill = "small" if dtype in ("bfloat16", "uint8") else draw(FILLS_DRAWN)  # few bits: sums must stay exact
        return Case.of("redistribute.reduce", mesh=mesh, x=TensorSpec(shape, at, dtype, fill), to=to, seed=draw(draws.seeds()))

    return case()


def draw_scatter(limits: Limits) -> SearchStrategy[Case]:
    mesh_drawn, shape_drawn = st.sampled_from(draws.meshes(limits, tables=False)), shapes(min_dims=1)
    ops = ("sum", "max", "avg", "min", "product")

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape, op = draw(mesh_drawn), draw(shape_drawn), draw(st.sampled_from(ops))
        at = _beside(draw, mesh, len(shape), op)
        dim = st.integers(0, len(shape) - 1)
        to: list[Placement] = [Shard(draw(dim)) if isinstance(p, Partial) else p for p in at]
        dtype = draw(st.sampled_from(draws.FLOATS if op == "avg" else draws.EXACT))
        spec = TensorSpec(shape, at, dtype, draw(FILLS_DRAWN))
        return Case.of("redistribute.reduce-scatter", mesh=mesh, x=spec, to=tuple(to), seed=draw(draws.seeds()))

    return case()


def draw_keep(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, dims=(2, 3), tables=False)
    drawn = draws.moved("redistribute.keep-partial", limits, on=on, kinds=("P", "S", "R"), targets=("P", "S", "R"))
    return drawn.filter(lambda case: "P(" in case.get("to") and case.get("to") not in case.get("x"))


MERGED = ("2x2", "1x2", "2x1", "2x2", "1x3", "1x2x2", "2x2x1")


def draw_merged(limits: Limits) -> SearchStrategy[Case]:
    mesh_drawn = st.sampled_from([mesh for mesh in map(Mesh.parse, MERGED) if max(mesh.ranks) < limits.world_size])
    shape_drawn = shapes(min_dims=1, max_dims=2)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(mesh_drawn), draw(shape_drawn)
        op = draw(st.sampled_from(["sum", "avg", "mixed", "max", "product"]))
        ops = [draw(st.sampled_from(["avg", "sum"])) for _ in mesh.shape] if op == "mixed" else [op] * mesh.ndim
        goals: list[Placement] = [Replicate(), Shard(0), Shard(len(shape) - 1)]
        goal = draw(st.sampled_from(goals))
        to: list[Placement] = [goal] * mesh.ndim
        if draw(st.integers(0, 3)) == 3:
            to[draw(st.integers(0, mesh.ndim - 1))] = draw(st.sampled_from(goals))
        flat = draw(st.sampled_from(["a,b"] if mesh.ndim == 2 else ["a,b,c", "a,b", "b,c"]))
        spec = TensorSpec(shape, tuple(map(Partial, ops)))
        return Case.of("redistribute.merged", mesh=mesh, x=spec, to=tuple(to), flatten=flat, seed=draw(draws.seeds()))

    return case()


def sweep_merged(limits: Limits) -> list[Case]:
    """On a mesh whose rows and columns ascend, but not when they are read one after the other; to shards of two dims, which are not to be
    merged; and where the dims that are flattened are others, of as many ranks."""
    turned = Case.of("redistribute.merged", mesh="2x2@0,2,1,3", x="4x4:P(sum),P(sum)", to="S(0),S(0)", flatten="a,b")
    plain = turned.with_fields(mesh="2x2", to="S(0),S(1)")
    others = Case.of("redistribute.merged", mesh="1x2x2", x="4x4:P(sum),R,P(sum)", to="R,R,R", flatten="a,b")
    return [case for case in (turned, turned.with_fields(to="R,R"), plain, others) if case.world <= limits.world_size]


def features_merged(case: Case) -> set[str]:
    return {"flattened-dims"}


def check_merged(case: Case, here: Here) -> None:
    """With a flattened mesh to merge them on, several reductions still give what they give one by one."""
    x = given(case)
    to = target(case, x)
    live = viewed(case, here)
    got = x.dtensor(here, mesh=live).redistribute(placements=here.placements(to.placements))
    judged(here, got, x, to.placements, "local")


def script_merged(case: Case) -> Script:
    x = given(case)
    names = NAMES[: x.layout.mesh.ndim]
    constants, body = scripts.source(x, case.world)
    body[0] = f"mesh = {scripts.mesh(x.layout.mesh, names)}"
    body.insert(1, f'mesh[{tuple(case.get("flatten").split(","))!r}]._flatten("flat")')
    return scripts.holds(case, body, steps(case, "to"), x.full, target(case, x), constants=constants)


LAWS = (
    Law(
        id="redistribute.reduce",
        clause="Contributions become, on every rank, their reduction by the operation that the placement names.",
        source=DOC,
        check=check_local,
        script=script_local,
        control="redistribute.reduce mesh=2x2 x=5x6:P(max),S(0) to=R,S(0)",
        planted="all_reduce_sums",
        draw=draw_reduce,
        sweep=draws.out_of_order("redistribute.reduce", "P(max)", to="R"),
        sweeps=3,
        draws=130,
        needs=("all_reduce",),
        weight=1.2,
    ),
    Law(
        id="redistribute.reduce-scatter",
        clause="Contributions become shards of their reduction, uneven and empty ones included.",
        source=DOC,
        check=check_local,
        script=script_local,
        control="redistribute.reduce-scatter mesh=2x2 x=5x6:P(sum),S(0) to=S(1),S(0)",
        planted="reduce_scatter_sums",
        draw=draw_scatter,
        sweep=draws.out_of_order("redistribute.reduce-scatter", "P(sum)", to="S(0)"),
        sweeps=3,
        draws=120,
        needs=("reduce_scatter",),
        weight=1.2,
    ),
    Law(
        id="redistribute.keep-partial",
        clause="Other mesh dims can be redistributed while a reduction stays pending on one.",
        source=DOC,
        check=check_local,
        script=script_local,
        control="redistribute.keep-partial mesh=2x2 x=5x6:P(sum),S(0) to=P(sum),R",
        planted="gather_reduces_too",
        draw=draw_keep,
        draws=60,
        weight=0.6,
    ),
    Law(
        id="redistribute.merged",
        clause="Reductions over several mesh dims give the same where a flattened mesh lets them be merged into one.",
        source="torch.distributed.tensor._redistribute, docstring of _optimize_transform_infos",
        check=check_merged,
        script=script_merged,
        features=features_merged,
        control="redistribute.merged mesh=2x2 x=4x6:P(avg),P(avg) to=S(0),S(0) flatten=a,b",
        planted="merged_average_is_sum",
        draw=draw_merged,
        sweep=sweep_merged,
        sweeps=4,
        draws=60,
        needs=("all_reduce", "reduce_scatter", "subgroups"),
        weight=1.0,
    ),
)
