"""The law of models that are replicated on all ranks: ``DistributedDataParallel``.

The model has two layers side by side, so that its results may be of any class and may go into the loss in part. The
fields of a case: ``gives`` is what its forward pass returns, ``graph`` what is known of it (``unused``: parameters may
be left out, ``static``: it is the same in every step), ``loss`` what the loss is made of (the ``first`` result alone,
or each ``apart``, in backward passes of their own), ``held`` how many passes go before each whose gradients are shared,
and ``buckets`` how gradients are put together on their way.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import ByRank, FromCase, ModuleCall
from shardlaw.conformance.laws.module.model_fields import reduced_gradients
from shardlaw.conformance.laws.shared import draws
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import build_model, eighths

SIZES, STEPS = (3, 2), 2
Gives = Literal["tensor", "tuple", "dict", "named", "data", "ordered", "own"]
Graph = Literal["free", "unused", "static"]


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Data:
    first: torch.Tensor
    second: torch.Tensor


class Ordered(OrderedDict[str, torch.Tensor]):
    """A dict of a class of its own, as libraries of models return them."""


class Own:
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second


class Pair(nn.Module):
    """Two linear layers side by side."""

    def __init__(self, sizes: tuple[int, ...], bias: bool = True, gives: str = "tensor") -> None:
        super().__init__()
        self.one, self.two, self.gives = nn.Linear(sizes[0], sizes[1], bias), nn.Linear(sizes[0], sizes[1], bias), gives

    def forward(self, x: torch.Tensor) -> Any:
        first, second = self.one(x), self.two(x)
        match self.gives:
            case "tensor":
                return torch.stack([first, second])
            case "dict":
                return {"first": first, "second": second}
            case "ordered":
                return Ordered(first=first, second=second)
            case "tuple":
                return first, second
        return {"named": Named, "data": Data, "own": Own}[self.gives](first, second)


def both_of(results: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The two results, whatever holds them."""
    if isinstance(results, dict):
        return results["first"], results["second"]
    if isinstance(results, torch.Tensor | tuple):
        return results[0], results[1]
    return results.first, results.second


def back(results: Any, loss: str) -> None:
    """Go back from the squares of the results that the loss is made of."""
    losses = [one.pow(2).sum() for one in both_of(results)]
    match loss:
        case "apart":
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        case "first":
            losses[0].backward()
        case "both":
            (losses[0] + losses[1]).backward()


def read_model(case: Case) -> ModuleCall:
    return ModuleCall(build_model, (Pair, SIZES, True, case.seed), {"gives": case.get("gives")})


def read_rank_batches(case: Case) -> ByRank:
    """For each step the inputs of its passes, each rank's own."""
    count, mesh = case.integer("held", 0) + 1, case.mesh()

    def one(rank: int) -> list[list[torch.Tensor]]:
        seeds = [case.seed + 5 * rank + at for at in range(STEPS * count)]
        every = [eighths((2, SIZES[0]), seed) for seed in seeds]
        return [every[at * count : (at + 1) * count] for at in range(STEPS)]

    return ByRank(one, [one(rank) for rank in mesh.ranks])


def features(case: Case) -> set[str]:
    graph = case.get("graph", "free")
    return {"module", "backward", "way:ddp", "repeated"} | ({f"option:{graph}"} if graph != "free" else set())


@st.composite
def draw_replicated(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(palette_meshes(("2", "2", "3", "4"), limits.world_size)))
    gives = draw(st.sampled_from(("tensor", "tuple", "dict", "named", "data", "ordered", "own")))
    said: dict[str, Any] = {"gives": gives, "graph": draw(st.sampled_from((None, "unused", "static")))}
    said["loss"] = draw(st.sampled_from((None, None, "apart", "first") if said["graph"] else (None, "apart")))
    said["held"] = draw(st.sampled_from((None, None, 1, 2)))
    said["buckets"] = draw(st.sampled_from((None, "view", "small")))
    return fields(mesh=mesh, **said, seed=draw(draws.seeds()))


SHOWN = (
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
)


@law(
    "module.replicated",
    source=(
        "torch.nn.parallel docs, DistributedDataParallel: gradients are averaged; find_unused_parameters, all tensors "
        "contained in the return value; static_graph; no_sync"
    ),
    control=SHOWN[0],
    draw=draw_replicated,
    draws=10,
    sweep=texts(*SHOWN),
    sweeps=len(SHOWN),
    features=features,
    needs=("all_reduce", "broadcast", "all_gather"),
    weight=0.3,
)
def replicated(
    model: Annotated[
        nn.Module,
        FromCase(
            lambda case: ModuleCall(build_model, (Pair, SIZES, True, case.seed), {"gives": case.get("gives")}), "gives"
        ),
    ],
    mesh: NamedMesh,
    inputs: Annotated[Any, FromCase(read_rank_batches, "held")],
    graph: Graph = "free",
    loss: Literal["both", "first", "apart"] = "both",
    buckets: Literal["view", "small"] | None = None,
):
    """A replicated model has on every rank the mean of all gradients after each step, whatever it returns, whatever of
    it goes into the loss, and however many passes come before."""
    options: dict[str, Any] = {
        "find_unused_parameters": graph == "unused",
        "static_graph": graph == "static",
        "gradient_as_bucket_view": buckets == "view",
    }
    if buckets == "small":
        options["bucket_cap_mb"] = 0.00001
    parallel, steps = DistributedDataParallel(model, process_group=mesh.get_group(), **options), []
    for passes in inputs:
        model.zero_grad()
        for at, x in enumerate(passes):
            with nullcontext() if at == len(passes) - 1 else parallel.no_sync():
                back(parallel(x), loss)
        steps.append({name: None if grad is None else grad.clone() for name, grad in reduced_gradients(model).items()})
    return {"steps": steps}


@replicated.due
def _(model, inputs: list[Any], loss: str):
    steps = []
    for at in range(STEPS):
        model.zero_grad()
        for passes in inputs:
            for x in passes[at]:
                back(model(x), loss)
        arrived = reduced_gradients(model)
        steps.append({name: None if grad is None else Near(grad / len(inputs)) for name, grad in arrived.items()})
    return {"steps": steps}
