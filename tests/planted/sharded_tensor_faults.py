"""Faults of sharded tensors and their specs, planted one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed._shard import sharded_optim
from torch.distributed._shard import sharded_tensor as factories
from torch.distributed._shard.sharded_tensor import api, reshard, utils
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, chunk_sharding_spec
from torch.distributed._shard.sharding_spec import api as spec_api
from torch.distributed.checkpoint import planner_helpers

from tests.planted.hook import breaks, instead


@breaks("sharded_tensor.made[chunk]", "sharded_tensor.local-tensor", "sharded_tensor.chunks")
def chunks_of_the_floor() -> None:
    """The last chunk gets what is left over, or is one too long."""

    @instead(ChunkShardingSpec, "build_metadata")
    def fault(true: Any, self: Any, sizes: Any, properties: Any) -> Any:
        found = true(self, sizes, properties)
        first, *rest = found.shards_metadata
        if rest and first.shard_sizes[self.dim] > 1:
            first.shard_sizes[self.dim] -= 1
            rest[0].shard_sizes[self.dim] += 1
            rest[0].shard_offsets[self.dim] -= 1
        return found


@breaks("sharded_tensor.made[boxes]")
def boxes_of_the_next_rank() -> None:
    @instead(EnumerableShardingSpec, "build_metadata")
    def fault(true: Any, self: Any, sizes: Any, properties: Any) -> Any:
        found = true(self, sizes, properties)
        placements = [shard.placement for shard in found.shards_metadata]
        for shard, placement in zip(found.shards_metadata, placements[1:] + placements[:1], strict=True):
            shard.placement = placement
        return found


@breaks("sharded_tensor.scattered")
def chunks_by_position() -> None:
    """A scatter hands its tensors to the wrong ranks."""

    @instead(chunk_sharding_spec.dist, "scatter")
    def fault(true: Any, tensor: Any, scatter_list: Any = None, **how: Any) -> Any:
        return true(tensor, scatter_list=scatter_list[::-1] if scatter_list else scatter_list, **how)


@breaks("sharded_tensor.local-shards")
def shards_moved_by_one() -> None:
    """Of what all ranks hold, the first and the last shard change places in the metadata."""

    @instead(utils, "build_global_metadata")
    def fault(true: Any, *args: Any, **how: Any) -> Any:
        found = true(*args, **how)
        shards = found.shards_metadata
        shards[0].placement, shards[-1].placement = shards[-1].placement, shards[0].placement
        return found

    api.build_global_metadata = utils.build_global_metadata


@breaks("sharded_tensor.gathered")
def gathered_in_order_of_ranks() -> None:
    @instead(api.dist, "gather")
    def fault(true: Any, tensor: Any, gather_list: Any = None, **how: Any) -> Any:
        true(tensor, gather_list=gather_list, **how)
        if gather_list:
            gather_list.reverse()


@breaks("sharded_tensor.reshard")
def pieces_in_reverse_order() -> None:
    @instead(reshard, "all_to_all")
    def fault(true: Any, outputs: Any, inputs: Any, **how: Any) -> Any:
        return true(outputs, inputs[::-1], **how)


@breaks("sharded_tensor.validates")
def overlaps_accepted() -> None:
    spec_api.validate_non_overlapping_shards_metadata = lambda shards: None
    spec_api.check_tensor = lambda shards, sizes: None


@breaks("sharded_tensor.refuses")
def sizes_that_differ_accepted() -> None:
    @instead(utils, "_raise_if_mismatch")
    def fault(true: Any, expected: Any, actual: Any, name: str, *args: Any, **how: Any) -> None:
        if name != "global_size":
            true(expected, actual, name, *args, **how)


@breaks("sharded_tensor.trip")
def every_shard_at_the_beginning() -> None:
    """The chunks that a sharded tensor is loaded into all begin at zero."""

    @instead(planner_helpers, "_chunk_for_shard")
    def fault(true: Any, shard: Any) -> Any:
        return dataclasses.replace(true(shard), offsets=torch.Size([0] * len(shard.shard_offsets)))


@breaks("sharded_tensor.copied")
def other_dtypes_forgotten() -> None:
    @instead(api.ShardedTensor, "to")
    def fault(true: Any, self: Any, *args: Any, **how: Any) -> Any:
        return self


@breaks("sharded_tensor.inferred")
def rows_without_an_offset() -> None:
    """The rows of the last rank lie at the beginning."""

    @instead(utils, "recalc_global_sharded_tensor_metadata")
    def fault(true: Any, metadata: Any, dim: int) -> None:
        true(metadata, dim)
        first, *_, last = metadata.shards_metadata
        first.shard_offsets[dim], last.shard_offsets[dim] = last.shard_sizes[dim], 0


@breaks("sharded_tensor.custom")
def custom_ops_turned_round() -> None:
    """What is registered for a function gets its arguments from last to first."""

    @instead(factories, "_decorator_func")
    def fault(true: Any, own: Any, op: Any, op_table: Any) -> Any:
        def turned(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
            return own(types, args[::-1], kwargs, process_group)

        return true(turned, op=op, op_table=op_table)


@breaks("sharded_tensor.trained")
def shards_cut_off_from_gradients() -> None:
    """A sharded tensor is made of shards that require no gradient."""

    @instead(api.ShardedTensor, "_post_init")
    def fault(true: Any, self: Any) -> None:
        true(self)
        self._local_shards = [api.Shard(shard.tensor.detach(), shard.metadata) for shard in self._local_shards]


@breaks("sharded_tensor.filled")
def initializers_that_do_nothing() -> None:
    api._SHARDED_OPS[torch.nn.init.constant_] = lambda types, args, kwargs, group: kwargs["tensor"]


@breaks("sharded_tensor.lookup")
def rows_looked_up_in_reverse() -> None:
    ops = spec_api._CUSTOM_SHARDING_SPEC_OPS["ChunkShardingSpec"]
    embedding = ops[torch.nn.functional.embedding]
    ops[torch.nn.functional.embedding] = lambda *given: embedding(*given).flip(0)


@breaks("sharded_tensor.optimized")
def sharded_tensors_not_optimized() -> None:
    """Of each sharded tensor an optimizer gets nothing."""

    @instead(sharded_optim.ShardedOptimizer, "__init__")
    def fault(true: Any, self: Any, named: Any, *args: Any, **how: Any) -> None:
        true(self, {name: one for name, one in named.items() if not isinstance(one, api.ShardedTensor)}, *args, **how)
