"""Laws of gradients on other ways: declared at the entrance, arriving in another layout or dtype."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from conformance.case import Case
from conformance.departures import of_layout
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given, target
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
from reference.placement import Partial, Placement, Replicate, Shard, is_reduction
from reference.tensors import DTYPES, dense
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

ARRIVING_SEED = 61
# an odd factor that takes integers beyond what bfloat16 holds
WIDE = 257


def lacks(method: Any, option: str) -> bool:
    """Whether this torch's method has no such option."""
    return option not in inspect.signature(method).parameters


def draw_from_local(limits: Limits) -> SearchStrategy[Case]:
    def declared(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        free = st.sampled_from([Replicate(), Partial()])
        return {"declared": tuple(draw(free) if isinstance(p, (Replicate, Partial)) else p for p in layout.placements)}

    law, on = "gradient.from-local", inside(limits)
    return draws.moved(
        law, limits, on=on, kinds=("R", "S", "P"), targets=("R", "S"), reduce_ops=("sum",), dtypes=draws.FLOATS, extra=declared
    )


def check_from_local(case: Case, here: Here) -> None:
    """With grad_placements, the gradients of all ranks' local tensors denote, under these placements, the gradient of the whole."""
    if lacks(DTensor.from_local, "grad_placements"):
        here.reject("this torch's from_local takes no grad_placements")
    x, declared = given(case), case.placements("declared")
    to, coord = target(case, x), here.coord(x.layout.mesh)
    local, live = here.tensor(x.local(coord)).requires_grad_(), here.mesh(x.layout.mesh)
    how: dict[str, Any] = {"shape": x.full.shape, "stride": x.stride, "grad_placements": here.placements(declared)}
    made = DTensor.from_local(local, live, here.placements(x.layout.placements), **how)
    out = made.redistribute(placements=here.placements(to.placements)).to_local()
    backward(out, here.tensor(part(incoming(x), to, coord)))
    if not here.require(local.grad is not None, "wrong-value", "gradient", "there is no gradient") or local.grad is None:
        return
    if not any(map(is_reduction, declared)):
        here.same(local.grad, part(incoming(x), x.layout.replace(declared), coord), "gradient", what="gradient of the local tensor")
        return
    left = DTensor.from_local(local.grad, live, here.placements(declared), shape=x.full.shape, stride=x.full.contiguous().stride())
    thirds = any(size & (size - 1) for size, p in zip(x.layout.mesh.shape, declared, strict=True) if is_reduction(p))
    here.same_dtensor(left, incoming(x), "contributions", exact=not thirds, mesh=x.layout.mesh, placements=declared)


def script_from_local(case: Case) -> Script:
    x, declared = given(case), case.placements("declared")
    to = target(case, x)
    body = [f"out = d.redistribute(placements={scripts.placements(to.placements)}).to_local()"]
    back = x.layout.replace(tuple(Replicate() if is_reduction(p) else p for p in declared))
    made = scripted(case, body, sliced(incoming(x), to, case.world), on_members(incoming(x), back))
    lines = list(made.stages[0].body)
    at = next(number for number, line in enumerate(lines) if line.startswith("d = "))
    lines[at] = f"{lines[at][:-1]}, grad_placements={scripts.placements(declared)})"
    summed = f"DTensor.from_local(x.grad, mesh, {scripts.placements(declared)}, shape=d.shape, stride=d.stride())"
    lines[-1] = f"got = {summed}.redistribute(placements={scripts.placements(back.placements)})"
    result = scripts.script([*lines, "return WANT[rank], got.to_local()"], world=case.world, constants=made.constants)
    return Script(result.stages, result.imports, result.constants, tolerance=1e-4)


def draw_arriving(limits: Limits) -> SearchStrategy[Case]:
    drawn = draws.moved(
        "gradient.arriving", limits, on=inside(limits), kinds=("R", "S", "P"), targets=("R", "S"), reduce_ops=("sum",), dtypes=draws.FLOATS
    )

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(drawn)
        ndim = len(base.tensor("x").shape)
        kinds = ("R", "S", "P") if ndim else ("R", "P")
        return base.with_fields(arrives=draw(placements(base.mesh(), ndim, kinds=kinds)))

    return case()


def features_arriving(case: Case) -> set[str]:
    spec = case.tensor("x")
    return set(of_layout(spec.shape, case.get("mesh"), case.get("arrives"))) | {"grad-placements"}


def _arriving(case: Case, x: Given) -> Given:
    """The global gradient in the layout in which it arrives."""
    return Given(x.spec, incoming(x), x.layout.replace(case.placements("arrives")), x.seed + ARRIVING_SEED)


def check_arriving(case: Case, here: Here) -> None:
    """A gradient that arrives in another layout than the result had goes back to the placements of the local tensor all the same."""
    x = given(case)
    to, coord = target(case, x), here.coord(x.layout.mesh)
    local, live = leaf(x, here)
    out = live.redistribute(placements=here.placements(to.placements))
    backward(out, _arriving(case, x).dtensor(here))
    expect_grad(here, local, part(incoming(x), returned(x.layout), coord), "gradient")


def script_arriving(case: Case) -> Script:
    x = given(case)
    grad = _arriving(case, x)
    body = [
        f"y = d.redistribute(placements={scripts.placements(case.placements('to'))})",
        f"g = DTensor.from_local(G[rank], mesh, {scripts.placements(grad.layout.placements)}, shape=d.shape, stride=d.stride())",
        "out, G[rank] = y, g",
    ]
    grads = {rank: grad.local(x.layout.mesh.coord(rank)) for rank in range(case.world)}
    return scripted(case, body, grads, on_members(incoming(x), returned(x.layout)))


def draw_adjoint(limits: Limits) -> SearchStrategy[Case]:
    drawn = draws.moved(
        "gradient.adjoint", limits, on=inside(limits), kinds=("R", "S", "P"), targets=("R", "S"), reduce_ops=("sum",), via=True
    )

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(drawn)
        ndim = len(base.tensor("x").shape)
        return base.with_fields(arrives=draw(placements(base.mesh(), ndim, kinds=("R", "S") if ndim else ("R",))))

    return case()


def check_adjoint(case: Case, here: Here) -> None:
    """Forward and backward are adjoint: <T x, y> over the whole is <x, T* y> over what the ranks hold."""
    x = given(case)
    coord, mesh = here.coord(x.layout.mesh), x.layout.mesh
    assert coord is not None
    local, live = leaf(x, here)
    between = live.redistribute(placements=here.placements(case.placements("via")))
    out = between.redistribute(placements=here.placements(case.placements("to")))
    backward(out, _arriving(case, x).dtensor(here))
    if not here.require(local.grad is not None, "wrong-value", "gradient", "there is no gradient") or local.grad is None:
        return
    if not here.require(local.grad.shape == local.shape, "wrong-layout", "gradient", "the gradient has another shape than its tensor"):
        return
    # replicas are one and the same element: the first of them speaks
    speaks = not any(position for position, p in zip(coord, x.layout.placements, strict=True) if isinstance(p, Replicate))
    product = (local.detach() * local.grad).sum() if speaks else torch.zeros((), device=here.device)
    summed = DTensor.from_local(product, here.mesh(mesh), here.placements((Partial(),) * mesh.ndim))
    here.same_dtensor(summed, (x.full * incoming(x)).sum(), "products", mesh=mesh)


def script_adjoint(case: Case) -> Script:
    made = script_arriving(case)
    lines = list(made.stages[0].body)
    at = next(number for number, line in enumerate(lines) if line.startswith("y = "))
    ways = "".join(f".redistribute(placements={scripts.placements(case.placements(name))})" for name in ("via", "to"))
    lines[at] = f"y = d{ways}"
    return scripts.script(lines, world=case.world, constants=made.constants)


def draw_dtype(limits: Limits) -> SearchStrategy[Case]:
    drawn = draws.moved(
        "gradient.dtype", limits, on=inside(limits), kinds=("R", "S", "P"), targets=("R", "S"), reduce_ops=("sum",), dtypes=draws.FLOATS
    )
    names = [name for name in ("bfloat16", "float32", "float64") if name in limits.dtypes]
    forward, back = st.sampled_from([None, *names]), st.sampled_from([None, *names])

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(drawn)
        spec = base.tensor("x")
        summed = any(map(is_reduction, spec.placements or ()))
        plain = f"{'x'.join(map(str, spec.shape)) or '()'}:{','.join(map(str, spec.placements or ()))}:{spec.dtype}"
        return base.with_fields(x=f"{plain}:small" if summed else plain, forward=draw(forward), backward=draw(back))

    return case()


def _dtypes(case: Case) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the result, and that in which the gradient travels back."""
    own = case.tensor("x").dtype
    return DTYPES[case.get("forward", own)], DTYPES[case.get("backward", own)]


def _wide_gradient(case: Case, x: Given) -> torch.Tensor:
    """A gradient in the dtype of the result, most of whose elements bfloat16 does not hold."""
    return (dense(x.layout.shape, torch.float64, "distinct", x.seed + ARRIVING_SEED) * WIDE).to(_dtypes(case)[0])


def _travels(source: Layout, to: Layout) -> bool:
    """Whether the gradient needs a collective on its way back."""

    def gathers(before: Placement, after: Placement) -> bool:
        return isinstance(after, Shard) and before != after

    return any(size > 1 and gathers(a, b) for size, a, b in zip(source.mesh.shape, source.placements, to.placements, strict=True))


def check_dtype(case: Case, here: Here) -> None:
    """A redistribution gives its result in forward_dtype; the gradient travels in backward_dtype, and is cast to its tensor's dtype."""
    if lacks(DTensor.redistribute, "backward_dtype"):
        here.reject("this torch's redistribute takes no backward_dtype")
    x, (forward, back) = given(case), _dtypes(case)
    to, coord = target(case, x), here.coord(x.layout.mesh)
    local, live = leaf(x, here)
    chosen: dict[str, Any] = {f"{name}_dtype": DTYPES[case.get(name)] for name in ("forward", "backward") if name in case}
    out = live.redistribute(placements=here.placements(to.placements), **chosen)
    here.same_dtensor(out, x.full.to(forward), "forward", mesh=x.layout.mesh, placements=to.placements)
    grad = _wide_gradient(case, x)
    backward(out.to_local(), here.tensor(part(grad, to, coord)))
    whole, cast = (part(grad.to(dtype).to(x.full.dtype), returned(x.layout), coord) for dtype in (x.full.dtype, back))
    # where the gradient need not travel, nobody says whether it is cast on its way
    kept = not _travels(x.layout, to) and local.grad is not None and torch.equal(local.grad, here.tensor(whole))
    expect_grad(here, local, whole if kept else cast, "backward")


def script_dtype(case: Case) -> Script:
    x, (_, back) = given(case), _dtypes(case)
    to = target(case, x)
    chosen = "".join(f", {name}_dtype=torch.{case.get(name)}" for name in ("forward", "backward") if name in case)
    body = [f"out = d.redistribute(placements={scripts.placements(to.placements)}{chosen}).to_local()"]
    grad = _wide_gradient(case, x)
    return scripted(case, body, sliced(grad, to, case.world), on_members(grad.to(back).to(x.full.dtype), returned(x.layout)))


LAWS = (
    Law(
        id="gradient.from-local",
        clause="Local gradients of a tensor that from_local took with grad_placements denote, so placed, the gradient of the whole.",
        source=f"{DOC}, DTensor.from_local (grad_placements)",
        check=check_from_local,
        script=script_from_local,
        control="gradient.from-local mesh=2x2 x=3x2:S(0),R to=R,S(1) declared=S(0),P(sum)",
        planted="entrance_ignores_declared_gradient",
        draw=draw_from_local,
        draws=42,
        weight=0.6,
    ),
    Law(
        id="gradient.arriving",
        clause="A gradient may arrive in any layout: it goes back to the placements of the source, whole to replicas and contributions.",
        source=f"{TABLE}; DTensor.redistribute",
        check=check_arriving,
        script=script_arriving,
        features=features_arriving,
        control="gradient.arriving mesh=2x2 x=3x2:S(0),R to=R,S(1) arrives=S(1),S(0)",
        planted="contributions_arrive_as_replicas",
        draw=draw_arriving,
        draws=48,
        weight=0.7,
    ),
    Law(
        id="gradient.adjoint",
        clause="A way through several placements and back is adjoint: <T x, y> over the whole equals <x, T* y> over what the ranks hold.",
        source=f"{TABLE}: every redistribution is linear and keeps the tensor that is denoted",
        check=check_adjoint,
        script=script_adjoint,
        features=features_arriving,
        control="gradient.adjoint mesh=2x2 x=3x2:S(0),P(sum) via=S(1),S(1) to=R,S(1) arrives=S(1),S(0)",
        planted="backward_counts_twice",
        draw=draw_adjoint,
        draws=36,
        weight=0.6,
    ),
    Law(
        id="gradient.dtype",
        clause="A redistribution gives its result in forward_dtype; its gradient travels in backward_dtype and ends in its tensor's dtype.",
        source=f"{DOC}, DTensor.redistribute (forward_dtype, backward_dtype)",
        check=check_dtype,
        script=script_dtype,
        features=lambda case: {"dtype-between"} if {"forward", "backward"} & set(dict(case.fields)) else set(),
        control="gradient.dtype mesh=2x2 x=3x2:S(0),R to=R,S(1) forward=bfloat16 backward=float64",
        planted="gradient_keeps_traveling_dtype",
        draw=draw_dtype,
        draws=42,
        weight=0.6,
        tier="extended",
    ),
)
