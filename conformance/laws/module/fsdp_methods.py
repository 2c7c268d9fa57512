"""Laws of the methods and options of FSDPModule: when and how parameters and gradients are communicated, and how
gradients are changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws.module.act_helpers import OwnAllGather, OwnReduceScatter, gather_in_two_parts
from shardlaw.conformance.laws.module.arguments import FromCase
from shardlaw.conformance.laws.module.fully_shard import FSDP, read_rank_batches
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Pairs,
    claimed,
    copied_parameters,
    mean_backward,
    read_model,
    reduced_gradients,
    sgd,
    take_step,
    uneven,
)
from shardlaw.conformance.laws.shared.newer import is_unsupported, require_attribute
from shardlaw.reference.mesh import Mesh

MLPModel = Annotated[Any, FromCase(read_model, "model", "dims")]
Inputs = Annotated[Pairs, FromCase(read_rank_batches)]


def features(case: Case) -> set[str]:
    found = {"module", "fully-sharded", "backward", f"way:{case.get('way')}"}
    return found | uneven(case.shape("dims")[1:], case.mesh().shape[-1])


def fsdp_law(
    name: str, source: str, cases: Sequence[str], features: Callable[[Case], set[str]] = features, **record: Any
) -> Callable[[Callable[..., Any]], Law]:
    """Decorate the act of the law ``module.NAME``. Its sweep is ``cases``; the first of them is its control."""
    return law(
        f"module.{name}",
        source=FSDP + source,
        control=cases[0],
        cases=cases,
        features=features,
        needs=NEEDS,
        refusal=is_unsupported,
        weight=0.3,
        **record,
    )


# Plain torch, for acts


def configure(model: Any, way: str) -> None:
    """Call the method of FSDPModule that ``way`` names, on the model or on its layers."""
    modules = [model, model.net1, model.net2]
    match way:
        case "prefetched-forward":
            model.set_modules_to_forward_prefetch(modules[1:])
            model.net1.set_modules_to_forward_prefetch([model.net2])
        case "prefetched-backward":
            model.set_modules_to_backward_prefetch([model.net2, model.net1])
            model.net2.set_modules_to_backward_prefetch([model.net1])
        case "kept-after-forward" | "freed-after-forward" | "freed-whole":
            model.set_reshard_after_forward(way != "kept-after-forward")
        case "kept-after-backward":
            model.set_reshard_after_backward(False)
        case "own-communication":
            for module in modules[1:]:
                module.set_custom_all_gather(OwnAllGather())
                module.set_custom_reduce_scatter(OwnReduceScatter())
        case "allocated":
            for module in modules:
                module.set_allocate_memory_from_process_group_for_comm(True)
        case "summed":
            for module in modules:
                module.set_force_sum_reduction_for_comms(True)
        case "buffers":
            require_attribute(model, "set_reduce_scatter_max_input_buffers")(2)
        case "own-group":
            require_attribute(model, "set_separate_reduce_scatter_group")()
        case "kept-storage":
            require_attribute(model, "set_keep_unsharded_storage")(True)
        case "unneeded":  # the first layer's input requires no gradient
            model.net1.set_unshard_in_backward(False)
        case "two-roots":
            fsdp.share_comm_ctx(modules[1:])
        case "halves":
            with torch.no_grad():  # the local tensors themselves
                for parameter in model.parameters():
                    gather_in_two_parts(parameter.to_local())


def fail_midway(model: Any, x: torch.Tensor, way: str) -> list[bool]:
    """Raise in a pass on every rank, forward once the second layer is unsharded, and reset the model. Returns which
    layers are unsharded then."""
    reset = require_attribute(model, "reset_iter_state")
    wait = {"failed-unsynced": model.set_requires_gradient_sync, "failed-held": model.set_requires_all_reduce}.get(way)
    if wait is not None:  # after a backward pass whose gradients were not reduced, or not over the replicas
        wait(False)
        model(x).sum().backward()
        wait(True)

    def raise_error(*_: Any) -> None:
        raise ArithmeticError("midway")

    fails = {"failed-backward": model.relu.register_full_backward_pre_hook}
    hook = fails.get(way, model.net2.register_forward_pre_hook)(raise_error)
    try:
        model(x).sum().backward()
    except ArithmeticError:
        hook.remove()
        reset()
        model.zero_grad()
    return are_unsharded([model.net1, model.net2])


def are_unsharded(layers: list[nn.Module]) -> list[bool]:
    """Whether each layer has its unsharded parameters."""
    return [not isinstance(layer.weight, DTensor) for layer in layers]


Way = Literal[
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
    "failed-held",
    "own-group",
    "kept-storage",
    "layer-method",
    "freed-whole",
]
METHOD_CASES = (
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
    "mesh=2 model=mlp dims=5x7x3 way=own-group",
    "mesh=2x2 model=mlp dims=5x7x3 passes=2 way=own-group",
    "mesh=2 model=mlp dims=5x7x3 way=kept-storage",
    "mesh=2 model=mlp dims=5x7x3 way=layer-method",
    "mesh=2 model=mlp dims=5x7x3 way=freed-whole",
    "mesh=2x2 model=mlp dims=5x7x3 way=failed-held",
)


@fsdp_law(
    "told",
    ", the methods of FSDPModule",
    METHOD_CASES,
    own_world=lambda case: case.get("way") == "own-group",  # a group that members alone create
)
def fsdp_methods(model: MLPModel, mesh: NamedMesh, inputs: Inputs, way: Way, passes: int = 1, single: bool = False):
    """Methods of FSDPModule that say when and how to communicate change no output, gradient or parameter, and layers
    are unsharded when these methods say so."""
    model = model.float() if single else model
    layers = [model.net1, model.net2]
    options = {"mesh": mesh} | ({"offload_policy": CPUOffloadPolicy(pin_memory=False)} if way == "offloaded" else {})
    for unit in {"grouped": [layers], "freed-whole": []}.get(way, layers):
        fully_shard(unit, **options)
    if way != "two-roots":
        fully_shard(model, **options)
    configure(model, way)
    call = model
    if way == "method":
        model.applied = lambda x: model.net2(model.relu(model.net1(x)))
        fsdp.register_fsdp_forward_method(model, "applied")
        call = model.applied
    if way == "layer-method":
        model.net1.applied = lambda x: nn.functional.linear(x, model.net1.weight, model.net1.bias)
        fsdp.register_fsdp_forward_method(model.net1, "applied")
        model.forward = lambda x: model.net2(model.relu(model.net1.applied(x)))
    reset = fail_midway(model, inputs[0][0], way) if way.startswith("failed") else [False, False]
    optim, steps = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(2):
        outs, unsharded = [], []
        for number, (x, grad) in enumerate(inputs[step * passes : (step + 1) * passes]):
            last = number == passes - 1
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
                unsharded.append(are_unsharded(layers))
            outs.append(call(x.float() if single else x))
            unsharded.append(are_unsharded(layers))
            outs[-1].backward(grad.to(outs[-1].dtype))
            unsharded.append(are_unsharded(layers))
        steps.append({"forward": outs, "whole": unsharded, **take_step(model, optim)})
    return {"reset": reset, "steps": steps}


@fsdp_methods.due
def _(model, mesh: Mesh, inputs: list[Pairs], way: str, passes: int, single: bool, rank: Rank):
    model = model.to(torch.float32 if single else torch.float64)
    after_forward = [way in ("kept-after-forward", "two-roots")] * 2
    steps = []
    for step in range(2):
        trained, outs, unsharded = copy.deepcopy(model), [], list[Any]()
        for number, pairs in enumerate(inputs[step * passes : (step + 1) * passes]):
            outs.append(Near(mean_backward(trained, pairs)[mesh.ranks.index(rank)].detach()))
            after_backward = way == "kept-after-backward" and number < passes - 1
            unsharded += [*([[True, ...]] if way == "ahead" else []), after_forward, [after_backward] * 2]
        grads = reduced_gradients(trained)
        sgd(model, grads)
        due_parameters = claimed(copied_parameters(model), mesh)
        steps.append(
            {"forward": outs, "whole": unsharded, "gradients": claimed(grads, mesh), "parameters": due_parameters}
        )
    return {"reset": [False, False], "steps": steps}


# Changes of gradients

GRADIENT_CASES = (
    "mesh=2 model=mlp dims=5x7x3 way=hook",
    "mesh=2x2 model=mlp dims=5x7x3 way=hook",
    "mesh=3 model=mlp dims=5x7x3 way=factor",
    "mesh=2x2 model=mlp dims=5x7x3 way=factor",
    "mesh=2x1 model=mlp dims=5x7x3 way=factor",
    "mesh=2 model=mlp dims=5x7x3 way=ignored",
    "mesh=3 model=mlp dims=5x4x4 way=unused",
    "mesh=2x2 model=mlp dims=5x7x3 way=meshes",
    "mesh=2x2 model=mlp dims=3x2x5 way=meshes seed=1",
    "mesh=2 model=mlp dims=4x4x4 way=turns",
    "mesh=3 model=mlp dims=4x4x4 way=turns passes=2",
    "mesh=2x2 model=mlp dims=4x4x4 way=turns",
    "mesh=2 model=mlp dims=5x4x4 way=unused passes=2 compute=float32",
    "mesh=2 model=mlp dims=4x4x4 way=turns passes=2 compute=float32",
    "mesh=3 model=mlp dims=5x7x3 way=integers",
    "mesh=2 model=mlp dims=5x7x3 way=integers compute=float32",
    "mesh=3 model=mlp dims=5x7x3 way=factor passes=2",
    "mesh=2 model=mlp dims=5x7x3 way=integers compute=float32 longs=1",
    "mesh=2x2 model=mlp dims=5x7x3 way=meshes freed=1",
    "mesh=3 model=mlp dims=5x4x4 way=unused frozen=1",
)


def used_part(model: Any, way: str, index: int, number: int) -> Any:
    """The part of a model that the rank with this index uses in a pass. ``unused``: ranks but the first use the first
    layer alone. ``turns``: ranks and passes take turns at the layers."""
    turns = {"turns": (index + number) % 2, "unused": 0 if index else 2}
    return [model.net1, model.net2, model][turns.get(way, 2)]


def multiply_by_integers(model: Any, longs: bool) -> None:
    """Give a model a frozen parameter of integers by which it multiplies its output: bytes, or ``longs``, of which
    float32 does not hold each."""
    above, dtype = (2**24, torch.int64) if longs else (0, torch.uint8)
    factors = torch.arange(above + 1, above + model.net2.out_features + 1, dtype=dtype)
    model.factors = nn.Parameter(factors, requires_grad=False)
    model.register_forward_hook(lambda module, _, out: out * (module.factors - above))


@fsdp_law("told-otherwise", ", the methods of FSDPModule, ignored_params, shard_placement_fn", GRADIENT_CASES)
def changed_gradients(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Inputs,
    way: Literal["hook", "factor", "ignored", "unused", "meshes", "turns", "integers"],
    passes: int = 1,
    compute: torch.dtype | None = None,
    longs: bool = False,
    freed: bool = False,
    frozen: bool = False,
):
    """Hooks, divide factors, ignored and unused parameters, parameters of integers, and a mesh for each parameter
    change the gradients of a fully sharded model as documented, also where only the last pass shares them."""
    model_mesh = mesh
    options: dict[str, Any] = {"reshard_after_forward": True} if freed else {}
    model.net2.bias.requires_grad_(not frozen)
    if compute is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float64)
    if way == "integers":
        multiply_by_integers(model, longs)
    if way == "ignored":
        options["ignored_params"] = {model.net2.bias}
    if way == "meshes":
        model_mesh, own_mesh = mesh["a"], compat.fsdp_common.FSDPMeshInfo(mesh["b"], shard_mesh_dim=0)
        result = require_attribute(compat.fsdp_common, "ShardPlacementResult")
        second = {*model.net2.parameters()}
        options["shard_placement_fn"] = lambda parameter: result(Shard(0), own_mesh) if parameter in second else None
    fully_shard(model, mesh=model_mesh, **options)
    if way == "hook":
        model.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    if way == "factor":
        model.set_reduce_scatter_divide_factor(4.0)
    if way == "unused":
        require_attribute(model, "set_reduce_scatter_unused_params")(True)
    if way == "turns":
        getattr(model, "set_reduce_scatter_unused_params", bool)(True)
    index = mesh.mesh.flatten().tolist().index(dist.get_rank())
    for number, (x, grad) in enumerate(inputs[:passes]):
        model.set_requires_gradient_sync(number == passes - 1)
        model.forward = used_part(model, way, index, number).forward
        out = model(x)
        out.backward(grad.to(out.dtype))
    return {"forward": out, "gradients": reduced_gradients(model)}


@changed_gradients.due
def _(model, mesh: Mesh, inputs: list[Pairs], way: str, passes: int, compute, longs, frozen, rank: Rank):
    model.net2.bias.requires_grad_(not frozen)
    if way == "integers":
        multiply_by_integers(model, longs)
    divisor = {"hook": mesh.size / 2, "factor": 4.0}.get(way, mesh.size)

    def reduce_over(ranks: Sequence[int], divisor: float) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The outputs of these ranks, and the sum of their gradients divided by ``divisor``."""
        trained, outs = copy.deepcopy(model), list[torch.Tensor]()
        for number, member in ((number, member) for number in range(passes) for member in ranks):
            x, grad = inputs[number][mesh.ranks.index(member)]
            outs.append(used_part(trained, way, mesh.ranks.index(member), number)(x))
            outs[-1].backward(grad / divisor)
        return outs[-len(ranks) :], reduced_gradients(trained)

    outs, grads = reduce_over(mesh.ranks, divisor)
    due = claimed(grads, mesh)
    if way == "ignored":
        due["net2.bias"] = Near(reduce_over([rank], 1.0)[1]["net2.bias"])
    for name in due if way == "meshes" else ():
        own_mesh = mesh.slice((int(name.startswith("net2")),), mesh.coord(rank) or (0,))
        due[name] = Claimed(reduce_over(own_mesh.ranks, own_mesh.size)[1][name], own_mesh, exact=False)
    out = outs[mesh.ranks.index(rank)].detach()
    return {"forward": Near(out.to(compute or out.dtype), compute), "gradients": due}
