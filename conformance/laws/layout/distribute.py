"""Laws of layouts: the local tensors of ``distribute_tensor``, and the local and global shapes that torch computes."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed import tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Of, Refused, caught
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import (
    FullTensor,
    GlobalOf,
    LocalShard,
    OwnFullTensor,
    OwnValues,
    PlacementsOf,
    ShapeOf,
    StrideOf,
)
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import shard_dim

DOC = "torch.distributed.tensor docs"
MEMORIES = ("plain", "transposed", "sliced", "expanded")


# dtypes without gradients ignore the field
REQUIRES_GRAD = {"requires_grad": st.sampled_from([None, None, None, 1])}


def first_rank(mesh: Mesh, position: int = 0) -> int:
    """The rank whose coordinate is ``position`` on every mesh dim."""
    return mesh.rank_at((position,) * mesh.ndim)


@law(
    "layout.distribute",
    source=f"{DOC}, distribute_tensor (src_data_rank=None) and Shard (torch.chunk semantic)",
    control="mesh=2x2 x=5x6:S(0),S(1)",
    draw=lambda limits: draws.tensor_cases(
        limits, dtypes=limits.dtypes, memories=MEMORIES, fills=draws.SELDOM_EDGES, extra=REQUIRES_GRAD
    ),
    draws=200,
    weight=1.2,
)
def distribute(x: FullTensor, mesh: DeviceMesh, placements: PlacementsOf, requires_grad: bool = False):
    """distribute_tensor without a source rank gives each rank the slice of its tensor that the placements name, and
    keeps stride, dtype and requires_grad; the input is unchanged."""
    x.requires_grad_(requires_grad and x.dtype.is_floating_point)
    d = distribute_tensor(x, mesh, placements, src_data_rank=None)
    return {"local": d, "requires_grad": d.requires_grad, "leaf": d.is_leaf, "stride": d.stride(), "input": x}


@distribute.due
def _(x: Global, requires_grad=False):
    grad = requires_grad and x.full.dtype.is_floating_point
    return {"local": x, "requires_grad": Of(grad), "leaf": Of(True), "stride": Of(x.full.stride()), "input": x.full}


def draw_tensors(limits: Limits) -> SearchStrategy[Case]:
    """Tensors of any dtype and memory layout, on meshes of ascending ranks."""
    on = draws.meshes(limits, permuted=False)
    return draws.tensor_cases(limits, on=on, dtypes=limits.dtypes, memories=MEMORIES)


@law(
    "layout.scatter",
    source=f"{DOC}, distribute_tensor (src_data_rank)",
    control="mesh=2x2 x=5x6:S(0),S(1)",
    draw=draw_tensors,
    draws=120,
    sweep=draws.permuted_mesh_cases("S(0)"),
    sweeps=3,
    needs=("broadcast", "scatter"),
    weight=1.2,
)
def scatter(x: OwnFullTensor, mesh: DeviceMesh, placements: PlacementsOf):
    """distribute_tensor gives every rank its slice of the tensor of the rank at coordinate 0 of each mesh dim."""
    return {"local": distribute_tensor(x, mesh, placements)}


@scatter.due
def _(x: OwnValues):
    return {"local": x.of(first_rank(x.mesh))}


def draw_source(limits: Limits) -> SearchStrategy[Case]:
    def source(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"src": draw(st.integers(1, min(layout.mesh.shape) - 1))}

    on = [mesh for mesh in draws.meshes(limits, permuted=False) if min(mesh.shape) > 1]
    return draws.tensor_cases(limits, on=on, dtypes=limits.dtypes, extra=source)


# even strided shards, and sums that are pending
FROM_SECOND = texts("mesh=2 x=8:_S(0,2) src=1", "mesh=2x2 x=3x4:R,P(sum):float32:small src=1")


def sweep_source(limits: Limits) -> list[Case]:
    permuted = [case for case in draws.permuted_mesh_cases("S(0)", src=1)(limits) if min(case.mesh().shape) > 1]
    return permuted + FROM_SECOND(limits)


@law(
    "layout.source",
    source=f"{DOC}, distribute_tensor (src_data_rank)",
    control="mesh=2 x=5x6:R src=1",
    draw=draw_source,
    draws=60,
    sweep=sweep_source,
    sweeps=4,
    needs=("broadcast", "scatter"),
    weight=0.8,
)
def source(x: OwnFullTensor, mesh: DeviceMesh, placements: PlacementsOf, src: int):
    """With src_data_rank=k every rank gets its slice of the tensor of the rank at coordinate k of each mesh dim."""
    return {"local": distribute_tensor(x, mesh, placements, src_data_rank=src)}


@source.due
def _(x: OwnValues, src):
    return {"local": x.of(first_rank(x.mesh, src))}


@law(
    "layout.input-kept",
    source=f"{DOC}, distribute_tensor: an out-of-place function",
    control="mesh=2 x=5x6:S(1)",
    draw=lambda limits: draws.tensor_cases(limits, kinds=("R", "S"), dtypes=limits.dtypes, memories=MEMORIES),
    draws=30,
    needs=("broadcast", "scatter"),
    weight=0.3,
    tier="advisory",
)
def input_kept(x: OwnFullTensor, mesh: DeviceMesh, placements: PlacementsOf):
    """distribute_tensor leaves its input unchanged on every rank."""
    distribute_tensor(x, mesh, placements)
    return {"input": x}


@input_kept.due
def _(x: OwnValues, rank: Rank):
    return {"input": x.of(rank).full}


@law(
    "layout.offsets",
    source="torch.distributed.tensor._utils, docstring of compute_local_shape_and_global_offset",
    control="mesh=2x2 x=5x6:S(0),S(0)",
    draw=lambda limits: draws.tensor_cases(limits, kinds=("R", "S", "_S", "P")),
    draws=180,
    weight=0.6,
)
def offsets(shape: ShapeOf, mesh: DeviceMesh, placements: PlacementsOf):
    """The local shape is the number of indices of each dim that a rank owns; the offset is the first of them, or the
    size of the dim if it owns none."""
    local, offset = compat.local_shape_and_offset(shape, mesh, placements)
    return {"shape": tuple(local), "offset": tuple(offset)}


@offsets.due
def _(x: GlobalOf, rank: Rank):
    coord = x.mesh.coord(rank)
    shape, offset = ((0,), ()) if coord is None else (x.layout.local_shape(coord), x.layout.offset(coord))
    return {"shape": Of(shape, "wrong-layout"), "offset": Of(offset, "wrong-layout")}


@law(
    "layout.chunks",
    source="torch.distributed.tensor, docstring of DTensor.__create_chunk_list__",
    control="mesh=2x2 x=5x6:S(0),S(0)",
    draw=lambda limits: draws.tensor_cases(limits),
    draws=90,
    members=True,
    weight=0.5,
)
def chunks(x: DTensor):
    """The chunks that a DTensor lists cover exactly the elements that the rank owns: one chunk if one box does."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in x.__create_chunk_list__()]
    runs = [[range(start, start + size) for start, size in zip(*box, strict=True)] for box in boxes]
    return {"box": boxes, "elements": sorted(at for box in runs for at in itertools.product(*box))}


@chunks.due
def _(x: Global, rank: Rank):
    coord = x.mesh.coord(rank)
    assert coord is not None
    box, owned = x.layout.box(coord), sorted(itertools.product(*x.layout.owned(coord)))
    return {"box": Of([(box.offset, box.size)], "wrong-layout") if box else ..., "elements": Of(owned, "wrong-layout")}


@law(
    "layout.full",
    source=f"{DOC}, DTensor.full_tensor",
    control="mesh=2x2 x=5x6:S(0),S(1)",
    draw=draw_tensors,
    draws=120,
    sweep=draws.permuted_mesh_cases("S(0)"),
    sweeps=3,
    needs=("all_gather",),
    weight=1.2,
)
def full(x: FullTensor, mesh: DeviceMesh, placements: PlacementsOf):
    """full_tensor of a distributed tensor is that tensor; on a rank outside the mesh it has no elements."""
    full = distribute_tensor(x, mesh, placements, src_data_rank=None).full_tensor()
    return {"elements": full.numel(), "full": full}


@full.due
def _(x: Global, rank: Rank):
    inside = x.mesh.coord(rank) is not None
    return {"elements": Of(x.full.numel() if inside else 0, "wrong-layout"), "full": x.full if inside else ...}


def draw_negative(limits: Limits) -> SearchStrategy[Case]:
    how = {"how": st.sampled_from(["distribute", "from_local", "redistribute"])}
    placed = draws.tensor_cases(limits, kinds=("S", "_S", "R"), min_dims=1, negative=True, extra=how)
    return placed.filter(lambda case: "(-" in case.text)


@law(
    "layout.negative-dims",
    source=f"{DOC}, DTensor.from_local and distribute_tensor (Shard dims are normalised)",
    control="mesh=2 x=5x6:S(-1) how=from_local",
    draw=draw_negative,
    draws=50,
    weight=0.4,
)
def negative_dims(
    x: FullTensor,
    local: LocalShard,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    how: Literal["distribute", "from_local", "redistribute"],
):
    """A shard of a negative dim is a shard of the dim counted from the end, under its non-negative number; the list of
    placements that was passed is unchanged."""
    original = copy.deepcopy(placements)
    if how == "distribute":
        d = distribute_tensor(x, mesh, placements, src_data_rank=None)
    elif how == "from_local":
        # outside the mesh the local tensor has one dim: from_local needs the dims of the placements
        part = local if mesh.get_coordinate() is not None else x
        d = DTensor.from_local(part, mesh, placements, shape=x.shape, stride=x.stride())
    else:
        d = distribute_tensor(x, mesh, [Replicate()] * mesh.ndim, src_data_rank=None).redistribute(
            placements=placements
        )
    dims = [getattr(placement, "dim", None) for placement in d.placements]
    return {"local": d, "dims": dims, "argument": placements == original}


@negative_dims.due
def _(x: Global):
    return {"local": x, "dims": Of([shard_dim(placement) for placement in x.placements]), "argument": True}


def draw_together(limits: Limits) -> SearchStrategy[Case]:
    on = [*draws.meshes(limits, dims=(1,)) * 2, *draws.meshes(limits, dims=(2,))]
    return draws.tensor_cases(limits, on=on, kinds=("R", "S"), memories=("plain", "transposed"))


EVEN_SHARDS = (
    "mesh=2x2 x=8x3:S(0),S(0)",
    "mesh=2x2 x=3x4x2:S(1),S(1):float32:distinct:transposed",
    "mesh=2x2 x=4x6:S(1),S(0)",
    "mesh=2x2 x=4x6x4:S(2),R:float32:distinct:transposed",
    "mesh=1x4 x=5x8:S(0),S(1)",
    "mesh=2x2x2 x=8x4:S(0),S(1),S(0)",
    "mesh=2x2 x=8x3:_S(0,2),R",
)


@law(
    "layout.together",
    source="torch.distributed.tensor, docstrings of compute_global_tensor_shape and compute_local_tensor_info",
    control="mesh=2 x=5x6:S(0)",
    cases=EVEN_SHARDS,
    draw=draw_together,
    draws=16,
    members=True,
    needs=("all_gather",),
    weight=0.2,
)
def together(local: LocalShard, mesh: DeviceMesh, placements: PlacementsOf, shape: ShapeOf, stride: StrideOf):
    """The global shape is computed from the local shapes on a 1-D mesh, also from uneven ones; the local shape and
    strides are computed from the global ones for even shards."""
    global_shape = caught(lambda: tuple(compat.global_tensor_shape(local.shape, mesh, placements)))
    shard = caught(lambda: compat.local_tensor_info(torch.empty_strided(shape, stride), mesh, placements))
    if not isinstance(shard, Exception):
        shard = tuple(shard[0]), [step for step, size in zip(shard[1], local.shape, strict=True) if size > 1]
    return {"whole": global_shape, "even part": shard}


@together.due
def _(local: Global, stride, rank: Rank):
    layout, coord = local.layout, local.mesh.coord(rank)
    global_shape = Refused() if layout.mesh.ndim > 1 else Of(layout.shape, "wrong-layout")
    if not layout.is_even() or 0 in layout.shape:
        return {"whole": global_shape, "even part": ...}
    assert coord is not None
    # dense strides of the local shape, in the dim order of the global memory
    shape, steps, step = layout.local_shape(coord), {}, 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], layout.shape[dim])):
        steps[dim], step = step, step * shape[dim]
    shard = shape, [steps[dim] for dim, size in enumerate(shape) if size > 1]
    return {"whole": global_shape, "even part": Of(shard, "wrong-layout")}


MOVED_NAMES = (
    *("DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "distribute_module", "distribute_tensor"),
    *("empty", "full", "init_device_mesh", "ones", "rand", "randn", "zeros"),
)


@law(
    "layout.old-paths",
    source=f"{DOC}: DTensor has moved here; the old import path is kept",
    control="mesh=2 x=5x6:S(0)",
    cases=("mesh=2 x=5x6:S(0)", "mesh=2x2 x=5x6:S(1),R", "mesh=3 x=4:R"),
    tier="advisory",
    weight=0.1,
)
def old_paths(x: FullTensor, mesh: DeviceMesh, placements: PlacementsOf):
    """The old import path of DTensor gives the same functions and classes as the documented one."""
    same = {name: getattr(compat.old_tensor, name) is getattr(tensor, name) for name in MOVED_NAMES}
    same["placement_types"] = compat.old_placement_types.Shard is tensor.Shard
    return {"named": same, "local": compat.old_tensor.distribute_tensor(x, mesh, placements, src_data_rank=None)}


@old_paths.due
def _(x: Global):
    return {"named": Of(dict.fromkeys((*MOVED_NAMES, "placement_types"), True)), "local": x}
