"""Laws of models whose parameters are placed by hand, and of models that are fully sharded while they are not in
use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Near, Of
from shardlaw.conformance.law.fields import BoolField, NamedMesh, Placements, Rank, Seed, Shape, WorldSize
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import ByRank, FromCase, ModuleCall, dtensor
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Model,
    Pairs,
    copied_parameters,
    model_name,
    reduced_gradients,
)
from shardlaw.conformance.laws.module.models import optimizer_of
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import MLP, ZOO, build_model, eighths, output_gradient

HAND = "torch.distributed.tensor docs, distribute_module"
FSDP = "torch.distributed.fsdp docs, fully_shard"


@st.composite
def drawn_by_hand(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = palette_meshes(("2", "3", "2x2", "1x2", "2x1"), limits.world_size)
    mesh, sizes = draw(st.sampled_from(meshes)), st.sampled_from([5, 4, 7, 8, 6])
    one, two = (tuple(draw(st.sampled_from([R(), S(0), S(1)])) for _ in mesh.shape) for _ in range(2))
    dims = format_shape(draw(st.tuples(sizes, sizes, sizes)))
    return fields(
        mesh=mesh, dims=dims, rows=draw(st.sampled_from([3, 4])), net1=one, net2=two, seed=draw(draws.seeds())
    )


def draw_by_hand(limits: Limits) -> SearchStrategy[Case]:
    def split_once(case: Case) -> bool:
        return all(
            side.count(S(dim)) < 2 for side in (case.placements("net1"), case.placements("net2")) for dim in (0, 1)
        )

    return drawn_by_hand(limits).filter(split_once)


def features_hand(case: Case) -> set[str]:
    dims, shape = case.shape("dims"), case.mesh().shape
    sizes = {"net1": (dims[1], dims[0]), "net2": (dims[2], dims[1])}
    cut = [
        sizes[name][at.dim] % ranks
        for name in sizes
        for at, ranks in zip(case.placements(name), shape, strict=True)
        if isinstance(at, S)
    ]
    return {"module"} | ({"uneven"} if any(cut) else set())


# the layouts that the documents show: partly replicated on a 2-D mesh, and on a mesh of every other rank
SHOWN = ("2x2 R,S(0) R,S(1)", "2@0,2 S(0) S(1)", "2@0,2 R R", "2@1,3 S(1) S(0)", "3 S(0) S(1)")


@law(
    "module.by-hand",
    source=HAND,
    control="mesh=2x2 dims=5x8x3 rows=3 net1=R,S(0) net2=R,S(1)",
    draw=draw_by_hand,
    draws=10,
    sweep=texts(
        *(
            "mesh={} dims={dims} rows=3 net1={} net2={}".format(*shown.split(), dims=dims)
            for shown in SHOWN
            for dims in ("5x8x3", "5x7x12")
        )
    ),
    sweeps=10,
    features=features_hand,
    needs=NEEDS,
    weight=0.2,
)
def by_hand(
    model: Annotated[
        nn.Module, FromCase(lambda case: ModuleCall(build_model, (MLP, case.shape("dims"), True, case.seed)))
    ],
    mesh: DeviceMesh,
    net1: Placements,
    net2: Placements,
    dims: Shape,
    rows: int,
    seed: Seed,
    world: WorldSize,
):
    """A model whose parameters a partition function placed gives the dense output and gradients on every rank of its
    mesh."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            at = net1 if name == "net1" else net2
            if key == "bias":  # lies along with the rows of its weight
                at = [one if one == Shard(0) else Replicate() for one in at]
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, at)))

    def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()] * mesh.ndim)

    def leave(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return outputs.full_tensor()

    model = distribute_module(model, mesh, partition, enter, leave)
    everywhere = mesh.size() == world
    x = eighths((rows, dims[0]), seed + 5).to(mesh.device_type).requires_grad_(everywhere)
    out = model(x)
    if everywhere:
        out.backward(output_gradient(tuple(out.shape), seed).to(mesh.device_type))
    return {
        "parameters": dict(model.named_parameters()),
        "elements": out.numel(),
        "forward": out,
        "input": x.grad,
        "gradients": reduced_gradients(model),
    }


@by_hand.due
def _(model, mesh: Mesh, net1, net2, dims, rows: int, seed: int, world, rank: Rank):
    x = eighths((rows, dims[0]), seed + 5).requires_grad_()
    out = model(x)
    out.backward(output_gradient(tuple(out.shape), seed))
    places = {"net1.weight": net1, "net2.weight": net2}
    places |= {f"{name[:4]}.bias": tuple(one if one == S(0) else R() for one in at) for name, at in places.items()}
    member, everywhere = mesh.coord(rank) is not None, mesh.size == world
    arrived: dict[str, Any] = reduced_gradients(model)
    return {
        "parameters": {name: dtensor(mesh, whole, *places[name]).near() for name, whole in model.named_parameters()},
        "elements": ... if member else 0,
        "forward": Near(out.detach()) if member else ...,
        "input": Near(x.grad) if everywhere else None,
        "gradients": {name: Claimed(grad, mesh, exact=False) if everywhere else None for name, grad in arrived.items()},
    }


# Fully sharded


def inputs_of(case: Case, *, shared: bool = False) -> ByRank:
    """Inputs of two rows and three steps for two optimizer steps of ``passes`` passes each: for each pass those of
    every rank, or, where
    tensors are sharded along the last of several mesh dims too, of all ranks along it. A rank has its own."""
    kind, sizes, mesh, passes = ZOO[model_name(case)], case.shape("dims"), case.mesh(), case.integer("passes", 1)

    def pair(at: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = kind.make_input(sizes, 2, 3, case.seed + 5 * rank + at)
        return x, kind.make_output_gradient(sizes, x, case.seed + rank)

    apart = mesh.size // mesh.shape[-1] if shared and mesh.ndim > 1 else mesh.size
    every = [[pair(at, rank) for rank in range(apart)] for at in range(2 * passes)]
    share = mesh.size // len(every[0])
    return ByRank(lambda rank: [pairs[mesh.ranks.index(rank) // share] for pairs in every], every)


class ReshardField(BoolField):
    """What becomes of parameters after the forward pass: all sharded, all kept, or sharded over so many ranks."""

    takes = "yes, no or a number of ranks"

    def parse(self, text: str) -> Any:
        return int(text) if text.isdecimal() else super().parse(text)


Reshard = Annotated[bool, ReshardField()]


@st.composite
def draw_fully(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = palette_meshes(("2", "2", "3", "3", "4", "2x2"), limits.world_size)
    mesh, sizes = draw(st.sampled_from(meshes)), st.sampled_from([3, 5, 7, 4, 2])
    kind = "mlp" if mesh.ndim > 1 else draw(st.sampled_from(["mlp", "mlp", "stacked", "norm"]))
    width = draw(sizes) if mesh.ndim == 1 else mesh.shape[1] * draw(st.sampled_from([1, 2, 3]))
    dims = (draw(sizes), width, draw(sizes)) if kind == "mlp" else (draw(sizes), width)
    said: dict[str, Any] = {
        "model": kind,
        "dims": format_shape(dims),
        "optimizer": draw(st.sampled_from(["sgd", "adamw"])),
    }
    said |= {"reshard": draw(st.sampled_from(["yes", "no"])), "units": draw(st.sampled_from([None, 1]))}
    said["frozen"] = draw(st.sampled_from([None, None, "weight", "bias"]))
    return fields(mesh=mesh, **said, seed=draw(draws.seeds()))


def features_fully(case: Case) -> set[str]:
    found = {"module", "fully-sharded", "backward"} | ({"frozen"} if "frozen" in case else set())
    return found | ({"uneven"} if any(extent % case.mesh().shape[0] for extent in case.shape("dims")[1:]) else set())


def freeze(model: nn.Module, names: str | None) -> None:
    """Let all parameters ask for gradients but those with such names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(names is None or names not in name)


@law(
    "module.fully-shard",
    source=FSDP,
    control="mesh=2 model=mlp dims=5x7x3 optimizer=sgd reshard=yes",
    draw=draw_fully,
    draws=8,
    # beside tensor parallelism, as one unit and as several; with widths that do and do not fit the mesh
    sweep=texts(
        "mesh=2x2 model=mlp dims=5x8x3 optimizer=sgd reshard=yes",
        "mesh=2x2 model=mlp dims=3x4x5 optimizer=adamw reshard=no units=1",
        # a layer without elements
        "mesh=2 model=mlp dims=5x0x3 optimizer=sgd reshard=yes",
    ),
    sweeps=3,
    features=features_fully,
    needs=NEEDS,
    weight=0.2,
)
def fully_sharded(
    model: Model,
    mesh: NamedMesh,
    inputs: Annotated[Pairs, FromCase(lambda case: inputs_of(case, shared=True))],
    optimizer: Literal["sgd", "adamw"],
    reshard: Reshard,
    units: bool = False,
    frozen: Literal["weight", "bias"] | None = None,
):
    """A fully sharded model computes the dense output, the mean of the ranks' gradients, and the dense optimizer's
    steps."""
    freeze(model, frozen)
    if mesh.ndim > 1:
        parallelize_module(model, mesh["b"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
        mesh = mesh["a"]
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    for part in [*layers, model] if units else [model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    stepping, steps = optimizer_of(optimizer, [one for one in model.parameters() if one.requires_grad]), []
    for x, grad in inputs:
        out = model(x)
        out.backward(grad)
        arrived = reduced_gradients(model)
        stepping.step()
        stepping.zero_grad()
        steps.append({"forward": out, "gradients": arrived, "parameters": copied_parameters(model)})
    return {"steps": steps, "trained": {name: one.requires_grad for name, one in model.named_parameters()}}


@fully_sharded.due
def _(model, mesh: Mesh, inputs: list[Pairs], optimizer: str, frozen: str | None, rank: Rank):
    freeze(model, frozen)
    stepping, steps = optimizer_of(optimizer, [one for one in model.parameters() if one.requires_grad]), []
    (row, *_) = mesh.coord(rank) or (0,)

    def sharded(named: dict[str, Any]) -> dict[str, Any]:
        return {name: None if whole is None else Claimed(whole, mesh, exact=False) for name, whole in named.items()}

    for pairs in inputs:
        outs = [model(x) for x, _ in pairs]
        for out, (_, grad) in zip(outs, pairs, strict=True):
            out.backward(grad / len(pairs))
        arrived = sharded(reduced_gradients(model))
        stepping.step()
        stepping.zero_grad()
        steps.append(
            {"forward": Near(outs[row].detach()), "gradients": arrived, "parameters": sharded(copied_parameters(model))}
        )
    return {"steps": steps, "trained": Of({name: one.requires_grad for name, one in model.named_parameters()})}
