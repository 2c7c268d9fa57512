"""The law on torch's example of a checkpoint of a simple MLP: its models, saved and loaded with different parallelism.

``way`` and ``way.load`` are the parallelism of the model that is saved and of the one that is loaded into: ``tensor``
(the first layer column-wise over all ranks, the second plain), ``partly`` (replicated along one dim of a 2x2 mesh and
sharded along the other), ``submesh`` (on every other rank only) or ``dense`` (plain on every rank).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Device, Folder, MeshField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.checkpoint.calls import load, poison, save
from shardlaw.conformance.laws.checkpoint.fields import Reader, Writer
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import parse_placements

SHAPES: dict[str, Shape] = {"net1.weight": (128, 5), "net1.bias": (128,), "net2.weight": (12, 128), "net2.bias": (12,)}
# the mesh of each model, and the placements of its parameters; the others are plain
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "tensor": ("4", {"net1.weight": "S(0)", "net1.bias": "S(0)"}),
    "partly": ("2x2", {"net1.weight": "R,S(0)", "net1.bias": "R,S(0)", "net2.weight": "R,S(1)", "net2.bias": "R,R"}),
    "submesh": ("2@0,2", {"net1.weight": "S(0)", "net1.bias": "S(0)", "net2.weight": "S(1)", "net2.bias": "R"}),
    "dense": ("4", {}),
}


class WayField(MeshField):
    """The mesh of the model that the field ``way`` names."""

    always = True

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def fields(self, name: str) -> tuple[str, ...]:
        return (self.way,)

    def read(self, case: Case, name: str) -> Mesh:
        return Mesh.parse(WAYS[case.get(self.way)][0])


Way = Literal["tensor", "partly", "submesh", "dense"]


def make_parameters() -> dict[str, torch.Tensor]:
    """A value for each parameter, with distinct elements."""
    return {
        name: torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + at
        for at, (name, shape) in enumerate(SHAPES.items())
    }


class SimpleMLP(nn.Module):
    """The model of the example with given parameters."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(5, 128), nn.ReLU(), nn.Linear(128, 12)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(values[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return output


def build_model(way: str, mesh: DeviceMesh, values: dict[str, torch.Tensor], device: torch.device) -> nn.Module:
    """The model, built as in the example."""
    model = SimpleMLP(values).to(device)
    if way == "dense":
        return model
    if way == "tensor":
        return parallelize_module(model, mesh, {"net1": ColwiseParallel()})
    outer = [Replicate()] if way == "partly" else []

    def partition(name: str, module: nn.Module, on: DeviceMesh) -> None:
        if not isinstance(module, nn.Linear):
            return
        for key, parameter in list(module.named_parameters()):
            inner = Shard(0) if name == "net1" else Shard(1) if key == "weight" else Replicate()
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), on, [*outer, inner])))

    return distribute_module(model, mesh, partition_fn=partition)


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def sweep(limits: Limits) -> list[Case]:
    if limits.world_size < 4:
        return []
    pairs = [(way, load) for way in WAYS for load in WAYS if (way, load) != ("dense", "dense")]
    return [
        Case.parse(f"- world=4 way={way} way.load={load}")
        for way, load in sorted(pairs, key=lambda pair: "dense" in pair)
    ]


def features(case: Case) -> set[str]:
    ways = {case.get("way"), case.get("way.load")}
    named = {"module", *(f"way:{way}" for way in ways)}
    named |= {"reshard"} if len(ways) > 1 else set()
    named |= {"submesh"} if "submesh" in ways else set()
    return named | ({"mesh-2d"} if "partly" in ways else set())


@law(
    "roundtrip.example",
    source="torch.distributed._tensor.examples.checkpoint_example: checkpoint save/load models with DTensor parameters",
    control="world=4 way=tensor way.load=submesh",
    sweep=sweep,
    sweeps=15,
    needs=("checkpoint", "object_collectives"),
    smallest=4,
    stages=lambda case: (4, 4),
    features=features,
)
def example(
    way: Way,
    mesh: Annotated[DeviceMesh, WayField("way")],
    writer: Writer,
    device: Device,
    folder: Folder,
):
    """The models of torch's checkpoint example, saved and loaded with any of its kinds of parallelism, have the saved
    parameters."""
    model = build_model(way, mesh, make_parameters(), device)
    save({"model": model.state_dict()}, writer(folder))
    return {"made": parameters_of(model)}


@example.due
def _(way):
    return {"made": due_parameters(way)}


def due_parameters(way: str) -> dict[str, Any]:
    """The parameters of a model, with their layouts."""
    mesh, placements = Mesh.parse(WAYS[way][0]), WAYS[way][1]
    layouts = {name: Layout(SHAPES[name], mesh, parse_placements(text)) for name, text in placements.items()}
    return {name: Global(full, layouts[name]) if name in layouts else full for name, full in make_parameters().items()}


@example.then
def _(
    way__load: Way,
    mesh: Annotated[DeviceMesh, WayField("way.load")],
    reader: Reader,
    device: Device,
    folder: Folder,
):
    poisoned = {name: poison(full) for name, full in make_parameters().items()}
    model = build_model(way__load, mesh, poisoned, device)
    state = load({"model": model.state_dict()}, reader(folder))
    model.load_state_dict(state["model"])
    return {"loaded": parameters_of(model)}


@example.due
def _(way__load):
    return {"loaded": due_parameters(way__load)}
