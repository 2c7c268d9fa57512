"""Laws of what redistributions may handle apart: tensors of many bytes, and bits that are no ordinary numbers."""

from __future__ import annotations

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

# which integers hold the bits of a dtype
BITS = {"float32": "int32", "float64": "int64", "bfloat16": "int16"}
# rows of twelve elements: parts of 64 KiB and more for each of two, three and four ranks, and of 1 MiB
ROWS = ((10923, "uint8"), (2731, "float32"), (5463, "float32"), (2731, "float64"), (43691, "float64"))
MOVES = (("S(0)", "R"), ("S(0)", "S(1)"), ("P(sum)", "R"), ("P(sum)", "S(0)"), ("S(1)", "S(0)"))


def sweep_large(limits: Limits) -> list[Case]:
    turns = [(move, rows) for rows in ROWS for move in MOVES]
    cases = [
        fields(mesh=2 + at % 3, rows=rows, dtype=dtype, from_=move[0], to=move[1])
        for at, (move, (rows, dtype)) in enumerate(turns)
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
    """A tensor of any size arrives whole: one whose parts have 64 KiB, 1 MiB, some bytes more."""
    me, size = mesh.get_local_rank(), mesh.size()
    # the elements come again after a prime number of them: no block of a power of two is like another
    full = (torch.arange(12 * rows, device=mesh.device_type) % 31).to(dtype).reshape(rows, 12)

    def part(placement):
        if isinstance(placement, Shard):
            return full.chunk(size, placement.dim)[me].contiguous()
        if isinstance(placement, Partial):
            return full * size if me == 0 else -full
        return full.clone()

    x = DTensor.from_local(part(from_[0]), mesh, from_, run_check=False, shape=full.shape, stride=full.stride())
    got, want = x.redistribute(placements=to).to_local(), part(to[0])
    return {"shape is right": got.shape == want.shape, "wrong elements": int((got != want).sum())}


@large.due
def _():
    return {"shape is right": True, "wrong elements": 0}


def draw_bits(limits: Limits) -> st.SearchStrategy[Case]:
    kinds = ("R", "S", "_S")
    some = {"as": st.sampled_from([dtype for dtype in BITS if dtype in limits.dtypes])}
    moved = draws.redistribution_cases(
        limits, on=draws.meshes(limits, permuted=False), kinds=kinds, targets=kinds, extra=some
    )
    return st.builds(with_bits, moved, st.sampled_from(("edges", "edges", "wide")))


def with_bits(case: Case, fill: str) -> Case:
    """The same case, its tensor one of the integers that hold the bits."""
    spec = case.tensor("x")
    return case.with_fields(x=TensorSpec(spec.shape, spec.placements, BITS[case.get("as")], fill))


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
    """What is redistributed and not reduced arrives bit by bit: any NaN, zeros of both signs, denormals, infinities."""
    how: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    floats = DTensor.from_local(x.to_local().view(as_), x.device_mesh, x.placements, **how)
    moved = floats.redistribute(placements=to)
    return DTensor.from_local(moved.to_local().view(x.dtype), x.device_mesh, to, **how)


@bits.due
def _(x: Global, to):
    return x.under(to)
