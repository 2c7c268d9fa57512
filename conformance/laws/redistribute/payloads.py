"""Laws of tensors that redistributions may treat specially: large ones, and NaNs, denormals and other special
values."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Placements
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.redistribute.placements import DOC
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.tensors import TensorSpec

# integer dtypes of the same width
BITS = {"float32": "int32", "float64": "int64", "bfloat16": "int16"}
# numbers of rows of twelve elements: shards of 64 KiB or more on two, three and four ranks, and of 1 MiB
ROWS = ((10923, "uint8"), (2731, "float32"), (5463, "float32"), (2731, "float64"), (43691, "float64"))
MOVES = (("S(0)", "R"), ("S(0)", "S(1)"), ("P(sum)", "R"), ("P(sum)", "S(0)"), ("S(1)", "S(0)"))


def sweep_large(limits: Limits) -> list[Case]:
    cases = [
        fields(mesh=2 + at % 3, rows=rows, dtype=dtype, from_=source, to=target)
        for at, ((rows, dtype), (source, target)) in enumerate(itertools.product(ROWS, MOVES))
        if dtype in limits.dtypes
    ]
    return [case for case in cases if case.world <= limits.world_size]


@law(
    "redistribute.large",
    source=DOC,
    control="mesh=2 rows=10923 dtype=uint8 from=S(0) to=R",
    features=lambda case: {"large"},
    sweep=sweep_large,
    sweeps=25,
    weight=0.2,
)
def large(mesh: DeviceMesh, rows: int, dtype: torch.dtype, from_: Placements, to: Placements):
    """Tensors whose shards have 64 KiB, 1 MiB or some bytes more are redistributed without a wrong element."""
    me, size = mesh.get_local_rank(), mesh.size()
    # the period is prime: no two blocks whose size is a power of two are equal
    full = (torch.arange(12 * rows, device=mesh.device_type) % 31).to(dtype).reshape(rows, 12)

    def local(placement):
        if isinstance(placement, Shard):
            return full.chunk(size, placement.dim)[me].contiguous()
        if isinstance(placement, Partial):
            return full * size if me == 0 else -full
        return full.clone()

    x = DTensor.from_local(local(from_[0]), mesh, from_, run_check=False, shape=full.shape, stride=full.stride())
    got, want = x.redistribute(placements=to).to_local(), local(to[0])
    return {"shape is right": got.shape == want.shape, "wrong elements": int((got != want).sum())}


@large.due
def _():
    return {"shape is right": True, "wrong elements": 0}


def draw_bits(limits: Limits) -> st.SearchStrategy[Case]:
    kinds = ("R", "S", "_S")
    dtype = {"as": st.sampled_from([dtype for dtype in BITS if dtype in limits.dtypes])}
    moves = draws.redistribution_cases(
        limits, on=draws.meshes(limits, permuted=False), kinds=kinds, targets=kinds, extra=dtype
    )

    def with_bits(case: Case, fill: str) -> Case:
        """The same case with a tensor of integers, whose bits are those of the dtype."""
        spec = case.tensor("x")
        return case.with_fields(x=TensorSpec(spec.shape, spec.placements, BITS[case.get("as")], fill))

    return st.builds(with_bits, moves, st.sampled_from(("edges", "edges", "wide")))


@law(
    "redistribute.bits",
    source=DOC,
    control="mesh=2 x=7x3:S(0):int32:edges to=S(1) as=float32",
    features=lambda case: {"nan", f"dtype:{case.get('as')}"} - {"dtype:float32"},
    draw=draw_bits,
    draws=40,
    members=True,
    weight=0.3,
)
def bits(x: DTensor, to: Placements, as_: torch.dtype):
    """A redistribution that does not reduce keeps every bit: of NaNs, signed zeros, denormals and infinities."""
    options: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    floats = DTensor.from_local(x.to_local().view(as_), x.device_mesh, x.placements, **options)
    moved = floats.redistribute(placements=to)
    return DTensor.from_local(moved.to_local().view(x.dtype), x.device_mesh, to, **options)


@bits.due
def _(x: Global, to):
    return x.under(to)
