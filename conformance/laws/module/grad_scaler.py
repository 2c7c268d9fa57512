"""The law of scaled losses: gradients of sharded parameters that overflow on one rank are noticed by all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import torch
from hypothesis import strategies as st
from torch import nn

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Near
from shardlaw.conformance.law.fields import WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import DTensorValue, FromCase
from shardlaw.conformance.laws.module.training import (
    NAMES,
    NEEDS,
    Parameters,
    arrive,
    claimed,
    copies,
    dense,
    gradients_of,
    kept,
    meshes,
)
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements

ODD = ("inf", "-inf", "nan")


def overflowing(case: Case) -> list[list[DTensorValue | None]]:
    """Gradients of three steps; in the second, one element of the parameter ``in`` is ``odd``."""
    rows, index = gradients_of(case, 3), [name for name in NAMES if name in case].index(case.get("in"))
    gradient = cast("DTensorValue", rows[1][index])
    full = gradient.full.clone()
    full.view(-1)[case.integer("at")] = float(WordField(ODD).parse(case.get("odd")))
    rows[1][index] = replace(gradient, full=full)
    return rows


def scaled_steps(parameters: Sequence[nn.Parameter], gradients: Any, device: str) -> list[dict[str, Any]]:
    """Steps under a scaler: the unscaled gradients, the scale that follows, and the parameters."""
    scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones((), device=device))
    stepping, steps = torch.optim.SGD(parameters, lr=0.5, foreach=False), []
    for row in gradients:
        arrive(parameters, row)
        scaler.unscale_(stepping)
        scaler.step(stepping)
        scaler.update()
        unscaled = [parameter.grad for parameter in parameters]
        steps.append({"unscaled": unscaled, "scale": scaler.get_scale(), "parameters": copies(parameters)})
    return steps


@st.composite
def draw_scaled(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, first = draw(st.sampled_from(meshes(limits))), draw(shapes(min_dims=1, max_dims=2, min_size=1))
    at = draw(placements(mesh, len(first), kinds=("R", "S", "S")))
    second = draw(shapes(min_dims=1, max_dims=2, min_size=1))
    beside = draw(placements(mesh, len(second), kinds=("R", "S", "S")))
    specs: dict[str, Any] = {"a": TensorSpec(first, at, "float64"), "b": TensorSpec(second, beside, "float64")}
    name = draw(st.sampled_from(sorted(specs)))
    place = draw(st.integers(0, math.prod(specs[name].shape) - 1))
    return fields(mesh=mesh, **specs, odd=draw(st.sampled_from(ODD)), in_=name, at=place, seed=draw(draws.seeds()))


def features_scaled(case: Case) -> set[str]:
    lie = {str(case.tensor(name).placements) for name in NAMES if name in case}
    return {"module", "scaled-loss", "repeated", "edge"} | ({"unlike-placements"} if len(lie) > 1 else set())


@law(
    "module.scaled",
    source=(
        "torch.amp docs, GradScaler: unscale_, step and update; torch.optim: a DTensor takes part as its dense "
        "tensor would"
    ),
    control="mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=a at=0",
    draw=draw_scaled,
    draws=9,
    # the overflow with the first and with the last rank, alone; and in one of two parameters that lie differently
    sweep=texts(
        "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=a at=0",
        "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=a at=11",
        "mesh=2 a=4x3:S(0):float64 b=5:R:float64 odd=inf in=a at=4",
        "mesh=2 a=4x3:R:float64 b=5:S(0):float64 odd=inf in=b at=4",
        "mesh=2x2 a=4x3:S(0),S(1):float64 b=5:R,S(0):float64 odd=-inf in=b at=2",
    ),
    sweeps=5,
    features=features_scaled,
    needs=NEEDS,
    weight=0.1,
)
def scaled(parameters: Parameters, gradients: Annotated[list[Any], FromCase(overflowing, "in", "at", "odd")]):
    """A gradient that overflows in the shard of one rank is noticed by all: the step is left out and the scale is
    lowered."""
    return {"steps": scaled_steps(parameters, gradients, parameters[0].device.type)}


@scaled.due
def _(parameters: list[Global], gradients):
    def lie(step: dict[str, Any]) -> dict[str, Any]:
        unscaled, whole = claimed(step["unscaled"], parameters), kept(step["parameters"], parameters)
        return {"unscaled": unscaled, "scale": Near(step["scale"]), "parameters": whole}

    return {
        "steps": [lie(step) for step in scaled_steps(*dense(parameters, gradients), parameters[0].full.device.type)]
    }
