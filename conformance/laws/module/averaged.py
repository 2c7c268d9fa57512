"""The law of ranks that share gradients through a hook, or train apart and average their parameters now and then.

Fields of a case: ``way`` is how ranks share what they have learned; on a mesh of two dims, ranks along the last dim
are those that share gradients among themselves; ``slowed`` has half the rate once a state was set. ``mixed`` has one
layer in a lower precision than the other, ``split`` each gradient in a bucket of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near, Of
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.arguments import ByRank, FromCase, ModuleCall
from shardlaw.conformance.laws.module.ddp import SIZES, TwoLayers
from shardlaw.conformance.laws.module.model_fields import copied_parameters
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.modules import build_model, eighths

STEPS = 6
HOOKS = ("mean", "half", "half-wrapped", "power", "power-fresh", "local", "bytes", "bytes-by-part")
Way = Literal[
    "mean", "half", "half-wrapped", "power", "power-fresh", "local", "apart", "groups", "levels", "idle", "optimizer",
    "resumed", "noticed", "slowed", "bytes", "bytes-by-part",
]  # fmt: skip
CASES = (
    "mesh=2 way=mean",
    "mesh=2 way=half",
    "mesh=3 way=half-wrapped",
    "mesh=2 way=power",
    "mesh=3 way=power-fresh",
    "mesh=2x2 way=local start=3 period=2",
    "mesh=2x2 way=local start=0 period=3",
    "mesh=2 way=apart period=2",
    "mesh=3 way=groups period=3 start=1",
    "mesh=4 way=levels period=2 start=1",
    "mesh=2 way=idle period=2",
    "mesh=2 way=optimizer period=2 start=1",
    "mesh=2 way=resumed period=2 start=3",
    "mesh=2 way=noticed period=2",
    "mesh=2 way=bytes",
    "mesh=3 way=bytes-by-part",
    "mesh=2@1,2 way=mean",
    "mesh=2@1,2 way=half",
    "mesh=2@0,2 way=half-wrapped",
    "mesh=2@1,2 way=power",
    "mesh=2@1,2 way=apart period=2",
    "mesh=2 way=apart period=2 mixed=1",
    "mesh=2 way=groups period=3 mixed=1",
    "mesh=2 way=mean split=1",
    "mesh=2 way=power split=1",
    "mesh=2 way=slowed period=2 start=3",
)
RATE, RESUMED_AT = 0.0625, 4


def read_model(case: Case) -> ModuleCall:
    return ModuleCall(build_model, (TwoLayers, SIZES, True, case.seed), {"gives": "tuple"})


def read_inputs(case: Case) -> ByRank:
    """The inputs of each rank, one for each step."""

    def inputs_of(rank: int) -> list[torch.Tensor]:
        return [eighths((2, SIZES[0]), case.seed + 7 * rank + number) for number in range(STEPS)]

    return ByRank(inputs_of, [inputs_of(rank) for rank in case.mesh().ranks])


# Plain torch, for acts


def lower_one(model: Any) -> None:
    """Have the first layer compute in float32."""
    model.one.float().register_forward_pre_hook(lambda layer, given: (given[0].float(),))


def loss_of(results: Sequence[torch.Tensor], way: str, place: int) -> torch.Tensor:
    """A loss of both results, or of one of them, which differs by rank."""
    if way == "idle":
        return results[place % 2].square().sum()
    return torch.stack([result.square().sum() for result in results]).sum()


def register_hook(parallel: Any, way: str, start: int, mesh: Any) -> None:
    """Register the hook through which ranks share gradients. That of PowerSGD has as many columns as a matrix."""
    group = parallel.process_group
    if way == "mean":
        parallel.register_comm_hook(group, default_hooks.allreduce_hook)
    if way == "half":
        parallel.register_comm_hook(group, default_hooks.fp16_compress_hook)
    if way == "half-wrapped":
        parallel.register_comm_hook(group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    if way == "local":
        state = post_localSGD_hook.PostLocalSGDState(group, mesh[mesh.mesh_dim_names[-1]].get_group(), start)
        parallel.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    if way.startswith("bytes"):
        hooks = quantization_hooks
        parallel.register_comm_hook(
            group, hooks.quantization_pertensor_hook if way == "bytes" else hooks.quantization_perchannel_hook
        )
    if way.startswith("power"):
        kept = way == "power"
        power = powerSGD_hook.PowerSGDState(
            group, 2, 2, min_compression_rate=0.01, use_error_feedback=kept, warm_start=kept
        )
        parallel.register_comm_hook(power, powerSGD_hook.powerSGD_hook)


def make_averager(way: str, period: int, start: int, group: Any) -> Any:
    """What averages parameters: of all ranks, or in levels, of two ranks twice as often."""
    if way == "levels":
        return HierarchicalModelAverager(OrderedDict([(period, 2), (2 * period, 4)]), start, group)
    return PeriodicModelAverager(period, start, group)


def take_steps(
    model: Any, forward: Any, inputs: Sequence[torch.Tensor], way: str, averager: Any, place: int
) -> dict[str, Any]:
    """Train a model. Returns its parameters after each step, and how often a hook on the step was called."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    optim: Any = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    called, steps = list[int](), list[Any]()
    wrapped = way in ("local", "optimizer", "resumed", "noticed", "slowed")
    if wrapped:
        optim = PostLocalSGDOptimizer(optim, averager)
    if way == "noticed":
        optim.register_step_post_hook(lambda *step: called.append(1))
    for number, x in enumerate(inputs):
        if way in ("resumed", "slowed") and number == RESUMED_AT:
            state, averager.step = optim.state_dict(), 0
            optim = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5), averager)
            optim.load_state_dict(state)
            for group in optim.param_groups if way == "slowed" else ():
                group["lr"] = RATE / 2
        optim.zero_grad()
        loss_of(forward(x), way, place).backward()
        optim.step()
        if averager is not None and not wrapped:
            averager.average_parameters(optim.param_groups if way == "groups" else model.parameters())
        steps.append(copied_parameters(model))
    return {"steps": steps, "called": len(called)}


@law(
    "module.averaged",
    source=(
        "torch.distributed docs, DDP Communication Hooks: allreduce_hook, fp16_compress_hook, powerSGD_hook; "
        "docstrings of quantization_pertensor_hook and quantization_perchannel_hook; "
        "torch.distributed.algorithms.model_averaging; torch.distributed.optim docs, PostLocalSGDOptimizer"
    ),
    control=CASES[0],
    cases=CASES,
    features=lambda case: {"module", "backward", "repeated", f"way:{case.get('way')}"},
    needs=("all_reduce", "broadcast", "subgroups"),
    weight=0.1,
)
def averaged(
    model: Annotated[nn.Module, FromCase(read_model)],
    mesh: NamedMesh,
    inputs: Annotated[list[Any], FromCase(read_inputs)],
    way: Way,
    period: int = 1,
    start: int = 0,
    mixed: bool = False,
    split: bool = False,
):
    """A hook gives every rank the mean of the gradients, as exact as what it sends, and from a step on the mean of its
    own group. Ranks that train apart have the mean of their parameters, each of the same parameter, in every
    ``period``-th step from ``start`` on, in levels or of all ranks, and by an optimizer as by hand, at any
    rate."""
    if mesh.get_coordinate() is None:
        return {}
    group = mesh.get_group() if mesh.ndim == 1 else None
    forward: Any = model
    if mixed:
        lower_one(model)
    if way.startswith("bytes"):
        model.float()
        inputs = [x.float() for x in inputs]
    if way in HOOKS:
        sizes: Any = {"bucket_cap_mb": 0.00001} if split else {}
        forward = DistributedDataParallel(model, process_group=group, **sizes)
        register_hook(forward, way, start, mesh)
    averager = make_averager(way, period, start, group) if way not in HOOKS or way == "local" else None
    return take_steps(model, forward, inputs, way, averager, dist.get_rank(group))


def means(tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """For each tensor the mean of those in its run of ``size``."""
    return [torch.stack([*tensors[at - at % size :][:size]]).mean(0) for at in range(len(tensors))]


@averaged.due
def _(model, mesh: Mesh, inputs: list[list[torch.Tensor]], way: str, period: int, start: int, mixed: bool, rank: Rank):
    if rank not in mesh.ranks:
        return {}
    if mixed:
        lower_one(model)
    place, ranks = mesh.ranks.index(rank), range(len(mesh.ranks))
    names = [name for name, _ in model.named_parameters()]
    held = [{name: parameter.detach().clone() for name, parameter in model.named_parameters()} for _ in ranks]
    speed: list[dict[str, Any]] = [dict.fromkeys(names) for _ in ranks]
    steps = []
    for number in range(STEPS):
        rate = RATE / 2 if way == "slowed" and number >= RESUMED_AT else RATE
        grads: list[dict[str, Any]] = []
        for at in ranks:
            leaves = {name: full.clone().requires_grad_() for name, full in held[at].items()}
            loss_of(torch.func.functional_call(model, leaves, (inputs[at][number],)), way, at).backward()
            grads.append({name: leaf.grad for name, leaf in leaves.items()})
        among = 1 if way not in HOOKS else mesh.shape[-1] if way == "local" and number >= start else len(ranks)
        size = 1
        if way == "levels":
            size = next((size for size in (4, 2) if number % (period * size // 2) == 0), 1)
        elif (way not in HOOKS or way == "local") and (number - start) % period == 0:
            size = len(ranks)
        for name in names:
            present = [grad[name] for grad in grads]
            for at, grad in enumerate(present if way == "idle" else means(present, among)):
                if grad is not None:
                    old = speed[at][name]
                    speed[at][name] = grad if old is None else old * 0.5 + grad
                    held[at][name] = held[at][name] - rate * speed[at][name]
            if number >= start and size > 1:
                for at, mean in enumerate(means([parameters[name] for parameters in held], size)):
                    held[at][name] = mean
        steps.append(dict(held[place]))
    rounding = torch.float16 if way.startswith("half") else torch.float32 if way.startswith("power") else None
    rounding = torch.float32 if mixed else rounding
    if way.startswith("bytes"):
        rounding, steps = torch.bfloat16, [{name: full.float() for name, full in step.items()} for step in steps]
    return {
        "steps": [{name: Near(full, rounding=rounding) for name, full in step.items()} for step in steps],
        "called": Of(STEPS if way == "noticed" else 0),
    }
