"""The law of expert parallelism: each rank has some of the experts of a layer, and all of their inputs."""

from __future__ import annotations

from typing import Annotated, Any

from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Near
from shardlaw.conformance.law.features.layout_features import placement_features
from shardlaw.conformance.law.fields import Placements, Seed, Shape
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import FromCase, ModuleCall, dtensor
from shardlaw.conformance.laws.module.model_fields import NEEDS, claimed, reduced_gradients
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Placements as Placed
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import Mixture, build_model, eighths, output_gradient

MESHES = ("2", "2", "3", "4", "2x2", "2@1,0")
CASES = (
    "mesh=2 dims=4x3x5 rows=3 experts=S(0) batch=R",
    "mesh=3 dims=5x4x2 rows=6 experts=S(0) batch=S(0)",
    "mesh=4 dims=3x2x4 rows=2 experts=S(0) batch=R",
    "mesh=2x2 dims=4x3x5 rows=4 experts=R,S(0) batch=S(0),R",
    "mesh=2x2 dims=3x4x3 rows=5 experts=S(0),S(0) batch=R,R",
    "mesh=2x2 dims=4x3x6 rows=3 experts=S(0),S(2) batch=R,R",
)


@st.composite
def draw_experts(draw: st.DrawFn, limits: Limits) -> Case:
    sizes = st.sampled_from([4, 3, 5, 2, 6])
    mesh = draw(st.sampled_from(palette_meshes(MESHES, limits.world_size)))
    experts = [draw(st.sampled_from([S(0), S(0), R()])) for _ in mesh.shape]
    batch = [draw(st.sampled_from([R(), R(), S(0)])) for _ in mesh.shape]
    dims = format_shape(draw(st.tuples(sizes, sizes, sizes)))
    rows = draw(st.sampled_from([3, 4, 5]))
    placements: dict[str, Any] = {"experts": tuple(experts), "batch": tuple(batch)}
    return fields(mesh=mesh, dims=dims, rows=rows, **placements, seed=draw(draws.seeds()))


def features(case: Case) -> set[str]:
    shape = case.shape("dims")
    layout = placement_features(
        shape, "x".join(map(str, case.mesh().shape)), ",".join(map(str, case.placements("experts")))
    )
    return {"module", "backward", "way:experts"} | layout & {"uneven", "empty-shard"}


@law(
    "module.experts",
    source="torch.distributed.tensor docs, distribute_module; the mixture of experts of torch's model zoo for tests",
    control=CASES[0],
    cases=CASES,
    draw=draw_experts,
    draws=6,
    features=features,
    needs=NEEDS,
    weight=0.2,
)
def experts(
    model: Annotated[
        nn.Module, FromCase(lambda case: ModuleCall(build_model, (Mixture, case.shape("dims"), True, case.seed)))
    ],
    mesh: DeviceMesh,
    experts: Placements,
    batch: Placements,
    dims: Shape,
    rows: int,
    seed: Seed,
):
    """A layer with sharded experts has the dense output and gradients, however the rows of its input are sharded."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placements = experts if name == "experts" else [Replicate()] * mesh.ndim
            if key == "w2":  # the columns of w1 are the rows of w2
                placements = [Shard(3 - at.dim) if isinstance(at, Shard) and at.dim else at for at in placements]
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))

    model = distribute_module(model, mesh, partition)
    x = distribute_tensor(eighths((rows, dims[1]), seed + 5).to(mesh.device_type), mesh, batch).requires_grad_()
    out = model(x).full_tensor()
    out.backward(output_gradient(tuple(out.shape), seed).to(mesh.device_type))
    return {
        "parameters": dict(model.named_parameters()),
        "forward": out,
        "input": x.grad,
        "gradients": reduced_gradients(model),
    }


@experts.due
def _(model, mesh: Mesh, experts, dims, rows: int, seed: int):
    x: Any = eighths((rows, dims[1]), seed + 5).requires_grad_()
    out = model(x)
    out.backward(output_gradient(tuple(out.shape), seed))
    placements: dict[str, Placed] = {name: (R(),) * mesh.ndim for name, _ in model.named_parameters()}
    placements["experts.w1"] = experts
    placements["experts.w2"] = tuple(S(3 - at.dim) if isinstance(at, S) and at.dim else at for at in experts)
    return {
        "parameters": {name: dtensor(mesh, full, *placements[name]).near() for name, full in model.named_parameters()},
        "forward": Near(out.detach()),
        "input": Claimed(x.grad, mesh, exact=False),
        "gradients": claimed(reduced_gradients(model), mesh),
    }
