"""Models and optimizers of checkpoint cases, as the laws on optimizers build and judge them.

The model of a case has one parameter for each tensor of floats and one buffer for each other, every second one inside a
submodule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.calls import poison
from shardlaw.conformance.rank.context import RankContext
from shardlaw.reference import simulate

RATES = (0.5, 0.25, 0.125)
OTHER_RATES = (0.75, 0.875, 0.375)
INNER = "inner."


class Model(nn.Module):
    """The first tensor and every second one after it at the top, the others in ``inner``; those in ``frozen`` are not
    trained."""

    def __init__(self, tensors: dict[str, Any], frozen: Sequence[str] = ()) -> None:
        super().__init__()
        self.inner = nn.Module()
        for at, (name, tensor) in enumerate(tensors.items()):
            home = self.inner if at % 2 else self
            if tensor.dtype.is_floating_point:
                home.register_parameter(name, nn.Parameter(tensor, requires_grad=name not in frozen))
            else:
                home.register_buffer(name, tensor)


def model_of(trip: t.Trip, here: RankContext, end: t.End, *, poisoned: bool, frozen: Sequence[str] = ()) -> Model:
    """The model of one end, on this rank."""
    put = poison if poisoned else torch.clone
    return Model({name: t.placed(here, end, name, trip.due(end, name), put) for name in trip.values}, frozen)


def frozen_of(trip: t.Trip) -> list[str]:
    """The last one of several parameters."""
    return [name for name, full in trip.values.items() if full.dtype.is_floating_point][1:][-1:]


def names_in_model(trip: t.Trip) -> dict[str, str]:
    """The name in the model of each tensor of a case."""
    return {name: f"{INNER}{name}" if at % 2 else name for at, name in enumerate(trip.values)}


def judge_model(trip: t.Trip, here: RankContext, end: t.End, model: Model, check: str) -> None:
    """Every parameter and buffer holds what was saved."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, path in names_in_model(trip).items():
        tensor = held[path].data if isinstance(held[path], nn.Parameter) else held[path]
        t.judge_tensor(here, tensor, trip.due(end, name), end.layout(name), place=path, check=check)


def optimizer_of(model: Model, rates: tuple[float, ...]) -> torch.optim.Optimizer:
    """Adam with a group for each trainable parameter, whose averages of small whole numbers are exact."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [parameter], "lr": rates[at % len(rates)]} for at, parameter in enumerate(trained)]
    return torch.optim.Adam(groups, betas=(0.5, 0.5), foreach=False)


def trained_of(trip: t.Trip, model: Model) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters, by the name of their tensor in the case."""
    held = dict(model.named_parameters())
    return [
        (name, held[path]) for name, path in names_in_model(trip).items() if path in held and held[path].requires_grad
    ]


def judge_optimizer(
    trip: t.Trip, here: RankContext, end: t.End, model: Model, optimizer: Any, *, check: str, steps: int = 1
) -> None:
    """Averages are halves of the gradient and of its square, as after one step; so many ``steps`` are counted; each
    group has its rate."""
    for at, (name, parameter) in enumerate(trained_of(trip, model)):
        rate = optimizer.param_groups[at]["lr"]
        want = RATES[at % len(RATES)]
        here.require(
            float(rate) == want, "wrong-value", check, f"the rate of {name} is {rate}, must be {want}", want, rate
        )
        held = optimizer.state.get(parameter, {})
        step = held.get("step")
        value = step.to_local() if isinstance(step, DTensor) else step
        counted = value is not None and float(value) == steps
        here.require(counted, "wrong-value", check, f"the step of {name} is {value}, must be {steps}", steps, value)
        grad = trip.due(end, name)
        for key, full in (("exp_avg", grad / 2), ("exp_avg_sq", grad * grad / 2)):
            if here.require(key in held, "wrong-metadata", check, f"the state of {name} has no {key}", key, [*held]):
                t.judge_tensor(here, held[key], full, end.layout(name), place=f"{key} of {name}", check=check)


def judge_model_unchanged(trip: t.Trip, here: RankContext, end: t.End, model: Model) -> None:
    """Loading the state of an optimizer leaves the parameters of its model alone."""
    for name, parameter in trained_of(trip, model):
        layout = end.layout(name)
        coord = here.coord(layout.mesh) if layout else None
        full = poison(trip.due(end, name))
        if layout is None or coord is not None:
            local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
            here.same(
                local,
                simulate.take(full, layout, coord) if layout and coord is not None else full,
                "parameters",
                what=name,
            )
