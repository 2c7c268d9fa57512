"""The checkpoint of the example with a simple MLP: its three models, saved by one and loaded into another.

Fields of a case: ``way`` and ``way.load`` say which model saves and which loads: ``tensor`` (its first layer by columns over all ranks, the
second one plain), ``partly`` (replicated along one axis of a mesh of two by two, sharded along the other), ``submesh`` (on every other
rank alone) or ``dense`` (plain on every rank).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Law, Limits
from conformance.report.reproducer import Script, Stage
from conformance.target import storage
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import Shape
from reference.placement import parse_placements
from reference.tensors import TensorSpec

SHAPES: dict[str, Shape] = {"net1.weight": (128, 5), "net1.bias": (128,), "net2.weight": (12, 128), "net2.bias": (12,)}
# the mesh of each model, and the placements of its parameters; one that is not named is plain
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "tensor": ("4", {"net1.weight": "S(0)", "net1.bias": "S(0)"}),
    "partly": ("2x2", {"net1.weight": "R,S(0)", "net1.bias": "R,S(0)", "net2.weight": "R,S(1)", "net2.bias": "R,R"}),
    "submesh": ("2@0,2", {"net1.weight": "S(0)", "net1.bias": "S(0)", "net2.weight": "S(1)", "net2.bias": "R"}),
    "dense": ("4", {}),
}


class SimpleMLP(nn.Module):
    """The example's model, with given values."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(5, 128), nn.ReLU(), nn.Linear(128, 12)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(values[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return found


def values() -> dict[str, torch.Tensor]:
    """A value for each parameter: no two elements of one are alike."""
    return {name: TensorSpec(shape).build(at) for at, (name, shape) in enumerate(SHAPES.items())}


def layout(way: str, name: str) -> Layout | None:
    """Where a parameter lies, or ``None`` for a plain one."""
    mesh, placed = WAYS[way]
    return Layout(SHAPES[name], Mesh.parse(mesh), parse_placements(placed[name])) if name in placed else None


def model_of(here: Here, way: str, given: dict[str, torch.Tensor]) -> nn.Module:
    """The model, made as the example makes it."""
    model = SimpleMLP(given).to(here.device)
    mesh = here.mesh(Mesh.parse(WAYS[way][0]))
    if way == "dense":
        return model
    if way == "tensor":
        return parallelize_module(model, mesh, {"net1": ColwiseParallel()})
    front: list[Any] = [Replicate()] if way == "partly" else []

    def place(name: str, module: nn.Module, on: DeviceMesh) -> None:
        if not isinstance(module, nn.Linear):
            return
        for key, parameter in list(module.named_parameters()):
            last = Shard(0) if name == "net1" else Shard(1) if key == "weight" else Replicate()
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), on, [*front, last])))

    return distribute_module(model, mesh, partition_fn=place)


def judge(here: Here, way: str, model: nn.Module, check: str) -> None:
    held, due = dict(model.named_parameters()), values()
    for name, full in due.items():
        if here.require(name in held, "wrong-metadata", check, f"the model has no {name}", [*due], [*held]):
            t.judge_tensor(here, held[name].data, full, layout(way, name), place=name, check=check)


def check_checkpoint(case: Case, here: Here) -> None:
    """A model that was saved is, loaded into a fresh one of its own or of another kind, the same model, bit for bit."""
    way = case.get("way") if here.stage == 0 else case.get("way.load")
    if here.stage == 0:
        model = model_of(here, way, values())
        judge(here, way, model, "made")
        with t.told_plainly():
            t.dcp.save({"model": model.state_dict()}, storage_writer=storage.writer(here.target, here.folder()))
        return
    model = model_of(here, way, {name: t.poison(full) for name, full in values().items()})
    state = {"model": model.state_dict()}
    with t.told_plainly():
        t.dcp.load(state, storage_reader=storage.reader(here.target, here.folder()))
    model.load_state_dict(state["model"])
    judge(here, way, model, "loaded")


def checkpoint_script(case: Case) -> Script:
    """Parameters are distributed one by one; each is ``arange`` of its size."""
    shapes = f"SHAPES = {SHAPES}"
    make = [
        "def made(mesh, placed, value):",
        "    state = {name: value(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)) for name, shape in SHAPES.items()}",
        "    for name, places in placed.items():",
        "        state[name] = distribute_tensor(state[name], mesh, places)",
        "    return state",
        "local = lambda x: x.to_local() if isinstance(x, DTensor) else x",
    ]
    stages = []
    for end in ("way", "way.load"):
        mesh, placed = WAYS[case.get(end)]
        table = torch.tensor(Mesh.parse(mesh).ranks).reshape(Mesh.parse(mesh).shape).tolist()
        read: Callable[[str], str] = lambda text: f"[{', '.join(map(_placement, parse_placements(text)))}]"  # noqa: E731
        places = "{" + ", ".join(f"{name!r}: {read(text)}" for name, text in placed.items()) + "}"
        lines = [f'mesh, placed = DeviceMesh("cpu", {table}), {places}']
        if end == "way":
            lines += ["dcp.save(made(mesh, placed, lambda x: x), checkpoint_id=folder)", "return None, None"]
        else:
            lines += [
                "state, want = made(mesh, placed, lambda x: -x), made(mesh, placed, lambda x: x)",
                "dcp.load(state, checkpoint_id=folder)",
                "return [local(want[k]) for k in SHAPES], [local(state[k]) for k in SHAPES]",
            ]
        stages.append(Stage(4, tuple(lines)))
    imports = (
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.device_mesh import DeviceMesh",
        "from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor",
    )
    return Script(tuple(stages), imports, (shapes, *make))


def _placement(placement: Any) -> str:
    return "Replicate()" if str(placement) == "R" else f"Shard({placement.dim})"


def _sweep(limits: Limits) -> list[Case]:
    if limits.world_size < 4:
        return []
    pairs = [(way, load) for way in WAYS for load in WAYS if (way, load) != ("dense", "dense")]
    return [
        Case.parse(f"roundtrip.example world=4 way={way} way.load={load}") for way, load in sorted(pairs, key=lambda pair: "dense" in pair)
    ]


def features(case: Case) -> set[str]:
    ways = {case.get("way"), case.get("way.load")}
    found = {"module", *(f"way:{way}" for way in ways)}
    found |= {"reshard"} if len(ways) > 1 else set()
    found |= {"submesh"} if "submesh" in ways else set()
    return found | ({"mesh-2d"} if "partly" in ways else set())


LAWS = (
    Law(
        id="roundtrip.example",
        clause="The example's models, by columns, partly replicated or on a sub-mesh, are the same once saved and loaded, also crosswise.",
        source="torch.distributed._tensor.examples.checkpoint_example: checkpoint save/load models with DTensor parameters",
        check=check_checkpoint,
        control="roundtrip.example world=4 way=tensor way.load=submesh",
        planted="overlap_offset_lost",
        sweep=_sweep,
        sweeps=15,
        needs=("checkpoint", "object_collectives"),
        smallest=4,
        stages=lambda case: (4, 4),
        features=features,
        script=checkpoint_script,
    ),
)
