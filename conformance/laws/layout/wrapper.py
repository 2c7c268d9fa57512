"""Laws of ``LocalShardsWrapper``, which holds any number of shards of any size on a rank: the layouts of embedding
tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Device, Rank, WordField
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import (
    BoxedOf,
    BoxedTensor,
    Offsets,
    PlacementsOf,
    ShapeOf,
    Shards,
    StrideOf,
)
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placement, Replicate, Shard
from shardlaw.reference.shards import are_side_by_side
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shards as draw_shards

WRAPPER = "torch.distributed.tensor._shards_wrapper, LocalShardsWrapper"
FROM_LOCAL = "torch.distributed.tensor docs, DTensor.from_local (shape, stride) and DTensor.to_local"
DTYPES = (*("float32",) * 7, "float64", "int64", "bfloat16")
# by kind of sharding: number of draws, meshes, control, clause
WAYS = {
    "rows": (
        60,
        "2 3 4 2@0,2 2@1,0",
        "mesh=4 x=8x3:S(0) boxes=0:1,0:3@0;1:4,0:3@1;4:5,0:3@2;5:8,0:3@3",
        "A DTensor of a wrapper with any number of rows on each rank has these shards, lists them, and has the given "
        "shape.",
    ),
    "columns": (
        60,
        "2 3 4 2@1,2",
        "mesh=2 x=4x6:S(1) boxes=0:4,0:1@0;0:4,1:3@0;0:4,3:4@1;0:4,4:6@1",
        "A DTensor of a wrapper with columns in any number of shards on each rank has these shards and lists them.",
    ),
    "table": (
        24,
        "1 1@1 1@2 1@3",
        "mesh=1@2 x=4x3:R boxes=0:4,0:3@2",
        "A DTensor of a table on the only rank of its mesh has its shape and stride on all ranks, its elements on one.",
    ),
    "grid": (
        30,
        "2x2 1x2 2x1 1x3 2x2@0,2,1,3",
        "mesh=2x2 x=4x5:S(0),S(1) boxes=0:1,0:2@0;0:1,2:5@1;1:4,0:2@2;1:4,2:5@3",
        "A DTensor of a wrapper with any rows by columns, on a 2-D mesh, has these shards and lists them.",
    ),
}


def sharded_dims(way: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """The placements for the dims along which a tensor is sharded."""
    dims = {"rows": [0], "columns": [len(shape) - 1], "grid": [0, 1]}
    return tuple(map(Shard, dims.get(way, []))) or (Replicate(),)


def draw_boxed(way: str, **extra: SearchStrategy[Any]) -> Callable[[Limits], SearchStrategy[Case]]:
    """Cases of a tensor ``x`` in ``boxes``, with the further fields ``extra``."""

    def draw_case(limits: Limits) -> SearchStrategy[Case]:
        on = [mesh for mesh in map(Mesh.parse, WAYS[way][1].split()) if max(mesh.ranks) < limits.world_size]
        mesh_drawn, sparse_drawn = st.sampled_from(on), st.sampled_from([False] * 5 + [True])
        dtype_drawn = st.sampled_from([name for name in DTYPES if name in limits.dtypes])

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            mesh = draw(mesh_drawn)
            shards = draw(
                draw_shards(mesh, way=way, sparse=draw(sparse_drawn)).filter(lambda shards: bool(shards.boxes))
            )
            x = TensorSpec(shards.shape, sharded_dims(way, shards.shape), draw(dtype_drawn))
            more = {name: draw(strategy) for name, strategy in extra.items()}
            return fields(mesh=mesh, x=x, boxes=str(shards), **more, seed=draw(draws.seeds()))

        return case()

    return draw_case


def features_boxed(case: Case) -> set[str]:
    """Whether ranks of the mesh have several boxes, or none."""
    x = BoxedTensor.of(case)
    counts = [len(x.boxes(rank)) for rank in case.mesh().ranks]
    return {*(["several-shards"] if max(counts) > 1 else []), *(["shardless"] if min(counts) == 0 else [])}


def chunk_boxes(chunks: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The offset and size of each chunk that has elements."""
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if 0 not in chunk.sizes]


def contents(wrapper: Any) -> dict[str, Any]:
    """The metadata and the shards of a wrapper."""
    metadata, shards = wrapper.storage_metadata(), wrapper.local_shards()
    return {
        "chunks": chunk_boxes(metadata.chunks),
        "count": len(shards),
        "shards": [shard.detach() for shard in shards],
        "size": tuple(metadata.size),
    }


def contents_due(x: BoxedTensor, rank: int) -> dict[str, Any]:
    own = x.boxes(rank)
    size = Of((*own[0].size[:-1], sum(box.size[-1] for box in own))) if own and are_side_by_side(own) else ...
    return {
        "chunks": Of([(box.offset, box.size) for box in own], "wrong-layout"),
        "count": Of(len(own), "wrong-layout"),
        "shards": x.parts(rank),
        "size": size,
    }


def pointers(wrapper: Any) -> list[int]:
    return [shard.data_ptr() for shard in wrapper.local_shards()]


def find_misplaced(d: DTensor, offsets: list[tuple[int, ...]], shards: list[torch.Tensor]) -> list[Any]:
    """The offsets at which a DTensor finds another shard, with the index that was passed as a hint."""
    wrong = []
    for at, (offset, shard) in enumerate(zip(offsets, shards, strict=True)):
        for number in (None, at, (at + 1) % len(offsets)):
            found = d.__get_tensor_shard__(MetadataIndex("x", torch.Size(offset), number))
            if found.data_ptr() != shard.data_ptr() or found.shape != shard.shape:
                wrong.append((offset, number))
    return wrong


def wrapper(
    shards: Shards,
    offsets: Offsets,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    shape: ShapeOf,
    stride: StrideOf,
    device: Device,
):
    inside = mesh.get_coordinate() is not None
    local = compat.LocalShardsWrapper(shards, offsets) if inside else torch.empty(0, device=device)
    d = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    back, metadata = d.to_local(), (tuple(d.shape), d.stride())
    if not inside:
        return {"whole": metadata, "elements": back.numel()}
    return {
        "whole": metadata,
        "to_local": contents(back),
        "same storage": pointers(back) == pointers(local),
        "chunks": chunk_boxes(d.__create_chunk_list__()),
        "listed": (len(back.local_sizes()), len(back.local_offsets())),  # type: ignore[attr-defined]
        "misplaced": find_misplaced(d, offsets, back.local_shards()),  # type: ignore[attr-defined]
        "dtype": d.dtype,
    }


def wrapper_due(x: BoxedOf, shape: ShapeOf, stride: StrideOf, rank: Rank):
    metadata, own = Of((tuple(shape), stride)), x.boxes(rank)
    if x.mesh.coord(rank) is None:
        return {"whole": metadata, "elements": Of(0, "wrong-layout")}
    return {
        "whole": metadata,
        "to_local": contents_due(x, rank),
        "same storage": True,
        "chunks": Of([(box.offset, box.size) for box in own], "wrong-layout"),
        "listed": Of((len(own), len(own))),
        "misplaced": [],
        "dtype": Of(x.full.dtype) if own else ...,
    }


LAWS: list[Law] = []
for way, (draws_of_way, _meshes, control, clause) in WAYS.items():
    made = law(
        f"layout.wrapper[{way}]",
        clause=clause,
        source=f"{WRAPPER}: local_shards, local_sizes, local_offsets, storage_metadata; {FROM_LOCAL}",
        control=control,
        features=features_boxed,
        draw=draw_boxed(way),
        draws=draws_of_way,
        weight=0.3,
        tier="extended",
    )(wrapper)
    made.due(wrapper_due)
    LAWS.append(made)


def draw_ops(limits: Limits) -> SearchStrategy[Case]:
    more = {"op": st.sampled_from([*OPS]), "requires_grad": st.sampled_from([None] * 4 + [1])}
    by_way = [draw_boxed(way, **more)(limits) for way in ("rows", "columns")]
    drawn = st.sampled_from(by_way).flatmap(lambda cases: cases)
    # equal also compares metadata: undefined for a clone that does not require a gradient like its source
    return drawn.filter(
        lambda case: "requires_grad" not in case or (case.tensor("x").dtype == "float32" and case.get("op") != "equal")
    )


OPS = {
    "clone": lambda wrapper: wrapper.clone(),
    "detach": lambda wrapper: wrapper.detach(),
    "copy": lambda wrapper: wrapper.to(torch.complex64),
    "equal": lambda wrapper: wrapper.clone(),
    "view": lambda wrapper: wrapper.view(wrapper.shape),
    "new_empty": lambda wrapper: wrapper.new_empty(wrapper.shape),
}


def equalities(source: Any) -> list[bool]:
    """Whether a wrapper equals its clone, the clone at other offsets, with fewer shards, and with one changed
    element."""
    clone, shards, offsets = source.clone(), source.local_shards(), source.local_offsets()
    same = torch.equal(source, clone)
    if not shards:
        return [same, False, False, False]
    moved = compat.LocalShardsWrapper(
        [shard.clone() for shard in shards], [tuple(start + 1 for start in offset) for offset in offsets]
    )
    fewer = compat.LocalShardsWrapper(clone.local_shards()[1:], offsets[1:])
    with torch.no_grad():
        clone.local_shards()[-1].view(-1)[-1:].zero_()
    return [same, torch.equal(source, moved), torch.equal(source, fewer), torch.equal(source, clone)]


@law(
    "layout.wrapper-ops",
    source=f"{WRAPPER}: the ops that __torch_dispatch__ lists",
    control="mesh=2 x=4x6:S(1) boxes=0:4,0:1@0;0:4,1:3@0;0:4,3:6@1 op=clone",
    features=features_boxed,
    draw=draw_ops,
    draws=90,
    weight=0.3,
    tier="extended",
)
def wrapper_ops(shards: Shards, offsets: Offsets, op: Annotated[str, WordField(OPS)], requires_grad: bool = False):
    """Each op that a wrapper supports returns a wrapper of the same boxes, with copies of the shards or views of them,
    and leaves its input unchanged."""
    source = compat.LocalShardsWrapper(shards, offsets)
    if requires_grad:
        source.requires_grad_()
    result = OPS[op](source)
    if op == "new_empty":
        with torch.no_grad():
            for shard in result.local_shards():
                shard.zero_()
    return {
        "contents": contents(result),
        "shared": pointers(result)[:1] == pointers(source)[:1],
        "equal": equalities(source) if op == "equal" else None,
        "requires_grad": [shard.requires_grad for shard in result.local_shards()],
        "source": contents(source),
        "source requires_grad": [shard.requires_grad for shard in source.local_shards()],
    }


@wrapper_ops.due
def _(x: BoxedOf, op, rank: Rank, requires_grad=False):
    own = x.boxes(rank)
    full = {"copy": x.full.to(torch.complex64), "new_empty": torch.zeros_like(x.full)}.get(op, x.full)
    return {
        "contents": contents_due(BoxedTensor(full, x.mesh, x.shards), rank),
        "shared": op in ("detach", "view") if own else ...,
        "equal": [True, False, False, False] if op == "equal" else None,
        "requires_grad": Of([False] * len(own)) if op == "detach" else ...,
        "source": contents_due(x, rank),
        "source requires_grad": Of([requires_grad] * len(own)),
    }


# ops that a wrapper does not support
ATTEMPTS = {
    "add": lambda wrapper: wrapper + 1,
    "mul": lambda wrapper: wrapper * wrapper,
    "sum": lambda wrapper: wrapper.sum(),
    "mean": lambda wrapper: wrapper.mean(),
    "transpose": lambda wrapper: wrapper.t(),
    "index": lambda wrapper: wrapper[0],
    "cat": lambda wrapper: torch.cat([wrapper, wrapper]),
    "relu": torch.relu,
    "fill": lambda wrapper: wrapper.fill_(0),
    "copy_": lambda wrapper: wrapper.copy_(wrapper),
    "unsqueeze": lambda wrapper: wrapper.unsqueeze(0),
    "matmul": lambda wrapper: wrapper @ wrapper.view(wrapper.shape),
    "eq": lambda wrapper: wrapper == 1,
}
# shards and offsets that the constructor refuses
MALFORMED = {
    "fewer-offsets": lambda shard: ([shard, shard], [(0, 0)]),
    "short-offset": lambda shard: ([shard], [(0,)]),
    "other-dims": lambda shard: ([shard, shard[0]], [(0, 0), (2,)]),
}


@law(
    "layout.wrapper-refusals",
    source=f"{WRAPPER}: __torch_dispatch__ raises for other ops; the constructor takes one offset for each shard",
    control="mesh=2 attempt=add",
    sweep=lambda limits: [fields(mesh="2", attempt=attempt) for attempt in (*ATTEMPTS, *MALFORMED)],
    sweeps=16,
    weight=0.1,
    tier="extended",
)
def wrapper_refusals(mesh: DeviceMesh, attempt: Annotated[str, WordField((*ATTEMPTS, *MALFORMED))]):
    """An op that a wrapper does not support is refused, and so are shards without an offset of their number of dims."""
    shard = torch.ones(2, 2, device=mesh.device_type)
    if attempt in MALFORMED:
        return caught(lambda: compat.LocalShardsWrapper(*MALFORMED[attempt](shard)))
    source = compat.LocalShardsWrapper([shard, shard.clone()], [(0, 0), (0, 2)])
    return caught(lambda: ATTEMPTS[attempt](source))


@wrapper_refusals.due
def _(attempt):
    return Refused((Exception,) if attempt in MALFORMED else (NotImplementedError, AssertionError, RuntimeError))
