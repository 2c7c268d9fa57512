"""Laws of what backends may handle apart: payloads of many bytes, and bits that are no ordinary numbers."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Device, Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import CALLS, STALE, attempted, prepared
from shardlaw.conformance.laws.collective.case_fields import Calling, Group
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.collectives import groups

NEEDED = ("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce_scatter", "scatter")
# 64 KiB, a byte less and a byte more, 1 MiB and a byte more, and as much in elements of several bytes
SIZES = (
    (65535, "uint8"),
    (65536, "uint8"),
    (65537, "uint8"),
    (1048577, "uint8"),
    (16385, "float32"),
    (262145, "float32"),
    (8193, "float64"),
    (131072, "int64"),
)
WIDE_CALLS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter_single",
    "all_to_all_single",
)
# which integers hold the bits of a dtype
BITS = {"float32": "int32", "float64": "int64", "bfloat16": "int16", "float16": "int16"}
MOVING = ("broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single")


def sweep_large(limits: Limits) -> list[Case]:
    """Every collective with every size, in turns on groups of two and three ranks."""
    turns = [(call, size) for size in SIZES for call in WIDE_CALLS]
    return [
        fields(mesh=2 + at % 2, call=call, elements=elements, dtype=dtype)
        for at, (call, (elements, dtype)) in enumerate(turns)
        if 2 + at % 2 <= limits.world_size and dtype in limits.dtypes
    ]


@draws.collective_law(
    "large",
    draws.DOC + "collective functions: of no size is anything else said",
    "mesh=2 call=all_gather elements=65537 dtype=uint8",
    needs=NEEDED,
    features=lambda case: draws.features_of_call(case) | {"large"},
    sweep=sweep_large,
    sweeps=64,
    members=True,
    weight=0.4,
)
def large(
    group: Group,
    call: Annotated[str, WordField(WIDE_CALLS)],
    elements: int,
    dtype: torch.dtype,
    device: Device,
):
    """A payload of any size arrives whole: one of 64 KiB, of 1 MiB, of a byte more."""
    size, me = dist.get_world_size(group), dist.get_rank(group)

    def values(member, part=0):
        # they come again after a prime number of elements: no block of a power of two is like another
        return ((torch.arange(elements, device=device) + 17 * member + 5 * part) % 31).to(dtype)

    def room(parts=1):
        return torch.full((parts * elements,), STALE, dtype=dtype, device=device)

    xs, outs, want, how = [values(me)], [], [], {}
    if call == "all_reduce":
        want = [sum(values(member) for member in range(size))]
    elif call == "broadcast":
        want, how = [values(size - 1)], {"group_src": size - 1}
    elif call == "all_gather" or (call == "gather" and me == 0):
        outs, want = [room() for _ in range(size)], [values(member) for member in range(size)]
    elif call == "all_gather_single":
        outs, want = [room(size)], [torch.cat([values(member) for member in range(size)])]
    elif call == "scatter":
        xs = [values(0, part) for part in range(size)] if me == 0 else []
        outs, want = [room()], [values(0, me)]
    elif call == "reduce_scatter_single":
        xs = [torch.cat([values(me, part) for part in range(size)])]
        outs, want = [room()], [sum(values(member, me) for member in range(size))]
    elif call == "all_to_all_single":
        xs = [torch.cat([values(me, part) for part in range(size)])]
        outs, want = [room(size)], [torch.cat([values(member, me) for member in range(size)])]
    if call in ("gather", "scatter"):
        how = {"group_dst" if call == "gather" else "group_src": 0}
    CALLS[call](xs, outs, group=group, **how)
    wrong = [int((got != right).sum()) for got, right in zip(outs or xs, want, strict=False)]
    return {"wrong elements": wrong}


@large.due
def _(group, call, rank: Rank):
    lists = call == "all_gather" or (call == "gather" and rank == group[0])
    return {"wrong elements": [] if call == "gather" and not lists else [0] * (len(group) if lists else 1)}


def draw_bits(limits: Limits) -> SearchStrategy[Case]:
    known = [dtype for dtype in BITS if dtype in limits.dtypes]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        call, mesh = draw(st.sampled_from(MOVING)), draw(groups(world_size=limits.world_size, least=2))
        dtype, fill = draw(st.sampled_from(known)), draw(st.sampled_from(("edges", "edges", "wide")))
        spec = TensorSpec(draw(shapes(min_dims=1, max_dims=2, min_size=1, max_size=9)), None, BITS[dtype], fill)
        root = draw(st.integers(0, mesh.size - 1)) if call in ("broadcast", "gather", "scatter") else 0
        form = "joined" if call.endswith("_single") else None
        said: dict[str, Any] = {"mesh": mesh, "x": spec, "call": call, "as": dtype, "form": form, "root": root or None}
        return fields(**said, seed=draw(st.integers(0, 9)) or None)

    return case()


@draws.collective_law(
    "bits",
    draws.DOC + "collective functions",
    "mesh=2 x=7:-:int32:edges call=all_gather as=float32",
    needs=("all_gather", "all_to_all", "broadcast", "gather", "scatter"),
    features=lambda case: draws.features_of_call(case) | {"nan", f"dtype:{case.get('as')}"} - {"dtype:float32"},
    draw=draw_bits,
    draws=40,
    members=True,
    weight=0.2,
)
def bits(call: Calling, group: Group, device: Device, as_: torch.dtype):
    """What is moved and not reduced arrives bit by bit: any NaN, zeros of both signs, denormals, infinities."""
    name, xs, rooms, options = call
    integers = [*(x.dtype for x in xs), *(dtype for _, dtype, _ in rooms)][0]
    floats = name, [x.view(as_) for x in xs], [(shape, as_, memory) for shape, _, memory in rooms], options
    found = attempted(prepared(floats, device), group)["result"]
    if isinstance(found, Exception):
        raise found
    return {"bits": [one.view(integers) for one in found]}


@bits.due
def _(call, rank: Rank):
    return {"bits": call.wanted(rank)}
