"""The law of invalid specs, shards and calls, which every acting rank must refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.choices import ChoiceField
from shardlaw.conformance.law.due import Refused
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.sharded_tensor.act_helpers import outcome
from shardlaw.conformance.laws.sharded_tensor.draws import sharded_law
from shardlaw.conformance.laws.sharded_tensor.fields import SOURCE, OwnBoxes, Size
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.tilings import assign_boxes, damaged_tilings, single_ranks

# Parts of the attempts, which are for a 4x3 tensor on two ranks


def chunk_spec(dim: Any = 0, ranks: Iterable[int] = (0, 1)) -> Any:
    return compat.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def box(offset: list[int], size: list[int], rank: int = 0) -> Any:
    return compat.ShardMetadata(offset, size, f"rank:{rank}/cpu")


def box_spec(*shards: Any) -> Any:
    return compat.EnumerableShardingSpec([*shards])


def zeros(spec: Any = None, *size: Any, **options: Any) -> Any:
    return compat.sharded_tensor.zeros(chunk_spec() if spec is None else spec, *(size or (4, 3)), **options)


def row_shard(rank: int, tensor: torch.Tensor | None = None, skip: int = 0, **options: Any) -> Any:
    """A shard, by default two rows of zeros, at row ``2 * rank + skip``."""
    local = torch.zeros(2, 3, **options) if tensor is None else tensor
    return compat.ShardOfTensor.from_tensor_and_offsets(local, [2 * rank + skip, 0], rank)


def from_shards(*shards: Any, size: tuple[int, ...] = (4, 3)) -> Any:
    return compat.init_from_local_shards([*shards], *size)


def two_shards(rank: int, **options: Any) -> Any:
    """Two shards of one row on each rank, the second created with these options."""
    return from_shards(row_shard(rank, torch.zeros(1, 3)), row_shard(rank, torch.zeros(1, 3, **options), 1))


def from_metadata(
    shards: list[Any], second: Any = ([2, 0], [2, 3]), size: Iterable[int] = (4, 3), **properties: Any
) -> Any:
    """A sharded tensor from local shards and the metadata of all ranks."""
    shards_metadata = [box([0, 0], [2, 3]), box(second[0], second[1], 1)] if second else []
    metadata = compat.ShardedTensorMetadata(shards_metadata, torch.Size(size), compat.TensorProperties(**properties))
    return compat.init_from_local_shards_and_metadata(shards, metadata)


def zeros_in_boxes(rank: int, size: Iterable[int], boxes: Iterable[Any]) -> Any:
    """A sharded tensor of zeros with these boxes on this rank."""
    make_shard = compat.ShardOfTensor.from_tensor_and_offsets
    return compat.init_from_local_shards(
        [make_shard(torch.zeros(extent), [*offset], rank) for offset, extent in boxes], *size
    )


class IdentitySharder(compat.shard_api.Sharder):  # type: ignore[misc]
    """A sharder that returns the module unchanged."""

    def shard(self, module: torch.nn.Module) -> torch.nn.Module:
        return module


def shard_module(plan: dict[str, Any], output: dict[str, Any] | None = None) -> Any:
    """Shard a module by a plan for its parameters and one for its outputs."""
    model: Any = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(4, 3))
    model.strided = torch.nn.Parameter(torch.zeros(3, 4).t())
    model.text = "rows"
    model.inner = torch.nn.Module()
    model.inner.weight = torch.nn.Parameter(torch.zeros(4, 3))
    compat.shard_api.shard_module(model, compat.shard_api.ShardingPlan(plan, output))


ATTEMPTS: dict[str, Callable[..., Any]] = {
    "no-boxes": lambda rank: box_spec(),
    "mixed-dims": lambda rank: box_spec(box([0], [4]), box([0, 0], [4, 3], 1)),
    "other-dims": lambda rank: zeros(box_spec(box([0], [2]), box([2], [2], 1))),
    "dim-fraction": lambda rank: chunk_spec(0.5),
    "dim-text": lambda rank: chunk_spec("rows"),
    "dim-outside": lambda rank: zeros(chunk_spec(2)),
    "dim-before": lambda rank: zeros(chunk_spec(-3)),
    "rank-outside": lambda rank: zeros(chunk_spec(0, (0, 7))),
    "nobody": lambda rank: from_shards(),
    "shard-size": lambda rank: compat.ShardOfTensor(torch.zeros(2, 3), box([2 * rank, 0], [1, 3], rank)),
    "other-rank": lambda rank: from_shards(
        compat.ShardOfTensor.from_tensor_and_offsets(torch.zeros(2, 3), [2 * rank, 0], 1 - rank)
    ),
    "strides": lambda rank: from_shards(row_shard(rank, torch.zeros(3, 2).t())),
    "dtypes": lambda rank: from_shards(row_shard(rank, dtype=(torch.int64, torch.float32)[rank])),
    "sizes": lambda rank: from_shards(row_shard(rank), size=(4, 3 + rank)),
    "requires-grad": lambda rank: from_shards(row_shard(rank, requires_grad=rank == 0)),
    "other-specs": lambda rank: compat.shard_tensor(torch.zeros(4, 3), chunk_spec(rank)),
    "other-sources": lambda rank: compat.shard_tensor(torch.zeros(4, 3), chunk_spec(), src_rank=rank),
    "strided-input": lambda rank: compat.shard_tensor(torch.zeros(3, 4).t(), chunk_spec()),
    "offset-negative": lambda rank: box([-1, 0], [4, 3]),
    "size-negative": lambda rank: box([0, 0], [-1, 3]),
    "fewer-offsets": lambda rank: box([0], [4, 3]),
    "shard-device": lambda rank: compat.ShardOfTensor(
        torch.zeros(2, 3, device="meta"), box([2 * rank, 0], [2, 3], rank)
    ),
    "no-placement": lambda rank: from_shards(
        compat.ShardOfTensor(torch.zeros(2, 3), compat.ShardMetadata([2 * rank, 0], [2, 3]))
    ),
    "sparse": lambda rank: from_shards(
        compat.ShardOfTensor(torch.zeros(2, 3).to_sparse(), box([2 * rank, 0], [2, 3], rank))
    ),
    "dtypes-beside": lambda rank: two_shards(rank, dtype=torch.int64),
    "grad-beside": lambda rank: two_shards(rank, requires_grad=True),
    "no-spec": lambda rank: zeros("rows"),
    "size-fraction": lambda rank: zeros(None, 4.5, 3),
    "layout": lambda rank: zeros(layout=torch.sparse_coo),
    "format": lambda rank: zeros(memory_format=torch.channels_last),
    "remote": lambda rank: zeros().remote_shards(),
    "references": lambda rank: zeros(init_rrefs=True),
    "gather-nowhere": lambda rank: zeros().gather(dst=rank),
    "gather-size": lambda rank: zeros().gather(dst=rank, out=torch.ones(3, 4)),
    "gather-larger": lambda rank: zeros().gather(dst=rank, out=torch.ones(5, 3)),
    "gather-elsewhere": lambda rank: zeros().gather(dst=1 - rank, out=torch.ones(4, 3)),
    "local-of-two": lambda rank: zeros(chunk_spec(0, (0, 1, 0, 1))).local_tensor(),
    "reshard-two": lambda rank: zeros(chunk_spec(0, (0, 1, 0, 1))).reshard(chunk_spec(1)),
    "copy-elsewhere": lambda rank: from_shards(row_shard(rank)).copy_(
        from_shards(row_shard(rank, torch.zeros(2, 3), 2 - 4 * rank))
    ),
    "cpu-format": lambda rank: zeros().cpu(memory_format=torch.channels_last),
    "to-list": lambda rank: zeros().to([1]),
    "unknown-op": lambda rank: torch.sort(zeros()),
    "op-of-three": lambda rank: compat.sharded_tensor.custom_sharded_op_impl(torch.sort)(
        lambda types, args, kwargs: None
    ),
    "local-strides": lambda rank: compat.init_from_local_tensor(torch.zeros(3, 2).t(), chunk_spec(), 4, 3),
    "stated-shards": lambda rank: from_metadata([]),
    "stated-nothing": lambda rank: from_metadata([], None),
    "stated-size": lambda rank: from_metadata([row_shard(rank)], size=(5, 3)),
    "stated-overlap": lambda rank: from_metadata([row_shard(rank)], ([1, 0], [3, 3])),
    "stated-layout": lambda rank: from_metadata([row_shard(rank)], layout=torch.sparse_coo),
    "stated-dtype": lambda rank: from_metadata([row_shard(rank)], dtype=torch.int64),
    "stated-grad": lambda rank: from_metadata([row_shard(rank)], requires_grad=True),
    "stated-strides": lambda rank: from_metadata([row_shard(rank, torch.zeros(3, 2).t())]),
    "plan-conflict": lambda rank: shard_module({"": IdentitySharder(), "inner.weight": chunk_spec()}),
    "plan-type": lambda rank: shard_module({"weight": "rows"}),
    "plan-sharder-of-all": lambda rank: shard_module({"": IdentitySharder()}),
    "plan-output": lambda rank: shard_module({}, {"": "rows"}),
    "plan-strides": lambda rank: shard_module({"strided": chunk_spec()}),
    "plan-no-tensor": lambda rank: shard_module({"text": chunk_spec()}),
    "reshard-boxes": lambda rank: from_shards(row_shard(rank)).reshard(box_spec(box([0, 0], [4, 3]))),
}
DAMAGES = ("gap", "overlap", "shifted", "grown", "duplicated", "outside")
Attempt = Annotated[Callable[..., Any], ChoiceField({**ATTEMPTS, **dict.fromkeys(DAMAGES, zeros_in_boxes)})]


def sweep_attempts(limits: Limits) -> list[Case]:
    return [fields(world=2, x="4x3", attempt=attempt) for attempt in ATTEMPTS]


def draw_damaged(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        shape, boxes, damage = draw(damaged_tilings(shapes(min_dims=1, min_size=1), kinds=DAMAGES))
        world = draw(st.sampled_from([size for size in (2, 3, 4) if size <= limits.world_size]))
        spec = assign_boxes(shape, boxes, single_ranks(range(world)), draw(st.integers(0, 1 << 16)))
        return fields(world=world, x=TensorSpec(shape), spec=str(spec) or None, attempt=damage)

    return case().filter(lambda case: "spec" in case)


def features(case: Case) -> set[str]:
    return {"must-refuse"} | ({f"damaged:{case.get('attempt')}"} if "spec" in case else set())


@sharded_law(
    "sharded_tensor.refuses",
    source=(
        f"{SOURCE}, ChunkShardingSpec, EnumerableShardingSpec, init_from_local_shards, _shard_tensor, "
        "ShardedTensor.gather"
    ),
    control="world=2 x=4x3 attempt=sizes",
    sweep=sweep_attempts,
    sweeps=len(ATTEMPTS),
    draw=draw_damaged,
    draws=30,
    smallest=2,
    features=features,
)
def refuses(attempt: Attempt, x: Size, rank: Rank, boxes: OwnBoxes | None = None):
    """Every acting rank refuses invalid specs, shards and calls of sharded tensors."""
    return {"attempt": outcome(attempt, rank) if boxes is None else outcome(attempt, rank, x, boxes)}


@refuses.due
def _():
    return {"attempt": Refused()}
