"""What the cases of the sharded tensor chapter name, as sharded tensors of torch, and how a rank judges what it holds of one.

Fields of a case: ``x`` is the global tensor (a plain one: the spec says who holds what), ``spec`` the sharding spec in the notation of
:mod:`reference.sharded_tensor`, ``world`` the number of ranks, and ``group`` the ranks that take part, where not all do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from conformance.case import Case
from conformance.here import Here
from conformance.laws.plan.torch import need
from reference.box import Box
from reference.mesh import Mesh
from reference.notation import Shape
from reference.sharded_tensor import ChunkSpec, Part, Spec, of_rank, parse_spec

SOURCE = "torch.distributed._shard docs"


def members(case: Case) -> tuple[int, ...]:
    """The ranks that take part."""
    return tuple(map(int, case.get("group").split(","))) if "group" in case else tuple(range(case.world))


def group_of(case: Case, here: Here) -> Any:
    """The process group of the ranks that take part, or ``None`` where all do and on other ranks. All ranks of the world must call it."""
    return group_over(here, members(case)) if "group" in case else None


def group_over(here: Here, ranks: tuple[int, ...]) -> Any:
    """The process group of some ranks, or ``None`` on the others. All ranks of the world must call it."""
    mesh = here.mesh(Mesh((len(ranks),), ranks))
    return mesh.get_group() if here.rank in ranks else None


def spec_of(case: Case, name: str = "spec") -> Spec:
    """A sharding spec that the case names."""
    return parse_spec(case.get(name), len(case.tensor("x").shape))


def values_of(case: Case, name: str = "x") -> torch.Tensor:
    """The global tensor; elements of wide dtypes need all of their bits."""
    return widened(case.tensor(name).build(case.seed))


def widened(full: torch.Tensor) -> torch.Tensor:
    """The same tensor, with elements that a narrower dtype would round where its dtype has room for such."""
    if full.dtype == torch.int64:
        return full * 2**40 + full
    return full + full * 2.0**-40 if full.dtype == torch.float64 else full


def device_of(here: Here, rank: int) -> str:
    """The device of a rank, as placements name it."""
    kind = here.target.device
    numbered = torch.empty(0, device=kind).device.index is not None
    return f"{kind}:{rank % torch.get_device_module(kind).device_count()}" if numbered else kind


def to_torch(here: Here, spec: Spec) -> Any:
    """A sharding spec as torch's."""
    chunks, enumerable, shard_metadata = need(here, "ChunkShardingSpec", "EnumerableShardingSpec", "ShardMetadata")
    if isinstance(spec, ChunkSpec):
        return chunks(dim=spec.dim, placements=[f"rank:{rank}/{device_of(here, rank)}" for rank in spec.ranks])
    return enumerable(
        [shard_metadata([*box.offset], [*box.size], placement=f"rank:{rank}/{device_of(here, rank)}") for box, rank in spec.boxes]
    )


@contextmanager
def without_warnings() -> Iterator[None]:
    """Sharded tensors warn at every step that there are others now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def from_parts(here: Here, full: torch.Tensor, parts: Sequence[Part], group: Any = None) -> Any:
    """A sharded tensor whose shards on this rank are copies of its boxes. All members of the group must call it."""
    shard, make = need(here, "ShardOfTensor", "init_from_local_shards")
    with without_warnings():
        held = [
            shard.from_tensor_and_offsets(here.tensor(full[box.slices()].contiguous()), [*box.offset], here.rank)
            for box in of_rank(parts, here.rank)
        ]
        return make(held, *full.shape, process_group=group)


def described(entries: Sequence[tuple[Box, int]]) -> list[tuple[Shape, Shape, int]]:
    """Boxes with elements and their ranks, by where they lie. One without elements may stand anywhere, or be left out."""
    return sorted((box.offset, box.size, rank) for box, rank in entries if box.volume)


def read_parts(metadata: Any) -> list[Part]:
    """The boxes that the metadata of a sharded tensor names."""
    return [(Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)), shard.placement.rank()) for shard in metadata.shards_metadata]


def judge(here: Here, got: Any, full: torch.Tensor, parts: Sequence[Part], *, check: str, what: str = "the sharded tensor") -> bool:
    """Hold a sharded tensor against the global tensor and the boxes that its ranks must hold: metadata first, then each local shard."""
    (kind,) = need(here, "ShardedTensor")
    if not here.require(isinstance(got, kind), "wrong-metadata", check, f"{what} is a {type(got).__name__}, must be a {kind.__name__}"):
        return False
    metadata = got.metadata()
    size, dtype = tuple(metadata.size), metadata.tensor_properties.dtype
    due, told = described(parts), described(read_parts(metadata))
    return (
        here.require(size == tuple(full.shape) == tuple(got.size()), "wrong-metadata", check, f"the size of {what}", full.shape, size)
        and here.require(dtype == full.dtype == got.dtype, "wrong-metadata", check, f"the dtype of {what}", full.dtype, dtype)
        and here.require(told == due, "wrong-metadata", check, f"the metadata of {what} names other shards than it must", due, told)
        and judge_shards(here, got.local_shards(), full, parts, check=check, what=what)
    )


def judge_shards(
    here: Here, shards: Sequence[Any], full: torch.Tensor, parts: Sequence[Part], *, check: str, what: str = "the sharded tensor"
) -> bool:
    """Hold the local shards against the boxes that this rank must hold."""
    held = {(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)): shard.tensor for shard in shards}
    boxes = [box for box in of_rank(parts, here.rank) if box.volume]
    due, got = sorted((box.offset, box.size) for box in boxes), sorted(place for place in held if 0 not in place[1])
    if not here.require(got == due, "wrong-layout", check, f"the local shards of {what} lie elsewhere than they must", due, got):
        return False
    for box in boxes:
        if not here.same(held[box.offset, box.size], full[box.slices()], check, what=f"the shard at {box.offset} of {what}"):
            return False
    return True


def features_of_parts(shape: Shape, parts: Sequence[Part], ranks: Sequence[int]) -> set[str]:
    """What the boxes of a tensor depart in."""
    counts = [len([box for box in of_rank(parts, rank) if box.volume]) for rank in ranks]
    sizes = {tuple(box.size for box in of_rank(parts, rank)) for rank in ranks}
    found = {"uneven"} if len(sizes) > 1 else set()
    if 0 not in shape and 0 in counts:
        found.add("empty-shard")
    if max(counts, default=0) > 1:
        found.add("several-shards")
    if any(not of_rank(parts, rank) for rank in ranks):
        found.add("shardless")
    return found


def features_of_spec(shape: Shape, spec: Spec, ranks: Sequence[int]) -> set[str]:
    """What a spec departs in; nothing for one that has no such tensor."""
    if spec.errors(shape):
        return set()
    found = features_of_parts(shape, spec.parts(shape), ranks)
    if not isinstance(spec, ChunkSpec):
        return found | {"explicit-shards"}
    extent, count = shape[spec.dim], len(spec.ranks)
    if -(-extent // count) * (count - 1) > extent:
        found.add("beyond-the-end")
    if list(spec.ranks) != sorted(spec.ranks):
        found.add("permuted")
    return found | ({"negative-shard"} if spec.dim < 0 else set())


def features(*names: str) -> Callable[[Case], set[str]]:
    """The features of a law whose cases name their specs in these fields."""

    def of(case: Case) -> set[str]:
        found = {"group", "submesh"} if "group" in case else set()
        shape = case.tensor("x").shape
        return found.union(*(features_of_spec(shape, spec_of(case, name), members(case)) for name in names if name in case))

    return of
