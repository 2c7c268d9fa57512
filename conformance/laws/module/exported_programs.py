"""The law of exported programs that a pass transforms into tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import Device, Rank, WorldSize

# an instance of a style, or its class
Style = Literal["column", "row", "column-class", "row-class"]
STYLES: dict[str, Callable[[], Any]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "column-class": lambda: ColwiseParallel,
    "row-class": lambda: RowwiseParallel,
}
CASES = (
    "world=2 x=2x4:-:float64:small a=6x4:-:float64:small b=2x6:-:float64:small first=column-class second=row-class",
    "world=2 x=2x4:-:float64:small a=6x4:-:float64:small b=2x6:-:float64:small first=row second=row",
    "world=3 x=1x3:-:float64:small a=6x3:-:float64:small b=3x6:-:float64:small first=row-class second=column-class",
    "world=2 x=2x4:-:float64:small a=6x4:-:float64:small b=2x6:-:float64:small first=column second=row",
)


class Linears(nn.Module):
    """Two linear layers with these weights; their biases are the first columns of the weights."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(w.shape[1], w.shape[0]) for w in (a, b))
        for layer, weight in ((self.first, a), (self.second, b)):
            layer.weight = nn.Parameter(weight)
            layer.bias = nn.Parameter(weight[:, 0].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).relu())
        return out


@law(
    "module.transformed",
    source="torch.distributed.tensor.experimental, docstring of tensor_parallel_transformation; ColwiseParallel and "
    "RowwiseParallel: how they shard nn.Linear",
    control="world=2 x=2x4:-:float64:small a=6x4:-:float64:small b=2x6:-:float64:small first=row second=row",
    sweep=texts(*CASES),
    sweeps=1,
    needs=("all_reduce", "all_gather", "object_collectives"),
)
def transformed(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    first: Style,
    second: Style,
    rank: Rank,
    world: WorldSize,
    device: Device,
):
    """An exported program that is transformed for a rank gives the same output, and has the shard of each weight that
    the layer's style documents."""
    with torch.no_grad():
        program = torch.export.export(Linears(a, b), (x,)).run_decompositions()
        styles = {"first": STYLES[first](), "second": STYLES[second]()}
        parallel = compat.transformation.tensor_parallel_transformation(program, rank, world, device.type, styles)
        out = parallel.module()(x)
    return {"given": out, "weights": [parallel.state_dict[f"{name}.weight"].detach() for name in styles]}


@transformed.due
def _(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: str, second: str, rank: Rank, world: WorldSize):
    out = (x @ a.T + a[:, 0]).relu() @ b.T + b[:, 0]
    dims = [0 if style.startswith("column") else 1 for style in (first, second)]
    shards = [weight.chunk(world, dim)[rank].contiguous() for weight, dim in zip((a, b), dims, strict=True)]
    return {"given": Near(out), "weights": shards}
