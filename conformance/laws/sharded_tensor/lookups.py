"""Laws of uses of sharded tensors: embedding tables, and optimizers of local shards."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn

from shardlaw.conformance import compat
from shardlaw.conformance.law.choices import ChoiceField
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.laws.plan.torch_plans import box_slices
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe, from_boxes
from shardlaw.conformance.laws.sharded_tensor.draws import sharded_law
from shardlaw.conformance.laws.sharded_tensor.fields import SOURCE, FullTensor, OwnBoxes, ShardingSpec, due_description

PADDING = 1


def bag_weights(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, 1 + ids.numel(), device=ids.device).reshape(ids.shape)


def look_up_bags(ids: torch.Tensor, table: Any, offsets: list[int], mode: str, **options: Any) -> torch.Tensor:
    """An embedding bag whose bags start at ``offsets``."""
    return F.embedding_bag(ids.flatten(), table, ids.new_tensor(offsets), mode=mode, **options)


LOOKUPS = {
    "rows": lambda ids, table: F.embedding(ids, table),
    "rows-padded": lambda ids, table: F.embedding(ids, table, padding_idx=PADDING),
    "rows-renormed": lambda ids, table: F.embedding(ids, table, max_norm=3.0),
    "rows-renormed-1": lambda ids, table: F.embedding(ids, table, max_norm=3.0, norm_type=1.0),
    "sum": lambda ids, table: F.embedding_bag(ids, table, mode="sum"),
    "mean": lambda ids, table: F.embedding_bag(ids, table, mode="mean"),
    "max": lambda ids, table: F.embedding_bag(ids, table, mode="max"),
    "weighted": lambda ids, table: F.embedding_bag(ids, table, mode="sum", per_sample_weights=bag_weights(ids)),
    "sum-padded": lambda ids, table: F.embedding_bag(ids, table, mode="sum", padding_idx=PADDING),
    "mean-padded": lambda ids, table: F.embedding_bag(ids, table, mode="mean", padding_idx=PADDING),
    "max-padded": lambda ids, table: F.embedding_bag(ids, table, mode="max", padding_idx=PADDING),
    "sum-renormed": lambda ids, table: F.embedding_bag(ids, table, mode="sum", max_norm=3.0),
    "sum-by-bags": lambda ids, table: look_up_bags(ids, table, [0, 2, 5], "sum"),
    "mean-by-bags": lambda ids, table: look_up_bags(ids, table, [0, 1, 5], "mean"),
    "max-by-bags": lambda ids, table: look_up_bags(ids, table, [0, 4], "max"),
    "sum-to-the-last": lambda ids, table: look_up_bags(ids, table, [0, 2, 6], "sum", include_last_offset=True),
    "max-to-the-last": lambda ids, table: look_up_bags(ids, table, [0, 1, 6], "max", include_last_offset=True),
    "sum-of-none": lambda ids, table: look_up_bags(ids, table, [0, 2, 2], "sum"),
    "mean-of-none": lambda ids, table: look_up_bags(ids, table, [0, 2, 2], "mean"),
    "weighted-by-bags": lambda ids, table: look_up_bags(
        ids, table, [0, 2, 5], "sum", per_sample_weights=bag_weights(ids).flatten()
    ),
}
TABLES = (
    "world=3 x=8x5:-:float32:small spec=chunk(0)@2,0,1",
    "world=2 x=5x3:-:float32:small spec=chunk(1)@1,0",
    "world=3 x=7x5:-:float32:small spec=chunk(1)@0,1,2",
)


def row_ids(rank: int, table: torch.Tensor) -> torch.Tensor:
    """The rows that a rank looks up in a table, some of them twice."""
    return (torch.tensor([[0, 3, 1], [4, 4, 2]], device=table.device) + 3 * rank) % table.shape[0]


@sharded_law(
    "sharded_tensor.lookup",
    source=f"{SOURCE}, chunk_sharding_spec_ops: sharded_embedding, sharded_embedding_bag; torch.nn.functional",
    control="world=2 x=6x4:-:float32:small spec=chunk(0)@0,1 how=rows",
    cases=[f"{table} how={how}" for how in LOOKUPS for table in TABLES],
)
def lookup(x: FullTensor, spec: ShardingSpec, how: Annotated[Any, ChoiceField(LOOKUPS)], rank: Rank):
    """embedding and embedding_bag of a sharded table have the results of the full table, for each rank's indices."""
    table = compat.shard_tensor(x, spec)
    return {"found": how(row_ids(rank, x), table)}


@lookup.due
def _(x, how, rank):
    return {"found": Near(LOOKUPS[how](row_ids(rank, x), x.clone()))}


OPTIMIZED = (
    "world=2 x=5x3:-:float32:small spec=0:2,0:3@0;2:4,0:3@1;4:5,0:3@0",
    "world=3 x=5x4:-:float32:small spec=chunk(0)@1,2,0",
)


@sharded_law(
    "sharded_tensor.optimized",
    source="torch.distributed._shard.sharded_optim, ShardedOptimizer: all tensors and local shard tensors",
    control="world=2 x=4x3:-:float32:small spec=0:2,0:3@0;2:4,0:3@1",
    cases=OPTIMIZED,
)
def optimized(x: FullTensor, boxes: OwnBoxes, rank: Rank):
    """ShardedOptimizer updates the local shards of a sharded tensor, and plain parameters; zero_grad clears the
    gradients of both."""
    model: Any = nn.Module()
    model.table = from_boxes(x, boxes, rank)
    model.plain = nn.Parameter(x.clone())
    named = dict(compat.sharded_optim.named_params_with_sharded_tensor(model))
    optimizer = compat.sharded_optim.ShardedOptimizer(named, torch.optim.SGD, lr=0.5)
    shards_and_grads = [
        (shard.tensor, x[box_slices(*box)]) for shard, box in zip(model.table.local_shards(), boxes, strict=True)
    ]
    for tensor, grad in [*shards_and_grads, (model.plain, x)]:
        tensor.grad = grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    return {
        "names": sorted(named),
        "table": describe(model.table),
        "plain": model.plain.detach(),
        "gradients left": [tensor.grad is not None for tensor, _ in shards_and_grads],
    }


@optimized.due
def _(x, boxes, rank):
    return {
        "names": ["plain", "table"],
        "table": due_description(x - 0.5 * x, boxes, rank),
        "plain": x - 0.5 * x,
        "gradients left": [False] * len(boxes.boxes_of(rank)),
    }
