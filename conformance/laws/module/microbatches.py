"""The law of the inputs of pipelines, which are split into microbatches and merged again.

Fields of a case: ``chunks`` is the number of microbatches, ``dim`` the dim along which the input is split. ``beside``
says that it splits tensors that are given by name too, whose specs come in the same order or in another
(``otherwise``).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Of
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.local_map import NEEDS
from shardlaw.conformance.laws.module.pipelined import DOC
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements


@st.composite
def draw_microbatches(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(draws.meshes(limits, submeshes=False, permuted=False, min_size=2)))
    shape = draw(shapes(min_dims=1, max_dims=2, min_size=2))
    dim = draw(st.integers(0, len(shape) - 1))
    x = TensorSpec(shape, draw(placements(mesh, len(shape), kinds=("R", "S", "S"))), "float64", "distinct")
    return fields(mesh=mesh, x=x, chunks=draw(st.integers(1, shape[dim])), dim=dim, seed=draw(draws.seeds()))


@law(
    "module.microbatches",
    source=(f"{DOC}, split_args_kwargs_into_chunks and merge_chunks; torch.tensor_split: the sizes of the parts"),
    control="mesh=2 x=4x3:S(0) chunks=2 dim=0",
    draw=draw_microbatches,
    draws=6,
    cases=(
        "mesh=2 x=6x3:S(0) chunks=2 dim=0",
        "mesh=2 x=4x6:S(0) chunks=2 dim=1",
        "mesh=2 x=5x3:R chunks=2 dim=0",
        "mesh=2x2 x=8x3:S(0),S(0) chunks=2 dim=0",
        "mesh=2x2 x=4x6:S(1),S(0) chunks=3 dim=1",
        "mesh=2 x=4x6:S(1) chunks=2 dim=1",
        "mesh=2 x=6x3:R chunks=3 dim=0 beside=named",
        "mesh=2 x=4x3:R chunks=2 dim=0 beside=otherwise",
    ),
    features=lambda case: {"module"},
    needs=NEEDS,
    weight=0.1,
)
def microbatches(x: DTensor, chunks: int, dim: int, beside: Literal["named", "otherwise"] | None = None):
    """A DTensor that a pipeline splits into microbatches gives parts of the sizes of tensor_split, of which each rank
    holds what their sizes and placements say; what is computed of them and merged is that of the whole tensor. What
    is given by name is split by the spec of its name, and what is to be summed is summed over all microbatches."""
    from torch.distributed.pipelining.microbatch import (
        TensorChunkSpec,
        merge_chunks,
        split_args_kwargs_into_chunks,
        sum_reducer,
    )

    table = torch.arange(4 * chunks**2, device=x.device).view(2 * chunks, 2 * chunks)
    named: Any = {"rows": table, "columns": table} if beside else {}
    specs = {name: TensorChunkSpec(("rows", "columns").index(name)) for name in named}
    if beside == "otherwise":
        specs = dict(reversed(specs.items()))
    split, given = split_args_kwargs_into_chunks((x,), named, chunks, (TensorChunkSpec(dim),), specs)
    parts = [part for (part,) in split]
    pairs = [(part * 2, torch.tensor(float(number + 1))) for number, part in enumerate(parts)]
    merged, total = merge_chunks(pairs, (TensorChunkSpec(dim), sum_reducer))
    return {
        "sizes": [part.shape[dim] for part in parts],
        "local": [
            part.to_local().shape == compat.local_shape_and_offset(part.shape, part.device_mesh, part.placements)[0]
            for part in parts
        ],
        "merged": merged,
        "stride": merged.stride(),
        "total": total.item(),
        "given": [[part[name].tolist() for name in named] for part in given],
    }


@microbatches.due
def _(x: Global, chunks: int, dim: int, beside: str | None):
    sizes = [part.shape[dim] for part in torch.tensor_split(x.full, chunks, dim)]
    table = torch.arange(4 * chunks**2).view(2 * chunks, 2 * chunks)
    named = (0, 1) if beside else ()
    return {
        "sizes": sizes,
        "local": [Of(True, "wrong-layout")] * len(sizes),
        "merged": Claimed(x.full * 2, x.mesh),
        "stride": Of((x.full * 2).stride(), "wrong-metadata"),
        "total": float(sum(range(chunks + 1))),
        "given": [[table.tensor_split(chunks, at)[number].tolist() for at in named] for number in range(chunks)],
    }
