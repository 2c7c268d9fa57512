"""Laws of gradients through whole graphs: inner tensors that are used several times, parameters, second derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance import compat
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
    part,
    returned,
    scripted,
    sliced,
)
from conformance.report.reproducer import Script
from reference.layout import Layout

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


def draw_graph(limits: Limits) -> SearchStrategy[Case]:
    return draws.moved(
        "gradient.graph",
        limits,
        on=inside(limits),
        kinds=("R", "S", "P"),
        targets=("R", "S"),
        reduce_ops=("sum",),
        dtypes=draws.FLOATS,
        via=True,
    )


def check_graph(case: Case, here: Here) -> None:
    """In one graph, a tensor that is no leaf and is used three times gets the sum of what its uses send back, and hands it on."""
    x = given(case)
    coord = here.coord(x.layout.mesh)
    local = here.tensor(x.local(coord)).requires_grad_()
    twice = local * 2
    twice.retain_grad()
    at = here.placements(x.layout.placements)
    live = DTensor.from_local(twice, here.mesh(x.layout.mesh), at, shape=x.full.shape, stride=x.stride)
    outs, grads = [live.to_local()], [here.tensor(part(incoming(x, 2), returned(x.layout), coord))]
    for number, field in enumerate(("to", "via")):
        goal = target(case, x, field)
        outs.append(live.redistribute(placements=here.placements(goal.placements)).to_local() * (number + 1))
        grads.append(here.tensor(part(incoming(x, number), goal, coord)))
    torch.autograd.backward(outs, grads)
    total = incoming(x) + 2 * incoming(x, 1) + incoming(x, 2)
    expect_grad(here, twice, part(total, returned(x.layout), coord), "inner")
    expect_grad(here, local, part(2 * total, returned(x.layout), coord), "gradient")


def script_graph(case: Case) -> Script:
    x = given(case)
    goals = [target(case, x, name) for name in ("to", "via")]
    moved = [f"d.redistribute(placements={scripts.placements(goal.placements)}).to_local()" for goal in goals]
    body = [
        f"torch.autograd.backward([{moved[0]}, {moved[1]} * 2], [H[rank], I[rank]])",
        "out = d.to_local()",
    ]
    total = 2 * (incoming(x) + 2 * incoming(x, 1) + incoming(x, 2))
    made = scripted(case, body, sliced(incoming(x, 2), returned(x.layout), case.world), on_members(total, returned(x.layout)))
    lines = [line.replace("from_local(x,", "from_local(x * 2,") for line in made.stages[0].body]
    lines = [line.replace("[H[rank], I[rank]])", "[H[rank], I[rank]], retain_graph=True)") for line in lines]
    more = [scripts.tensors(name, sliced(incoming(x, at), goals[at], case.world)) for at, name in enumerate("HI")]
    return scripts.script(lines, world=case.world, constants=[*made.constants, *more[0], *more[1]])


def draw_parameter(limits: Limits) -> SearchStrategy[Case]:
    def frozen(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"frozen": draw(st.sampled_from([None, None, None, 1]))}

    return draws.moved(
        "gradient.parameter", limits, on=inside(limits), kinds=("R", "S"), targets=("R", "S"), dtypes=draws.FLOATS, extra=frozen
    )


def check_parameter(case: Case, here: Here) -> None:
    """The gradient of a distributed parameter denotes the dense one, adds up over backward passes, and goes where it is set to None."""
    x, frozen = given(case), "frozen" in case
    to, coord = target(case, x), here.coord(x.layout.mesh)
    live, at = here.mesh(x.layout.mesh), here.placements(x.layout.placements)
    plain = nn.Parameter(here.tensor(x.full), requires_grad=not frozen)
    parameter: Any = nn.Parameter(distribute_tensor(plain, live, at, src_data_rank=None), requires_grad=not frozen)
    here.require(parameter.requires_grad is not frozen, "wrong-metadata", "requires_grad", "requires_grad differs", not frozen)
    if compat.torch_release() >= (2, 13):  # which promises it
        with torch.no_grad():
            kinds = [isinstance(one.to_local(), nn.Parameter) for one in (parameter, parameter.detach())]
        kinds.append(isinstance(parameter.to_local(), nn.Parameter))
        due = [True, False, True]
        here.require(
            kinds == due, "wrong-metadata", "kind", "whether a local tensor is a parameter, as its DTensor is, differs", due, kinds
        )
    for times in (1, 2):
        out = parameter.redistribute(placements=here.placements(to.placements)).to_local()
        here.require(
            out.requires_grad is not frozen, "wrong-metadata", "result", "a result of it requires a gradient otherwise", not frozen
        )
        if frozen:
            return
        backward(out, here.tensor(part(incoming(x), to, coord)))
        here.same_dtensor(parameter.grad, incoming(x) * times, "gradient", mesh=x.layout.mesh)
    here.require(plain.grad is None, "wrong-value", "source", "the plain parameter got a gradient", None, plain.grad)
    parameter.grad = None
    backward(parameter.to_local(), here.tensor(part(incoming(x), x.layout, coord)))
    here.same_dtensor(parameter.grad, incoming(x), "anew", mesh=x.layout.mesh, placements=x.layout.placements)


def script_parameter(case: Case) -> Script:
    x, to = given(case), case.placements("to")
    body = [
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        f"plain = torch.nn.Parameter({scripts.tensor(x.full)}, requires_grad={'frozen' not in case})",
        f"d = distribute_tensor(plain, mesh, {scripts.placements(x.layout.placements)}, src_data_rank=None)",
        f"p = torch.nn.Parameter(d, requires_grad={'frozen' not in case})",
        f"y = p.redistribute(placements={scripts.placements(to)}).to_local()",
    ]
    if "frozen" in case:
        return scripts.compared(case, body, "y.requires_grad", dict.fromkeys(range(case.world), False))
    constants = scripts.tensors("G", sliced(incoming(x), target(case, x), case.world))
    return scripts.holds(case, [*body, "y.backward(G[rank])"], "p.grad", incoming(x), x.layout, constants=constants)


def draw_second(limits: Limits) -> SearchStrategy[Case]:
    def way(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"by": draw(st.sampled_from(["full_tensor", "to_local"]))}

    return draws.placed("gradient.second-ways", limits, on=inside(limits), kinds=("R", "S"), dtypes=draws.FLOATS, extra=way)


def check_second(case: Case, here: Here) -> None:
    """Out of a DTensor by full_tensor or to_local: sum(g*x*x) has the gradient 2*g*x, and that has 2*g*h along h."""
    x, by = given(case), case.get("by")
    coord = here.coord(x.layout.mesh)
    local, live = leaf(x, here)
    out: torch.Tensor = live.full_tensor() if by == "full_tensor" else live.to_local()
    weight = here.tensor(incoming(x) if by == "full_tensor" else part(incoming(x), x.layout, coord))
    (first,) = torch.autograd.grad((out * out * weight).sum(), local, create_graph=True)
    here.same(first, part(incoming(x) * 2 * x.full, x.layout, coord), "first", what="gradient of the local tensor")
    backward(first, here.tensor(part(incoming(x, 1), x.layout, coord)))
    expect_grad(here, local, part(incoming(x) * 2 * incoming(x, 1), x.layout, coord), "second")


def script_second(case: Case) -> Script:
    x, by = given(case), case.get("by")
    body = [f"y = d.{by}()", "(first,) = torch.autograd.grad((y * y * H[rank]).sum(), x, create_graph=True)", "out = first"]
    made = scripted(case, body, sliced(incoming(x, 1), x.layout, case.world), on_members(incoming(x) * 2 * incoming(x, 1), x.layout))
    whole = {rank: incoming(x) for rank in range(case.world)}
    weights = scripts.tensors("H", whole if by == "full_tensor" else sliced(incoming(x), x.layout, case.world))
    return Script(made.stages, made.imports, (*made.constants, *weights))


LAWS = (
    Law(
        id="gradient.graph",
        clause="A tensor inside a graph that is used three times gets the sum of what its uses send back.",
        source=f"{TABLE}; from_local is differentiable",
        check=check_graph,
        script=script_graph,
        control="gradient.graph mesh=2x2 x=3x2:S(0),R via=R,R to=R,S(1)",
        planted="backward_counts_twice",
        draw=draw_graph,
        draws=30,
        weight=0.6,
    ),
    Law(
        id="gradient.parameter",
        clause="The gradient of a distributed parameter denotes the dense one, adds up over passes, and a frozen parameter gets none.",
        source=f"{DOC}, distribute_tensor (nn.Parameter)",
        check=check_parameter,
        script=script_parameter,
        control="gradient.parameter mesh=2x2 x=3x2:S(0),R to=R,S(1)",
        planted="backward_counts_twice",
        draw=draw_parameter,
        draws=30,
        weight=0.6,
    ),
    Law(
        id="gradient.second-ways",
        clause="full_tensor and to_local are twice differentiable.",
        source=f"{DOC}, DTensor.full_tensor (differentiable) and DTensor.redistribute, note",
        check=check_second,
        script=script_second,
        control="gradient.second-ways mesh=2x2 x=3x2:S(0),R by=full_tensor",
        planted="exit_is_differentiable_once",
        draw=draw_second,
        draws=24,
        weight=0.5,
        tier="extended",
    ),
)
