"""A law of pipelines whose stages are of other kinds than layer after layer.

Fields of a case: ``kind`` says what the stages are, ``schedule`` in which order they run, ``chunks`` how many
microbatches there are. Kinds ``thawed``, whose first stage is frozen in the first step alone, and ``hook-input`` take
two steps, of which the second is judged. ``scaled`` says that gradients are divided by that number, as those of a mean
are. With ``given`` every stage is given a tensor by keyword that is cut into microbatches, too, and asks for a
gradient.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.nn.functional import mse_loss

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank, Seed
from shardlaw.conformance.laws.module.arguments import FromCase, ModuleCall
from shardlaw.conformance.laws.module.pipelined import DOC, WIDTH, batch, learned, place_of, schedule_class
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.modules import build_model

OwnKind = Literal["thawed", "hook-inside", "hook-input", "alone", "returned", "function"]
Kind = Literal["plain", "frozen", "tied", "in-place", "sums", "factors", "pair", "mask", OwnKind]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
CASES = (
    "mesh=2 schedule=gpipe chunks=2 kind=plain",
    "mesh=2 schedule=gpipe chunks=2 kind=frozen",
    "mesh=2 schedule=interleaved chunks=2 kind=frozen",
    "mesh=2 schedule=zero-bubble chunks=4 kind=frozen",
    "mesh=2 schedule=interleaved chunks=2 kind=tied scaled=0",
    "mesh=2 schedule=interleaved chunks=2 kind=tied",
    "mesh=2 schedule=gpipe chunks=2 kind=in-place",
    "mesh=2 schedule=1f1b chunks=2 kind=sums",
    "mesh=2 schedule=zero-bubble chunks=4 kind=sums",
    "mesh=2 schedule=gpipe chunks=2 kind=factors",
    "mesh=2 schedule=zero-bubble chunks=4 kind=factors",
    "mesh=2 schedule=1f1b chunks=2 kind=pair",
    "mesh=2 schedule=zero-bubble chunks=4 kind=pair",
    "mesh=2 schedule=gpipe chunks=3 kind=mask",
    "mesh=2 schedule=interleaved chunks=2 kind=plain given=1 scaled=0",
    "mesh=2 schedule=zero-bubble chunks=4 kind=plain given=1 scaled=0",
    "mesh=2 schedule=gpipe chunks=2 kind=hook-inside",
    "mesh=2 schedule=zero-bubble chunks=4 kind=hook-inside",
    "mesh=2 schedule=gpipe chunks=2 kind=hook-input",
    "mesh=2 schedule=gpipe chunks=2 kind=returned",
    "mesh=2 schedule=1f1b chunks=2 kind=alone",
    "mesh=2 schedule=zero-bubble chunks=4 kind=alone",
    "mesh=2 schedule=gpipe chunks=2 kind=thawed",
    "mesh=2 schedule=zero-bubble chunks=4 kind=function",
)


class Product(torch.autograd.Function):
    """The product with a vector."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum(0)


class OddStage(nn.Module):
    """A linear layer, and what its kind says: it begins in place, uses parameters more than once, has a hook that
    doubles a gradient or a function of its own, or gives two results, of which the other was made from the first, is
    a mask, or comes from a parameter ``alone``; of kind ``returned`` it is the parameter."""

    def __init__(self, width: int, bias: bool, kind: str, last: bool) -> None:
        super().__init__()
        self.kind, self.last = kind, last
        self.net = nn.Linear(width, width, bias)
        if kind == "pair":
            self.other = nn.Linear(width, width, bias)
        if kind in ("factors", "alone", "returned", "function"):
            self.factor = nn.Parameter(torch.empty(width))
        if kind == "sums":
            self.first = nn.ParameterList(torch.empty(width) for _ in range(4))
            self.second = nn.ParameterList(torch.empty(width) for _ in range(4))

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> Any:
        if self.kind == "in-place":
            x = x.relu_()
        if self.kind == "sums":
            for first, second in zip(self.first, self.second, strict=True):
                x = (x + second) + (first + second)
        if self.kind == "factors":
            return self.net(x * self.factor.exp()) * self.factor.sigmoid()
        out = self.net(x)
        if self.kind == "pair":
            out = out if beside is None else out + beside
            return out * self.other(out) if self.last else (out, self.other(out))
        if self.kind == "mask":
            chosen = x > 0 if beside is None else ~beside
            return out * chosen if self.last else (out, chosen)
        if self.kind == "alone":
            out = out if beside is None else out * beside
            return out if self.last else (out, self.factor * 2)
        if self.kind == "returned":
            return out * self.factor, self.factor
        if self.kind == "function":
            return Product.apply(out, self.factor)
        hooked = {"hook-inside": out, "hook-input": x}.get(self.kind)
        if hooked is not None and hooked.requires_grad:
            hooked.register_hook(lambda grad: 2 * grad)
        return out if scale is None else out * scale


class OddStages(nn.Module):
    """Stages one after the other. The first one of kind ``frozen`` asks for no gradients, that of kind ``in-place``
    leaves its input as it is; of kind ``tied``, stages that go round to the same rank have one weight, and of kind
    ``factors`` and ``returned`` the last one alone has factors."""

    def __init__(self, sizes: tuple[int, ...], bias: bool, kind: str) -> None:
        super().__init__()
        width, count, ranks = sizes
        plain = {"in-place": range(1), "factors": range(count - 1), "returned": range(count - 1)}.get(kind, ())
        stages = [
            OddStage(width, bias, "plain" if number in plain else kind, number == count - 1) for number in range(count)
        ]
        if kind == "frozen":
            stages[0].requires_grad_(False)
        for number in range(ranks, count) if kind == "tied" else ():
            stages[number].net.weight = stages[number % ranks].net.weight
        self.stages = nn.ModuleList(stages)


def first_of(results: Any) -> Any:
    return results[0] if isinstance(results, tuple) else results


def loss_of(results: Any, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(first_of(results), target)


def read_odd_stages(case: Case) -> ModuleCall:
    (ranks,) = case.mesh().shape
    count = ranks * (1 if case.get("schedule") in ("gpipe", "1f1b") else 2)
    return ModuleCall(build_model, (OddStages, (WIDTH, count, ranks), True, case.seed), {"kind": case.get("kind")})


@law(
    "module.pipeline-stages",
    source=f"{DOC}, PipelineStage: any module that takes and gives tensors; schedules: scale_grads",
    control=CASES[0],
    cases=CASES,
    features=lambda case: {"module", "backward", f"way:{case.get('schedule')}"},
    needs=("p2p",),
    weight=0.2,
)
def pipeline_stages(
    model: Annotated[Any, FromCase(read_odd_stages, "schedule", "kind")],
    mesh: NamedMesh,
    schedule: Schedule,
    chunks: int,
    kind: Kind,
    seed: Seed,
    scaled: bool = True,
    given: bool = False,
):
    """Stages of any kind, frozen ones, also for a while, ones that have a weight in common, change their input in
    place, use a parameter several times, have hooks or functions of their own, give a second tensor, also a parameter,
    or take one by keyword, have in a pipeline the outputs, the losses and the gradients, those of what they are given
    too, that they have one after the other."""
    from torch.distributed import pipelining

    count, device, place = len(model.stages), torch.device(mesh.device_type), mesh.get_local_rank()
    own = [number for number in range(count) if place_of(number, mesh.size(), schedule) == place]
    stages: Any = [
        pipelining.PipelineStage(model.stages[number], number, count, device, group=mesh.get_group()) for number in own
    ]
    if schedule in ("gpipe", "1f1b"):
        (stages,) = stages
    pipeline = schedule_class(schedule)(stages, chunks, loss_of, scale_grads=scaled)
    x, target = batch(chunks, 0, seed, mesh.device_type)
    scale = batch(chunks, 1, seed, mesh.device_type)[0].requires_grad_()
    losses: list[Any] = []
    for step in range(2 if kind in ("thawed", "hook-input") else 1):
        model.zero_grad()
        if kind == "thawed":
            model.stages[0].requires_grad_(step == 1)
        out = pipeline.step(
            *([x] if 0 in own else []),
            **({"scale": scale} if given else {}),
            **({"target": target, "losses": losses} if count - 1 in own else {}),
        )
    return {
        "output": first_of(out),
        "losses": losses,
        "learned": learned([model.stages[number] for number in own]),
        "given": scale.grad,
    }


@pipeline_stages.due
def _(model, mesh: Mesh, schedule: str, chunks: int, kind: str, seed: int, scaled: bool, given: bool, rank: Rank):
    count, ((ranks,), (place,)) = len(model.stages), (mesh.shape, mesh.coord(rank) or (0,))
    places = [place_of(number, ranks, schedule) for number in range(count)]
    own = [number for number in range(count) if places[number] == place]
    x, target = batch(chunks, 0, seed)
    scales = [batch(chunks, 1, seed)[0].requires_grad_() for _ in range(ranks)]
    results, losses = [], []
    for number, (part, wanted) in enumerate(zip(x.tensor_split(chunks), target.tensor_split(chunks), strict=True)):
        passed: Any = (part,)
        for stage, at in zip(model.stages, places, strict=True):
            keywords = {"scale": scales[at].tensor_split(chunks)[number]} if given else {}
            result = stage(*passed, **keywords)
            passed = result if isinstance(result, tuple) else (result,)
        results.append(passed[0])
        losses.append(loss_of(passed, wanted))
    total = torch.stack(losses).sum()
    (total / chunks if scaled else total).backward()
    is_last, grad = count - 1 in own, scales[place].grad
    stages = learned([model.stages[number] for number in own])
    return {
        "output": Near(torch.cat(results).detach()) if is_last else None,
        "losses": [Near(loss.detach()) for loss in losses] if is_last else [],
        "learned": [
            {name: None if value is None else Near(value) for name, value in stage.items()} for stage in stages
        ],
        "given": None if grad is None else Near(grad),
    }
