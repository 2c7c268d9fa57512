"""The law of scaled losses: every rank skips the step if the gradient of one rank's shard overflows.

Fields of a case: ``odd`` is the element at the position ``at`` of the gradient of parameter ``in`` in the second step,
``growth`` after how many steps the scale grows, ``apart`` whether each parameter has an optimizer of its own, and
``plain`` whether ranks train their shards as plain tensors under FSDP's scaler, which shares what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Near
from shardlaw.conformance.law.fields import Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import DTensorValue, FromCase
from shardlaw.conformance.laws.module.training import (
    NAMES,
    NEEDS,
    Parameters,
    copied,
    dense_copies,
    due_gradients,
    due_parameters,
    meshes,
    read_gradients,
    set_gradients,
)
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements

ODD = ("inf", "-inf", "nan")


def read_overflowing_gradients(case: Case) -> list[list[DTensorValue | None]]:
    """The gradients of three steps. In the second step, the element at the position ``at`` of the gradient of parameter
    ``in`` is ``odd``."""
    rows, index = read_gradients(case, 3), [name for name in NAMES if name in case].index(case.get("in"))
    gradient = cast("DTensorValue", rows[1][index])
    full = gradient.full.clone()
    full.view(-1)[case.integer("at")] = float(WordField(ODD).parse(case.get("odd")))
    rows[1][index] = replace(gradient, full=full)
    return rows


# Plain torch, for acts


def run_scaled_steps(scaler: Any, parameters: Sequence[nn.Parameter], gradients: Any, apart: bool) -> list[Any]:
    """Steps under a scaler: for each the unscaled gradients, the next scale, and the parameters."""
    scaler.scale(torch.ones((), device=parameters[0].device))
    optims = [
        torch.optim.SGD(some, lr=0.5, foreach=False)
        for some in ([[one] for one in parameters] if apart else [parameters])
    ]
    steps = []
    for row in gradients:
        set_gradients(parameters, row)
        for optim in optims:
            scaler.unscale_(optim)
            scaler.step(optim)
        scaler.update()
        unscaled = [parameter.grad for parameter in parameters]
        steps.append({"unscaled": unscaled, "scale": scaler.get_scale(), "parameters": copied(parameters)})
    return steps


def run_plain_steps(scaler: Any, parameters: Sequence[Any], gradients: Any, apart: bool) -> list[Any]:
    """The same of the shards of this rank, as tensors that have them."""
    shards = [nn.Parameter(parameter.to_local().detach().clone()) for parameter in parameters]
    steps = run_scaled_steps(scaler, shards, [[one.to_local() for one in row] for row in gradients], apart)
    for step in steps:
        for name in ("unscaled", "parameters"):
            step[name] = [
                DTensor.from_local(
                    shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
                for shard, p in zip(step[name], parameters, strict=True)
            ]
    return steps


@st.composite
def draw_scaled(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, first = draw(st.sampled_from(meshes(limits))), draw(shapes(min_dims=1, max_dims=2, min_size=1))
    first_placements = draw(placements(mesh, len(first), kinds=("R", "S", "S")))
    second = draw(shapes(min_dims=1, max_dims=2, min_size=1))
    second_placements = draw(placements(mesh, len(second), kinds=("R", "S", "S")))
    specs: dict[str, Any] = {
        "a": TensorSpec(first, first_placements, "float64"),
        "b": TensorSpec(second, second_placements, "float64"),
    }
    name = draw(st.sampled_from(sorted(specs)))
    position = draw(st.integers(0, math.prod(specs[name].shape) - 1))
    return fields(mesh=mesh, **specs, odd=draw(st.sampled_from(ODD)), in_=name, at=position, seed=draw(draws.seeds()))


def features_scaled(case: Case) -> set[str]:
    together = "apart" not in case and "plain" not in case  # one call is given DTensors of several placements
    layouts = {str(case.tensor(name).placements) for name in NAMES if name in case and together}
    return {"module", "scaled-loss", "repeated", "edge"} | ({"unlike-placements"} if len(layouts) > 1 else set())


@law(
    "module.scaled",
    source=(
        "torch.amp docs, GradScaler: unscale_, step and update; docstring of ShardedGradScaler; torch.optim: a DTensor "
        "takes part as its dense tensor would"
    ),
    control="mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=a at=0",
    draw=draw_scaled,
    draws=9,
    # only the first or only the last rank overflows; and in one of two parameters with different placements
    cases=(
        "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=a at=0",
        "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=a at=11",
        "mesh=2 a=4x3:S(0):float64 b=5:R:float64 odd=inf in=a at=4",
        "mesh=2 a=4x3:R:float64 b=5:S(0):float64 odd=inf in=b at=4",
        "mesh=2x2 a=4x3:S(0),S(1):float64 b=5:R,S(0):float64 odd=-inf in=b at=2",
        "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=b at=4 growth=2",
        "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=nan in=b at=4 apart=1",
        "mesh=3 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=a at=11 plain=1",
        "mesh=2@1,2 a=4x3:S(0):float64 b=5:S(0):float64 odd=nan in=b at=4 plain=1 growth=2",
        "mesh=2@1,2 a=4x3:S(0):float64 b=5:R:float64 odd=inf in=b at=0 plain=1 apart=1",
    ),
    features=features_scaled,
    needs=NEEDS,
    weight=0.1,
)
def scaled(
    parameters: Parameters,
    gradients: Annotated[list[Any], FromCase(read_overflowing_gradients, "in", "at", "odd")],
    growth: int = 1,
    apart: bool = False,
    plain: bool = False,
):
    """If a gradient overflows in the shard of one rank, every rank skips the step of its optimizer and lowers the
    scale, which grows after as many steps as it was told without an overflow."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    first: Any = parameters[0]
    options: dict[str, Any] = {"device": first.device.type, "init_scale": 4.0, "growth_interval": growth}
    if not plain:
        return {"steps": run_scaled_steps(torch.amp.GradScaler(**options), parameters, gradients, apart)}
    if first.device_mesh.get_coordinate() is None:
        return {}
    scaler = ShardedGradScaler(**options, process_group=first.device_mesh.get_group())
    return {"steps": run_plain_steps(scaler, parameters, gradients, apart)}


@scaled.due
def _(parameters: list[Global], gradients, growth: int, apart: bool, plain: bool, rank: Rank):
    def due(step: dict[str, Any]) -> dict[str, Any]:
        return {
            "unscaled": due_gradients(step["unscaled"], parameters),
            "scale": Near(step["scale"]),
            "parameters": due_parameters(step["parameters"], parameters),
        }

    if plain and rank not in parameters[0].mesh.ranks:
        return {}
    scaler = torch.amp.GradScaler(parameters[0].full.device.type, init_scale=4.0, growth_interval=growth)
    return {"steps": [due(step) for step in run_scaled_steps(scaler, *dense_copies(parameters, gradients), apart)]}
