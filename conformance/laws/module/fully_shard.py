"""Laws of models whose parameters a partition function places, and of models under fully_shard."""

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

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near, Of
from shardlaw.conformance.law.fields import BoolField, NamedMesh, Placements, Rank, Seed, Shape, WorldSize
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import ByRank, FromCase, ModuleCall, dtensor
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Model,
    Pairs,
    claimed,
    mean_backward,
    model_name,
    reduced_gradients,
    take_step,
    uneven,
)
from shardlaw.conformance.laws.module.models import make_optimizer
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import MLP, ZOO, build_model, eighths, output_gradient

BY_HAND_DOC = "torch.distributed.tensor docs, distribute_module"
FSDP = "torch.distributed.fsdp docs, fully_shard"


@st.composite
def by_hand_cases(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = palette_meshes(("2", "3", "2x2", "1x2", "2x1"), limits.world_size)
    mesh, sizes = draw(st.sampled_from(meshes)), st.sampled_from([5, 4, 7, 8, 6])
    net1, net2 = (tuple(draw(st.sampled_from([R(), S(0), S(1)])) for _ in mesh.shape) for _ in range(2))
    dims = format_shape(draw(st.tuples(sizes, sizes, sizes)))
    return fields(
        mesh=mesh, dims=dims, rows=draw(st.sampled_from([3, 4])), net1=net1, net2=net2, seed=draw(draws.seeds())
    )


def draw_by_hand(limits: Limits) -> SearchStrategy[Case]:
    def shards_each_dim_once(case: Case) -> bool:
        return all(case.placements(name).count(S(dim)) < 2 for name in ("net1", "net2") for dim in (0, 1))

    return by_hand_cases(limits).filter(shards_each_dim_once)


def features_by_hand(case: Case) -> set[str]:
    dims, shape = case.shape("dims"), case.mesh().shape
    sizes = {"net1": (dims[1], dims[0]), "net2": (dims[2], dims[1])}
    remainders = [
        sizes[name][placement.dim] % ranks
        for name in sizes
        for placement, ranks in zip(case.placements(name), shape, strict=True)
        if isinstance(placement, S)
    ]
    return {"module"} | ({"uneven"} if any(remainders) else set())


# mesh and placements of both layers, as the documents show them: partly replicated, and on a mesh of every other rank
DOCUMENTED = ("2x2 R,S(0) R,S(1)", "2@0,2 S(0) S(1)", "2@0,2 R R", "2@1,3 S(1) S(0)", "3 S(0) S(1)")


@law(
    "module.by-hand",
    source=BY_HAND_DOC,
    control="mesh=2x2 dims=5x8x3 rows=3 net1=R,S(0) net2=R,S(1)",
    draw=draw_by_hand,
    draws=10,
    cases=[
        "mesh={} dims={dims} rows=3 net1={} net2={}".format(*layout.split(), dims=dims)
        for layout in DOCUMENTED
        for dims in ("5x8x3", "5x7x12")
    ],
    features=features_by_hand,
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
    """A model whose parameters a partition function placed has the dense output and gradients on every rank of its
    mesh."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placements = net1 if name == "net1" else net2
            if key == "bias":  # is sharded with the rows of its weight
                placements = [placement if placement == Shard(0) else Replicate() for placement in placements]
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))

    def to_dtensor(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()] * mesh.ndim)

    def to_plain(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return outputs.full_tensor()

    model = distribute_module(model, mesh, partition, to_dtensor, to_plain)
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
    placements = {"net1.weight": net1, "net2.weight": net2}
    for layer in ("net1", "net2"):
        placements[f"{layer}.bias"] = tuple(
            placement if placement == S(0) else R() for placement in placements[f"{layer}.weight"]
        )
    member, everywhere = mesh.coord(rank) is not None, mesh.size == world
    grads = reduced_gradients(model)
    return {
        "parameters": {name: dtensor(mesh, full, *placements[name]).near() for name, full in model.named_parameters()},
        "elements": ... if member else 0,
        "forward": Near(out.detach()) if member else ...,
        "input": Near(x.grad) if everywhere else None,
        "gradients": claimed(grads, mesh) if everywhere else dict.fromkeys(grads),
    }


# Fully sharded


def read_rank_batches(case: Case, *, shared: bool = False) -> ByRank:
    """The inputs of ``passes`` passes in each of two optimizer steps, two rows of three steps each, with the gradients
    of the outputs. Every rank has its own; if ``shared``, ranks along the last of several mesh dims have the same. The
    due function gets those of all ranks for each pass."""
    kind, sizes, mesh, passes = ZOO[model_name(case)], case.shape("dims"), case.mesh(), case.integer("passes", 1)

    def pair(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = kind.make_input(sizes, 2, 3, case.seed + 5 * rank + number)
        return x, kind.make_output_gradient(sizes, x, case.seed + rank)

    copies = mesh.shape[-1] if shared and mesh.ndim > 1 else 1
    batches = [[pair(number, rank) for rank in range(mesh.size // copies)] for number in range(2 * passes)]
    coords = {rank: at // copies for at, rank in enumerate(mesh.ranks)}
    return ByRank(lambda rank: [pairs[coords[rank]] for pairs in batches if rank in coords], batches)


class ReshardField(BoolField):
    """``reshard_after_forward``: whether parameters are sharded again after the forward pass, or over how many
    ranks."""

    takes = "yes, no or a number of ranks"

    def parse(self, text: str) -> Any:
        return int(text) if text.isdecimal() else super().parse(text)


Reshard = Annotated[bool, ReshardField()]


@st.composite
def draw_fully_shard(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = palette_meshes(("2", "2", "3", "3", "4", "2x2"), limits.world_size)
    mesh, sizes = draw(st.sampled_from(meshes)), st.sampled_from([3, 5, 7, 4, 2])
    kind = "mlp" if mesh.ndim > 1 else draw(st.sampled_from(["mlp", "mlp", "stacked", "norm"]))
    width = draw(sizes) if mesh.ndim == 1 else mesh.shape[1] * draw(st.sampled_from([1, 2, 3]))
    dims = (draw(sizes), width, draw(sizes)) if kind == "mlp" else (draw(sizes), width)
    values: dict[str, Any] = {
        "model": kind,
        "dims": format_shape(dims),
        "optimizer": draw(st.sampled_from(["sgd", "adamw"])),
    }
    values |= {"reshard": draw(st.sampled_from(["yes", "no"])), "units": draw(st.sampled_from([None, 1]))}
    values["frozen"] = draw(st.sampled_from([None, None, "weight", "bias"]))
    return fields(mesh=mesh, **values, seed=draw(draws.seeds()))


def features_fully_shard(case: Case) -> set[str]:
    found = {"module", "fully-sharded", "backward"} | ({"frozen"} if "frozen" in case else set())
    return found | uneven(case.shape("dims")[1:], case.mesh().shape[0])


def freeze(model: nn.Module, frozen: str | None) -> None:
    """Set ``requires_grad`` of all parameters; to ``False`` where the name contains ``frozen``."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@law(
    "module.fully-shard",
    source=FSDP,
    control="mesh=2 model=mlp dims=5x7x3 optimizer=sgd reshard=yes",
    draw=draw_fully_shard,
    draws=8,
    # with tensor parallelism, as one unit and as several, with widths that divide by the ranks and that do not
    cases=(
        "mesh=2x2 model=mlp dims=5x8x3 optimizer=sgd reshard=yes",
        "mesh=2x2 model=mlp dims=3x4x5 optimizer=adamw reshard=no units=1",
        # a layer without elements
        "mesh=2 model=mlp dims=5x0x3 optimizer=sgd reshard=yes",
        # on the mesh of all ranks, which is not given
        "mesh=3 model=mlp dims=5x7x3 optimizer=sgd reshard=yes given=no",
        # with tensor parallelism, on other dims
        "mesh=2x2 model=mlp dims=4x8x2 optimizer=sgd reshard=yes dim=1",
        "mesh=2x2 model=mlp dims=4x8x2 optimizer=adamw reshard=yes units=1 dim=-1",
        "mesh=2x2 model=mlp dims=4x8x2 optimizer=sgd reshard=yes dim=-2",
    ),
    features=features_fully_shard,
    needs=NEEDS,
    weight=0.2,
)
def fully_sharded(
    model: Model,
    mesh: NamedMesh,
    inputs: Annotated[Pairs, FromCase(lambda case: read_rank_batches(case, shared=True))],
    optimizer: Literal["sgd", "adamw"],
    reshard: Reshard,
    units: bool = False,
    frozen: Literal["weight", "bias"] | None = None,
    given: bool = True,
    dim: int | None = None,
):
    """A fully sharded model has the dense output, the mean of the ranks' gradients, and the steps of the dense
    optimizer."""
    freeze(model, frozen)
    if mesh.ndim > 1:
        parallelize_module(model, mesh["b"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
        mesh = mesh["a"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    elsewhere = accelerator is not None and accelerator.type != mesh.device_type  # the default mesh is of its device
    options: dict[str, Any] = {"mesh": mesh} if given or elsewhere else {}
    if dim is not None:
        options["shard_placement_fn"] = lambda parameter: Shard(dim) if parameter.ndim > 1 else None
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for unit in [*layers, model] if units else [model]:
        fully_shard(unit, reshard_after_forward=reshard, **options)
    optim, steps = make_optimizer(optimizer, trained_parameters(model)), []
    for x, grad in inputs:
        out = model(x)
        out.backward(grad)
        steps.append({"forward": out, **take_step(model, optim)})
    return {"steps": steps, "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()}}


@fully_sharded.due
def _(model, mesh: Mesh, inputs: list[Pairs], optimizer: str, frozen: str | None, rank: Rank):
    freeze(model, frozen)
    optim, steps = make_optimizer(optimizer, trained_parameters(model)), []
    (row, *_) = mesh.coord(rank) or (0,)
    for pairs in inputs:
        outs = mean_backward(model, pairs)
        due = {key: claimed(tensors, mesh) for key, tensors in take_step(model, optim).items()}
        steps.append({"forward": Near(outs[row].detach()), **due})
    return {
        "steps": steps,
        "trained": Of({name: parameter.requires_grad for name, parameter in model.named_parameters()}),
    }
