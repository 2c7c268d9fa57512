"""Laws of creating sharded tensors from specs, resharding and gathering them.

However a sharded tensor was created, its metadata and its local shards must have the boxes of its spec, on every rank,
and its elements must be in the right places.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.choices import ChoiceField
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Rank, Word
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws.plan.torch_plans import box_slices
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe, from_boxes, spec_boxes
from shardlaw.conformance.laws.sharded_tensor.draws import factory_cases, sharded_law, spec_cases
from shardlaw.conformance.laws.sharded_tensor.fields import (
    SOURCE,
    FullTensor,
    Group,
    OwnBoxes,
    ShardingSpec,
    due_boxes,
    due_description,
    spec_features,
    spec_of,
)
from shardlaw.reference.sharded_tensor import ChunkSpec, shards_of

FILL_VALUES = {"zeros": 0, "ones": 1, "full": 3}


def group_rank(group: Any, rank: int) -> int:
    """The position of a rank in a group, ``None`` for the group of all ranks; -1 outside the group."""
    return rank if group is None else group.index(rank) if rank in group else -1


# Creating


def create(make: Word, x: FullTensor, spec: ShardingSpec, size: Literal["apart"] | None = None, group: Group = None):
    fill_value = [3] if make == "full" else []
    shape = [*x.shape] if size == "apart" else [x.shape]

    def new() -> Any:
        return getattr(compat.sharded_tensor, make)(spec, *shape, *fill_value, dtype=x.dtype, process_group=group)

    sharded = new()
    shards = [shard.tensor for shard in sharded.local_shards()]
    outside = [shard for shard in shards if make == "rand" and not bool(((shard >= 0) & (shard < 1)).all())]
    abnormal = abnormal_moments(new) if make == "randn" else []
    if make in ("empty", "rand", "randn"):
        for shard in shards:
            shard.zero_()
    return {"outside [0, 1)": outside, "far from normal": abnormal, **describe(sharded)}


def abnormal_moments(new: Callable[[], Any]) -> list[float]:
    """The mean and the variance of 300 elements or more of this rank, if they differ from 0 and 1 by more than six
    standard errors."""
    sample, numel = 300, sum(shard.tensor.numel() for shard in new().local_shards())
    if not numel:
        return []
    times = -(-sample // numel)
    values = torch.cat([shard.tensor.flatten().double() for _ in range(times) for shard in new().local_shards()])
    mean, variance = values.mean().item(), values.var().item()
    return [] if abs(mean) < 6 * sample**-0.5 and abs(variance - 1) < 6 * (2 / sample) ** 0.5 else [mean, variance]


def due_created(make, x, spec, rank: Rank):
    full = torch.full_like(x, FILL_VALUES.get(make, 0))
    return {"outside [0, 1)": [], "far from normal": [], **due_description(full, shards_of(spec, tuple(x.shape)), rank)}


def factory_law(kind: str, clause: str, source: str, spec: str) -> Law:
    built = sharded_law(
        f"sharded_tensor.made[{kind}]",
        clause=clause,
        source=f"{SOURCE}, {source}",
        control=f"world=2 x=4x3 spec={spec} make=ones",
        draw=lambda limits: factory_cases(limits, chunks=kind == "chunk"),
        draws=40,
    )(create)
    built.due(due_created)
    return built


@sharded_law(
    "sharded_tensor.scattered",
    source=f"{SOURCE}, _shard_tensor: shards that tensor according to the sharding_spec; src_rank is the ground truth",
    control="world=2 x=4x3 spec=chunk(0)@0,1",
    draw=lambda limits: spec_cases(limits, chunks=True, rank_field="src"),
    draws=40,
    cases=("world=3 group=1,2 x=4x3 spec=chunk(0)@1,2", "world=3 group=1,2 x=4x3 spec=chunk(0)@1,2 src=1"),
)
def scattered(x: FullTensor, spec: ShardingSpec, src: int = 0, group: Group = None):
    """_shard_tensor scatters the tensor of the source rank in the chunks of the spec, each to its rank."""
    source = x.clone() if dist.get_rank(group) == src else torch.zeros_like(x)
    sharded = compat.shard_tensor(source, spec, src_rank=src, process_group=group)
    return {**describe(sharded), "input": source}


@scattered.due
def _(x, spec, src, group, rank: Rank):
    source = x if group_rank(group, rank) == src else torch.zeros_like(x)
    return {**due_description(x, shards_of(spec, tuple(x.shape)), rank), "input": source}


@sharded_law(
    "sharded_tensor.local-shards",
    source=f"{SOURCE}, init_from_local_shards; ShardedTensor.sharding_spec",
    control="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1",
    draw=spec_cases,
    draws=40,
)
def local_shards(x: FullTensor, boxes: OwnBoxes, rank: Rank, group: Group = None):
    """init_from_local_shards accepts local shards in any boxes that tile a tensor, and its spec has these boxes."""
    sharded = from_boxes(x, boxes, rank, group)
    return {**describe(sharded), "spec": spec_boxes(sharded)}


@local_shards.due
def _(x, boxes, rank):
    return {**due_description(x, boxes, rank), "spec": Of(due_boxes(boxes))}


@sharded_law(
    "sharded_tensor.local-tensor",
    source=f"{SOURCE}, ShardedTensor._init_from_local_tensor",
    control="world=2 x=4x3 spec=chunk(0)@0,1",
    draw=lambda limits: spec_cases(limits, chunks=True),
    draws=30,
)
def local_tensor(x: FullTensor, spec: ShardingSpec, boxes: OwnBoxes, group: Group = None):
    """Local tensors that are the chunks of a spec become one sharded tensor, without a copy."""
    local = x[box_slices(*boxes[0])].contiguous()
    sharded = compat.init_from_local_tensor(local, spec, *x.shape, process_group=group)
    return {**describe(sharded), "copied": local.numel() > 0 and sharded.local_tensor().data_ptr() != local.data_ptr()}


@local_tensor.due
def _(x, boxes, rank: Rank):
    return {**due_description(x, boxes, rank), "copied": Of(False)}


REQUIRING_GRAD: dict[str, Callable[..., Any]] = {
    "scattered": lambda x, spec, boxes, rank: compat.shard_tensor(x.requires_grad_(), spec),
    "local": lambda x, spec, boxes, rank: compat.init_from_local_tensor(
        x[box_slices(*boxes[0])].contiguous().requires_grad_(), spec, *x.shape
    ),
    "shards": lambda x, spec, boxes, rank: compat.init_from_local_shards(
        [
            compat.ShardOfTensor.from_tensor_and_offsets(
                x[box_slices(offset, size)].contiguous().requires_grad_(), [*offset], rank
            )
            for offset, size in boxes
        ],
        *x.shape,
    ),
    "asked": lambda x, spec, boxes, rank: compat.shard_tensor(x, spec).requires_grad_(),
    "factory": lambda x, spec, boxes, rank: compat.sharded_tensor.full(
        spec, x.shape, 3.0, dtype=x.dtype, requires_grad=True
    ),
}
GRAD_LINES = (
    "world=2 x=4x3 spec=chunk(0)@0,1",
    "world=3 x=5x3:-:float64 spec=chunk(0)@2,0,1",
    "world=2 x=2x5:-:bfloat16 spec=chunk(1)@1,0",
)


@sharded_law(
    "sharded_tensor.trained",
    source=f"{SOURCE}, _shard_tensor, init_from_local_shards and the factories: requires_grad",
    control="world=2 x=4x3 spec=chunk(0)@0,1 how=local",
    cases=[f"{line} how={how}" for how in REQUIRING_GRAD for line in GRAD_LINES],
)
def trained(
    x: FullTensor, spec: ShardingSpec, boxes: OwnBoxes, how: Annotated[Any, ChoiceField(REQUIRING_GRAD)], rank: Rank
):
    """A sharded tensor created with requires_grad requires a gradient, and so do its local shards, which are leaves."""
    sharded = how(x.clone(), spec, boxes, rank)
    shards = [shard.tensor for shard in sharded.local_shards()]
    return {
        **describe(sharded),
        "asks for a gradient": [sharded.requires_grad, sharded.metadata().tensor_properties.requires_grad],
        "shards that ask for none": sum(not shard.requires_grad for shard in shards),
        "shards that are no leaves": sum(not shard.is_leaf for shard in shards),
    }


@trained.due
def _(x, boxes, rank, how):
    full = torch.full_like(x, 3.0) if how == "factory" else x
    return {
        **due_description(full, boxes, rank),
        "asks for a gradient": Of([True, True]),
        "shards that ask for none": Of(0),
        "shards that are no leaves": Of(0),
    }


# Gathering and resharding


@sharded_law(
    "sharded_tensor.gathered",
    source=f"{SOURCE}, ShardedTensor.gather: creates a full tensor on rank dst",
    control="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1",
    draw=lambda limits: spec_cases(limits, rank_field="dst", hows=("plain", "dtype", "plain", "enforced")),
    draws=60,
)
def gathered(x: FullTensor, boxes: OwnBoxes, rank: Rank, dst: int = 0, how: Word = "plain", group: Group = None):
    """gather writes the full tensor, bit for bit, into the output tensor of the destination rank."""
    sharded = from_boxes(x, boxes, rank, group)
    out = torch.zeros_like(x) if dist.get_rank(group) == dst else None
    options: dict[str, Any] = {"plain": {}, "dtype": {"dtype": x.dtype}, "enforced": {"enforce_dtype": True}}
    returned = sharded.gather(dst=dst, out=out, **options[how])
    return {"returned": returned, "gathered": out, **describe(sharded)}


@gathered.due
def _(x, boxes, rank, dst, group):
    return {
        "returned": Of(None),
        "gathered": x if group_rank(group, rank) == dst else None,
        **due_description(x, boxes, rank),
    }


def reshard_features(case: Case) -> set[str]:
    """The features of both specs, and of the relation between them."""
    found = spec_features("spec", "respec")(case)
    spec, other = spec_of(case), spec_of(case, "respec")
    assert isinstance(spec, ChunkSpec)
    assert isinstance(other, ChunkSpec)
    shape = case.tensor("x").shape
    ndim = len(shape)
    if spec.dim != other.dim and shape[other.dim] % len(other.ranks):
        found.add("moved:unlike-pieces")
    if spec.dim % ndim == other.dim % ndim:
        found.add("moved:same-dim")
        if spec.dim != other.dim:
            found.add("dim-named-twice")
    if any(other.ranks[spec.ranks.index(to)] != at for at, to in zip(spec.ranks, other.ranks, strict=True)):
        found.add("moved:around")
    return found


ORDERS = [",".join(map(str, order)) for order in permutations(range(3))]
# even chunks, resharded to the other dim, on ranks in every order
RESHARDS = (
    *(f"world=3 x=3x6 spec=chunk(0)@0,1,2 respec=chunk(1)@{order}" for order in ORDERS),
    *(f"world=3 x=6x3x2 spec=chunk(1)@{order} respec=chunk(0)@0,1,2" for order in ORDERS[1:]),
    *(f"world=3 x=3x3 spec=chunk(0)@{one} respec=chunk(1)@{other}" for one, other in pairwise(ORDERS)),
)


@sharded_law(
    "sharded_tensor.reshard",
    source=f"{SOURCE}, ShardedTensor.reshard",
    control="world=2 x=4x4 spec=chunk(0)@0,1 respec=chunk(1)@0,1",
    cases=RESHARDS,
    draw=lambda limits: spec_cases(limits, chunks=True, with_respec=True),
    draws=60,
    features=reshard_features,
)
def reshard(x: FullTensor, spec: ShardingSpec, boxes: OwnBoxes, respec: ShardingSpec, group: Group = None):
    """reshard changes a sharded tensor with a chunk spec to any other chunk spec, of any dim and order of ranks."""
    sharded = compat.init_from_local_tensor(x[box_slices(*boxes[0])].contiguous(), spec, *x.shape, process_group=group)
    resharded = sharded.reshard(respec)
    return {**describe(resharded), "has the spec": resharded.sharding_spec() == respec}


@reshard.due
def _(x, respec, rank: Rank):
    return {**due_description(x, respec.shards(tuple(x.shape)), rank), "has the spec": Of(True)}


LAWS = [
    factory_law(
        "chunk",
        "A factory creates a sharded tensor with the chunks of its spec, cut as by torch.chunk, each on its rank.",
        "ChunkShardingSpec: in line with torch.chunk; sharded_tensor.zeros and others",
        "chunk(0)@0,1",
    ),
    factory_law(
        "boxes",
        "A factory creates a sharded tensor with the boxes of its spec, any number of them on each rank.",
        "EnumerableShardingSpec: exactly how each shard is laid out",
        "0:1,0:3@0;1:4,0:3@1",
    ),
]
