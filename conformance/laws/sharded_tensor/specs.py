"""Laws on sharded tensors that are made from specs and moved between them: who holds what of them, on every rank.

A spec is the whole truth about a sharded tensor: its boxes, in the metadata that every rank holds and in the shards
that each holds
itself, whichever way it was made. Values are judged by their places.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.choices import ChoiceField
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Rank, Word
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws.plan.torch_plans import cut
from shardlaw.conformance.laws.sharded_tensor.draws import made, placed, sharded_law
from shardlaw.conformance.laws.sharded_tensor.fields import (
    SOURCE,
    Group,
    OwnBoxes,
    ShardingSpec,
    Whole,
    described,
    due_of,
    features,
    spec_of,
)
from shardlaw.conformance.laws.sharded_tensor.shards import in_boxes, respelled, told
from shardlaw.reference.sharded_tensor import ChunkSpec, shards_of

FILLED = {"zeros": 0, "ones": 1, "full": 3}


def place_in(group: Any, rank: int) -> int:
    """The position of a rank in a group of the reference, which is ``None`` where all ranks take part; -1 outside."""
    return rank if group is None else group.index(rank) if rank in group else -1


# Made


def from_factory(make: Word, x: Whole, spec: ShardingSpec, size: Literal["apart"] | None = None, group: Group = None):
    filled = [3] if make == "full" else []
    shape = [*x.shape] if size == "apart" else [x.shape]

    def once() -> Any:
        return getattr(compat.sharded_tensor, make)(spec, *shape, *filled, dtype=x.dtype, process_group=group)

    sharded = once()
    shards = [shard.tensor for shard in sharded.local_shards()]
    outside = [shard for shard in shards if make == "rand" and not bool(((shard >= 0) & (shard < 1)).all())]
    moments = far_from_normal(once) if make == "randn" else []
    if make in ("empty", "rand", "randn"):
        for shard in shards:
            shard.zero_()
    return {"outside [0, 1)": outside, "far from normal": moments, **told(sharded)}


def far_from_normal(once: Callable[[], Any]) -> list[float]:
    """The mean and the variance of some hundred elements of this rank, where they are not 0 and 1 by six standard
    errors."""
    sample, numel = 300, sum(shard.tensor.numel() for shard in once().local_shards())
    if not numel:
        return []
    times = -(-sample // numel)
    drawn = torch.cat([shard.tensor.flatten().double() for _ in range(times) for shard in once().local_shards()])
    mean, spread = drawn.mean().item(), drawn.var().item()
    return [] if abs(mean) < 6 * sample**-0.5 and abs(spread - 1) < 6 * (2 / sample) ** 0.5 else [mean, spread]


def due_factory(make, x, spec, rank: Rank):
    full = torch.full_like(x, FILLED.get(make, 0))
    return {"outside [0, 1)": [], "far from normal": [], **due_of(full, shards_of(spec, tuple(x.shape)), rank)}


def law_of_factory(kind: str, clause: str, source: str, spec: str) -> Law:
    law = sharded_law(
        f"sharded_tensor.made[{kind}]",
        clause=clause,
        source=f"{SOURCE}, {source}",
        control=f"world=2 x=4x3 spec={spec} make=ones",
        draw=lambda limits: made(limits, chunks=kind == "chunk"),
        draws=40,
    )(from_factory)
    law.due(due_factory)
    return law


@sharded_law(
    "sharded_tensor.scattered",
    source=f"{SOURCE}, _shard_tensor: shards that tensor according to the sharding_spec; src_rank is the ground truth",
    control="world=2 x=4x3 spec=chunk(0)@0,1",
    draw=lambda limits: placed(limits, chunks=True, numbered="src"),
    draws=40,
)
def scattered(x: Whole, spec: ShardingSpec, src: int = 0, group: Group = None):
    """A tensor that one rank holds is handed out in the chunks of the spec, each to the rank that the spec names."""
    own = x.clone() if dist.get_rank(group) == src else torch.zeros_like(x)
    sharded = compat.shard_tensor(own, spec, src_rank=src, process_group=group)
    return {**told(sharded), "input": own}


@scattered.due
def _(x, spec, src, group, rank: Rank):
    own = x if place_in(group, rank) == src else torch.zeros_like(x)
    return {**due_of(x, shards_of(spec, tuple(x.shape)), rank), "input": own}


@sharded_law(
    "sharded_tensor.local-shards",
    source=f"{SOURCE}, init_from_local_shards; ShardedTensor.sharding_spec",
    control="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1",
    draw=placed,
    draws=40,
)
def local_shards(x: Whole, boxes: OwnBoxes, rank: Rank, group: Group = None):
    """Local shards in any boxes that tile a tensor are that tensor, and its spec names these boxes again."""
    sharded = in_boxes(x, boxes, rank, group)
    return {**told(sharded), "spec": respelled(sharded)}


@local_shards.due
def _(x, boxes, rank):
    return {**due_of(x, boxes, rank), "spec": Of(described(boxes))}


@sharded_law(
    "sharded_tensor.local-tensor",
    source=f"{SOURCE}, ShardedTensor._init_from_local_tensor",
    control="world=2 x=4x3 spec=chunk(0)@0,1",
    draw=lambda limits: placed(limits, chunks=True),
    draws=30,
)
def local_tensor(x: Whole, spec: ShardingSpec, boxes: OwnBoxes, group: Group = None):
    """Local tensors that are the chunks of a spec are one sharded tensor, without a copy."""
    local = x[cut(*boxes[0])].contiguous()
    sharded = compat.init_from_local_tensor(local, spec, *x.shape, process_group=group)
    return {**told(sharded), "copied": local.numel() > 0 and sharded.local_tensor().data_ptr() != local.data_ptr()}


@local_tensor.due
def _(x, boxes, rank: Rank):
    return {**due_of(x, boxes, rank), "copied": Of(False)}


TRAINED: dict[str, Callable[..., Any]] = {
    "scattered": lambda x, spec, boxes, rank: compat.shard_tensor(x.requires_grad_(), spec),
    "local": lambda x, spec, boxes, rank: compat.init_from_local_tensor(
        x[cut(*boxes[0])].contiguous().requires_grad_(), spec, *x.shape
    ),
    "shards": lambda x, spec, boxes, rank: compat.init_from_local_shards(
        [
            compat.ShardOfTensor.from_tensor_and_offsets(
                x[cut(offset, size)].contiguous().requires_grad_(), [*offset], rank
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
OF_TRAINED = (
    "world=2 x=4x3 spec=chunk(0)@0,1",
    "world=3 x=5x3:-:float64 spec=chunk(0)@2,0,1",
    "world=2 x=2x5:-:bfloat16 spec=chunk(1)@1,0",
)


@sharded_law(
    "sharded_tensor.trained",
    source=f"{SOURCE}, _shard_tensor, init_from_local_shards and the factories: requires_grad",
    control="world=2 x=4x3 spec=chunk(0)@0,1 how=local",
    sweep=texts(*(f"{line} how={how}" for how in TRAINED for line in OF_TRAINED)),
    sweeps=len(TRAINED) * len(OF_TRAINED),
)
def trained(x: Whole, spec: ShardingSpec, boxes: OwnBoxes, how: Annotated[Any, ChoiceField(TRAINED)], rank: Rank):
    """What is made of elements that require a gradient requires one, as every rank's shards do, which are leaves."""
    sharded = how(x.clone(), spec, boxes, rank)
    shards = [shard.tensor for shard in sharded.local_shards()]
    return {
        **told(sharded),
        "asks for a gradient": [sharded.requires_grad, sharded.metadata().tensor_properties.requires_grad],
        "shards that ask for none": sum(not shard.requires_grad for shard in shards),
        "shards that are no leaves": sum(not shard.is_leaf for shard in shards),
    }


@trained.due
def _(x, boxes, rank, how):
    full = torch.full_like(x, 3.0) if how == "factory" else x
    return {
        **due_of(full, boxes, rank),
        "asks for a gradient": Of([True, True]),
        "shards that ask for none": Of(0),
        "shards that are no leaves": Of(0),
    }


# Moved


@sharded_law(
    "sharded_tensor.gathered",
    source=f"{SOURCE}, ShardedTensor.gather: creates a full tensor on rank dst",
    control="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1",
    draw=lambda limits: placed(limits, numbered="dst", hows=("plain", "dtype", "plain", "enforced")),
    draws=60,
)
def gathered(x: Whole, boxes: OwnBoxes, rank: Rank, dst: int = 0, how: Word = "plain", group: Group = None):
    """gather writes the whole tensor, bit for bit, into the tensor that the destination gives."""
    sharded = in_boxes(x, boxes, rank, group)
    out = torch.zeros_like(x) if dist.get_rank(group) == dst else None
    options: dict[str, Any] = {"plain": {}, "dtype": {"dtype": x.dtype}, "enforced": {"enforce_dtype": True}}
    returned = sharded.gather(dst=dst, out=out, **options[how])
    return {"returned": returned, "gathered": out, **told(sharded)}


@gathered.due
def _(x, boxes, rank, dst, group):
    return {"returned": Of(None), "gathered": x if place_in(group, rank) == dst else None, **due_of(x, boxes, rank)}


def reshard_features(case: Case) -> set[str]:
    """Features of both specs, and of what they are to one another."""
    found = features("spec", "respec")(case)
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
# even chunks, of one dim and then of the other, on the ranks in all orders
TURNED = (
    *(f"world=3 x=3x6 spec=chunk(0)@0,1,2 respec=chunk(1)@{order}" for order in ORDERS),
    *(f"world=3 x=6x3x2 spec=chunk(1)@{order} respec=chunk(0)@0,1,2" for order in ORDERS[1:]),
    *(f"world=3 x=3x3 spec=chunk(0)@{one} respec=chunk(1)@{other}" for one, other in pairwise(ORDERS)),
)


@sharded_law(
    "sharded_tensor.reshard",
    source=f"{SOURCE}, ShardedTensor.reshard",
    control="world=2 x=4x4 spec=chunk(0)@0,1 respec=chunk(1)@0,1",
    sweep=texts(*TURNED),
    sweeps=len(TURNED),
    draw=lambda limits: placed(limits, chunks=True, again=True),
    draws=60,
    features=reshard_features,
)
def reshard(x: Whole, spec: ShardingSpec, boxes: OwnBoxes, respec: ShardingSpec, group: Group = None):
    """A sharded tensor of chunks becomes, by reshard, the one of any other chunks: along any dim, on the ranks in any
    order."""
    sharded = compat.init_from_local_tensor(x[cut(*boxes[0])].contiguous(), spec, *x.shape, process_group=group)
    moved = sharded.reshard(respec)
    return {**told(moved), "has the spec": moved.sharding_spec() == respec}


@reshard.due
def _(x, respec, rank: Rank):
    return {**due_of(x, respec.shards(tuple(x.shape)), rank), "has the spec": Of(True)}


LAWS = [
    law_of_factory(
        "chunk",
        "A factory makes a sharded tensor of the chunks that its spec names: as torch.chunk cuts, each on its rank.",
        "ChunkShardingSpec: in line with torch.chunk; sharded_tensor.zeros and others",
        "chunk(0)@0,1",
    ),
    law_of_factory(
        "boxes",
        "A factory makes a sharded tensor of the boxes that its spec enumerates, several on a rank or none.",
        "EnumerableShardingSpec: exactly how each shard is laid out",
        "0:1,0:3@0;1:4,0:3@1",
    ),
]
