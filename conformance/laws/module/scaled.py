"""Laws of gradients that were scaled: an infinity on one rank is found by all, what is finite is scaled back and stepped with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.laws.module.given import near_dtensor
from conformance.laws.module.training import MESHES, NAMES, features_training, placed, value
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.placement import Partial, Placements
from reference.placement import Replicate as R
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

SCALE, RATE = 8.0, 0.5


def wholes(case: Case) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The parameters by name, each with its gradient as it comes out of the backward pass; ``bad=NAME:AT`` is no finite number."""
    found = {}
    for name in filter(case.__contains__, NAMES):
        x = given(case, name)
        grad = SCALE * value(case, name, x.layout.shape, 1).to(x.full.dtype)
        if case.get("bad", "").startswith(f"{name}:"):
            grad.view(-1)[int(case.get("bad").partition(":")[2])] = float(case.get("what"))
        found[name] = value(case, name, x.layout.shape, 0).to(x.full.dtype), grad
    return found


def grad_placements(case: Case, name: str) -> Placements:
    return case.placements(f"grad.{name}") if f"grad.{name}" in case else given(case, name).layout.placements


def check_scaled(case: Case, here: Here) -> None:
    """Gradients are scaled back and stepped with where all are finite, on every rank; where one is not, no rank steps, and all back off."""
    here.mesh(case.mesh())
    if here.coord(case.mesh()) is None:
        return
    finite, dense, live = "bad" not in case, wholes(case), {}
    for name, (whole, grad) in dense.items():
        x = given(case, name)
        live[name] = nn.Parameter(placed(here, whole, x, x.layout.placements))
        live[name].grad = placed(here, grad, x, grad_placements(case, name), case.seed)
    scaler = torch.amp.GradScaler(here.device.type, init_scale=SCALE, growth_interval=1)
    scaler.scale(here.tensor(torch.ones(())))
    optimizer = torch.optim.SGD(list(live.values()), lr=RATE)
    scaler.unscale_(optimizer)
    for name, (_, grad) in dense.items() if finite else ():
        near_dtensor(here, live[name].grad, grad / SCALE, "unscaled", f"the gradient of {name}", grad_placements(case, name))
    if not pending(case):
        scaler.step(optimizer)
        for name, (whole, grad) in dense.items():
            due = whole - RATE * grad / SCALE if finite else whole
            near_dtensor(here, live[name], due, "step", name, given(case, name).layout.placements)
    scaler.update()
    due_scale = SCALE * (2 if finite else 0.5)
    scale = scaler.get_scale()
    here.require(scale == due_scale, "wrong-value", "scale", "the scale afterwards", due_scale, scale)


def pending(case: Case) -> bool:
    return any(isinstance(at, Partial) for name in NAMES if name in case for at in grad_placements(case, name))


def features_scaled(case: Case) -> set[str]:
    found = features_training(case) | ({"non-finite"} if "bad" in case else set())
    places = {grad_placements(case, name) for name in NAMES if name in case}
    return found | ({"unlike-placements"} if len(places) > 1 else set())


def draw_scaled(limits: Limits) -> SearchStrategy[Case]:
    on = [mesh for mesh in map(Mesh.parse, MESHES) if mesh.size <= limits.world_size for _ in range(MESHES[str(mesh)])]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, first = draw(st.sampled_from(on)), None
        fields: dict[str, Any] = {}
        alike = draw(st.integers(0, 3)) < 3
        for name in NAMES[: draw(st.sampled_from([1, 2, 2, 3]))]:
            shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
            at = first if first and alike else draw(placements(mesh, 1, kinds=("R", "S", "S")))
            first = first or at
            fields[name] = TensorSpec(shape, at, draw(st.sampled_from(["float64", "float32"])))
        more: dict[str, Any] = {}
        if draw(st.integers(0, 1)):
            name = draw(st.sampled_from(list(fields)))
            more = {
                "bad": f"{name}:{draw(st.integers(0, math.prod(fields[name].shape) - 1))}",
                "what": draw(st.sampled_from(["inf", "-inf", "nan"])),
            }
        if alike and all(at == R() for at in first or ()) and "bad" not in more and draw(st.booleans()):
            more |= {f"grad__{name}": (Partial("sum"),) + (R(),) * (mesh.ndim - 1) for name in fields}
        return Case.of("module.scaled", mesh=mesh, **fields, **more, seed=draw(draws.seeds()))

    return case()


def script_scaled(case: Case) -> Script:
    finite, dense = "bad" not in case, wholes(case)
    body = [f"mesh = {scripts.mesh(case.mesh())}", "parameters = []"]
    constants: list[str] = []
    for name, (whole, grad) in dense.items():
        constants += [f"{name.upper()} = {scripts.tensor(whole)}", f"GRAD_{name.upper()} = {scripts.tensor(grad)}"]
        at, grad_at = scripts.placements(given(case, name).layout.placements), scripts.placements(grad_placements(case, name))
        body += [f"p = torch.nn.Parameter(distribute_tensor({name.upper()}, mesh, {at}))"]
        body += [f"p.grad = distribute_tensor(GRAD_{name.upper()}, mesh, {at}).redistribute(mesh, {grad_at})", "parameters.append(p)"]
    body += [
        f'scaler = torch.amp.GradScaler("cpu", init_scale={SCALE}, growth_interval=1)',
        "scaler.scale(torch.ones(()))",
        "scaler.unscale_(torch.optim.SGD(parameters))",
        "scaler.update()",
    ]
    return scripts.compared(
        case, body, "scaler.get_scale()", dict.fromkeys(sorted(case.mesh().ranks), SCALE * (2 if finite else 0.5)), constants=constants
    )


LAWS = (
    Law(
        id="module.scaled",
        clause="Gradients are scaled back where all are finite; one that is not, on any rank, keeps every rank from stepping.",
        source="torch.amp docs, GradScaler.unscale_, step and update; torch.distributed.tensor docs: as its dense tensor would",
        check=check_scaled,
        script=script_scaled,
        features=features_scaled,
        control="module.scaled mesh=2 a=4x2:S(0):float64 bad=a:0 what=inf",
        planted="infinities_are_forgotten",
        draw=draw_scaled,
        draws=12,
        needs=("all_gather", "all_reduce"),
        weight=0.1,
    ),
)
