"""Laws of modules whose parameters are distributed: by ``distribute_module``, and by the parallel styles."""

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

from shardlaw.conformance.law.act import fields, law, texts
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
from shardlaw.strategies.placements import placements as drawn_placements

DOC = "torch.distributed.tensor docs, distribute_module"
HOOKS = ("none", "input", "output", "both")
Replicated = Annotated[
    torch.Tensor,
    ByRankField(lambda case, name: replace(own_values(case, name), step=7), OwnValues.full),
]


class Table(nn.Module):
    """A module that gives back what it is given: a weight and a bias in a module inside, and a buffer."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor, buffer: torch.Tensor, *, frozen: bool, shared: bool
    ) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_parameter("weight", nn.Parameter(weight, requires_grad=not frozen))
        self.inner.register_parameter("bias", nn.Parameter(bias))
        self.inner.register_parameter("none", None)
        self.register_buffer("kept", buffer)
        if shared:  # the bias, by another module
            self.other = nn.Module()
            self.other.register_parameter("bias", self.inner.bias)  # type: ignore[arg-type]

    def forward(self, given: Any) -> Any:
        return given


def draw_module(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False)
    hooks, arguments = st.sampled_from(HOOKS), st.sampled_from([3, 3, 2])
    frozen, fn = st.sampled_from([None, None, 1]), st.sampled_from(["some", "some", "some", "none"])
    others = shapes(min_dims=1, max_dims=2)  # of a 0-d tensor a rank outside holds a placeholder with an element

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(st.sampled_from(on)), draw(shapes(min_dims=1))
        at = draw(drawn_placements(mesh, len(shape), kinds=("R", "S")))
        way, hook = draw(fn), draw(hooks)
        if way == "none":
            at = (reference.Replicate(),) * mesh.ndim
        x, a, b = TensorSpec(shape, at), TensorSpec(draw(others)), TensorSpec(draw(others), None, "int64")
        count = draw(arguments) if hook != "none" else None
        more = {"fn": way, "hooks": hook, "arguments": count, "frozen": draw(frozen)}
        return fields(mesh=mesh, x=x, a=a, b=b, **more, seed=draw(draws.seeds()))

    return case()


@law(
    "layout.module",
    source=DOC,
    control="mesh=2x2 x=5x6:R,S(0) a=5 b=3:-:int64 fn=some hooks=both arguments=3",
    draw=draw_module,
    draws=60,
    # the layouts of a partly replicated model on a 2-D mesh, and of one on a sub-mesh
    sweep=texts(
        "mesh=2x2 x=128x5:R,S(0) a=128 b=3:-:int64 fn=some hooks=both arguments=3",
        "mesh=2x2 x=12x128:R,S(1) a=12 b=3:-:int64 fn=some hooks=both arguments=3",
        "mesh=2@0,2 x=16x10:S(0) a=16 b=3:-:int64 fn=some hooks=none",
        "mesh=2@0,2 x=16x10:S(1) a=16 b=3:-:int64 fn=some hooks=none",
        "mesh=2@0,2 x=16x10:R a=16 b=3:-:int64 fn=some hooks=none",
        "mesh=2 x=4x3:S(0) a=4 b=3:-:int64 fn=some hooks=none shared=1",
        "mesh=2x2 x=4x3:R,R a=4 b=3:-:int64 fn=none hooks=none shared=1",
    ),
    sweeps=7,
    needs=("broadcast", "scatter"),
    weight=0.6,
)
def module(
    x: OwnFullTensor,
    a: Replicated,
    b: Replicated,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    fn: Literal["some", "none"],
    hooks: Literal["none", "input", "output", "both"],
    arguments: int = 3,
    frozen: bool = False,
    shared: bool = False,
):
    """distribute_module leaves what partition_fn placed, replicates all other parameters and buffers from the first
    rank, and installs the hooks."""
    table = Table(x, a, b, frozen=frozen, shared=shared)
    visited, ran = [], []

    def partition(name, part, on):
        visited.append((name, on is mesh))
        if name == "inner":
            weight = distribute_tensor(part.weight.data, on, placements)
            part.register_parameter("weight", nn.Parameter(weight, requires_grad=not frozen))

    def enter(module, inputs, on):
        ran.append("input")
        return DTensor.from_local(inputs[0], on, [Replicate()] * on.ndim)

    def leave(module, outputs, on):
        ran.append("output")
        return "out", outputs

    def of_two(hook):
        return lambda values, on: hook(None, values, on)

    options = {"input_fn": enter} if hooks in ("input", "both") else {}
    options |= {"output_fn": leave} if hooks in ("output", "both") else {}
    if arguments == 2:
        options = {name: of_two(hook) for name, hook in options.items()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = distribute_module(table, mesh, partition if fn == "some" else None, **options)
    weight, bias, kept = table.inner.weight, table.inner.bias, table.kept
    out = table(torch.ones(2, device=x.device))
    marked = isinstance(out, tuple) and out[0] == "out"
    parts = {"weight": weight, "bias": bias, "buffer": kept}
    return parts | {
        "result": result is table,
        "partition_fn": visited,
        "warning": any(issubclass(one.category, FutureWarning) for one in warned),
        "parameters": [isinstance(one, nn.Parameter) and one.requires_grad for one in parts.values()],
        "names": [sorted(dict(table.named_parameters())), sorted(dict(table.named_buffers()))],
        "hooks": [*ran, "output" if marked else "", "input" if isinstance(out[1] if marked else out, DTensor) else ""],
    }


@module.due
def _(x: OwnValues, a: OwnValues, b: OwnValues, fn, hooks, arguments=3, frozen=False, shared=False):
    first = first_rank(x.mesh)
    ran = [hook for hook in ("input", "output") if hooks in (hook, "both")]
    seen = ["output" if "output" in ran else "", "input" if "input" in ran else ""]
    parts = ["", "inner", *(["other"] if shared else [])]
    return {"weight": x.of(first), "bias": a.of(first), "buffer": b.of(first)} | {
        "result": Of(True),
        "partition_fn": [(part, True) for part in parts] if fn == "some" else [],
        "warning": Of(arguments == 2) if ran else ...,
        "parameters": Of([not frozen, True, False]),
        "names": Of([["inner.bias", "inner.weight"], ["kept"]]),
        "hooks": [*ran, *seen],
    }


def sweep_refusals(limits: Limits) -> list[Case]:
    cases = [fields(mesh=mesh, attempt=attempt) for attempt in ATTEMPTS for mesh in ("2", "1x2", "2x2", "2@0,2")]
    return [case for case in cases if case.world <= limits.world_size]


# what distribute_module refuses, and by which documented error
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
    """A second call on a module, hooks of other than two or three arguments, and a call without a mesh are refused."""
    call, _ = ATTEMPTS[attempt]
    return caught(lambda: call(nn.Linear(3, 4, device=mesh.device_type), mesh))


@module_refusals.due
def _(attempt):
    return Refused((ATTEMPTS[attempt][1],))


# a style by name: the placements of its weight and of its bias, of which an embedding has none
STYLES: dict[str, tuple[reference.Placement, reference.Placement | None]] = {
    "colwise": (reference.Shard(0), reference.Shard(0)),
    "rowwise": (reference.Shard(1), reference.Replicate()),
    "colwise-embedding": (reference.Shard(1), None),
    "rowwise-embedding": (reference.Shard(0), None),
}


def draw_parallel(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, dims=(1,), permuted=False)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, style = draw(st.sampled_from(on)), draw(st.sampled_from([*STYLES, "pair"]))
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
    """A linear layer with this weight, and its first column as the bias."""
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
    """Column-wise and row-wise styles shard the weight and bias of a linear or an embedding, and in a row compute the
    same."""
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
        # the bias is shared out among the ranks: over three of them that rounds
        return {"first": x, "second": a, "forward": Near(functional.linear(hidden, a.full, a.full[:, 0]))}
    weight, bias = STYLES[style]
    due = bias and Global(x.full[:, 0], Layout(x.full.shape[:1], x.mesh, (bias,)))
    return {"weight": x.under((weight,)), "bias": due, "parameter": Of(True)}
