"""Laws of gradients: through distribution, redistribution and the ways in and out of a DTensor, on each rank's local tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import distribute_tensor

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given, target
from conformance.laws.gradient.given import (
    DOC,
    TABLE,
    backward,
    expect_grad,
    incoming,
    inside,
    leaf,
    on_members,
    outside,
    part,
    returned,
    scripted,
    sliced,
)
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.mesh import Coord
from reference.placement import Partial, Placements, Replicate
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


def draw_redistribute(limits: Limits) -> SearchStrategy[Case]:
    law, kinds = "gradient.redistribute", ("R", "S", "P")
    usual = draws.moved(law, limits, on=inside(limits), kinds=kinds, targets=("R", "S"), reduce_ops=("sum",), dtypes=draws.FLOATS)
    strided = draws.moved(law, limits, on=inside(limits), kinds=("R", "S", "_S"), targets=("R", "S", "_S"))
    elsewhere = draws.moved(law, limits, on=outside(limits), kinds=kinds, targets=("R", "S"), reduce_ops=("sum",))
    return draws.mostly(draws.mostly(usual, strided, 9), elsewhere, 24)


def check_redistribute(case: Case, here: Here) -> None:
    """The gradient goes back to the placements that the tensor came from; contributions get it whole."""
    x = given(case)
    to, coord = target(case, x), here.coord(x.layout.mesh)
    local, live = leaf(x, here)
    out = live.redistribute(placements=here.placements(to.placements)).to_local()
    backward(out, here.tensor(part(incoming(x), to, coord)))
    if coord is not None:
        expect_grad(here, local, part(incoming(x), returned(x.layout), coord), "gradient")


def script_redistribute(case: Case) -> Script:
    x = given(case)
    to = target(case, x)
    body = [f"out = d.redistribute(placements={scripts.placements(to.placements)}).to_local()"]
    return scripted(case, body, sliced(incoming(x), to, case.world), on_members(incoming(x), returned(x.layout)))


def check_leaf(case: Case, here: Here) -> None:
    """The gradient of a distributed leaf is a DTensor that denotes the dense gradient."""
    x = given(case)
    to, coord = target(case, x), here.coord(x.layout.mesh)
    full = here.tensor(x.full).requires_grad_()
    live = distribute_tensor(full, here.mesh(x.layout.mesh), here.placements(x.layout.placements), src_data_rank=None)
    out = live.redistribute(placements=here.placements(to.placements)).to_local()
    backward(out, here.tensor(part(incoming(x), to, coord)))
    here.require(full.grad is None, "wrong-value", "source", "the plain tensor that was distributed got a gradient", None, full.grad)
    if coord is not None:
        here.same_dtensor(live.grad, incoming(x), "gradient", mesh=x.layout.mesh)


def draw_leaf(limits: Limits) -> SearchStrategy[Case]:
    return draws.moved("gradient.leaf", limits, on=inside(limits), kinds=("R", "S"), targets=("R", "S"), dtypes=draws.FLOATS)


def script_leaf(case: Case) -> Script:
    x = given(case)
    to = target(case, x)
    body = [
        f"full = {scripts.tensor(x.full)}.requires_grad_()",
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        f"d = distribute_tensor(full, mesh, {scripts.placements(x.layout.placements)}, src_data_rank=None)",
        f"d.redistribute(placements={scripts.placements(to.placements)}).to_local().backward(G[rank])",
    ]
    constants = scripts.tensors("G", sliced(incoming(x), to, case.world))
    return scripts.holds(case, body, "d.grad", incoming(x), x.layout, constants=constants)


def draw_full(limits: Limits) -> SearchStrategy[Case]:
    def grads(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"grads": draw(st.sampled_from(["replicate", "partial"]))}

    law, kinds = "gradient.full-tensor", ("R", "S", "P")
    usual = draws.placed(law, limits, on=inside(limits), kinds=kinds, dtypes=draws.FLOATS, extra=grads)
    strided = draws.placed(law, limits, on=inside(limits), extra=grads)
    elsewhere = draws.placed(law, limits, on=outside(limits), kinds=kinds, extra=grads)
    return draws.mostly(draws.mostly(usual, strided, 9), elsewhere, 24)


def _full_grad(case: Case, coord: Coord) -> torch.Tensor:
    """What arrives for the whole tensor at a coordinate: its own gradient, or the sum of all ranks' gradients."""
    x = given(case)
    mesh = x.layout.mesh
    if case.get("grads") == "replicate":
        return incoming(x, mesh.rank_at(coord) + 1)
    return torch.stack([incoming(x, rank + 1) for rank in mesh.ranks]).sum(0)


def check_full(case: Case, here: Here) -> None:
    """Each rank's gradient of the full tensor counts as a replica, of which it keeps its slice; declared partial, they add up."""
    x = given(case)
    coord = here.coord(x.layout.mesh)
    local, live = leaf(x, here)
    declared = {} if case.get("grads") == "replicate" else {"grad_placements": here.placements((Partial(),) * x.layout.mesh.ndim)}
    out = live.full_tensor(**declared)
    own = torch.empty_like(out) if coord is None else here.tensor(incoming(x, here.rank + 1))
    backward(out, own)
    if coord is not None:
        expect_grad(here, local, part(_full_grad(case, coord), returned(x.layout), coord), "gradient")


def script_full(case: Case) -> Script:
    x = given(case)
    mesh, back = x.layout.mesh, returned(x.layout)
    declared = "" if case.get("grads") == "replicate" else f"grad_placements={scripts.placements((Partial(),) * mesh.ndim)}"
    grads = {rank: torch.empty(0, dtype=x.full.dtype) if mesh.coord(rank) is None else incoming(x, rank + 1) for rank in range(case.world)}
    want = {mesh.rank_at(coord): part(_full_grad(case, coord), back, coord) for coord in mesh.coords()}
    return scripted(case, [f"out = d.full_tensor({declared})"], grads, want)


def draw_to_local(limits: Limits) -> SearchStrategy[Case]:
    def declared(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        free = [
            p if not isinstance(p, (Replicate, Partial)) else draw(st.sampled_from([Replicate(), Partial()])) for p in layout.placements
        ]
        return {"declared": draw(st.sampled_from([None, tuple(free), tuple(free)]))}

    return draws.placed("gradient.to-local", limits, on=inside(limits), kinds=("R", "S", "P"), dtypes=draws.FLOATS, extra=declared)


def _declared(case: Case) -> Placements | None:
    return case.placements("declared") if "declared" in case else None


def _local_grad(case: Case, coord: Coord) -> torch.Tensor:
    """The sum of the local gradients along the mesh dims that are declared partial; else the rank's own."""
    x, declared = given(case), _declared(case)
    mesh, back = x.layout.mesh, returned(x.layout)
    summed = [isinstance(p, Partial) for p in declared] if declared else [False] * mesh.ndim
    others = [at for at in mesh.coords() if all(add or a == b for add, a, b in zip(summed, at, coord, strict=True))]
    return torch.stack([part(incoming(x, mesh.rank_at(at) + 1), back, at) for at in others]).sum(0)


def check_to_local(case: Case, here: Here) -> None:
    """The gradient of a local tensor comes back as it is; along mesh dims that were declared partial the ranks' gradients add up."""
    x, declared = given(case), _declared(case)
    coord, back = here.coord(x.layout.mesh), returned(x.layout)
    local, live = leaf(x, here)
    out = live.to_local(grad_placements=here.placements(declared)) if declared else live.to_local()
    own = torch.empty_like(out) if coord is None else here.tensor(part(incoming(x, here.rank + 1), back, coord))
    backward(out, own)
    if coord is not None:
        expect_grad(here, local, _local_grad(case, coord), "gradient")


def script_to_local(case: Case) -> Script:
    x, declared = given(case), _declared(case)
    mesh, back = x.layout.mesh, returned(x.layout)
    option = f"grad_placements={scripts.placements(declared)}" if declared else ""
    grads = {rank: part(incoming(x, rank + 1), back, mesh.coord(rank)) for rank in range(case.world)}
    want = {mesh.rank_at(coord): _local_grad(case, coord) for coord in mesh.coords()}
    return scripted(case, [f"out = d.to_local({option})"], grads, want)


def draw_twice(limits: Limits) -> SearchStrategy[Case]:
    law, on = "gradient.accumulate", inside(limits)
    drawn = draws.moved(law, limits, on=on, kinds=("R", "S", "P"), targets=("R", "S"), reduce_ops=("sum",), dtypes=draws.FLOATS)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(drawn)
        return base.with_fields(
            via=draw(placements(base.mesh(), len(base.tensor("x").shape), kinds=("R", "S") if base.tensor("x").shape else ("R",)))
        )

    return case()


def check_twice(case: Case, here: Here) -> None:
    """A tensor that is used twice, by two redistributions and in two backward passes, gets the sum of the gradients."""
    x = given(case)
    coord = here.coord(x.layout.mesh)
    local, live = leaf(x, here)
    total = torch.zeros_like(incoming(x))
    for at, field in enumerate(("to", "via", "to")):
        goal = target(case, x, field)
        out = live.redistribute(placements=here.placements(goal.placements)).to_local()
        backward(out, here.tensor(part(incoming(x, at), goal, coord)))
        total += incoming(x, at)
    if coord is not None:
        expect_grad(here, local, part(total, returned(x.layout), coord), "gradient")


def script_twice(case: Case) -> Script:
    x = given(case)
    goals = [target(case, x, field) for field in ("to", "via")]
    body = [
        f"d.redistribute(placements={scripts.placements(goals[0].placements)}).to_local().backward(G[rank], retain_graph=True)",
        f"d.redistribute(placements={scripts.placements(goals[1].placements)}).to_local().backward(H[rank], retain_graph=True)",
        f"out = d.redistribute(placements={scripts.placements(goals[0].placements)}).to_local()",
    ]
    total = incoming(x) * 2 + incoming(x, 1)
    made = scripted(case, body, sliced(incoming(x), goals[0], case.world), on_members(total, returned(x.layout)))
    second = scripts.tensors("H", sliced(incoming(x, 1), goals[1], case.world))
    return Script(made.stages, made.imports, (*made.constants, *second))


def draw_second(limits: Limits) -> SearchStrategy[Case]:
    return draws.moved("gradient.second", limits, on=inside(limits), kinds=("R", "S"), targets=("R", "S"), dtypes=draws.FLOATS)


def check_second(case: Case, here: Here) -> None:
    """The gradient of a gradient goes through a redistribution and back: sum(g*x*x) has 2*g*x, and that has 2*g*h along h."""
    x = given(case)
    to, coord = target(case, x), here.coord(x.layout.mesh)
    local, live = leaf(x, here)
    if coord is None:
        live.redistribute(placements=here.placements(to.placements))
        return
    out = live.redistribute(placements=here.placements(to.placements)).to_local()
    weight = here.tensor(part(incoming(x), to, coord))
    (first,) = torch.autograd.grad((out * out * weight).sum(), local, create_graph=True)
    here.same(first, part(incoming(x) * 2 * x.full, x.layout, coord), "first", what="gradient of the local tensor")
    along = here.tensor(part(incoming(x, 1), x.layout, coord))
    backward(first, along)
    expect_grad(here, local, part(incoming(x) * 2 * incoming(x, 1), x.layout, coord), "second")


def script_second(case: Case) -> Script:
    x = given(case)
    to = target(case, x)
    body = [
        "if mesh.get_coordinate() is None:",
        "    return None, None",
        f"y = d.redistribute(placements={scripts.placements(to.placements)}).to_local()",
        "(first,) = torch.autograd.grad((y * y * H[rank]).sum(), x, create_graph=True)",
        "out = first",
    ]
    want = on_members(incoming(x) * 2 * incoming(x, 1), x.layout)
    made = scripted(case, body, sliced(incoming(x, 1), x.layout, case.world), want)
    return Script(made.stages, made.imports, (*made.constants, *scripts.tensors("H", sliced(incoming(x), to, case.world))))


LAWS = (
    Law(
        id="gradient.redistribute",
        clause="Through a redistribution the gradient returns to the placements of its source, whole to replicas and contributions.",
        source=f"{TABLE}; DTensor.redistribute",
        check=check_redistribute,
        script=script_redistribute,
        control="gradient.redistribute mesh=2x2 x=3x2:S(0),P(sum) to=R,S(1)",
        planted="backward_counts_twice",
        draw=draw_redistribute,
        sweep=draws.out_of_order("gradient.redistribute", "R", to="S(0)"),
        sweeps=3,
        draws=98,
        weight=1.5,
    ),
    Law(
        id="gradient.leaf",
        clause="The gradient of a distributed leaf is a DTensor on its mesh that denotes the dense gradient.",
        source=f"{DOC}, distribute_tensor",
        check=check_leaf,
        script=script_leaf,
        control="gradient.leaf mesh=2x2 x=3x2:S(0),R to=R,S(1)",
        planted="replicate_to_shard_takes_first",
        draw=draw_leaf,
        sweep=draws.out_of_order("gradient.leaf", "R", to="S(0)"),
        sweeps=3,
        draws=35,
        weight=0.6,
    ),
    Law(
        id="gradient.full-tensor",
        clause="A rank's gradient of the full tensor is a replica, of which it keeps its slice; declared partial, the ranks' add up.",
        source=f"{DOC}, DTensor.full_tensor (grad_placements)",
        check=check_full,
        script=script_full,
        control="gradient.full-tensor mesh=2x2 x=3x2:S(0),R grads=partial",
        planted="grad_placements_ignored",
        draw=draw_full,
        sweep=draws.out_of_order("gradient.full-tensor", "S(0)", grads="partial"),
        sweeps=3,
        draws=56,
        weight=0.8,
    ),
    Law(
        id="gradient.to-local",
        clause="The gradient of a local tensor comes back as it is, or summed along the mesh dims that grad_placements declares partial.",
        source=f"{DOC}, DTensor.to_local (grad_placements)",
        check=check_to_local,
        script=script_to_local,
        control="gradient.to-local mesh=2x2 x=3x2:S(0),R declared=S(0),P(sum)",
        planted="grad_placements_ignored",
        draw=draw_to_local,
        draws=49,
        weight=0.7,
    ),
    Law(
        id="gradient.accumulate",
        clause="A tensor that several redistributions use gets the sum of their gradients.",
        source=f"{TABLE}; gradients accumulate",
        check=check_twice,
        script=script_twice,
        control="gradient.accumulate mesh=2x2 x=3x2:S(0),R via=R,R to=R,S(1)",
        planted="backward_overwrites",
        draw=draw_twice,
        sweep=draws.out_of_order("gradient.accumulate", "R", via="R", to="S(0)"),
        sweeps=3,
        draws=28,
        weight=0.6,
    ),
    Law(
        id="gradient.second",
        clause="A redistribution is twice differentiable.",
        source=f"{DOC}, DTensor.redistribute, note",
        check=check_second,
        script=script_second,
        control="gradient.second mesh=2x2 x=3x2:S(0),R to=R,S(1)",
        planted="second_backward_is_zero",
        draw=draw_second,
        sweep=draws.out_of_order("gradient.second", "S(0)", to="R"),
        sweeps=3,
        draws=28,
        weight=0.6,
        tier="extended",
    ),
)
