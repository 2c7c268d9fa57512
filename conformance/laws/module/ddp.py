"""The law of ``DistributedDataParallel``.

The model has two layers in parallel, so that it has two results: it may return them in a container of any class, and
the loss may use one of them. Fields of a case: ``gives`` is the class of the return value, ``graph`` what DDP is told
about the graph (``unused``: parameters may be unused, ``static``: every step has the same graph), ``loss`` which
results the loss uses (``first`` alone, or ``apart``: both, in separate backward passes, or ``later``: one of each of
two forward passes, which come before one backward pass), ``held`` how many passes under
``no_sync`` come before each synchronised one, ``nested``: each of them after another ``no_sync`` within it has ended,
``buckets`` how gradients are put into buckets, ``composed``: the model itself is made to replicate. ``delayed`` has the
gradients of the second layer wait for those of the first before they are shared, ``dtype`` is that of the parameters.
``hooked`` registers a communication hook, after the model was evaluated, ``cut`` replicates the model as the one module
of a container, of which a slice is taken. ``apart`` has ranks begin with parameters and buffers of their own, and says
what of them is shared: all (``shared``), or what the option of that name leaves where it is false. Once it is
replicated, they make its buffers differ again.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Meaningless, Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import ByRank, FromCase, ModuleCall
from shardlaw.conformance.laws.module.model_fields import reduced_gradients
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.newer import is_unsupported, require_options
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import build_model, eighths

SIZES, STEPS = (3, 2), 2
Graph = Literal["free", "unused", "static"]
Apart = Literal["shared", "init_sync", "broadcast_buffers", "forward_sync_buffers"]


class NamedResults(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class DataResults:
    first: torch.Tensor
    second: torch.Tensor


class OrderedResults(OrderedDict[str, torch.Tensor]):
    """A subclass of OrderedDict, such as libraries of models return."""


class ObjectResults:
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second


class TwoLayers(nn.Module):
    """Two linear layers with the same input, scaled by a buffer; ``gives`` is the class of the return value."""

    def __init__(self, sizes: tuple[int, ...], bias: bool = True, gives: str = "tensor") -> None:
        super().__init__()
        self.one, self.two, self.gives = nn.Linear(sizes[0], sizes[1], bias), nn.Linear(sizes[0], sizes[1], bias), gives
        self.scale = nn.Buffer(torch.full((sizes[1],), 0.5))

    def forward(self, x: torch.Tensor) -> Any:
        first, second = self.one(x) * self.scale, self.two(x) * self.scale
        match self.gives:
            case "tensor":
                return torch.stack([first, second])
            case "dict":
                return {"first": first, "second": second}
            case "ordered":
                return OrderedResults(first=first, second=second)
            case "tuple":
                return first, second
        return {"named": NamedResults, "data": DataResults, "own": ObjectResults}[self.gives](first, second)


def unpack_results(results: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The two results in a return value of any class."""
    if isinstance(results, dict):
        return results["first"], results["second"]
    if isinstance(results, torch.Tensor | tuple):
        return results[0], results[1]
    return results.first, results.second


def backward(model: Any, x: torch.Tensor, loss: str) -> None:
    """Run backward from the sum of squares of the results that the loss uses."""
    results = model(x)
    if loss == "later":
        results = unpack_results(results)[0], unpack_results(model(2 * x))[1]
    losses = [result.pow(2).sum() for result in unpack_results(results)]
    match loss:
        case "apart":
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        case "first":
            losses[0].backward()
        case "both" | "later":
            (losses[0] + losses[1]).backward()


def read_model(case: Case) -> ModuleCall:
    return ModuleCall(build_model, (TwoLayers, SIZES, True, case.seed), {"gives": case.get("gives")})


def read_passes(case: Case) -> ByRank:
    """For each step the inputs of its passes; each rank has its own."""
    passes, ranks = case.integer("held", 0) + 1, case.mesh().ranks

    def steps_of(rank: int) -> list[list[torch.Tensor]]:
        seeds = [case.seed + 5 * rank + number for number in range(STEPS * passes)]
        inputs = [eighths((2, SIZES[0]), seed) for seed in seeds]
        return [inputs[step * passes : (step + 1) * passes] for step in range(STEPS)]

    return ByRank(steps_of, [steps_of(rank) for rank in ranks])


def features(case: Case) -> set[str]:
    graph = case.get("graph", "free")
    return {"module", "backward", "way:ddp", "repeated"} | ({f"option:{graph}"} if graph != "free" else set())


@st.composite
def draw_ddp(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(palette_meshes(("2", "2", "3", "4"), limits.world_size)))
    gives = draw(st.sampled_from(("tensor", "tuple", "dict", "named", "data", "ordered", "own")))
    values: dict[str, Any] = {"gives": gives, "graph": draw(st.sampled_from((None, "unused", "static")))}
    values["loss"] = draw(
        st.sampled_from((None, None, "apart", "first") if values["graph"] else (None, "apart", "later"))
    )
    values["held"] = draw(st.sampled_from((None, None, 1, 2)))
    values["buckets"] = draw(st.sampled_from((None, "view", "small")))
    return fields(mesh=mesh, **values, seed=draw(draws.seeds()))


CASES = (
    "mesh=2 gives=tensor",
    "mesh=3 gives=own held=1 buckets=view",
    "mesh=2 gives=tuple loss=apart buckets=small",
    "mesh=2 gives=tensor loss=apart",
    "mesh=2 gives=data graph=unused loss=first held=1",
    "mesh=2 gives=named graph=static buckets=view",
    "mesh=2 gives=data graph=static",
    "mesh=2 gives=own graph=unused",
    "mesh=2 gives=tensor graph=static held=1",
    "mesh=2 gives=tuple graph=static loss=first",
    "mesh=2 gives=tuple graph=static loss=apart",
    "mesh=2 gives=dict graph=unused loss=apart",
    "mesh=2 gives=tensor held=2 nested=1",
    "mesh=2 gives=tensor held=1 composed=1",
    "mesh=2 gives=tuple loss=later",
    "mesh=3 gives=own loss=later held=1 buckets=view",
    "mesh=2 gives=tuple delayed=1 held=1",
    "mesh=2 gives=tuple delayed=1 dtype=float64",
    "mesh=2 gives=tensor hooked=1",
    "mesh=2 gives=tensor composed=1 hooked=1",
    "mesh=2 gives=tensor composed=1 cut=1",
    "mesh=3 gives=tensor apart=shared",
    "mesh=2 gives=tensor apart=init_sync",
    "mesh=2 gives=tensor apart=broadcast_buffers",
    "mesh=2 gives=tensor apart=forward_sync_buffers held=1",
    "mesh=2 gives=tensor held=1 buckets=lazy",
    "mesh=3 gives=data graph=unused loss=first buckets=lazy",
    "mesh=2 gives=tensor held=1 buckets=batched",
    "mesh=2 gives=tuple graph=static buckets=batched",
)


def copied_gradients(model: nn.Module) -> dict[str, Any]:
    return {name: None if grad is None else grad.clone() for name, grad in reduced_gradients(model).items()}


def set_apart(model: nn.Module, by: int, named: tuple[str, ...] = ("",)) -> None:
    """Add a number to the parameters and buffers whose names begin so."""
    for name, value in model.state_dict().items():
        value += by * name.startswith(named)


def left_apart(apart: str | None) -> tuple[tuple[str, ...], int]:
    """How the names begin of that in which ranks go on to differ, and how often they were set apart."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    match apart:
        case "init_sync":
            return ("one", "two"), 1
        case "broadcast_buffers":  # since there is the other option, it leaves buffers as they are at first, too
            return ("scale",), 2 if "forward_sync_buffers" in options else 1
        case "forward_sync_buffers":
            if apart not in options:
                raise Meaningless("this version of torch has no forward_sync_buffers")
            return ("scale",), 1
    return (), 0


def note_bucket(noted: list[int], group: Any, bucket: Any) -> Any:
    """Share a bucket of gradients as without a hook, and note it."""
    noted.append(bucket.index())
    return allreduce_hook(group, bucket)


@law(
    "module.replicated",
    source=(
        "torch.nn.parallel docs, DistributedDataParallel: gradients are averaged; find_unused_parameters, all tensors "
        "contained in the return value; static_graph; no_sync; delay_all_reduce_named_params; register_comm_hook: "
        "before calling backward; init_sync, broadcast_buffers, forward_sync_buffers: what is synced at first, what at "
        "the beginning of forward; docstring of DDP.__new__ of replicate: indexing into a container module"
    ),
    control=CASES[0],
    draw=draw_ddp,
    draws=10,
    cases=CASES,
    features=features,
    needs=("all_reduce", "broadcast", "all_gather"),
    refusal=is_unsupported,
    weight=0.3,
)
def ddp(
    model: Annotated[nn.Module, FromCase(read_model, "gives")],
    mesh: NamedMesh,
    inputs: Annotated[Any, FromCase(read_passes, "held")],
    graph: Graph = "free",
    loss: Literal["both", "first", "apart", "later"] = "both",
    buckets: Literal["view", "small", "lazy", "batched"] | None = None,
    nested: bool = False,
    composed: bool = False,
    delayed: bool = False,
    dtype: torch.dtype = torch.float32,
    hooked: bool = False,
    cut: bool = False,
    apart: Apart | None = None,
):
    """After each step every rank has the mean of all gradients, whatever the model returns, whatever of it the loss
    uses, however many passes under no_sync come before, after which it has the sum of its own, and whether or not some
    gradients are to wait for others or go through a hook. A slice of a container that is replicated is one of it. Ranks
    go on with what the first one has, but for what options leave to each."""
    model.to(dtype)
    if apart is not None:
        set_apart(model, mesh.get_local_rank())
    options: dict[str, Any] = {
        "find_unused_parameters": graph == "unused",
        "static_graph": graph == "static",
        "gradient_as_bucket_view": buckets == "view",
    }
    if buckets == "small":
        options["bucket_cap_mb"] = 0.00001
    if buckets in ("lazy", "batched"):
        options["lazy_bucket_allocation" if buckets == "lazy" else "batched_grad_copy"] = True
    if delayed:
        second = [(name, p) for name, p in model.named_parameters() if name.startswith("two.")]
        options["delay_all_reduce_named_params"] = second
        options["param_to_hook_all_reduce"] = model.get_parameter("one.weight")
    if apart not in (None, "shared"):
        options[apart] = False
    require_options(DistributedDataParallel.__init__, options)
    replicate: Any = compat.replicate if composed else DistributedDataParallel
    group, steps, held, noted = mesh.get_group(), list[Any](), list[Any](), list[int]()
    parallel = replicate(nn.Sequential(model) if cut else model, process_group=group, **options)
    if apart is not None:
        set_apart(model, mesh.get_local_rank(), ("scale",))
    if hooked:
        with torch.no_grad():
            parallel(inputs[0][0].to(dtype))
        parallel.register_comm_hook(group, lambda state, bucket: note_bucket(noted, state, bucket))
    for passes in inputs:
        model.zero_grad()
        for number, x in enumerate(passes):
            last = number == len(passes) - 1
            if composed:
                parallel.set_requires_gradient_sync(last)
            with nullcontext() if last or composed else parallel.no_sync():
                if nested and not last:
                    with parallel.no_sync():
                        pass
                backward(parallel, x.to(dtype), loss)
            if not last:
                held.append(copied_gradients(model))
        steps.append(copied_gradients(model))
    state = {name: value.clone() for name, value in model.state_dict().items()} if apart else {}
    return {"steps": steps, "held": held, "hooked": bool(noted), "cut": len(parallel[:1]) if cut else 0, "state": state}


@ddp.due
def _(
    model,
    mesh: Mesh,
    inputs: list[Any],
    loss: str,
    dtype: torch.dtype,
    hooked: bool,
    cut: bool,
    apart: str | None,
    rank: Rank,
):
    model.to(dtype)
    (named, times), place = left_apart(apart), mesh.ranks.index(rank)
    steps, held = [], list[Any]()
    for step in range(STEPS):
        model.zero_grad()
        set_apart(model, times * place, named)
        for x in inputs[place][step][:-1]:
            backward(model, x.to(dtype), loss)
            held.append({name: None if grad is None else Near(grad) for name, grad in copied_gradients(model).items()})
        state = {name: Near(value.clone()) for name, value in model.state_dict().items()} if apart else {}
        set_apart(model, -times * place, named)
        model.zero_grad()
        for at, rank_steps in enumerate(inputs):
            set_apart(model, times * at, named)
            for x in rank_steps[step]:
                backward(model, x.to(dtype), loss)
            set_apart(model, -times * at, named)
        grads = reduced_gradients(model)
        steps.append({name: None if grad is None else Near(grad / len(inputs)) for name, grad in grads.items()})
    return {"steps": steps, "held": held, "hooked": hooked, "cut": int(cut), "state": state}
