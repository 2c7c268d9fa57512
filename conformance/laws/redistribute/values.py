"""Laws of the values that travel: dtypes that a backend need not carry, replicas bit by bit, reductions that no dtype has."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given, target
from conformance.laws.redistribute.placements import DOC, judged, script_local
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import Partial, Placement, Placements, Replicate, Shard
from reference.simulate import can_reduce
from reference.tensors import DTYPES, TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

# dtypes that targets are not asked to declare: carried right, or refused by every rank
WIDE = ("float16", "int8", "complex64", "complex128", "int16")
PARTIAL_OPS = ("sum", "max", "min", "avg", "product", "bxor")


def draw_dtypes(limits: Limits) -> SearchStrategy[Case]:
    mesh_drawn, shape_drawn = st.sampled_from(draws.meshes(limits, tables=False)), shapes()
    by_dtype = {dtype: tuple(op for op in PARTIAL_OPS if can_reduce(DTYPES[dtype], op)) for dtype in WIDE}

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape, dtype = draw(mesh_drawn), draw(shape_drawn), draw(st.sampled_from((*WIDE[:4], *WIDE)))
        at = draw(placements(mesh, len(shape), kinds=("R", "S", "P"), reduce_ops=(draw(st.sampled_from(by_dtype[dtype])),)))
        to = draw(placements(mesh, len(shape), kinds=("R", "S")))
        return Case.of("redistribute.dtypes", mesh=mesh, x=TensorSpec(shape, at, dtype, "small"), to=to, seed=draw(draws.seeds()))

    return case()


def check_dtypes(case: Case, here: Here) -> None:
    """What a backend does not carry it refuses in words; what it takes arrives as it is, in its dtype."""
    x = given(case)
    to = target(case, x)
    live = x.dtensor(here)
    try:
        got = live.redistribute(placements=here.placements(to.placements))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        here.require(bool(str(error).strip()), "wrong-error", "words", f"refused by {type(error).__name__} without a word")
        return
    judged(here, got, x, to.placements, "local")


def draw_replicas(limits: Limits) -> SearchStrategy[Case]:
    mesh_drawn, shape_drawn = st.sampled_from(draws.meshes(limits, least=2)), shapes(min_dims=1, min_size=1)
    floats = [dtype for dtype in ("float32", "bfloat16", "float64") if dtype in limits.dtypes]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape, op = draw(mesh_drawn), draw(shape_drawn), draw(st.sampled_from(("sum", "avg", "product")))
        free = draw(placements(mesh, len(shape), kinds=("P", "S", "R"), reduce_ops=(op,)))
        at = draw(st.integers(0, mesh.ndim - 1))
        spec = TensorSpec(shape, (*free[:at], Partial(op), *free[at + 1 :]), draw(st.sampled_from(floats)), "unit")
        return Case.of("redistribute.replicas", mesh=mesh, x=spec, seed=draw(draws.seeds()))

    return case()


def _rounding(x: Given, rank: int) -> torch.Tensor:
    """Contributions that no sum of the dtype holds exactly: every order of adding them rounds otherwise."""
    coord = x.layout.mesh.coord(rank)
    pending = [position for position, placement in zip(coord or (), x.layout.placements, strict=False) if isinstance(placement, Partial)]
    local = x.local(coord)
    return local / 3 + local * (sum(pending) + 1) / 7


def check_replicas(case: Case, here: Here) -> None:
    """After a reduction to replicas all ranks hold the same bits, whatever was rounded on the way."""
    x = given(case)
    mesh = x.layout.mesh
    coord = here.coord(mesh)
    live = DTensor.from_local(here.tensor(_rounding(x, here.rank)), here.mesh(mesh), here.placements(x.layout.placements),
                              run_check=False, shape=x.full.shape, stride=x.stride)  # fmt: skip
    whole = live.redistribute(placements=here.placements((Replicate(),) * mesh.ndim)).to_local()
    if coord is not None:
        here.alike(whole, mesh, "replicas")


def script_replicas(case: Case) -> Script:
    x = given(case)
    mesh = x.layout.mesh
    table = scripts.tensors("X", {rank: _rounding(x, rank) for rank in range(case.world)})
    made = f"x = DTensor.from_local(X[rank], mesh, {scripts.placements(x.layout.placements)}, "
    body = [f"mesh = {scripts.mesh(mesh)}", f"{made}shape=torch.Size({tuple(x.full.shape)}), stride={x.stride})"]
    body += [f"full = x.redistribute(placements={scripts.placements((Replicate(),) * mesh.ndim)}).to_local()"]
    body += ["if mesh.get_coordinate() is None:", "    return None, None"] if mesh.size < case.world else []
    body += ["parts = [torch.empty_like(full) for _ in range(dist.get_world_size())]", "dist.all_gather(parts, full)"]
    lines = [*body, f"return True, all(torch.equal(parts[{min(mesh.ranks)}], parts[r]) for r in {sorted(mesh.ranks)})"]
    return scripts.script(lines, world=case.world, constants=table)


# Memory


def draw_apart(limits: Limits) -> SearchStrategy[Case]:
    on, law = draws.meshes(limits, tables=False, least=2), "redistribute.apart"
    options: dict[str, Any] = {"on": on, "dtypes": draws.EXACT, "memories": ("plain", "transposed")}
    replicas = draws.moved(law, limits, kinds=("R",), targets=("R", "S"), **options)
    any_kind = draws.moved(law, limits, kinds=("R", "S", "P"), targets=("R", "S", "P"), **options)

    def moves(case: Case) -> bool:
        """Whether any mesh dim of several ranks changes its placement; without one a redistribution may give the same memory."""
        return any(size > 1 and old != new for size, old, new in zip(case.mesh().shape, *(_ends(case)), strict=True))

    return draws.mostly(replicas, any_kind, 3).filter(moves)


def _ends(case: Case) -> tuple[Placements, Placements]:
    return case.tensor("x").placements or (), case.placements("to")


def check_apart(case: Case, here: Here) -> None:
    """What is written into the result of a redistribution does not reach the tensor that was redistributed."""
    x = given(case)
    live = x.dtensor(here)
    got = live.redistribute(placements=here.placements(target(case, x).placements))
    if here.coord(x.layout.mesh) is None:
        return
    with torch.no_grad():
        got.to_local().add_(1)
    here.same(live.to_local(), x.local(here.coord(x.layout.mesh)), "source", what="what was redistributed, once the result was written")


def script_apart(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    body += [f"got = x.redistribute(placements={scripts.placements(target(case, x).placements)})", "before = x.to_local().clone()"]
    body += ["if mesh.get_coordinate() is None:", "    return None, None"] if x.layout.mesh.size < case.world else []
    return scripts.script([*body, "got.to_local().add_(1)", "return before, x.to_local()"], world=case.world, constants=constants)


# reductions that elements of a dtype do not have
NOT_THERE = (("int64", "avg"), ("int32", "avg"), ("uint8", "avg"), ("bool", "avg"), ("float32", "band"), ("float64", "bor"),
             ("float32", "bxor"), ("bfloat16", "band"), ("complex64", "max"), ("complex64", "min"))  # fmt: skip
CLOSED_MESHES = ("2", "3", "1x2", "2x1", "2@0,2", "2x2")


def sweep_closed(limits: Limits) -> list[Case]:
    cases = []
    goals: tuple[Placement, ...] = (Replicate(), Shard(0))
    for mesh, (dtype, op), goal in itertools.product(map(Mesh.parse, CLOSED_MESHES), NOT_THERE, goals):
        pending = mesh.shape.index(max(mesh.shape))  # along a mesh dim of one rank nothing is left to do
        at = tuple(Partial(op) if dim == pending else Replicate() for dim in range(mesh.ndim))
        to = tuple(goal if dim == pending else Replicate() for dim in range(mesh.ndim))
        cases.append(Case.of("redistribute.dtype-closure", mesh=mesh, x=TensorSpec((5, 3), at, dtype, "small"), to=to))
    return [case for case in cases if case.world <= limits.world_size]


def _closed(case: Case) -> tuple[torch.Tensor, Layout, Layout]:
    spec = case.tensor("x")
    layout = Layout(spec.shape, case.mesh(), spec.placements or ())
    return spec.build(case.seed), layout, layout.replace(case.placements("to"))


def check_closed(case: Case, here: Here) -> None:
    """A reduction that the dtype does not have is refused on every rank, and the world goes on."""
    full, layout, to = _closed(case)
    if here.coord(layout.mesh) is None:
        return
    kept = full + 0 if full.dtype != torch.bool else full.clone()
    live: Any = DTensor.from_local(here.tensor(kept), here.mesh(layout.mesh), here.placements(layout.placements), run_check=False)
    here.refused(lambda: live.redistribute(placements=here.placements(to.placements)), "dtype", f"a reduction of {full.dtype}")
    here.same(live.to_local(), full, "input", what="what was not reduced")


def script_closed(case: Case) -> Script:
    full, layout, to = _closed(case)
    body = [
        f"mesh = {scripts.mesh(layout.mesh)}",
        f"x = DTensor.from_local({scripts.tensor(full)}, mesh, {scripts.placements(layout.placements)})",
    ]
    body += ["if mesh.get_coordinate() is None:", "    return None, None"] if layout.mesh.size < case.world else []
    return scripts.refused(case, body, f"x.redistribute(placements={scripts.placements(to.placements)}).to_local()")


LAWS = (
    Law(
        id="redistribute.dtypes",
        clause="Half, short and complex elements are redistributed as they are, or refused by every rank.",
        source=DOC,
        check=check_dtypes,
        script=script_local,
        control="redistribute.dtypes mesh=2x2 x=5x6:S(0),P(sum):float16:small to=S(1),R",
        planted="half_arrives_halved",
        draw=draw_dtypes,
        draws=70,
        weight=0.8,
        tier="extended",
    ),
    Law(
        id="redistribute.replicas",
        clause="After a reduction to replicas every rank holds the same bits.",
        source=f"{DOC}: Replicate means that each rank holds the same tensor",
        check=check_replicas,
        script=script_replicas,
        control="redistribute.replicas mesh=2x2 x=5x3:P(sum),S(0):float32:unit",
        planted="reduction_rounds_by_rank",
        draw=draw_replicas,
        draws=30,
        needs=("all_reduce",),
        weight=0.4,
    ),
    Law(
        id="redistribute.apart",
        clause="A tensor that was redistributed is of its own memory: what is written into it does not reach its source.",
        source=f"{DOC}: out of place, it leaves the original one unchanged",
        check=check_apart,
        script=script_apart,
        control="redistribute.apart mesh=2 x=4x6:R to=S(0)",
        planted="shards_are_views",
        draw=draw_apart,
        draws=30,
        weight=0.2,
        tier="extended",
    ),
    Law(
        id="redistribute.dtype-closure",
        clause="Averages of integers, bitwise reductions of floats and extremes of complex numbers are refused on every rank.",
        source="torch.distributed.tensor docs, Partial: the reductions and which tensors have them",
        check=check_closed,
        script=script_closed,
        control="redistribute.dtype-closure mesh=2 x=5x3:P(avg):int64:small to=R",
        planted="integers_are_averaged",
        sweep=sweep_closed,
        narrow=draws.narrowed,
        sweeps=120,
        weight=0.3,
        tier="extended",
    ),
)
