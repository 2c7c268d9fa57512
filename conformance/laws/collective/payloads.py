"""Laws of payloads that backends may treat specially: large ones, and NaNs, denormals and other special values."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Device, Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import CALLS, STALE, prepare, run_call
from shardlaw.conformance.laws.collective.fields import Call, Group
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.collectives import groups

NEEDS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce_scatter", "scatter")
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
LARGE_CALLS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter_single",
    "all_to_all_single",
)
# integer dtypes of the same width
BITS = {"float32": "int32", "float64": "int64", "bfloat16": "int16", "float16": "int16"}
MOVES = ("broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single")


def sweep_large(limits: Limits) -> list[Case]:
    """Every collective with every size, alternately on groups of two and three ranks."""
    pairs = itertools.product(SIZES, LARGE_CALLS)
    return [
        fields(mesh=2 + at % 2, call=call, elements=elements, dtype=dtype)
        for at, ((elements, dtype), call) in enumerate(pairs)
        if 2 + at % 2 <= limits.world_size and dtype in limits.dtypes
    ]


@draws.collective_law(
    "large",
    draws.DOC + "collective functions: of no size is anything else said",
    "mesh=2 call=all_gather elements=65537 dtype=uint8",
    needs=NEEDS,
    features=lambda case: draws.features_of_call(case) | {"large"},
    sweep=sweep_large,
    sweeps=64,
    members=True,
    weight=0.4,
)
def large(
    group: Group,
    call: Annotated[str, WordField(LARGE_CALLS)],
    elements: int,
    dtype: torch.dtype,
    device: Device,
):
    """Payloads of 64 KiB, 1 MiB and a byte more or less arrive without a wrong element."""
    size, me = dist.get_world_size(group), dist.get_rank(group)

    def values(member, part=0):
        # the period is prime: no two blocks whose size is a power of two are equal
        return ((torch.arange(elements, device=device) + 17 * member + 5 * part) % 31).to(dtype)

    def output(parts=1):
        return torch.full((parts * elements,), STALE, dtype=dtype, device=device)

    xs, outs, want, options = [values(me)], [], [], {}
    if call == "all_reduce":
        want = [sum(values(member) for member in range(size))]
    elif call == "broadcast":
        want, options = [values(size - 1)], {"group_src": size - 1}
    elif call == "all_gather" or (call == "gather" and me == 0):
        outs, want = [output() for _ in range(size)], [values(member) for member in range(size)]
    elif call == "all_gather_single":
        outs, want = [output(size)], [torch.cat([values(member) for member in range(size)])]
    elif call == "scatter":
        xs = [values(0, part) for part in range(size)] if me == 0 else []
        outs, want = [output()], [values(0, me)]
    elif call == "reduce_scatter_single":
        xs = [torch.cat([values(me, part) for part in range(size)])]
        outs, want = [output()], [sum(values(member, me) for member in range(size))]
    elif call == "all_to_all_single":
        xs = [torch.cat([values(me, part) for part in range(size)])]
        outs, want = [output(size)], [torch.cat([values(member, me) for member in range(size)])]
    if call in ("gather", "scatter"):
        options = {"group_dst" if call == "gather" else "group_src": 0}
    CALLS[call](xs, outs, group=group, **options)
    wrong = [int((got != right).sum()) for got, right in zip(outs or xs, want, strict=False)]
    return {"wrong elements": wrong}


@large.due
def _(group, call, rank: Rank):
    lists = call == "all_gather" or (call == "gather" and rank == group[0])
    return {"wrong elements": [] if call == "gather" and not lists else [0] * (len(group) if lists else 1)}


@st.composite
def draw_bits(draw: st.DrawFn, limits: Limits) -> Case:
    dtypes = [dtype for dtype in BITS if dtype in limits.dtypes]
    call, mesh = draw(st.sampled_from(MOVES)), draw(groups(world_size=limits.world_size, least=2))
    dtype, fill = draw(st.sampled_from(dtypes)), draw(st.sampled_from(("edges", "edges", "wide")))
    spec = TensorSpec(draw(shapes(min_dims=1, max_dims=2, min_size=1, max_size=9)), None, BITS[dtype], fill)
    root = draw(st.integers(0, mesh.size - 1)) if call in ("broadcast", "gather", "scatter") else 0
    form = "joined" if call.endswith("_single") else None
    values: dict[str, Any] = {"mesh": mesh, "x": spec, "call": call, "as": dtype, "form": form}
    return fields(**values, root=root or None, seed=draw(st.integers(0, 9)) or None)


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
def bits(call: Call, group: Group, device: Device, as_: torch.dtype):
    """A collective that does not reduce keeps every bit: of NaNs, signed zeros, denormals and infinities."""
    name, xs, outputs, options = call
    integers = [*(x.dtype for x in xs), *(dtype for _, dtype, _ in outputs)][0]
    floats = name, [x.view(as_) for x in xs], [(shape, as_, memory) for shape, _, memory in outputs], options
    result = run_call(prepare(floats, device), group)["result"]
    if isinstance(result, Exception):
        raise result
    return {"bits": [tensor.view(integers) for tensor in result]}


@bits.due
def _(call, rank: Rank):
    return {"bits": call.due(rank)}
