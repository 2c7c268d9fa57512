"""The law of gradients through writes: a tensor that is changed in place before something goes back through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.report.reproducer import Script
from reference import simulate
from reference.tensors import TensorSpec, dense
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

# a write: its text, and the call on y, which is no leaf, and w, of the same shape, without a 0
WRITES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("y.add_(w)", lambda y, w: y.add_(w)),
    "sub": ("y.sub_(w, alpha=2)", lambda y, w: y.sub_(w, alpha=2)),
    "mul": ("y.mul_(w)", lambda y, w: y.mul_(w)),
    "div": ("y.div_(w)", lambda y, w: y.div_(w)),
    "number": ("y.mul_(3).add_(1)", lambda y, w: y.mul_(3).add_(1)),
    "relu": ("y.relu_()", lambda y, w: y.relu_()),
    "tanh": ("y.tanh_()", lambda y, w: y.tanh_()),
    "neg": ("y.neg_()", lambda y, w: y.neg_()),
    "square": ("y.square_()", lambda y, w: y.square_()),
    "zero": ("y.zero_()", lambda y, w: y.zero_()),
    "fill": ("y.fill_(2)", lambda y, w: y.fill_(2)),
    "copy": ("y.copy_(w)", lambda y, w: y.copy_(w)),
    "masked": ("y.masked_fill_(w > 3, 5.0)", lambda y, w: y.masked_fill_(w > 3, 5.0)),
    "addcmul": ("y.addcmul_(w, w)", lambda y, w: y.addcmul_(w, w)),
    "clamp": ("y.clamp_(-1.5, 2.5)", lambda y, w: y.clamp_(-1.5, 2.5)),
    "whole-view": ("y.t().mul_(w.t())", lambda y, w: y.t().mul_(w.t())),
    "twice": ("y.add_(w).mul_(w)", lambda y, w: y.add_(w).mul_(w)),
}


def arriving(case: Case) -> torch.Tensor:
    """The gradient of what was written, small integers."""
    x = given(case).full
    return dense(tuple(x.shape), x.dtype, "small", case.seed + 5)


def check_writes(case: Case, here: Here) -> None:
    """What was written stays where it lay; both operands have the dense gradients, or none as the dense ones."""
    x, w, write = given(case), given(case, "w"), WRITES[case.get("call")][1]
    whole, other = x.full.clone().requires_grad_(), w.full.clone().requires_grad_()
    due: Any = whole * 2
    write(due, other)
    due.backward(arriving(case))
    live, beside = x.dtensor(here).detach().requires_grad_(), w.dtensor(here).detach().requires_grad_()
    got: Any = live * 2
    write(got, beside)
    here.same_dtensor(got.detach(), due.detach(), "value", exact=False, mesh=x.layout.mesh, placements=x.layout.placements)
    coord, full = here.coord(x.layout.mesh), arriving(case)
    assert coord is not None
    local = here.tensor(simulate.take(full, x.layout, coord))
    at = here.placements(x.layout.placements)
    got.backward(DTensor.from_local(local, here.mesh(x.layout.mesh), at, shape=full.shape, stride=full.stride()))
    for name, mine, want in (("x", live.grad, whole.grad), ("w", beside.grad, other.grad)):
        if want is None:
            here.require(mine is None, "wrong-value", name, f"{name} has a gradient, must have none", None, mine)
        else:
            here.same_dtensor(mine, want, name, exact=False, mesh=x.layout.mesh)


def draw_writes(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, outside=False, least=2)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, call = draw(st.sampled_from(on)), draw(st.sampled_from(sorted(WRITES)))
        shape = draw(shapes(min_dims=2, max_dims=2))
        at = draw(placements(mesh, 2, kinds=("R", "S", "S")))
        beside = draw(st.sampled_from([at, None]))
        x = TensorSpec(shape, at, "float64", "small")
        w = TensorSpec(shape, draw(placements(mesh, 2, kinds=("R", "S"))) if beside is None else at, "float64", "positive")
        return Case.of("gradient.writes", mesh=mesh, x=x, w=w, call=call, seed=draw(draws.seeds()))

    return case()


def features_writes(case: Case) -> set[str]:
    unlike = {"unlike-placements"} if given(case).layout.placements != given(case, "w").layout.placements else set()
    return {"in-place", "backward", f"write:{case.get('call')}"} | unlike


def script_writes(case: Case) -> Script:
    x, w = given(case), given(case, "w")
    body = [f"mesh = {scripts.mesh(x.layout.mesh)}"]
    for name, one in (("x", x), ("w", w)):
        put = scripts.placements(one.layout.placements)
        body += [f"{name} = distribute_tensor({scripts.tensor(one.full)}, mesh, {put}).requires_grad_()"]
    body += ["y = x * 2", WRITES[case.get("call")][0]]
    grad, at = scripts.tensor(arriving(case)), scripts.placements(x.layout.placements)
    body += [f"y.backward(distribute_tensor({grad}, mesh, {at}))"]
    whole, other = x.full.clone().requires_grad_(), w.full.clone().requires_grad_()
    due: Any = whole * 2
    WRITES[case.get("call")][1](due, other)
    due.backward(arriving(case))
    wants = ", ".join("None" if grad is None else scripts.tensor(grad) for grad in (whole.grad, other.grad))
    body += [f"return [{wants}], [None if t.grad is None else t.grad.full_tensor() for t in (x, w)]"]
    made = scripts.script(body, world=case.world)
    return Script(made.stages, made.imports, made.constants, tolerance=1e-9)


LAWS = (
    Law(
        id="gradient.writes",
        clause="What goes back through a tensor that was written in place is the dense gradient; the tensor stays where it lay.",
        source="torch.distributed.tensor docs, DTensor: operators follow the semantics of torch.Tensor, in place and with autograd",
        check=check_writes,
        script=script_writes,
        features=features_writes,
        control="gradient.writes mesh=2 x=4x3:S(0):float64:small w=4x3:S(0):float64:positive call=mul",
        planted="what_arrives_is_doubled",
        draw=draw_writes,
        draws=10,
        needs=("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
        refusal="allowed",
        weight=0.2,
    ),
)
