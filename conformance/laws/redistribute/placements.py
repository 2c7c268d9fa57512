"""Laws of redistribution: from every placement to every placement, judged on what each rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given, target
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.placement import Placements, Replicate
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor docs, DTensor.redistribute"


def judged(here: Here, got: object, x: Given, to: Placements, check: str) -> None:
    """``got`` is the tensor of ``x`` under ``to``, on every rank."""
    here.same_dtensor(got, x.full, check, mesh=x.layout.mesh, placements=to)


def moving(
    law: str, *, plain: tuple[str, ...] = ("R", "S", "P"), one_in: int = 6, tables: bool = True, **options: Any
) -> Callable[[Limits], SearchStrategy[Case]]:
    """A drawing of redistributions, one in ``one_in`` with strided shards among its placements."""
    whole = tuple(kind for kind in plain if kind != "P")

    def draw(limits: Limits) -> SearchStrategy[Case]:
        on = draws.meshes(limits, tables=tables)
        usual = draws.moved(law, limits, on=on, kinds=plain, targets=plain, dtypes=limits.dtypes, **options)
        strided = draws.moved(law, limits, on=on, kinds=(*plain, "_S"), targets=(*whole, "_S"), **options)
        return draws.mostly(usual, strided, one_in)

    return draw


def check_local(case: Case, here: Here) -> None:
    """Each rank ends with the slice that the target placements name; what was redistributed is as it was."""
    x = given(case)
    to = target(case, x)
    live = x.dtensor(here)
    got = live.redistribute(placements=here.placements(to.placements))
    judged(here, got, x, to.placements, "local")
    if here.coord(x.layout.mesh) is not None:
        here.same(live.to_local(), x.local(here.coord(x.layout.mesh)), "input", what="what was redistributed")


def steps(case: Case, *fields: str) -> str:
    """The calls that redistribute ``x`` to the placements of these fields, one after the other."""
    return "x" + "".join(f".redistribute(placements={scripts.placements(case.placements(field))})" for field in fields)


def script_local(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    return scripts.holds(case, body, steps(case, "to"), x.full, target(case, x), constants=constants)


def check_path(case: Case, here: Here) -> None:
    """By way of other placements a redistribution ends where the direct one does."""
    x = given(case)
    to, via = target(case, x), target(case, x, "via")
    between = x.dtensor(here).redistribute(placements=here.placements(via.placements))
    judged(here, between, x, via.placements, "between")
    judged(here, between.redistribute(placements=here.placements(to.placements)), x, to.placements, "local")


def script_path(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    return scripts.holds(case, body, steps(case, "via", "to"), x.full, target(case, x), constants=constants)


def draw_back(limits: Limits) -> SearchStrategy[Case]:
    return moving("redistribute.back", plain=("R", "S"), tables=False)(limits)


def check_back(case: Case, here: Here) -> None:
    """There and back again every rank holds what it held, bit by bit."""
    x = given(case)
    live = x.dtensor(here)
    there = live.redistribute(placements=here.placements(target(case, x).placements))
    back = there.redistribute(placements=here.placements(x.layout.placements))
    judged(here, back, x, x.layout.placements, "back")


def script_back(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    back = f"{steps(case, 'to')}.redistribute(placements={scripts.placements(x.layout.placements)})"
    return scripts.holds(case, body, back, x.full, x.layout, constants=constants)


def draw_same(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, tables=False)
    usual = draws.placed("redistribute.same", limits, on=on, kinds=("R", "S", "P"), reduce_ops=("sum", "max", "avg"))
    return draws.mostly(usual, draws.placed("redistribute.same", limits, on=on), 6)


def check_same(case: Case, here: Here) -> None:
    """To the placements that it has, a redistribution moves nothing: no collective, the same elements, the same placements."""
    x = given(case)
    live = x.dtensor(here)
    with compat.name("CommDebugMode")() as traffic:
        got = live.redistribute(placements=here.placements(x.layout.placements))
    here.require(traffic.get_total_counts() == 0, "wrong-value", "traffic", "collectives for nothing", 0, dict(traffic.get_comm_counts()))
    judged(here, got, x, x.layout.placements, "local")


def script_same(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    body += ["with CommDebugMode() as traffic:", f"    x.redistribute(placements={scripts.placements(x.layout.placements)})"]
    return scripts.compared(case, body, "traffic.get_total_counts()", dict.fromkeys(range(case.world), 0), constants=constants)


def check_full(case: Case, here: Here) -> None:
    """``full_tensor`` is the whole tensor, pending reductions done, on every rank; of contiguous parts it is contiguous, as views need."""
    x = given(case)
    got = x.dtensor(here).full_tensor()
    here.require(not isinstance(got, DTensor), "wrong-metadata", "kind", "full_tensor is a DTensor")
    if here.coord(x.layout.mesh) is None:
        here.require(got.numel() == 0, "wrong-layout", "outside", "a rank outside the mesh got elements", "nothing", got)
    else:
        here.same(got, x.full, "full", what="full tensor")
        if x.spec.memory == "plain":
            here.require(got.is_contiguous(), "wrong-metadata", "strides", "the full tensor of contiguous parts is not", "", got.stride())


def draw_full(limits: Limits) -> SearchStrategy[Case]:
    ops = ("sum", "max", "avg", "min", "product")
    on = draws.meshes(limits, tables=False)
    usual = draws.placed("redistribute.full", limits, on=on, kinds=("R", "S", "P"), reduce_ops=ops, memories=("plain", "transposed"))
    return draws.mostly(usual, draws.placed("redistribute.full", limits, on=on, kinds=("R", "S", "_S", "P")), 6)


def script_full(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    body += [f"full = {scripts.tensor(x.full.contiguous())}", "got = x.full_tensor()"]
    return scripts.script(
        [
            *body,
            f"whole = [got{', got.is_contiguous()' if x.spec.memory == 'plain' else ''}]",
            "return ([full, True][: len(whole)], whole) if mesh.get_coordinate() is not None else (None, None)",
        ],
        world=case.world,
        constants=constants,
    )


def check_async(case: Case, here: Here) -> None:
    """With ``async_op`` the result, once it is used, is that of the synchronous redistribution."""
    x = given(case)
    to = target(case, x)
    got = x.dtensor(here).redistribute(placements=here.placements(to.placements), async_op=True)
    judged(here, got, x, to.placements, "local")
    if here.coord(x.layout.mesh) is not None and not to.has_partial():
        local = x.local_of(to, here.rank)
        twice: Any = got + got
        here.same(twice.to_local(), local + local, "use", what="the sum of the result with itself")


def script_async(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    moved = f"x.redistribute(placements={scripts.placements(case.placements('to'))}, async_op=True)"
    return scripts.holds(case, body, moved, x.full, target(case, x), constants=constants)


def draw_quiet(limits: Limits) -> SearchStrategy[Case]:
    mesh_drawn, shape_drawn = st.sampled_from(draws.meshes(limits, tables=False)), shapes(min_dims=1)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(mesh_drawn), draw(shape_drawn)
        free = draw(placements(mesh, len(shape), kinds=("R", "S", "P")))
        source = tuple(p if size == 1 else Replicate() for p, size in zip(free, mesh.shape, strict=True))
        strided = ("_S",) * (draw(st.integers(0, 5)) == 5)
        to = draw(placements(mesh, len(shape), kinds=("R", "S", *strided)))
        spec = TensorSpec(shape, source)
        return Case.of("redistribute.quiet", mesh=mesh, x=spec, to=to, seed=draw(draws.seeds()))

    return case()


def check_quiet(case: Case, here: Here) -> None:
    """What every rank holds already it takes without asking: replicas are cut, and mesh dims of one rank change, without a collective."""
    x = given(case)
    to = target(case, x)
    live = x.dtensor(here)
    with compat.name("CommDebugMode")() as traffic:
        got = live.redistribute(placements=here.placements(to.placements))
    here.require(traffic.get_total_counts() == 0, "wrong-value", "traffic", "collectives for nothing", 0, dict(traffic.get_comm_counts()))
    judged(here, got, x, to.placements, "local")


def script_traffic(case: Case, due: int = 0) -> Script:
    """A script that counts collectives, of which at most ``due`` are due."""
    x = given(case)
    constants, body = scripts.source(x, case.world)
    to = target(case, x)
    body += ["with CommDebugMode() as traffic:", f"    y = {steps(case, 'to')}"]
    body += ["if rank not in WANT:", "    return None, None"] if x.layout.mesh.size < case.world else []
    want = scripts.tensors("WANT", {rank: x.local_of(to, rank) for rank in sorted(x.layout.mesh.ranks)})
    lines = [*body, f"return (True, WANT[rank]), (traffic.get_total_counts() <= {due}, y.to_local())"]
    return scripts.script(lines, world=case.world, constants=[*constants, *want])


def draw_budget(limits: Limits) -> SearchStrategy[Case]:
    return draws.moved(
        "redistribute.budget", limits, on=draws.meshes(limits, dims=(1,), tables=False), kinds=("R", "S", "P"), targets=("R", "S")
    )


def sweep_budget(limits: Limits) -> list[Case]:
    return [case for case in draws.out_of_order("redistribute.budget", "S(0)", to="S(1)")(limits) if case.mesh().ndim == 1]


def script_budget(case: Case) -> Script:
    x = given(case)
    return script_traffic(case, _due(x.layout, target(case, x)))


def _due(source: Layout, to: Layout) -> int:
    """The collectives that the documentation names for one mesh dim."""
    (before,), (after,) = source.placements, to.placements
    return int(before != after and not isinstance(before, Replicate) and source.mesh.size > 1)


def check_budget(case: Case, here: Here) -> None:
    """On a 1-D mesh a redistribution is at most one collective, and none from replicas."""
    x = given(case)
    to = target(case, x)
    live = x.dtensor(here)
    with compat.name("CommDebugMode")() as traffic:
        got = live.redistribute(placements=here.placements(to.placements))
    due = _due(x.layout, to)
    counts = {str(op): count for op, count in traffic.get_comm_counts().items()}
    here.require(traffic.get_total_counts() <= due, "wrong-value", "traffic", "more collectives than are documented", due, counts)
    judged(here, got, x, to.placements, "local")


LAWS = (
    Law(
        id="redistribute.local",
        clause="After a redistribution each rank holds the slice that the target placements name, and the source is unchanged.",
        source=DOC,
        check=check_local,
        script=script_local,
        control="redistribute.local mesh=2x2 x=5x6:S(0),S(0) to=R,S(1)",
        planted="new_shard_dim_keeps_padding",
        draw=moving("redistribute.local", reduce_ops=("sum", "max", "avg", "min"), memories=("plain", "transposed")),
        draws=420,
        weight=3.0,
    ),
    Law(
        id="redistribute.path",
        clause="A redistribution by way of other placements ends where the direct one does.",
        source=DOC,
        check=check_path,
        script=script_path,
        control="redistribute.path mesh=2x2 x=5x6:S(0),S(1) via=S(1),R to=S(0),S(0)",
        planted="replicate_to_shard_takes_first",
        draw=moving("redistribute.path", tables=False, via=True),
        sweep=draws.out_of_order("redistribute.path", "S(0)", via="R", to="S(1)"),
        sweeps=3,
        draws=160,
        weight=1.5,
    ),
    Law(
        id="redistribute.back",
        clause="Redistributed and redistributed back, a tensor is on every rank what it was, bit by bit.",
        source=DOC,
        check=check_back,
        script=script_back,
        control="redistribute.back mesh=2x2 x=5x6:S(0),S(1) to=R,S(0)",
        planted="gather_in_reverse",
        draw=draw_back,
        sweep=draws.out_of_order("redistribute.back", "S(1)", to="S(0)"),
        sweeps=3,
        draws=120,
        weight=1.2,
    ),
    Law(
        id="redistribute.same",
        clause="A redistribution to the placements that a tensor has moves nothing.",
        source=DOC,
        check=check_same,
        script=script_same,
        control="redistribute.same mesh=2x2 x=5x6:S(0),P(sum)",
        planted="same_placements_communicate",
        draw=draw_same,
        sweep=draws.out_of_order("redistribute.same", "S(0)"),
        sweeps=3,
        draws=60,
        weight=0.4,
    ),
    Law(
        id="redistribute.full",
        clause="full_tensor is the whole tensor from every placement, with pending reductions done.",
        source="torch.distributed.tensor docs, DTensor.full_tensor",
        check=check_full,
        script=script_full,
        control="redistribute.full mesh=2x2 x=5x6:S(0),P(sum)",
        planted="full_tensor_of_first_mesh_dim",
        draw=draw_full,
        sweep=draws.out_of_order("redistribute.full", "S(0)"),
        sweeps=3,
        draws=150,
        weight=1.2,
    ),
    Law(
        id="redistribute.async",
        clause="An asynchronous redistribution gives, once its result is used, what the synchronous one gives.",
        source=f"{DOC} (async_op)",
        check=check_async,
        script=script_async,
        control="redistribute.async mesh=2x2 x=5x6:S(0),S(1) to=R,S(1)",
        planted="async_returns_source",
        draw=moving("redistribute.async", tables=False, one_in=9),
        draws=70,
        sweep=draws.out_of_order("redistribute.async", "S(0)", to="R"),
        sweeps=3,
        weight=0.8,
    ),
    Law(
        id="redistribute.quiet",
        clause="Replicas are cut into shards, and mesh dims of one rank change their placement, without any collective.",
        source=f"{DOC}: Replicate to Shard is local chunking",
        check=check_quiet,
        script=script_traffic,
        control="redistribute.quiet mesh=2x2 x=5x6:R,R to=S(0),S(0)",
        planted="chunking_communicates",
        draw=draw_quiet,
        sweep=draws.out_of_order("redistribute.quiet", "R", to="S(0)"),
        sweeps=3,
        draws=80,
        weight=0.5,
    ),
    Law(
        id="redistribute.budget",
        clause="On a 1-D mesh a redistribution is the one collective that is documented for its two placements, or none.",
        source=f"{DOC}, the list of operations on one mesh dim",
        check=check_budget,
        script=script_budget,
        control="redistribute.budget mesh=2 x=5x6:P(sum) to=S(0)",
        planted="reduce_scatter_reduces_twice",
        draw=draw_budget,
        sweep=sweep_budget,
        sweeps=2,
        draws=60,
        weight=0.5,
        tier="extended",
    ),
)
