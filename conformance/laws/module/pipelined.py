"""The law of schedules of pipelines: a model that is split over ranks is trained as the whole one.

Fields of a case: ``chunks`` is the number of microbatches, ``schedule`` in which order the stages run, ``mode`` that of
their norms: in ``train`` their statistics are updated. ``within`` says what the last mesh dim does in each stage: data
parallelism (``ddp``, ``fsdp``) or tensor parallelism (``tensor``).
``kept`` says that gradients are added up over the steps, ``turned`` that stages give what lies transposed in memory,
``once`` that there is one step.
``evaluated`` says what comes beside them: afterwards the whole is evaluated by the same schedule without targets
(``alike``), or by one without a loss, twice, with the same rows (``again``) or the second time with fewer (``fewer``);
or it is evaluated with targets after each of them, before its gradients are used (``between``), or before the first
(``first``).
``divided`` says that the microbatches are given, ``deferred`` that gradients are finalized by the last step alone,
``option`` what the schedule is told of stages that are active, sends, gathers and reductions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank, Seed
from shardlaw.conformance.laws.module.arguments import FromCase, ModuleCall
from shardlaw.conformance.laws.shared.newer import is_unsupported, require_options
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.modules import build_model, eighths

DOC = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"
Schedule = Literal["gpipe", "1f1b", "loops", "interleaved", "zero-bubble", "v", "dual-v"]
Within = Literal["alone", "ddp", "fsdp", "tensor"]
Evaluated = Literal["alike", "again", "fewer", "between", "first"]
Option = Literal["active", "waits", "ahead", "sends"]
WIDTH, STEPS = 4, 2
SCHEDULE_CASES = (
    *(f"mesh=2 schedule={schedule} chunks=4" for schedule in get_args(Schedule)),
    "mesh=3 schedule=1f1b chunks=5",
    "mesh=2 schedule=gpipe chunks=3 mode=train",
    "mesh=2 schedule=v chunks=4 mode=train",
    "mesh=3 schedule=interleaved chunks=3 mode=train",
    "mesh=2x2 schedule=gpipe chunks=3 within=ddp",
    "mesh=2x2 schedule=1f1b chunks=4 within=ddp",
    "mesh=2x2 schedule=gpipe chunks=3 within=fsdp",
    "mesh=2x2 schedule=loops chunks=4 within=fsdp",
    "mesh=2x2 schedule=v chunks=4 within=fsdp",
    "mesh=2x2 schedule=1f1b chunks=3 within=tensor",
    "mesh=2x2 schedule=zero-bubble chunks=4 within=tensor",
    "mesh=2 schedule=gpipe chunks=3 kept=1",
    "mesh=2x2 schedule=1f1b chunks=4 within=fsdp kept=1",
    "mesh=2 schedule=gpipe chunks=1 kept=1",
    "mesh=2 schedule=gpipe chunks=2 turned=1",
    "mesh=2 schedule=gpipe chunks=2 evaluated=alike",
    "mesh=2 schedule=gpipe chunks=2 evaluated=fewer",
    "mesh=2 schedule=gpipe chunks=2 evaluated=again",
    "mesh=2 schedule=gpipe chunks=1 evaluated=between",
    "mesh=2 schedule=gpipe chunks=2 evaluated=between",
    "mesh=2 schedule=interleaved chunks=2 evaluated=between",
    "mesh=2 schedule=v chunks=4 evaluated=between",
    "mesh=2x2 schedule=zero-bubble chunks=4 within=ddp once=1",
    "mesh=2x2 schedule=interleaved chunks=4 within=ddp once=1",
    "mesh=2 schedule=gpipe chunks=2 evaluated=first",
    "mesh=2 schedule=interleaved chunks=2 evaluated=first",
    "mesh=2x2 schedule=gpipe chunks=1 within=fsdp kept=1 evaluated=between",
    "mesh=3 schedule=1f1b chunks=4 divided=1",
    "mesh=2 schedule=interleaved chunks=2 divided=1",
    *(f"mesh=2x2 schedule={schedule} chunks=4 within=fsdp deferred=1" for schedule in get_args(Schedule)),
    "mesh=2x2 schedule=interleaved chunks=4 within=fsdp option=active",
    "mesh=2x2 schedule=loops chunks=4 within=fsdp option=waits",
    "mesh=2x2 schedule=v chunks=4 within=fsdp option=ahead",
    "mesh=2 schedule=zero-bubble chunks=4 option=sends",
)


class Stages(nn.Module):
    """Layers one after the other, each with statistics of what it was given."""

    def __init__(self, sizes: tuple[int, ...], bias: bool = True) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(sizes[0]), nn.Linear(sizes[0], sizes[0], bias)) for _ in range(sizes[1])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Turned(nn.Module):
    """The same matrix, transposed in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()


def read_stages(case: Case) -> ModuleCall:
    count = case.mesh().shape[0] * (1 if case.get("schedule") in ("gpipe", "1f1b") else 2)
    return ModuleCall(build_model, (Stages, (WIDTH, count), True, case.seed), {})


# Plain torch, for acts


def batch(chunks: int, step: int, seed: int, device: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and a target of three rows for each microbatch."""
    x, target = (eighths((3 * chunks, WIDTH), seed + 2 * step + number) for number in range(2))
    return x.to(device), target.to(device)


def evaluated_rows(evaluated: str | None) -> tuple[int, ...]:
    """The rows of a microbatch in each evaluation."""
    return {"alike": (3,), "again": (3, 3), "fewer": (3, 2)}.get(evaluated or "", ())


def schedule_class(name: str) -> Any:
    """Torch's class of that schedule."""
    from torch.distributed import pipelining

    names = {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "loops": "ScheduleLoopedBFS",
        "interleaved": "ScheduleInterleaved1F1B",
        "zero-bubble": "ScheduleInterleavedZeroBubble",
        "v": "ScheduleZBVZeroBubble",
        "dual-v": "ScheduleDualPipeV",
    }
    return getattr(pipelining, names[name])


def schedule_options(option: str | None) -> dict[str, Any]:
    """What a schedule is told."""
    options: dict[str, dict[str, Any]] = {
        "active": {"max_active_stages": 1},
        "waits": {"defer_reduce_grad_wait": True},
        "ahead": {"unshard_lookahead": "auto"},
        "sends": {"max_outstanding_sends": 1},
    }
    return options.get(option or "", {})


def place_of(stage: int, ranks: int, schedule: str) -> int:
    """The rank of a stage: stages go round, or there and back."""
    return 2 * ranks - 1 - stage if schedule in ("v", "dual-v") and stage >= ranks else stage % ranks


def spread(stage: nn.Module, over: DeviceMesh, within: str) -> Any:
    """A stage whose parameters, or batches, are spread over a mesh dim."""
    if within == "ddp":
        return DistributedDataParallel(stage, process_group=over.get_group())
    if within == "fsdp":
        return fully_shard(stage, mesh=over)
    if within == "tensor":
        return parallelize_module(stage, over, {"1": ColwiseParallel(output_layouts=Replicate())})
    return stage


def learned(stages: Any) -> list[dict[str, Any]]:
    """The gradients and buffers of stages."""
    found: list[dict[str, Any]] = []
    for stage in stages:
        given = {name: parameter.grad for name, parameter in stage.named_parameters()}
        gradients = {
            name: grad.full_tensor() if isinstance(grad, DTensor) else None if grad is None else grad.clone()
            for name, grad in given.items()
        }
        found.append(gradients | {name: buffer.double().clone() for name, buffer in stage.named_buffers()})
    return found


@law(
    "module.pipelined",
    source=f"{DOC}, PipelineStage and schedules: a model that is split over ranks is trained as the whole one",
    control=SCHEDULE_CASES[0],
    cases=SCHEDULE_CASES,
    features=lambda case: {"module", "backward", "repeated", f"way:{case.get('schedule')}"},
    needs=("p2p", "all_gather", "all_reduce", "reduce_scatter"),
    refusal=is_unsupported,
    weight=0.2,
)
def pipelined(
    model: Annotated[Any, FromCase(read_stages, "schedule")],
    mesh: NamedMesh,
    schedule: Schedule,
    chunks: int,
    seed: Seed,
    mode: Literal["eval", "train"] = "eval",
    within: Within = "alone",
    kept: bool = False,
    turned: bool = False,
    once: bool = False,
    evaluated: Evaluated | None = None,
    divided: bool = False,
    deferred: bool = False,
    option: Option | None = None,
):
    """Stages that are trained in a pipeline have the outputs and losses of the whole model on each microbatch, the mean
    of their gradients, which is added to those that they have, and buffers that have seen each microbatch once, in
    whichever order the stages run, and whether or not each stage is data or tensor parallel, or gradients wait for the
    last step; evaluated, they have the outputs of the whole model, however many rows there are, and keep their
    gradients."""
    from torch.distributed import pipelining

    model.train(mode == "train")
    line, over = (mesh[name] for name in (mesh.mesh_dim_names[0], mesh.mesh_dim_names[-1]))
    count, device = len(model.stages), torch.device(mesh.device_type)
    own = [number for number in range(count) if place_of(number, line.size(), schedule) == line.get_local_rank()]
    for number in own if turned else ():
        model.stages[number].append(Turned())
    stages: Any = [
        pipelining.PipelineStage(
            spread(model.stages[number], over, within), number, count, device, group=line.get_group()
        )
        for number in own
    ]
    part = over.get_local_rank() if within in ("ddp", "fsdp") else 0
    if schedule in ("gpipe", "1f1b"):
        (stages,) = stages
    make, options = schedule_class(schedule), schedule_options(option)
    require_options(make.__init__, options)
    pipeline = make(stages, chunks, mse_loss, **options)
    require_options(pipeline.step, ["arg_mbs"] * divided + ["finalize_gradients"] * deferred)
    outs: list[Any] = []
    losses: list[list[Any]] = []
    noted: list[Any] = []
    steps: list[Any] = []
    for step in range(1 if once else STEPS):
        x, target = batch(chunks, step, seed + 8 * part, mesh.device_type)
        if not (kept or deferred):
            model.zero_grad()
        first = [x] if 0 in own else []
        last: dict[str, Any] = {"target": target, "losses": noted} if count - 1 in own else {}
        if divided:
            if first:
                last["arg_mbs"] = [(part,) for part in first.pop().tensor_split(chunks)]
            if "target" in last:
                last["target_mbs"] = list(last.pop("target").tensor_split(chunks))
        if deferred:
            last["finalize_gradients"] = step == STEPS - 1
        methods = [pipeline.step, pipeline.eval] if evaluated == "between" else [pipeline.step]
        if evaluated == "first" and step == 0:
            methods.insert(0, pipeline.eval)
        outs.extend(method(*first, **last) for method in methods)
        losses.append([*noted])
        if not deferred or step == STEPS - 1:
            steps.append(learned([model.stages[number] for number in own]))
    if evaluated in ("again", "fewer"):
        pipeline = schedule_class(schedule)(stages, chunks)
    for rows in evaluated_rows(evaluated):
        x, _ = batch(chunks, 0, seed, mesh.device_type)
        outs.append(pipeline.eval(*([x[: rows * chunks]] if 0 in own else [])))
    return {"outputs": outs, "losses": losses, "learned": steps}


@pipelined.due
def _(
    model,
    mesh: Mesh,
    schedule: str,
    chunks: int,
    seed: int,
    mode: str,
    within: str,
    kept: bool,
    once: bool,
    evaluated: str | None,
    deferred: bool,
    rank: Rank,
):
    model.train(mode == "train")
    count, (place, *at) = len(model.stages), mesh.coord(rank) or (0,)
    own = [number for number in range(count) if place_of(number, mesh.shape[0], schedule) == place]
    parts, part = (range(mesh.shape[-1]), at[-1]) if within in ("ddp", "fsdp") else (range(1), 0)
    outs, losses, steps = [], [], []
    for step in range(1 if once else STEPS):
        if not (kept or deferred):
            model.zero_grad()
        results = []
        for each in parts:
            x, target = batch(chunks, step, seed + 8 * each)
            results.append(
                [(model(a), b) for a, b in zip(x.tensor_split(chunks), target.tensor_split(chunks), strict=True)]
            )
        found = [[mse_loss(*pair) for pair in pairs] for pairs in results]
        torch.stack([loss for losses_of_part in found for loss in losses_of_part]).mean().backward()
        is_last = count - 1 in own
        for _ in range(2 if evaluated == "between" or (evaluated == "first" and step == 0) else 1):
            outs.append(Near(torch.cat([out for out, _ in results[part]]).detach()) if is_last else None)
        losses.append([Near(loss.detach()) for loss in found[part]] if is_last else [])
        stages = learned([model.stages[number] for number in own])
        if not deferred or step == STEPS - 1:
            steps.append([{name: Near(value) for name, value in stage.items()} for stage in stages])
    for rows in evaluated_rows(evaluated):
        x, _ = batch(chunks, 0, seed)
        outs.append(Near(model(x[: rows * chunks]).detach()) if count - 1 in own else None)
    return {"outputs": outs, "losses": losses, "learned": steps}
