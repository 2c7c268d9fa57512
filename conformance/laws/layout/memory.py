"""Laws of local tensors out of the ordinary: of every dtype, and not contiguous."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Of
from shardlaw.conformance.law.fields import Placements, Rank, RankField, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws.layout.distribute import DOC
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import (
    ByRankField,
    FullTensor,
    LocalShard,
    PlacementsOf,
    global_x,
    local_shard,
)
from shardlaw.reference.tensors import DTYPES, TensorSpec

# dtypes that few backends carry, by the whole numbers of the same width that stand for their bits
RARE = {"float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "uint16": "int16", "uint32": "int32", "uint64": "int64"}
# the dtypes that a target declares
Declared = Annotated[tuple[str, ...], RankField(lambda here: here.target.dtypes, repr(Target.dtypes))]


def draw_dtype(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False)
    usual = [name for name in DTYPES if name not in limits.dtypes]
    declared = st.sampled_from(limits.dtypes)
    common, rare = st.sampled_from([*usual, *usual, *limits.dtypes]), st.sampled_from(list(RARE))
    strange, how = st.sampled_from([False] * 3 + [True]), st.sampled_from(["scatter", "full", "move", "move"])
    drawn = draws.redistribution_cases(limits, on=on, kinds=("R", "S"), targets=("R", "S"))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(drawn)
        outside = base.mesh().size < base.world  # a rank outside takes no part, and cannot refuse what the others do
        odd = draw(strange) and not outside
        spec, dtype = base.tensor("x"), draw(rare) if odd else draw(declared if outside else common)
        changed = TensorSpec(spec.shape, spec.placements, RARE.get(dtype, dtype), "positive" if odd else "distinct")
        more = {"bits": dtype} if odd else {}
        return base.with_fields(x=changed, how=draw(how), **more)

    return case()


UNSUPPORTED = ("scalar type", "scalartype", "dtype", "not implemented", "not supported", "unsupported")


@law(
    "layout.dtype",
    source=f"{DOC}, distribute_tensor, DTensor.full_tensor and DTensor.redistribute: no dtype is excepted",
    features=lambda case: {"rare-dtype"} if "bits" in case else set(),
    control="mesh=2x2 x=5x6:S(0),R:float16 to=R,S(1) how=move",
    draw=draw_dtype,
    draws=110,
    weight=0.8,
    needs=("broadcast", "scatter", "all_gather"),
    refusal="allowed",
    members=True,  # a rank outside the mesh has nothing to refuse
)
def every_dtype(
    x: FullTensor,
    local: LocalShard,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    to: Placements,
    how: Literal["scatter", "full", "move"],
    declared: Declared,
    bits: Annotated[str, WordField(RARE)] = "",
):
    """Elements of every dtype are scattered, gathered and redistributed bit by bit, or refused by all ranks alike;
    those that the backend declares are never refused."""
    name = bits or str(x.dtype).removeprefix("torch.")
    dtype = getattr(torch, name)
    try:
        if how == "scatter":
            moved = distribute_tensor(x.view(dtype), mesh, placements).to_local()
        else:
            d = DTensor.from_local(local.view(dtype), mesh, placements, shape=x.shape, stride=x.stride())
            moved = d.full_tensor() if how == "full" else d.redistribute(placements=to).to_local()
    except (RuntimeError, TypeError, ValueError) as error:
        if name in declared or not any(word in str(error).lower() for word in UNSUPPORTED):
            raise
        raise NotImplementedError(f"{name} is not supported: {error}") from None
    return {"dtype": moved.dtype, "elements": moved.contiguous().view(x.dtype)}


@every_dtype.due
def _(x: Global, to, how, rank: Rank, bits=""):
    if x.mesh.coord(rank) is None:
        return {"dtype": ..., "elements": ...}
    moved = x.full if how == "full" else (x.under(to) if how == "move" else x).local(rank)
    return {"dtype": Of(getattr(torch, bits) if bits else x.full.dtype), "elements": moved}


LIES = ("sliced", "expanded", "transposed", "channels-last", "offset")


def lie(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    """The same elements (for ``expanded``: the first row repeated), lying in memory as ``memory`` says."""
    if memory == "channels-last" and tensor.ndim > 1:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if memory == "transposed" and tensor.ndim > 1:
        order = tuple(reversed(range(tensor.ndim)))
        return tensor.permute(order).contiguous().permute(order)
    if memory == "expanded" and tensor.ndim and tensor.shape[0]:
        return tensor[:1].clone().expand(tensor.shape)
    if memory == "sliced" and tensor.ndim:
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    buffer = tensor.new_zeros(tensor.numel() + 3)
    return buffer[3:].view(tensor.shape).copy_(tensor)


def draw_memory(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False)
    deep = draws.redistribution_cases(limits, on=on, kinds=("R", "S"), targets=("R", "S"), dtypes=draws.EXACT)
    lies, how = st.sampled_from(LIES), st.sampled_from(["keep", "full", "move", "move", "scatter"])
    four = st.tuples(st.sampled_from([2, 3, 1]), *[st.sampled_from([2, 3, 4])] * 3)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base, memory = draw(deep), draw(lies)
        spec = base.tensor("x")
        shape = draw(four) if memory == "channels-last" and len(spec.shape) > 1 else spec.shape
        return base.with_fields(x=TensorSpec(shape, spec.placements, spec.dtype), memory=memory, how=draw(how))

    return case()


def rows_alike(case: Case, name: str) -> Global:
    """The tensor ``x``, all rows of which are the first one if they are to lie in one place."""
    x = global_x(case)
    expanded = case.get("memory") == "expanded" and x.full.ndim and x.full.shape[0]
    return x.holding(x.full[:1].expand(x.full.shape).contiguous()) if expanded else x


def where(tensor: torch.Tensor) -> list[int]:
    """Where the elements of a tensor lie: the steps of dims of one index say nothing, nor does a tensor without
    elements."""
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return [tensor.data_ptr(), int(tensor.storage_offset()), *steps] if tensor.numel() else []


@law(
    "layout.memory",
    source=f"{DOC}, DTensor.from_local, DTensor.to_local and DTensor.redistribute: nothing is said of memory",
    control="mesh=2 x=5x6:S(0) to=R memory=sliced how=full",
    draw=draw_memory,
    draws=110,
    weight=0.8,
    needs=("broadcast", "scatter", "all_gather"),
)
def memory(
    x: FullTensor,
    local: Annotated[torch.Tensor, ByRankField(rows_alike, local_shard, "x", "memory")],
    mesh: DeviceMesh,
    placements: PlacementsOf,
    to: Placements,
    memory: Annotated[str, WordField(LIES)],
    how: Literal["keep", "full", "move", "scatter"],
):
    """A local tensor that is not contiguous is kept as it lies, and its elements are what is gathered and
    redistributed."""
    if how == "scatter":
        full = lie(x, memory)
        d = distribute_tensor(full, mesh, placements)
        return {"moved": d, "stride": d.stride() == full.stride()}
    local = lie(local, memory)
    d = DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())
    kept = where(d.to_local()) == where(local)
    if how == "keep":
        return {"to_local": kept, "input": local}
    moved = d.full_tensor() if how == "full" else d.redistribute(placements=to)
    return {"to_local": kept, "moved": moved, "input": local}


@memory.due
def _(x: Global, local: Global, to, memory, how, rank: Rank):
    if how == "scatter":
        return {"moved": x.holding(lie(x.full, memory)), "stride": Of(True)}
    due = {"to_local": Of(True), "input": local.local(rank)}
    if how != "keep":
        due["moved"] = local.under(to) if how == "move" else local.full
    return due if x.mesh.coord(rank) is not None else dict.fromkeys(due, ...)
