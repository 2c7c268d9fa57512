"""Laws of local tensors of every dtype and of every memory layout."""

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
from shardlaw.reference.tensors import DTYPES, TensorSpec, lay_out

# dtypes that few backends support, with the integer dtype of the same width
RARE = {"float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "uint16": "int16", "uint32": "int32", "uint64": "int64"}
DeclaredDtypes = Annotated[tuple[str, ...], RankField(lambda here: here.target.dtypes, repr(Target.dtypes))]


def draw_dtype(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False)
    undeclared = [name for name in DTYPES if name not in limits.dtypes]
    declared = st.sampled_from(limits.dtypes)
    common, rare = st.sampled_from([*undeclared, *undeclared, *limits.dtypes]), st.sampled_from(list(RARE))
    draw_rare, how = st.sampled_from([False] * 3 + [True]), st.sampled_from(["scatter", "full", "move", "move"])
    moves = draws.redistribution_cases(limits, on=on, kinds=("R", "S"), targets=("R", "S"))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(moves)
        # a rank outside the mesh cannot refuse what the others refuse: only declared dtypes
        outside = base.mesh().size < base.world
        is_rare = draw(draw_rare) and not outside
        spec, dtype = base.tensor("x"), draw(rare) if is_rare else draw(declared if outside else common)
        fill = "positive" if is_rare else "distinct"
        x = TensorSpec(spec.shape, spec.placements, RARE.get(dtype, dtype), fill)
        return base.with_fields(x=x, how=draw(how), **({"bits": dtype} if is_rare else {}))

    return case()


# words of an error that says that a dtype is not supported
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
    declared: DeclaredDtypes,
    bits: Annotated[str, WordField(RARE)] = "",
):
    """Tensors of every dtype are scattered, gathered and redistributed without a changed bit, or refused by all ranks;
    dtypes that the target declares are never refused."""
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


MEMORIES = ("sliced", "expanded", "transposed", "channels-last", "offset")


def in_memory(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    """The same elements (for ``expanded``: the first row repeated) in the memory layout ``memory``; where the tensor
    cannot have it, at a storage offset."""
    laid = lay_out(tensor, memory)
    return torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(tensor.shape) if laid is tensor else laid


def draw_memory(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False)
    moves = draws.redistribution_cases(limits, on=on, kinds=("R", "S"), targets=("R", "S"), dtypes=draws.EXACT)
    memories, how = st.sampled_from(MEMORIES), st.sampled_from(["keep", "full", "move", "move", "scatter"])
    four_dims = st.tuples(st.sampled_from([2, 3, 1]), *[st.sampled_from([2, 3, 4])] * 3)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base, memory = draw(moves), draw(memories)
        spec = base.tensor("x")
        shape = draw(four_dims) if memory == "channels-last" and len(spec.shape) > 1 else spec.shape
        return base.with_fields(x=TensorSpec(shape, spec.placements, spec.dtype), memory=memory, how=draw(how))

    return case()


def read_local(case: Case, name: str) -> Global:
    """The tensor ``x``; with ``memory=expanded`` all its rows equal the first."""
    x = global_x(case)
    expanded = case.get("memory") == "expanded" and x.full.ndim and x.full.shape[0]
    return x.holding(x.full[:1].expand(x.full.shape).contiguous()) if expanded else x


def address(tensor: torch.Tensor) -> list[int]:
    """The pointer, storage offset and strides of a tensor; without strides of dims of size 1, which have no effect, and
    nothing for a tensor without elements."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return [tensor.data_ptr(), int(tensor.storage_offset()), *strides] if tensor.numel() else []


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
    local: Annotated[torch.Tensor, ByRankField(read_local, local_shard, "x", "memory")],
    mesh: DeviceMesh,
    placements: PlacementsOf,
    to: Placements,
    memory: Annotated[str, WordField(MEMORIES)],
    how: Literal["keep", "full", "move", "scatter"],
):
    """A non-contiguous local tensor keeps its memory layout; its elements are scattered, gathered and redistributed
    like those of a contiguous one."""
    if how == "scatter":
        full = in_memory(x, memory)
        d = distribute_tensor(full, mesh, placements)
        return {"moved": d, "stride": d.stride() == full.stride()}
    local = in_memory(local, memory)
    d = DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())
    same_memory = address(d.to_local()) == address(local)
    if how == "keep":
        return {"to_local": same_memory, "input": local}
    moved = d.full_tensor() if how == "full" else d.redistribute(placements=to)
    return {"to_local": same_memory, "moved": moved, "input": local}


@memory.due
def _(x: Global, local: Global, to, memory, how, rank: Rank):
    if how == "scatter":
        return {"moved": x.holding(in_memory(x.full, memory)), "stride": Of(True)}
    due = {"to_local": Of(True), "input": local.local(rank)}
    if how != "keep":
        due["moved"] = local.under(to) if how == "move" else local.full
    return due if x.mesh.coord(rank) is not None else dict.fromkeys(due, ...)
