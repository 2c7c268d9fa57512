"""The law of scaled losses: gradients of sharded parameters that overflow on one rank are noticed by all of them."""

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
from conformance.laws.module.training import MESHES, NAMES, NEEDS, arrive, judge_all, parameters, placed
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

SCALE = 4.0
ODD = ("inf", "-inf", "nan")


def overflow(case: Case, here: Here, dense: list[nn.Parameter], live: list[nn.Parameter]) -> None:
    """Put into the gradient of one parameter the one element that the case names, on the ranks that hold it."""
    name, at = case.get("in"), case.integer("at")
    index = [one for one in NAMES if one in case].index(name)
    x, whole = given(case, name), dense[index]
    assert whole.grad is not None
    grad = whole.grad.clone()
    grad.view(-1)[at] = float(case.get("odd"))
    whole.grad, live[index].grad = grad, placed(here, grad, x, x.layout.placements)


def check_scaled(case: Case, here: Here) -> None:
    """Three steps: the second, whose gradient overflows, is left out by all ranks and lowers the scale, as for dense parameters."""
    dense, live = parameters(case, here)
    pairs: list[tuple[Any, Any, list[nn.Parameter]]] = []
    for of in (live, dense):
        device = of[0].device.type
        scaler: Any = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=1)
        scaler.scale(torch.ones((), device=device))
        pairs.append((scaler, torch.optim.SGD(of, lr=0.5, foreach=False), of))
    for step in range(3):
        arrive(case, here, dense, live, step)
        if step == 1:
            overflow(case, here, dense, live)
        for scaler, optimizer, _ in pairs:
            scaler.unscale_(optimizer)
        judge_all(here, case, dense, live, f"unscaled-{step}", grads=True)
        for scaler, optimizer, _ in pairs:
            scaler.step(optimizer)
            scaler.update()
        got, want = (scaler.get_scale() for scaler, _, _ in pairs)
        here.require(math.isclose(got, want), "wrong-value", f"scale-{step}", "the scale is another than of dense parameters", want, got)
        judge_all(here, case, dense, live, f"step-{step}", grads=False)


def draw_scaled(limits: Limits) -> SearchStrategy[Case]:
    on = [mesh for mesh in map(Mesh.parse, MESHES) if mesh.size <= limits.world_size for _ in range(MESHES[str(mesh)])]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, first = draw(st.sampled_from(on)), draw(shapes(min_dims=1, max_dims=2, min_size=1))
        at = draw(placements(mesh, len(first), kinds=("R", "S", "S")))
        second = draw(shapes(min_dims=len(first), max_dims=2, min_size=1))
        # torch looks at where the first of the list lies: one that lies otherwise is in the sweep
        specs: dict[str, Any] = {"a": TensorSpec(first, at, "float64"), "b": TensorSpec(second, at, "float64")}
        name = draw(st.sampled_from(sorted(specs)))
        place = draw(st.integers(0, math.prod(specs[name].shape) - 1))
        fields: dict[str, Any] = {"odd": draw(st.sampled_from(ODD)), "in": name, "at": place}
        return Case.of("module.scaled", mesh=mesh, **specs, **fields, seed=draw(draws.seeds()))

    return case()


def sweep_scaled(limits: Limits) -> list[Case]:
    """The overflow with the first and with the last rank, alone; and in one of two parameters that lie otherwise."""
    lies = [("4x3:S(0)", "5:S(0)", "a", at) for at in (0, 11)]
    lies += [("4x3:S(0)", "5:R", "a", 4), ("4x3:R", "5:S(0)", "b", 4)]
    cases = []
    for a, b, name, at in lies:
        fields: dict[str, Any] = {"a": f"{a}:float64", "b": f"{b}:float64", "odd": "inf", "in": name, "at": at}
        cases.append(Case.of("module.scaled", mesh="2", **fields))
    return [case for case in cases if case.world <= limits.world_size]


def features_scaled(case: Case) -> set[str]:
    lie = {str(case.tensor(name).placements) for name in NAMES if name in case}
    return {"module", "scaled-loss", "repeated"} | ({"unlike-placements"} if len(lie) > 1 else set())


def script_scaled(case: Case) -> Script:
    name, at, odd = case.get("in"), case.integer("at"), case.get("odd")
    index = [one for one in NAMES if one in case].index(name)
    body = [f"mesh = {scripts.mesh(case.mesh())}", "dense, live = [], []"]
    for number, one in enumerate(filter(case.__contains__, NAMES)):
        x = given(case, one)
        put = scripts.placements(x.layout.placements)
        body += [f"full = torch.ones({x.layout.shape}, dtype=torch.float64)", "grad = full.clone()"]
        body += [f'grad.view(-1)[{at}] = float("{odd}")'] if number == index else []
        body += ["dense.append(torch.nn.Parameter(full.clone()))", "dense[-1].grad = grad.clone()"]
        body += [f"live.append(torch.nn.Parameter(distribute_tensor(full, mesh, {put})))"]
        body += [f"live[-1].grad = distribute_tensor(grad, mesh, {put})"]
    body += ["scales = []", "for of in (dense, live):"]
    lines = (f"scaler = torch.amp.GradScaler(mesh.device_type, init_scale={SCALE})", "scaler.scale(torch.ones(()))",
             "optimizer = torch.optim.SGD(of, lr=0.5, foreach=False)", "scaler.unscale_(optimizer)", "scaler.step(optimizer)",
             "scaler.update()", "scales.append(scaler.get_scale())")  # fmt: skip
    body += [f"    {line}" for line in lines]
    return scripts.script([*body, "return scales[0], scales[1]"], world=case.world)


LAWS = (
    Law(
        id="module.scaled",
        clause="A gradient that overflows in the shard of one rank is noticed by all: the step is left out and the scale is lowered.",
        source="torch.amp docs, GradScaler: unscale_, step and update; torch.optim: a DTensor takes part as its dense tensor would",
        check=check_scaled,
        script=script_scaled,
        features=features_scaled,
        control="module.scaled mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 odd=inf in=a at=0",
        planted="overflow_stays_on_its_rank",
        draw=draw_scaled,
        draws=6,
        sweep=sweep_scaled,
        sweeps=4,
        needs=NEEDS,
        weight=0.1,
    ),
)
