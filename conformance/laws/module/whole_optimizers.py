"""The law of optimizers that look at whole tensors or at the loss, and of fused ones, on sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Near
from shardlaw.conformance.law.fields import WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.training import (
    ADAPTIVE,
    AMSGRAD,
    NEEDS,
    OPTIMIZER_DOC,
    Parameters,
    ThreeSteps,
    copied,
    dense_copies,
    draw_tensors,
    due_gradients,
    features_training,
    meshes,
    optimizer_state,
    set_gradients,
)
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.placement import Shard

FUSED: dict[str, Any] = {**ADAPTIVE, "fused": True}
TENSORS: dict[str, Any] = {**ADAPTIVE, "lr": torch.tensor(0.25), "betas": (torch.tensor(0.875), torch.tensor(0.96875))}
SEARCHES: dict[str, dict[str, Any]] = {"wolfe": {"line_search_fn": "strong_wolfe"}, "short": {"history_size": 1}}
# as the table of training.py
WHOLE: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], dict[Any, dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}, {}),
    "adam-fused": (torch.optim.Adam, FUSED, AMSGRAD),
    "adamw-fused": (torch.optim.AdamW, FUSED, AMSGRAD),
    "adam-tensors": (torch.optim.Adam, {**TENSORS, "foreach": False}, {}),
    "adamw-tensor-rate": (torch.optim.AdamW, {**FUSED, "lr": torch.tensor(0.25)}, {}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.25, "foreach": False}, {"decay": {"weight_decay": 0.25}}),
    "rprop": (torch.optim.Rprop, {"lr": 0.25, "foreach": False}, {}),
    "muon": (torch.optim.Muon, {"lr": 0.25}, {"nesterov": {"nesterov": False}}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 3}, SEARCHES),
}
PAIR = "a=4x3:S(0):float64 b=5:S(0):float64"
CASES = (
    f"mesh=2 {PAIR} optimizer=adam-fused",
    "mesh=3 a=5x3:S(1):float64 b=7:S(0):float64 optimizer=adamw-fused options=amsgrad without=b",
    "mesh=2x2 a=3x5:S(0),S(1):float64 b=4:R,S(0):float64 optimizer=adam-fused options=decay",
    "mesh=2 a=5x3:S(0):float64 b=5:S(0):float64 grad.a=S(1) optimizer=adam-fused",
    "mesh=2 a=5x3:S(0):float64 b=5:S(0):float64 grad.a=R grad.b=P(sum) optimizer=adamw-fused",
    "mesh=3 a=5x3:S(0):float64 b=5:S(0):float64 optimizer=adam-tensors",
    "mesh=2 a=4x3:R:float64 b=5:S(0):float64 grad.a=S(0) optimizer=adamw-tensor-rate",
    f"mesh=2 {PAIR} optimizer=adafactor",
    "mesh=2 a=6:S(0):float64 b=5:R:float64 optimizer=adafactor options=decay",
    "mesh=2 a=4x3:R:float64 b=5:R:float64 optimizer=adafactor options=decay",
    "mesh=2 a=4x3:R:float64 b=5:R:float64 optimizer=rprop",
    f"mesh=2 {PAIR} optimizer=rprop",
    "mesh=2 a=4x4:S(1):float64 b=5:R:float64 optimizer=rprop",
    "mesh=2 a=4x3:S(0):float64 b=3x4:S(1):float64 optimizer=muon",
    "mesh=3 a=5x3:S(0):float64 b=2x4:R:float64 optimizer=muon options=nesterov",
    "mesh=2x2 a=3x5:S(0),S(1):float64 b=4x3:R,S(0):float64 optimizer=muon",
    "mesh=2 a=4x3:S(0):float64 b=6:S(0):float64 optimizer=lbfgs",
    "mesh=2 a=4x3:S(1):float64 b=6:R:float64 optimizer=lbfgs options=short",
    "mesh=2 a=4x3:R:float64 b=6:R:float64 optimizer=lbfgs options=wolfe",
    "mesh=2 a=4x3:S(0):float64 b=6:S(0):float64 optimizer=lbfgs options=wolfe",
    "mesh=2 a=5x3:R:float64 b=5:R:float64 optimizer=sgd then=plateau",
    f"mesh=2 {PAIR} optimizer=sgd then=plateau",
    f"mesh=2 {PAIR} optimizer=sgd then=cycle",
)


# Plain torch, for acts


def distance(parameters: Sequence[nn.Parameter], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """A loss: how far parameters are from what they should be. Their gradients are set."""
    for parameter in parameters:
        parameter.grad = None
    losses = [(parameter - target).square().sum() for parameter, target in zip(parameters, targets, strict=True)]
    loss = losses[0] + losses[1]
    loss.backward()
    return loss


def take_steps(
    parameters: Sequence[nn.Parameter], rows: Sequence[Any], optimizer: str, options: str | None, then: str | None
) -> dict[str, Any]:
    """The parameters after each step, the rates of learning, and the optimizer's state for each parameter. LBFGS is
    given a loss, of which the gradients are the targets; a schedule by plateaus is told how it goes."""
    make, common, further = WHOLE[optimizer]
    optim: Any = make(parameters, **common, **further.get(options, {}))
    steps, rates = list[Any](), list[float]()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optim, factor=0.5, patience=0)
    cycle = (
        torch.optim.lr_scheduler.OneCycleLR(optim, 1.0, total_steps=5, cycle_momentum=False)
        if then == "cycle"
        else None
    )
    for row in rows:
        if optimizer == "lbfgs":
            optim.step(partial(distance, parameters, row))
        else:
            set_gradients(parameters, row)
            optim.step()
        if then == "plateau":
            plateau.step((parameters[0].detach() - row[0]).sum())
        if cycle is not None:
            cycle.step()
        steps.append(copied(parameters))
        rates.append(float(optim.param_groups[0]["lr"]))
    state = [{} if optimizer == "lbfgs" else optimizer_state(optim, parameter) for parameter in parameters]
    return {"steps": steps, "rates": rates, "state": state}


@st.composite
def draw_fused(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, name = draw(st.sampled_from(meshes(limits))), draw(st.sampled_from(("adam-fused", "adamw-fused", "muon")))
    values = draw_tensors(draw, mesh, pending=True)
    shapes = [values[key].shape for key in ("a", "b", "c") if key in values]
    if name == "muon" and any(len(shape) < 2 for shape in shapes):
        name = "adam-tensors"
    if draw(st.integers(0, 3)) == 0 and len(values["a"].shape) > 1:
        values["grad__a"] = (Shard(draw(st.integers(0, 1))),) * mesh.ndim
    values |= {"optimizer": name, "without": draw(st.sampled_from([None, None, "b"]))}
    return fields(mesh=mesh, **values, seed=draw(draws.seeds()))


@law(
    "module.optimizer[whole]",
    source=OPTIMIZER_DOC,
    control=CASES[0],
    draw=draw_fused,
    draws=4,
    cases=CASES,
    refusal="allowed",
    features=features_training,
    needs=NEEDS,
    weight=0.2,
)
def whole(
    parameters: Parameters,
    gradients: ThreeSteps,
    optimizer: Annotated[str, WordField(WHOLE)],
    options: str | None = None,
    then: Literal["plateau", "cycle"] | None = None,
):
    """Fused optimizers, those with rates that are tensors or that a schedule changes, and those that look at whole
    matrices, norms or the loss step sharded parameters as dense ones, whatever placements gradients have."""
    return take_steps(parameters, gradients, optimizer, options, then)


@whole.due
def _(parameters: list[Global], gradients, optimizer: str, options, then):
    want = take_steps(*dense_copies(parameters, gradients), optimizer, options, then)
    rounding = torch.bfloat16 if optimizer == "muon" else None

    def due(value: Any, parameter: Global) -> Any:
        if isinstance(value, torch.Tensor):
            return Claimed(value, parameter.mesh, exact=False, rounding=rounding)
        return value and Near(value)

    states = zip(want["state"], parameters, strict=True)
    return {
        "steps": [due_gradients(row, parameters, rounding) for row in want["steps"]],
        "rates": [Near(rate) for rate in want["rates"]],
        "state": [{key: due(value, parameter) for key, value in state.items()} for state, parameter in states],
    }
