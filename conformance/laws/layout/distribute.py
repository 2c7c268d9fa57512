"""Laws of layouts: what ``distribute_tensor`` puts on each rank, and what torch says that each rank holds, or the
whole is."""

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


def keeps_grad(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
    """Sometimes the field ``requires_grad=1``: the tensor requires a gradient, if its dtype has one."""
    return {"requires_grad": draw(st.sampled_from([None, None, None, 1]))}


def first_rank(mesh: Mesh, position: int = 0) -> int:
    """The rank at one ``position`` of every mesh dim."""
    return mesh.rank_at((position,) * mesh.ndim)


@law(
    "layout.distribute",
    source=f"{DOC}, distribute_tensor (src_data_rank=None) and Shard (torch.chunk semantic)",
    control="mesh=2x2 x=5x6:S(0),S(1)",
    draw=lambda limits: draws.tensor_cases(
        limits, dtypes=limits.dtypes, memories=MEMORIES, fills=draws.SELDOM_EDGES, extra=keeps_grad
    ),
    draws=200,
    weight=1.2,
)
def distribute(x: FullTensor, mesh: DeviceMesh, placements: PlacementsOf, requires_grad: bool = False):
    """distribute_tensor without a source rank leaves on each rank the slice of its tensor that the placements name;
    stride, dtype and requires_grad are the tensor's, which is untouched."""
    x.requires_grad_(requires_grad and x.dtype.is_floating_point)
    d = distribute_tensor(x, mesh, placements, src_data_rank=None)
    return {"local": d, "requires_grad": d.requires_grad, "leaf": d.is_leaf, "stride": d.stride(), "input": x}


@distribute.due
def _(x: Global, requires_grad=False):
    grad = requires_grad and x.full.dtype.is_floating_point
    return {"local": x, "requires_grad": Of(grad), "leaf": Of(True), "stride": Of(x.full.stride()), "input": x.full}


def draw_scatter(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False)
    return draws.tensor_cases(limits, on=on, dtypes=limits.dtypes, memories=MEMORIES)


@law(
    "layout.scatter",
    source=f"{DOC}, distribute_tensor (src_data_rank)",
    control="mesh=2x2 x=5x6:S(0),S(1)",
    draw=draw_scatter,
    draws=120,
    sweep=draws.permuted_mesh_cases("S(0)"),
    sweeps=3,
    needs=("broadcast", "scatter"),
    weight=1.2,
)
def scatter(x: OwnFullTensor, mesh: DeviceMesh, placements: PlacementsOf):
    """distribute_tensor gives every rank its slice of the tensor of the first rank of each mesh dim."""
    return {"local": distribute_tensor(x, mesh, placements)}


@scatter.due
def _(x: OwnValues):
    return {"local": x.of(first_rank(x.mesh))}


def draw_source(limits: Limits) -> SearchStrategy[Case]:
    def source(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"src": draw(st.integers(1, min(layout.mesh.shape) - 1))}

    on = [mesh for mesh in draws.meshes(limits, permuted=False) if min(mesh.shape) > 1]
    return draws.tensor_cases(limits, on=on, dtypes=limits.dtypes, extra=source)


def sweep_source(limits: Limits) -> list[Case]:
    return [case for case in draws.permuted_mesh_cases("S(0)", src=1)(limits) if min(case.mesh().shape) > 1]


@law(
    "layout.source",
    source=f"{DOC}, distribute_tensor (src_data_rank)",
    control="mesh=2 x=5x6:R src=1",
    draw=draw_source,
    draws=60,
    sweep=sweep_source,
    sweeps=2,
    needs=("broadcast", "scatter"),
    weight=0.8,
)
def source(x: OwnFullTensor, mesh: DeviceMesh, placements: PlacementsOf, src: int):
    """With src_data_rank=k every rank gets its slice of the tensor of the rank at position k of each mesh dim."""
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
    """distribute_tensor does not change the tensor that it is given, on any rank."""
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
    """A rank's local shape is how much it owns of each dim, its offset the first index, or the extent where it owns
    nothing."""
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
    """The chunks that a DTensor lists hold the elements that the rank owns, all of them and no others: one chunk where
    one box holds them."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in x.__create_chunk_list__()]
    runs = [[range(start, start + size) for start, size in zip(*box, strict=True)] for box in boxes]
    return {"box": boxes, "elements": sorted(at for box in runs for at in itertools.product(*box))}


@chunks.due
def _(x: Global, rank: Rank):
    coord = x.mesh.coord(rank)
    assert coord is not None
    box, owned = x.layout.box(coord), sorted(itertools.product(*x.layout.owned(coord)))
    return {"box": Of([(box.offset, box.size)], "wrong-layout") if box else ..., "elements": Of(owned, "wrong-layout")}


def draw_full(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False)
    return draws.tensor_cases(limits, on=on, dtypes=limits.dtypes, memories=MEMORIES)


@law(
    "layout.full",
    source=f"{DOC}, DTensor.full_tensor",
    control="mesh=2x2 x=5x6:S(0),S(1)",
    draw=draw_full,
    draws=120,
    sweep=draws.permuted_mesh_cases("S(0)"),
    sweeps=3,
    needs=("all_gather",),
    weight=1.2,
)
def full(x: FullTensor, mesh: DeviceMesh, placements: PlacementsOf):
    """full_tensor of a distributed tensor is the tensor; a rank outside the mesh gets no elements."""
    whole = distribute_tensor(x, mesh, placements, src_data_rank=None).full_tensor()
    return {"elements": whole.numel(), "full": whole}


@full.due
def _(x: Global, rank: Rank):
    inside = x.mesh.coord(rank) is not None
    return {"elements": Of(x.full.numel() if inside else 0, "wrong-layout"), "full": x.full if inside else ...}


def draw_negative(limits: Limits) -> SearchStrategy[Case]:
    def how(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"how": draw(st.sampled_from(["distribute", "from_local", "redistribute"]))}

    drawn = draws.tensor_cases(limits, kinds=("S", "_S", "R"), min_dims=1, negative=True, extra=how)
    return drawn.filter(lambda case: "(-" in case.text)


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
    """A shard of a negative dim is a shard of the dim counted from the end, and a DTensor names it so; the list that
    was passed stays as it was."""
    passed = copy.deepcopy(placements)
    if how == "distribute":
        d = distribute_tensor(x, mesh, placements, src_data_rank=None)
    elif how == "from_local":
        part = local if mesh.get_coordinate() is not None else x  # a rank outside has no local tensor of as many dims
        d = DTensor.from_local(part, mesh, placements, shape=x.shape, stride=x.stride())
    else:
        d = distribute_tensor(x, mesh, [Replicate()] * mesh.ndim, src_data_rank=None).redistribute(
            placements=placements
        )
    dims = [getattr(placement, "dim", None) for placement in d.placements]
    return {"local": d, "dims": dims, "argument": placements == passed}


@negative_dims.due
def _(x: Global):
    return {"local": x, "dims": Of([shard_dim(placement) for placement in x.placements]), "argument": True}


def draw_together(limits: Limits) -> SearchStrategy[Case]:
    lines, planes = (draws.meshes(limits, dims=dims) for dims in ((1,), (2,)))
    return draws.tensor_cases(limits, on=[*lines * 2, *planes], kinds=("R", "S"), memories=("plain", "transposed"))


EVENLY_TOGETHER = (
    "mesh=2x2 x=8x3:S(0),S(0)",
    "mesh=2x2 x=3x4x2:S(1),S(1):float32:distinct:transposed",
    "mesh=2x2 x=4x6:S(1),S(0)",
    "mesh=2x2 x=4x6x4:S(2),R:float32:distinct:transposed",
    "mesh=1x4 x=5x8:S(0),S(1)",
    "mesh=2x2x2 x=8x4:S(0),S(1),S(0)",
)


@law(
    "layout.together",
    source="torch.distributed.tensor, docstrings of compute_global_tensor_shape and compute_local_tensor_info",
    control="mesh=2 x=5x6:S(0)",
    sweep=texts(*EVENLY_TOGETHER),
    sweeps=len(EVENLY_TOGETHER),
    draw=draw_together,
    draws=16,
    members=True,
    needs=("all_gather",),
    weight=0.2,
)
def together(local: LocalShard, mesh: DeviceMesh, placements: PlacementsOf, shape: ShapeOf, stride: StrideOf):
    """The shapes of shards, uneven ones too, make that of the whole, on a mesh of one dim; even ones have its strides,
    shrunk, without what others hold."""
    whole = caught(lambda: tuple(compat.global_tensor_shape(local.shape, mesh, placements)))
    part = caught(lambda: compat.local_tensor_info(torch.empty_strided(shape, stride), mesh, placements))
    if not isinstance(part, Exception):
        part = tuple(part[0]), [step for step, size in zip(part[1], local.shape, strict=True) if size > 1]
    return {"whole": whole, "even part": part}


@together.due
def _(local: Global, stride, rank: Rank):
    layout, coord = local.layout, local.mesh.coord(rank)
    whole = Refused() if layout.mesh.ndim > 1 else Of(layout.shape, "wrong-layout")
    if not layout.is_even() or 0 in layout.shape:
        return {"whole": whole, "even part": ...}
    assert coord is not None
    # the extents of the shard, in the order that the whole has in memory
    shape, steps, step = layout.local_shape(coord), {}, 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], layout.shape[dim])):
        steps[dim], step = step, step * shape[dim]
    part = shape, [steps[dim] for dim, size in enumerate(shape) if size > 1]
    return {"whole": whole, "even part": Of(part, "wrong-layout")}


MOVED = (
    *("DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "distribute_module", "distribute_tensor"),
    *("empty", "full", "init_device_mesh", "ones", "rand", "randn", "zeros"),
)


@law(
    "layout.old-paths",
    source=f"{DOC}: DTensor has moved here; the old import path is kept",
    control="mesh=2 x=5x6:S(0)",
    sweep=texts("mesh=2 x=5x6:S(0)", "mesh=2x2 x=5x6:S(1),R", "mesh=3 x=4:R"),
    sweeps=3,
    tier="advisory",
    weight=0.1,
)
def old_paths(x: FullTensor, mesh: DeviceMesh, placements: PlacementsOf):
    """What is imported from where DTensor was before is what the documents name, and shards a tensor alike."""
    named = {name: getattr(compat.old_tensor, name) is getattr(tensor, name) for name in MOVED}
    named["placement_types"] = compat.old_placement_types.Shard is tensor.Shard
    return {"named": named, "local": compat.old_tensor.distribute_tensor(x, mesh, placements, src_data_rank=None)}


@old_paths.due
def _(x: Global):
    return {"named": Of(dict.fromkeys((*MOVED, "placement_types"), True)), "local": x}
