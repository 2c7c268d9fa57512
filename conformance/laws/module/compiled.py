"""Laws of torch.compile: compiled functions of DTensors and compiled parallel models compute what they compute
uncompiled."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import DTensor, Replicate

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global
from shardlaw.conformance.law.fields import Rank
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
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.meshes import palette_meshes

DOC = "torch.compile docs; torch.distributed.tensor docs: DTensors in torch.compile"
# functions of DTensors, and those of the dense tensor where they differ
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: (x * 2 + 1).relu(),
    "sum": lambda x: (x - 1).sum(0),
    "product": lambda x: x @ x.t(),
    "turned": lambda x: x.t() + x.t(),
    "gathered": lambda x: x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) * 3,
    "locally": lambda x: DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements),
}
DENSE: dict[str, Callable[[Any], Any]] = {"gathered": lambda x: x * 3, "locally": lambda x: x * 2}
# inductor is not drawn: compiling with it may take longer than a case is allowed to
Backend = Literal["aot_eager", "eager", "inductor"]


def reset_compiler() -> None:
    """Drop everything compiled. tqdm, which compilation uses, starts no monitor thread."""
    if importlib.util.find_spec("tqdm") is not None:
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    torch.compiler.reset()


SWEEP = (
    *(f"mesh=2 x=4x4:S(0):float64:small fn={fn}" for fn in PROGRAMS),
    *(f"mesh=2 x=4x4:S(0):float64:small fn={fn} grads=1" for fn in ("pointwise", "product")),
)


@st.composite
def draw_function(draw: st.DrawFn, limits: Limits) -> Case:
    meshes = palette_meshes(("2", "2", "3", "2x2"), limits.world_size)
    mesh, fn = draw(st.sampled_from(meshes)), draw(st.sampled_from(sorted(PROGRAMS)))
    even = fn == "locally"
    shape = tuple(
        mesh.size * draw(st.sampled_from([1, 2])) if even else draw(st.sampled_from([4, 3, 5, 6])) for _ in range(2)
    )
    places: list[Placement] = [S(0), S(1), R()]
    x = TensorSpec(shape, tuple(draw(st.sampled_from(places)) for _ in mesh.shape), "float64", "small")
    return fields(mesh=mesh, x=x, fn=fn, grads=draw(st.sampled_from([None, 1])), seed=draw(draws.seeds()))


@law(
    "module.compiled",
    source=DOC,
    control="mesh=2 x=4x4:S(0):float64:small fn=pointwise",
    draw=draw_function,
    draws=2,
    sweep=texts(*SWEEP),
    sweeps=1,
    features=lambda case: {"compiled", f"way:{case.get('fn')}"} | ({"backward"} if "grads" in case else set()),
    needs=NEEDS,
    seconds=60.0,  # the first compilation of a process, on a busy machine
    weight=0.2,
)
def compiled_function(
    x: DTensor,
    fn: Literal["pointwise", "sum", "product", "turned", "gathered", "locally"],
    grads: bool = False,
    backend: Backend = "aot_eager",
):
    """A compiled function of DTensors has the same results and gradients as the function itself, in each call."""
    reset_compiler()
    try:
        function, outs, leaves = torch.compile(PROGRAMS[fn], backend=backend), [], []
        for _ in range(2):
            leaves.append(x.detach().requires_grad_(grads))
            outs.append(function(leaves[-1]))
            if grads:
                outs[-1].sum().backward()
    finally:
        reset_compiler()
    return {"calls": outs, "gradients": [leaf.grad for leaf in leaves]}


@compiled_function.due
def _(x: Global, fn: str, grads: bool):
    full: Any = x.full.clone().requires_grad_()
    want = DENSE.get(fn, PROGRAMS[fn])(full)
    want.sum().backward()
    gradient = Claimed(full.grad, x.mesh) if grads else None
    return {"calls": [Claimed(want.detach(), x.mesh)] * 2, "gradients": [gradient] * 2}


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
    sweep=texts(*(f"mesh=2 {model}" for model in MODELS)),
    sweeps=len(MODELS),
    features=lambda case: features(case) | {"compiled", "backward"},
    needs=NEEDS,
    seconds=60.0,  # the first compilation of a process, on a busy machine
    weight=0.2,
)
def compiled_model(model: Model, mesh: ModelMesh, way: StylePlan, batches: OneBatch, backend: Backend = "aot_eager"):
    """A compiled parallel model has the dense gradients."""
    model = parallelize(model, mesh, way)
    reset_compiler()
    try:
        function = torch.compile(model, backend=backend)
        for x, grad in batches:
            forward_backward(function, x, grad)
    finally:
        reset_compiler()
    return {"input": [x.grad for x, _ in batches], "gradients": reduced_gradients(model)}


@compiled_model.due
def _(model, mesh: Mesh, way: Plan, batches, rank: Rank):
    want = backward_due(model, mesh, way, batches, rank)
    return {"input": want["input"], "gradients": want["gradients"]}
