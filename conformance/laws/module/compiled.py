"""Laws of torch.compile: compiled functions of DTensors and compiled parallel models compute what they compute
uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Of
from shardlaw.conformance.law.fields import Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Model,
    ModelMesh,
    OneBatch,
    StylePlan,
    cases,
    features,
    forward_backward,
    reduced_gradients,
)
from shardlaw.conformance.laws.module.models import backward_due, parallelize
from shardlaw.conformance.laws.module.plans import Plan
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.compiler import fresh_compiler
from shardlaw.conformance.laws.shared.derived import operand
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.meshes import palette_meshes

DOC = "torch.compile docs; torch.distributed.tensor docs: DTensors in torch.compile"
# functions of DTensors, and those of the dense tensor where they differ
DRAWN: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: (x * 2 + 1).relu(),
    "sum": lambda x: (x - 1).sum(0),
    "product": lambda x: x @ x.t(),
    "turned": lambda x: x.t() + x.t(),
    "gathered": lambda x: x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) * 3,
    "locally": lambda x: DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements),
    "rows-counted": lambda x: x.sum(0) * x.shape[0],
    "pair": lambda x: (x * 2, (x - 1).sum(0)),
    "view-of-input": lambda x: (x.t(), x + 1),
    "view-of-output": lambda x: (y := x * 2, y.t()),
    "detached": lambda x: (y := DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements), y.detach()),
    "lookup": lambda x: looked_up(x),
    "lookup-gathered": lambda x: looked_up(x).redistribute(placements=[Replicate()] * x.device_mesh.ndim),
}
FLATTENED: dict[str, Callable[[Any], Any]] = {  # of even shards alone: others are refused
    "flattened": lambda x: (x * 2).flatten(),
    "flattened-within": lambda x: (x * 2).flatten().relu().reshape(x.shape) + 1,
}
PROGRAMS = {**DRAWN, **FLATTENED}
DENSE: dict[str, Callable[[Any], Any]] = {
    "gathered": lambda x: x * 3,
    "locally": lambda x: x * 2,
    "detached": lambda x: (y := x * 2, y.detach()),
    "lookup": lambda x: x * 1,
    "lookup-gathered": lambda x: x * 1,
}
# inductor is not drawn: compiling with it may take longer than a case is allowed to
Backend = Literal["aot_eager", "eager", "inductor"]


def looked_up(x: DTensor) -> Any:
    """Every row of a table, by numbers that are replicated."""
    rows = DTensor.from_local(torch.arange(x.shape[0]), x.device_mesh, [Replicate()] * x.device_mesh.ndim)
    return F.embedding(rows, x)


def copied(x: DTensor, mesh: DeviceMesh) -> DTensor:
    """The same tensor on an equal mesh, by no op of DTensors: these are cached."""
    return DTensor.from_local(x.to_local(), mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def several(outs: Any) -> list[Any]:
    return [*outs] if isinstance(outs, tuple) else [outs]


FLAT_ON_TWO_DIMS = "2x2 x=4x4:S(0),S(1):float64:small"
SWEEP = (
    *(f"mesh=2 x=4x4:S(0):float64:small fn={fn}" for fn in DRAWN),
    *(f"mesh=2 x=4x4:S(0):float64:small fn={fn} grads=1" for fn in DRAWN),
    "mesh=2 x=4x4:S(0):float64:small y=6x4:S(0):float64:small fn=pointwise grads=1",
    "mesh=2 x=4x4:S(0):float64:small y=3x4:S(0):float64:small fn=pointwise grads=1",
    "mesh=2 x=4x4:S(0):float64:small y=3x4:S(0):float64:small fn=rows-counted",
    "mesh=2 x=4x4:S(0):float64:small y=4x4:S(1):float64:small fn=product grads=1",
    "mesh=2 x=4x4:S(0):float64:small fn=pointwise grads=1 before=eager",
    "mesh=2 x=4x4:S(0):float64:small fn=pointwise grads=1 before=equal-mesh",
    "mesh=2 x=4x4:S(0):float64:small fn=pointwise before=equal-mesh",
    *(f"mesh={mesh} fn={fn}" for fn in FLATTENED for mesh in ("2 x=4x4:S(1):float64:small", FLAT_ON_TWO_DIMS)),
    *(f"mesh={FLAT_ON_TWO_DIMS} fn={fn} grads=1" for fn in FLATTENED),
    "mesh=2 x=4x4:S(0):float64:small fn=flattened grads=1",
)


def features_compiled(case: Case) -> set[str]:
    found = {"compiled", f"way:{case.get('fn')}"} | ({"backward"} if "grads" in case else set())
    if "y" in case:
        x, y = operand(case, "x").layout, operand(case, "y").layout
        if x.shape != y.shape and x.placements == y.placements:
            same = any(x.local_shape(coord) == y.local_shape(coord) for coord in x.mesh.coords())
            found |= {"local-shape-kept"} if same else set()
    return found


@st.composite
def draw_function(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = palette_meshes(("2", "2", "3", "2x2"), limits.world_size)
    mesh, fn = draw(st.sampled_from(meshes)), draw(st.sampled_from(sorted(DRAWN)))
    even = fn in ("locally", "detached")
    places: list[Placement] = [S(0), S(1), R()]

    def draw_tensor() -> TensorSpec:
        sizes = [mesh.size, 2 * mesh.size] if even else [4, 3, 5, 6]
        shape = tuple(draw(st.sampled_from(sizes)) for _ in range(2))
        return TensorSpec(shape, tuple(draw(st.sampled_from(places)) for _ in mesh.shape), "float64", "small")

    x, y = draw_tensor(), draw(st.sampled_from([None, "shape", "all"]))
    second = None if y is None else draw_tensor()
    if second and y == "shape":
        second = replace(second, placements=x.placements)
    return fields(
        mesh=mesh,
        x=x,
        y=second,
        fn=fn,
        grads=draw(st.sampled_from([None, 1])),
        before=draw(st.sampled_from([None, None, "eager", "equal-mesh"])),
        dynamic=draw(st.sampled_from([None, None, "yes", "no"])),
        seed=draw(draws.seeds()),
    )


@law(
    "module.compiled",
    source=DOC,
    control="mesh=2 x=4x4:S(0):float64:small fn=pointwise",
    draw=draw_function,
    draws=2,
    sweep=texts(*SWEEP),
    sweeps=1,
    features=features_compiled,
    needs=NEEDS,
    seconds=60.0,  # the first compilation of a process, on a busy machine
    weight=0.2,
)
def compiled_function(
    x: DTensor,
    fn: Annotated[str, WordField(PROGRAMS)],
    grads: bool = False,
    backend: Backend = "aot_eager",
    y: DTensor | None = None,
    before: Annotated[str, WordField(["eager", "equal-mesh"])] = "",
    dynamic: bool | None = None,
):
    """A compiled function of DTensors has the same results and gradients as the function itself, in each call, also of
    an operand with another shape or other placements, and whatever ran uncompiled before."""
    with fresh_compiler():
        if before:
            mesh = x.device_mesh
            PROGRAMS[fn](copied(x, DeviceMesh(mesh.device_type, mesh.mesh) if before == "equal-mesh" else mesh))
        function = torch.compile(PROGRAMS[fn], backend=backend, dynamic=dynamic)
        outs, leaves = [], []
        for each in (x, x if y is None else y):
            leaves.append(copied(each, each.device_mesh).requires_grad_(grads))
            outs.append(several(function(leaves[-1])))
            if grads:
                torch.autograd.backward([out.sum() for out in outs[-1] if out.requires_grad])
    return {
        "calls": outs,
        "gradients": [leaf.grad for leaf in leaves],
        "requires_grad": [[out.requires_grad for out in call] for call in outs],
    }


@compiled_function.due
def _(x: Global, fn: str, grads: bool, y: Global | None):
    calls, gradients, asks = [], [], []
    for each in (x, x if y is None else y):
        full: Any = each.full.clone().requires_grad_(grads)
        want = several(DENSE.get(fn, PROGRAMS[fn])(full))
        if grads:
            torch.autograd.backward([out.sum() for out in want if out.requires_grad])
        calls.append([Claimed(out.detach(), x.mesh) for out in want])
        gradients.append(Claimed(full.grad, x.mesh) if grads else None)
        asks.append([out.requires_grad for out in want])
    return {"calls": calls, "gradients": gradients, "requires_grad": Of(asks)}


# on two ranks: each imports torch's compiler once
MODELS = (
    *(f"model=mlp dims=5x8x3 rows=3 way={way}" for way in ("pair", "gathered", "kept")),
    "model=mlp dims=3x4x5 rows=4 way=scattered",
    "model=mlp dims=6x5x4 rows=2 way=rows-first bias=no",
    "model=norm dims=5x4 rows=3 length=4 norm=rms way=sequence",
    "model=norm dims=4x6 rows=2 length=4 norm=layer way=local",
    "model=tied dims=5x3 rows=2 length=3 way=local",
)


def draw_model(limits: Limits) -> SearchStrategy[Case]:
    return st.one_of(*(cases(limits, kind, model=st.just(kind)) for kind in ("mlp", "norm", "tied")))


@law(
    "module.compiled-model",
    source=DOC,
    control="mesh=2 way=pair dims=5x8x3 rows=3 model=mlp",
    draw=draw_model,
    draws=1,
    cases=[f"mesh=2 {model}" for model in MODELS],
    features=lambda case: features(case) | {"compiled", "backward"},
    needs=NEEDS,
    seconds=60.0,  # the first compilation of a process, on a busy machine
    weight=0.2,
)
def compiled_model(model: Model, mesh: ModelMesh, way: StylePlan, batches: OneBatch, backend: Backend = "aot_eager"):
    """A compiled parallel model has the dense gradients."""
    model = parallelize(model, mesh, way)
    with fresh_compiler():
        function = torch.compile(model, backend=backend)
        for x, grad in batches:
            forward_backward(function, x, grad)
    return {"input": [x.grad for x, _ in batches], "gradients": reduced_gradients(model)}


@compiled_model.due
def _(model, mesh: Mesh, way: Plan, batches, rank: Rank):
    want = backward_due(model, mesh, way, batches, rank)
    return {"input": want["input"], "gradients": want["gradients"]}
