"""Laws of what a fully sharded model is told beside how it is sharded: when and by what its parameters and gradients
travel, and which of them do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws.module.arguments import FromCase
from shardlaw.conformance.laws.module.fully_shard import FSDP, inputs_of
from shardlaw.conformance.laws.module.fully_shard_options import sgd
from shardlaw.conformance.laws.module.model_fields import NEEDS, Pairs, copied_parameters, read_model, reduced_gradients
from shardlaw.reference.mesh import Mesh

Whole = Annotated[Any, FromCase(read_model, "model", "dims")]
Inputs = Annotated[Pairs, FromCase(inputs_of)]


def features(case: Case) -> set[str]:
    uneven = {"uneven"} if any(extent % case.mesh().shape[-1] for extent in case.shape("dims")[1:]) else set()
    return {"module", "fully-sharded", "backward", f"way:{case.get('way')}"} | uneven


def told_law(
    name: str, source: str, shown: Sequence[str], features: Callable[[Case], set[str]] = features
) -> Callable[[Callable[..., Any]], Law]:
    """Make the law ``module.NAME`` of the function below, whose sweep is ``shown``, the first of them its control."""
    return law(
        f"module.{name}",
        source=FSDP + source,
        control=shown[0],
        sweep=texts(*shown),
        sweeps=len(shown),
        features=features,
        needs=NEEDS,
        refusal=lacking,
        weight=0.3,
    )


# Plain torch, for acts


def offered(owner: Any, name: str) -> Any:
    """What older releases of torch lack."""
    if not hasattr(owner, name):
        raise NotImplementedError(f"not supported by torch {torch.__version__}: {name}")
    return getattr(owner, name)


def lacking(case: Case, text: str) -> bool:
    """Whether a refusal says that the installed torch has no such thing."""
    return "not supported by torch" in text


class Gather:
    """An all-gather of one's own, into memory that is kept."""

    def __init__(self) -> None:
        self.kept: dict[Any, torch.Tensor] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.kept.setdefault((tuple(size), dtype), torch.empty(*size, dtype=dtype, device=device))

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter:
    """A reduce-scatter of one's own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def in_two_halves(part: Any) -> None:
    """Let the shard of a parameter travel as what float32 holds of it and what is left."""

    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        coarse = part.float()
        return (coarse, part - coarse), None

    def after(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
        whole = outputs[0].double() + outputs[1]
        if out is not None:
            return out.data.copy_(whole)
        return whole, (whole,)

    part.fsdp_pre_all_gather, part.fsdp_post_all_gather = before, after


def tell(model: Any, way: str) -> None:
    """Tell a model and its two layers when and by what to communicate."""
    parts = [model, model.net1, model.net2]
    match way:
        case "prefetched-forward":
            model.set_modules_to_forward_prefetch(parts[1:])
            model.net1.set_modules_to_forward_prefetch([model.net2])
        case "prefetched-backward":
            model.set_modules_to_backward_prefetch([model.net2, model.net1])
            model.net2.set_modules_to_backward_prefetch([model.net1])
        case "kept-after-forward" | "freed-after-forward":
            model.set_reshard_after_forward(way == "freed-after-forward")
        case "kept-after-backward":
            model.set_reshard_after_backward(False)
        case "own-communication":
            for part in parts[1:]:
                part.set_custom_all_gather(Gather())
                part.set_custom_reduce_scatter(Scatter())
        case "allocated":
            for part in parts:
                part.set_allocate_memory_from_process_group_for_comm(True)
        case "summed":
            for part in parts:
                part.set_force_sum_reduction_for_comms(True)
        case "buffers":
            offered(model, "set_reduce_scatter_max_input_buffers")(2)
        case "unneeded":  # the first layer's input asks for no gradient
            model.net1.set_unshard_in_backward(False)
        case "two-roots":
            fsdp.share_comm_ctx(parts[1:])
        case "halves":
            with torch.no_grad():  # the local tensors themselves
                for parameter in model.parameters():
                    in_two_halves(parameter.to_local())


def fail(model: Any, x: torch.Tensor, way: str) -> None:
    """Let a forward or a backward pass fail midway, on every rank, and have the model forget it: a step starts anew."""
    reset = offered(model, "reset_iter_state")
    if way == "failed-unsynced":  # after a pass whose gradients were not shared yet
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        model.set_requires_gradient_sync(True)

    def fails(*_: Any) -> None:
        raise ArithmeticError("midway")

    def failing_later(*heard: Any) -> None:
        heard[-1].register_hook(fails)

    hook = model.relu.register_forward_hook(failing_later if way == "failed-backward" else fails)
    try:
        model(x).sum().backward()
    except ArithmeticError:
        hook.remove()
        reset()
        model.zero_grad()


def whole_of(layers: list[nn.Module]) -> list[bool]:
    """Whether these layers have their parameters whole."""
    return [not isinstance(layer.weight, DTensor) for layer in layers]


WAYS = Literal[
    "prefetched-forward",
    "prefetched-backward",
    "kept-after-forward",
    "freed-after-forward",
    "kept-after-backward",
    "own-communication",
    "allocated",
    "summed",
    "buffers",
    "unneeded",
    "two-roots",
    "halves",
    "last-backward",
    "event",
    "ahead",
    "method",
    "grouped",
    "offloaded",
    "failed-forward",
    "failed-backward",
    "failed-unsynced",
]
SHOWN = (
    "mesh=2 model=mlp dims=5x7x3 way=prefetched-forward",
    "mesh=3 model=mlp dims=5x7x3 way=prefetched-backward",
    "mesh=2 model=mlp dims=5x7x3 way=kept-after-forward",
    "mesh=2 model=mlp dims=5x7x3 way=freed-after-forward",
    "mesh=2 model=mlp dims=5x7x3 passes=2 way=kept-after-backward",
    "mesh=2 model=mlp dims=5x7x3 way=own-communication",
    "mesh=2x2 model=mlp dims=5x7x3 way=own-communication",
    "mesh=2 model=mlp dims=5x7x3 way=allocated",
    "mesh=2 model=mlp dims=5x7x3 way=summed",
    "mesh=2 model=mlp dims=5x7x3 way=summed single=1",
    "mesh=2 model=mlp dims=5x7x3 way=buffers",
    "mesh=2 model=mlp dims=5x7x3 way=unneeded",
    "mesh=2 model=mlp dims=5x7x3 way=two-roots",
    "mesh=2 model=mlp dims=5x6x4 way=halves",
    "mesh=2 model=mlp dims=5x7x3 passes=2 way=last-backward",
    "mesh=2 model=mlp dims=5x7x3 way=event",
    "mesh=2 model=mlp dims=5x7x3 way=ahead",
    "mesh=2 model=mlp dims=5x7x3 way=method",
    "mesh=3 model=mlp dims=5x7x3 way=grouped",
    "mesh=2 model=mlp dims=5x7x3 way=offloaded",
    "mesh=2 model=mlp dims=5x7x3 way=failed-forward",
    "mesh=2 model=mlp dims=5x7x3 way=failed-backward",
    "mesh=2 model=mlp dims=5x7x3 way=failed-unsynced",
    "mesh=2x1 model=mlp dims=5x7x3 way=summed",
)


@told_law("told", ", the methods of FSDPModule", SHOWN)
def told(model: Whole, mesh: NamedMesh, inputs: Inputs, way: WAYS, passes: int = 1, single: bool = False):
    """When and by what the parameters and gradients of a fully sharded model travel changes neither, and layers have
    their parameters whole when they are told to."""
    model = model.float() if single else model
    layers = [model.net1, model.net2]
    options = {"mesh": mesh} | ({"offload_policy": CPUOffloadPolicy(pin_memory=False)} if way == "offloaded" else {})
    for part in [layers] if way == "grouped" else layers:
        fully_shard(part, **options)
    if way != "two-roots":
        fully_shard(model, **options)
    tell(model, way)
    call = model
    if way == "method":
        model.applied = lambda x: model.net2(model.relu(model.net1(x)))
        fsdp.register_fsdp_forward_method(model, "applied")
        call = model.applied
    if way.startswith("failed"):
        fail(model, inputs[0][0], way)
    stepping, steps = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(2):
        outs, whole = [], []
        for at, (x, grad) in enumerate(inputs[step * passes : (step + 1) * passes]):
            last = at == passes - 1
            if way == "last-backward":
                model.set_is_last_backward(last)
            if way == "kept-after-backward":
                model.set_reshard_after_backward(last)
            if way == "event":
                event = getattr(torch, mesh.device_type).Event()
                event.record()
                model.set_post_optim_event(event)
            if way == "ahead":
                handles = [layer.unshard(async_op=True) for layer in layers]
                handles[0].wait()
                whole.append(whole_of(layers))
            outs.append(call(x.float() if single else x))
            whole.append(whole_of(layers))
            outs[-1].backward(grad.to(outs[-1].dtype))
            whole.append(whole_of(layers))
        arrived = reduced_gradients(model)
        stepping.step()
        stepping.zero_grad()
        steps.append({"forward": outs, "whole": whole, "gradients": arrived, "parameters": copied_parameters(model)})
    return {"steps": steps}


@told.due
def _(model, mesh: Mesh, inputs: list[Pairs], way: str, passes: int, single: bool, rank: Rank):
    place, dtype = mesh.ranks.index(rank), torch.float32 if single else torch.float64
    model = model.to(dtype)
    after = {"kept-after-forward": [True, True], "two-roots": [True, True]}.get(way, [False, False])

    def sharded(named: dict[str, Any]) -> dict[str, Any]:
        return {name: Claimed(whole, mesh, exact=False) for name, whole in named.items()}

    steps = []
    for step in range(2):
        computed, outs, whole = copy.deepcopy(model), [], list[Any]()
        for at, pairs in enumerate(inputs[step * passes : (step + 1) * passes]):
            every = [computed(x.to(dtype)) for x, _ in pairs]
            for out, (_, grad) in zip(every, pairs, strict=True):
                out.backward((grad / mesh.size).to(dtype))
            outs.append(Near(every[place].detach()))
            kept = way == "kept-after-backward" and at < passes - 1
            whole += [*([[True, ...]] if way == "ahead" else []), after, [kept, kept]]
        sgd(model, reduced_gradients(computed))
        steps.append(
            {
                "forward": outs,
                "whole": whole,
                "gradients": sharded(reduced_gradients(computed)),
                "parameters": sharded(copied_parameters(model)),
            }
        )
    return {"steps": steps}


# What changes gradients

CHANGED = (
    "mesh=2 model=mlp dims=5x7x3 way=hook",
    "mesh=2x2 model=mlp dims=5x7x3 way=hook",
    "mesh=3 model=mlp dims=5x7x3 way=factor",
    "mesh=2x2 model=mlp dims=5x7x3 way=factor",
    "mesh=2x1 model=mlp dims=5x7x3 way=factor",
    "mesh=2 model=mlp dims=5x7x3 way=ignored",
    "mesh=3 model=mlp dims=5x4x4 way=unused",
    "mesh=2x2 model=mlp dims=5x7x3 way=meshes",
    "mesh=2x2 model=mlp dims=3x2x5 way=meshes seed=1",
)


@told_law("told-otherwise", ", the methods of FSDPModule, ignored_params, shard_placement_fn", CHANGED)
def told_otherwise(
    model: Whole,
    mesh: NamedMesh,
    inputs: Inputs,
    way: Literal["hook", "factor", "ignored", "unused", "meshes"],
):
    """Gradients go through the hook, are divided by the factor, stay a rank's own, count as zero where a rank has none,
    or are means over a mesh of their parameter's own, as a fully sharded model is told."""
    over, options = mesh, dict[str, Any]()
    if way == "ignored":
        options["ignored_params"] = {model.net2.bias}
    if way == "meshes":
        over, own = mesh["a"], compat.fsdp_common.FSDPMeshInfo(mesh["b"], shard_mesh_dim=0)
        result = offered(compat.fsdp_common, "ShardPlacementResult")
        second = {*model.net2.parameters()}
        options["shard_placement_fn"] = lambda one: result(Shard(0), own) if one in second else None
    fully_shard(model, mesh=over, **options)
    if way == "hook":
        model.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    if way == "factor":
        model.set_reduce_scatter_divide_factor(4.0)
    if way == "unused":
        offered(model, "set_reduce_scatter_unused_params")(True)
        if mesh.get_local_rank():
            model.forward = model.net1.forward
    x, grad = inputs[0]
    out = model(x)
    out.backward(grad)
    return {"forward": out, "gradients": reduced_gradients(model)}


@told_otherwise.due
def _(model, mesh: Mesh, inputs: list[Pairs], way: str, rank: Rank):
    coord, place = mesh.coord(rank) or (0,), mesh.ranks.index(rank)
    scale = {"hook": mesh.size / 2, "factor": 4.0}.get(way, mesh.size)

    def passed(ranks: Sequence[int], divided: float) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """What the model gives on some of the mesh's ranks, and the sum of their gradients divided."""
        computed, outs = copy.deepcopy(model), []
        for one in ranks:
            x, grad = inputs[0][mesh.ranks.index(one)]
            outs.append((computed.net1 if way == "unused" and one != mesh.ranks[0] else computed)(x))
            outs[-1].backward(grad / divided)
        return outs, reduced_gradients(computed)

    outs, arrived = passed(mesh.ranks, scale)
    due: dict[str, Any] = {name: Claimed(grad, mesh, exact=False) for name, grad in arrived.items()}
    if way == "ignored":
        due["net2.bias"] = Near(passed([rank], 1.0)[1]["net2.bias"])
    for name in due if way == "meshes" else ():
        own = mesh.slice((int(name.startswith("net2")),), coord)
        due[name] = Claimed(passed(own.ranks, own.size)[1][name], own, exact=False)
    return {"forward": Near(outs[place].detach()), "gradients": due}
