"""The law of models that are created on the meta device, sharded, and then allocated and initialised."""

from __future__ import annotations

from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Near, Of
from shardlaw.conformance.law.fields import NamedMesh, Rank, Seed, Shape
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import dtensor
from shardlaw.conformance.laws.module.model_fields import NEEDS
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Replicate as R
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import Blank, eighths

CASES = (
    "mesh=2 dims=3x4x5 way=tensor",
    "mesh=2 dims=3x5x4 way=fully",
    "mesh=3 dims=2x6x3 way=tensor",
    "mesh=3 dims=5x4x2 way=fully",
    "mesh=2x2 dims=3x4x4 way=both",
    "mesh=2x2 dims=5x6x3 way=both seed=1",
)


@st.composite
def draw_meta_device(draw: st.DrawFn, limits: Limits) -> Case:
    sizes = st.sampled_from([3, 4, 5, 2, 7])
    mesh = draw(st.sampled_from(palette_meshes(("2", "3", "4", "2x2"), limits.world_size)))
    way = "both" if mesh.ndim > 1 else draw(st.sampled_from(["fully", "tensor"]))
    split = mesh.shape[-1] * draw(st.sampled_from([1, 2])) if way != "fully" else draw(sizes)
    dims = format_shape((draw(sizes), split, draw(sizes)))
    return fields(mesh=mesh, dims=dims, way=way, seed=draw(draws.seeds()))


def features(case: Case) -> set[str]:
    way = case.get("way")
    return {"module", f"way:{way}"} | ({"fully-sharded"} if way != "tensor" else set())


@law(
    "module.materialized",
    source="torch.distributed.fsdp docs, fully_shard: meta device; torch.nn.Module.to_empty",
    control=CASES[0],
    cases=CASES,
    draw=draw_meta_device,
    draws=5,
    features=features,
    needs=NEEDS,
    weight=0.2,
)
def materialized(mesh: NamedMesh, dims: Shape, way: Literal["tensor", "fully", "both"], seed: Seed):
    """A model that is sharded on the meta device equals the dense model once its memory is allocated and its parameters
    are reset."""
    with torch.device("meta"):
        model: Any = Blank(dims)
    if way != "fully":
        tp_mesh = mesh["b"] if way == "both" else mesh
        parallelize_module(model, tp_mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    if way != "tensor":
        fully_shard(model, mesh=mesh["a"] if way == "both" else mesh)
    model.to_empty(device=mesh.device_type)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return {
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "forward": model(eighths((4, dims[0]), seed).to(mesh.device_type)),
    }


@materialized.due
def _(mesh: Mesh, dims, way: str, seed: int, rank: Rank):
    model = Blank(dims)
    fsdp_mesh, tp_mesh = mesh, mesh
    if way == "both":
        fsdp_mesh, tp_mesh = (mesh.slice((dim,), mesh.coord(rank) or (0, 0)) for dim in (0, 1))

    def due(name: str, full: torch.Tensor) -> Any:
        if name.startswith("norm"):
            return Near(full) if way == "tensor" else Claimed(full, fsdp_mesh)
        return Claimed(full, mesh)

    # styles replicate the buffers of their modules
    buffers = {name: full if way == "fully" else dtensor(tp_mesh, full, R()) for name, full in model.named_buffers()}
    return {
        "parameters": {name: due(name, full.detach()) for name, full in model.named_parameters()},
        "buffers": buffers,
        "trained": Of({name: True for name, _ in model.named_parameters()}),
        "forward": Near(model(eighths((4, dims[0]), seed)).detach()),
    }
