"""Laws of ``distribute_module`` and of the parallel styles for linear and embedding layers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Near, Of, Refused, caught
from shardlaw.conformance.law.fields import WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.layout.distribute import first_rank
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import (
    ByRankField,
    FullTensor,
    OwnFullTensor,
    OwnValues,
    PlacementsOf,
    own_values,
)
from shardlaw.reference import placement as reference
from shardlaw.reference.layout import Layout
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements as draw_placements

DOC = "torch.distributed.tensor docs, distribute_module"
OwnTensor = Annotated[
    torch.Tensor,
    ByRankField(lambda case, name: replace(own_values(case, name), step=7), OwnValues.full),
]


class Model(nn.Module):
    """A module that returns its input. It has two buffers, one of them not saved, and an inner module with a weight
    and a bias."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor, buffer: torch.Tensor, *, frozen: bool, shared: bool
    ) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_parameter("weight", nn.Parameter(weight, requires_grad=not frozen))
        self.inner.register_parameter("bias", nn.Parameter(bias))
        self.inner.register_parameter("none", None)
        self.register_buffer("kept", buffer)
        self.register_buffer("unsaved", buffer.clone(), persistent=False)
        if shared:  # a second module with the same bias
            self.other = nn.Module()
            self.other.register_parameter("bias", self.inner.bias)  # type: ignore[arg-type]

    def forward(self, x: Any) -> Any:
        return x


@st.composite
def draw_module(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(draws.meshes(limits, permuted=False))), draw(shapes(min_dims=1))
    others = shapes(min_dims=1, max_dims=2)  # not 0-d: outside the mesh such a local tensor has an element
    at = draw(draw_placements(mesh, len(shape), kinds=("R", "S")))
    partition = draw(st.sampled_from(["some", "some", "some", "none"]))
    hooks = draw(st.sampled_from(["none", "input", "output", "both"]))
    if partition == "none":
        at = (reference.Replicate(),) * mesh.ndim
    x, a, b = TensorSpec(shape, at), TensorSpec(draw(others)), TensorSpec(draw(others), None, "int64")
    arguments = draw(st.sampled_from([3, 3, 2])) if hooks != "none" else None
    frozen = draw(st.sampled_from([None, None, 1]))
    more = {"fn": partition, "hooks": hooks, "arguments": arguments, "frozen": frozen}
    return fields(mesh=mesh, x=x, a=a, b=b, **more, seed=draw(draws.seeds()))


@law(
    "layout.module",
    source=DOC,
    control="mesh=2x2 x=5x6:R,S(0) a=5 b=3:-:int64 fn=some hooks=both arguments=3",
    draw=draw_module,
    draws=60,
    # a partly replicated model on a 2-D mesh, a model on a sub-mesh, shared parameters, a model in another one, and a
    # frozen parameter that nothing distributes
    cases=(
        "mesh=2x2 x=128x5:R,S(0) a=128 b=3:-:int64 fn=some hooks=both arguments=3",
        "mesh=2x2 x=12x128:R,S(1) a=12 b=3:-:int64 fn=some hooks=both arguments=3",
        "mesh=2@0,2 x=16x10:S(0) a=16 b=3:-:int64 fn=some hooks=none",
        "mesh=2@0,2 x=16x10:S(1) a=16 b=3:-:int64 fn=some hooks=none",
        "mesh=2@0,2 x=16x10:R a=16 b=3:-:int64 fn=some hooks=none",
        "mesh=2 x=4x3:S(0) a=4 b=3:-:int64 fn=some hooks=none shared=1",
        "mesh=2x2 x=4x3:R,R a=4 b=3:-:int64 fn=none hooks=none shared=1",
        "mesh=2 x=4x3:R a=4 b=3:-:int64 fn=none hooks=none deep=1",
        "mesh=2 x=4x3:S(0) a=4 b=3:-:int64 fn=some hooks=both arguments=2 deep=1",
        "mesh=2 x=4x3:R a=4 b=3:-:int64 fn=none hooks=none frozen=1",
    ),
    needs=("broadcast", "scatter"),
    weight=0.6,
)
def module(
    x: OwnFullTensor,
    a: OwnTensor,
    b: OwnTensor,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    fn: Literal["some", "none"],
    hooks: Literal["none", "input", "output", "both"],
    arguments: int = 3,
    frozen: bool = False,
    shared: bool = False,
    deep: bool = False,
):
    """distribute_module keeps the parameters that partition_fn distributed, replicates all other parameters and buffers
    from the first rank, and installs the hooks."""
    model = Model(x, a, b, frozen=frozen, shared=shared)
    whole = nn.Sequential(model) if deep else model
    visited, ran = [], []

    def partition(name, module, mesh_arg):
        visited.append((name, mesh_arg is mesh))
        if module is model.inner:
            weight = distribute_tensor(model.inner.weight.data, mesh, placements)
            module.register_parameter("weight", nn.Parameter(weight, requires_grad=not frozen))

    def input_hook(module, inputs, mesh):
        ran.append("input")
        return DTensor.from_local(inputs[0], mesh, [Replicate()] * mesh.ndim)

    def output_hook(module, outputs, mesh):
        ran.append("output")
        return "out", outputs

    def without_module(hook):
        return lambda values, mesh: hook(None, values, mesh)

    options = {"input_fn": input_hook} if hooks in ("input", "both") else {}
    options |= {"output_fn": output_hook} if hooks in ("output", "both") else {}
    if arguments == 2:
        options = {name: without_module(hook) for name, hook in options.items()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = distribute_module(whole, mesh, partition if fn == "some" else None, **options)
    out = whole(torch.ones(2, device=x.device))
    has_output_mark = isinstance(out, tuple) and out[0] == "out"
    has_dtensor_input = isinstance(out[1] if has_output_mark else out, DTensor)
    tensors = {"weight": model.inner.weight, "bias": model.inner.bias, "buffer": model.kept, "unsaved": model.unsaved}
    return tensors | {
        "result": result is whole,
        "partition_fn": visited,
        "warning": any(issubclass(warning.category, FutureWarning) for warning in warned),
        "parameters": [isinstance(x, nn.Parameter) and x.requires_grad for x in tensors.values()],
        "names": [sorted(dict(model.named_parameters())), sorted(dict(model.named_buffers()))],
        "hooks": [*ran, "output" if has_output_mark else "", "input" if has_dtensor_input else ""],
    }


@module.due
def _(x: OwnValues, a: OwnValues, b: OwnValues, fn, hooks, arguments=3, frozen=False, shared=False, deep=False):
    first = first_rank(x.mesh)
    ran = [hook for hook in ("input", "output") if hooks in (hook, "both")]
    effects = ["output" if "output" in ran else "", "input" if "input" in ran else ""]
    inside = ["inner", *(["other"] if shared else [])]
    modules = ["", "0", *(f"0.{name}" for name in inside)] if deep else ["", *inside]
    return {"weight": x.of(first), "bias": a.of(first), "buffer": b.of(first), "unsaved": b.of(first)} | {
        "result": Of(True),
        "partition_fn": [(name, True) for name in modules] if fn == "some" else [],
        "warning": Of(arguments == 2) if ran else ...,
        "parameters": Of([not frozen, True, False, False]),
        "names": Of([["inner.bias", "inner.weight"], ["kept", "unsaved"]]),
        "hooks": [*ran, *effects],
    }


def sweep_refusals(limits: Limits) -> list[Case]:
    cases = [fields(mesh=mesh, attempt=attempt) for attempt in ATTEMPTS for mesh in ("2", "1x2", "2x2", "2@0,2")]
    return [case for case in cases if case.world <= limits.world_size]


# invalid calls of distribute_module, and their documented errors
ATTEMPTS = {
    "again": (lambda layer, mesh: distribute_module(distribute_module(layer, mesh), mesh), RuntimeError),
    "input-of-one": (lambda layer, mesh: distribute_module(layer, mesh, input_fn=lambda a: a), ValueError),  # type: ignore[misc,arg-type]
    "input-of-four": (lambda layer, mesh: distribute_module(layer, mesh, input_fn=lambda a, b, c, d: a), ValueError),  # type: ignore[misc,arg-type]
    "output-of-one": (lambda layer, mesh: distribute_module(layer, mesh, output_fn=lambda a: a), ValueError),  # type: ignore[misc,arg-type]
    "output-of-four": (lambda layer, mesh: distribute_module(layer, mesh, output_fn=lambda a, b, c, d: a), ValueError),  # type: ignore[misc,arg-type]
    "no-mesh": (lambda layer, mesh: distribute_module(layer), RuntimeError),
}


@law(
    "layout.module-refusals",
    source=DOC,
    control="mesh=2 attempt=again",
    sweep=sweep_refusals,
    sweeps=24,
    needs=("broadcast",),
    weight=0.2,
)
def module_refusals(mesh: DeviceMesh, attempt: Annotated[str, WordField(ATTEMPTS)]):
    """distribute_module refuses a distributed module, hooks of other than two or three arguments, and a missing
    mesh."""
    call, _ = ATTEMPTS[attempt]
    return caught(lambda: call(nn.Linear(3, 4, device=mesh.device_type), mesh))


@module_refusals.due
def _(attempt):
    return Refused((ATTEMPTS[attempt][1],))


# the placements of weight and bias by style; embeddings have no bias
STYLES: dict[str, tuple[reference.Placement, reference.Placement | None]] = {
    "colwise": (reference.Shard(0), reference.Shard(0)),
    "rowwise": (reference.Shard(1), reference.Replicate()),
    "colwise-embedding": (reference.Shard(1), None),
    "rowwise-embedding": (reference.Shard(0), None),
}


def draw_parallel(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(draws.meshes(limits, dims=(1,), permuted=False)))
        style = draw(st.sampled_from([*STYLES, "pair"]))
        shape = draw(shapes(min_dims=2, max_dims=2, min_size=1))
        if style == "pair":
            shape = (mesh.size * draw(st.sampled_from([1, 2, 3])), shape[1])
            out = draw(shapes(min_dims=1, max_dims=1, min_size=1))
            x = TensorSpec(shape, (reference.Shard(0),), fill="small")
            second = TensorSpec((*out, shape[0]), (reference.Shard(1),), fill="small")
            return fields(mesh=mesh, x=x, a=second, style=style, seed=draw(draws.seeds()))
        return fields(mesh=mesh, x=TensorSpec(shape, STYLES[style][:1]), style=style, seed=draw(draws.seeds()))

    return case().filter(lambda case: case.get("style") != "pair" or 1 < case.mesh().size == case.world)


def linear(weight: torch.Tensor) -> nn.Linear:
    """A linear layer with this weight, whose first column is the bias."""
    layer = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(weight[:, 0])
    return layer  # type: ignore[no-any-return]


def inputs(width: int) -> torch.Tensor:
    return (torch.arange(3.0 * width) % 7 - 3).reshape(3, width)


@law(
    "layout.parallel",
    source="torch.distributed.tensor.parallel docs, ColwiseParallel and RowwiseParallel",
    control="mesh=2 x=5x6:S(0) style=colwise",
    draw=draw_parallel,
    draws=50,
    needs=("broadcast", "scatter", "all_reduce"),
    weight=0.5,
)
def parallel(
    x: FullTensor,
    mesh: DeviceMesh,
    style: Literal["colwise", "rowwise", "colwise-embedding", "rowwise-embedding", "pair"],
    a: FullTensor | None = None,
):
    """ColwiseParallel and RowwiseParallel shard the weight and bias of a linear or embedding layer, and a column-wise
    followed by a row-wise layer computes what the layers compute without them."""
    if style == "pair":
        model = nn.Sequential(linear(x), nn.ReLU(), linear(a))  # type: ignore[arg-type]
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return {"first": model[0].weight, "second": model[2].weight, "forward": model(inputs(x.shape[1]).to(x.device))}
    layer = nn.Embedding.from_pretrained(x, freeze=False) if "embedding" in style else linear(x)
    parallelize_module(layer, mesh, ColwiseParallel() if "colwise" in style else RowwiseParallel())
    return {
        "weight": layer.weight,
        "bias": getattr(layer, "bias", None),
        "parameter": isinstance(layer.weight, nn.Parameter),
    }


@parallel.due
def _(x: Global, style, a: Any = None):
    if style == "pair":
        hidden = functional.linear(inputs(x.full.shape[1]), x.full, x.full[:, 0]).relu()
        # the bias is divided by the number of ranks, which rounds
        return {"first": x, "second": a, "forward": Near(functional.linear(hidden, a.full, a.full[:, 0]))}
    weight, bias = STYLES[style]
    due = bias and Global(x.full[:, 0], Layout(x.full.shape[:1], x.mesh, (bias,)))
    return {"weight": x.under((weight,)), "bias": due, "parameter": Of(True)}
