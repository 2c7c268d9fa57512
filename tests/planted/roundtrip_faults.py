"""Faults of what a checkpoint holds and of how it is saved and loaded, planted one at a time in the rank processes.

Every function plants one fault when it is called, before the process group starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    _dedup_save_plans,
    _nested_dict,
    _traverse,
    default_planner,
    filesystem,
    planner_helpers,
    resharding,
    state_dict_loader,
    utils,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from tests.planted.hook import breaks


@breaks("roundtrip.example", "roundtrip.dtensor", "roundtrip.described")
def overlap_offset_lost() -> None:
    """A saved chunk that starts inside the wanted one is written at its beginning."""
    true = resharding._shards_get_overlap_region_wrt_saved_tensor

    def fault(saved_shard: Any, current_shard: Any) -> Any:
        return [(dim, saved, 0, length) for dim, saved, _, length in true(saved_shard, current_shard)]

    planner_helpers._shards_get_overlap_region_wrt_saved_tensor = fault


@breaks("roundtrip.plain")
def plain_tensor_offset_one() -> None:
    """A plain tensor is read from the saved chunk's second row on, where there is one."""
    true = planner_helpers._create_chunk_from_tensor

    def fault(tensor: torch.Tensor) -> Any:
        chunk = true(tensor)
        sizes = torch.Size(max(size - 1, min(size, 1)) for size in chunk.sizes)
        return dataclasses.replace(chunk, sizes=sizes)

    planner_helpers._create_chunk_from_tensor = fault


@breaks("roundtrip.strided")
def strided_taken_for_shard() -> None:
    """A strided shard is saved and loaded where a plain shard would lie."""
    true = planner_helpers.compute_local_shape_and_global_offset

    def fault(shape: Any, mesh: Any, placements: Any) -> Any:
        return true(shape, mesh, [Shard(p.dim) if hasattr(p, "split_factor") else p for p in placements])

    planner_helpers.compute_local_shape_and_global_offset = fault


@breaks("roundtrip.dtype")
def reinterpreted_dtype() -> None:
    """What is loaded into another dtype is rounded away from zero."""
    true = torch.Tensor.copy_

    def fault(self: torch.Tensor, other: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if other.dtype not in (self.dtype, torch.bool):
            other = other + 1
        return true(self, other, *args, **options)

    torch.Tensor.copy_ = fault


@breaks("roundtrip.views")
def memory_order_saved() -> None:
    """A tensor that is a view is saved in the order of its memory."""

    def values(self: Any) -> Any:
        for _, item in self.items:
            tensor = self.resolve_fun(item).detach()
            if not tensor.is_contiguous():
                flat = tensor.new_empty(0).set_(tensor.untyped_storage())
                tensor = flat[tensor.storage_offset() :][: tensor.numel()].reshape(tensor.shape)
            yield tensor.clone(), item

    filesystem._SerialCpuLoader.values = values


@breaks("roundtrip.meta")
def meta_shape_inferred() -> None:
    """The global shape of a DTensor that leaves the meta device is inferred from its local shard."""
    true = DTensor.from_local

    def fault(local: Any, *args: Any, shape: Any = None, stride: Any = None, **options: Any) -> Any:
        return true(local, *args, **options)

    def init(state: dict[str, Any]) -> None:
        DTensor.from_local = staticmethod(fault)
        try:
            healthy(state)
        finally:
            DTensor.from_local = staticmethod(true)

    healthy = default_planner._init_state_dict
    default_planner._init_state_dict = init


@breaks("roundtrip.kinds")
def numbers_at_the_top_dropped() -> None:
    """A number at the top of a state is not saved, nor missed by the load."""
    true = _traverse.traverse_state_dict

    def fault(state: Any, visitor: Callable[..., None], *args: Any) -> None:
        def visit(path: Any, value: Any) -> None:
            if not (isinstance(value, float) and len(path) == 1):
                visitor(path, value)

        true(state, visit, *args)

    _nested_dict.traverse_state_dict = fault


@breaks("roundtrip.by-rank")
def values_of_followers_dropped() -> None:
    """Values that are no tensors are saved by the coordinator alone."""
    true = default_planner.create_default_local_save_plan

    def fault(state: dict[str, Any], is_coordinator: bool) -> Any:
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        return true(state if is_coordinator else tensors, is_coordinator)

    default_planner.create_default_local_save_plan = fault


@breaks("roundtrip.stateful")
def stateful_not_told() -> None:
    """An object with state gets its old state back."""

    class Never:
        pass

    state_dict_loader.Stateful = Never


@breaks("roundtrip.subset")
def partial_load_clears() -> None:
    """Tensors that are loaded take whatever lies beside them along: every tensor is zeroed before a load."""
    true = default_planner.create_default_local_load_plan

    def fault(state: dict[str, Any], metadata: Any, strict: bool = True) -> Any:
        if not strict or set(metadata.state_dict_metadata) - set(state):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    (value.to_local() if isinstance(value, DTensor) else value).zero_()
            if strict:
                state = {name: value for name, value in state.items() if not isinstance(value, DTensor)}
        return true(state, metadata, strict)

    default_planner.create_default_local_load_plan = fault


@breaks("roundtrip.files")
def threads_drop_values() -> None:
    """With several writer threads only the last values that are no tensors are written."""
    true = filesystem._split_by_size_and_type

    def fault(bins: int, items: list[Any]) -> Any:
        buckets = true(bins, items)
        if bins == 1:
            return buckets
        kept = []
        for bucket in buckets:
            values = [item for item in bucket if item.type == WriteItemType.BYTE_IO]
            kept.append(values[-1:] + [item for item in bucket if item.type != WriteItemType.BYTE_IO])
        return kept

    filesystem._split_by_size_and_type = fault


@breaks("roundtrip.metadata")
def every_item_at_offset_zero() -> None:
    """The metadata says of every item that it starts where its file does."""
    true = filesystem._write_item

    def fault(*args: Any) -> Any:
        result = true(*args)
        return dataclasses.replace(result, storage_data=dataclasses.replace(result.storage_data, offset=0))

    filesystem._write_item = fault


@breaks("roundtrip.dedup")
def duplicates_kept_by_the_highest() -> None:
    """What several ranks hold is written by the highest of them."""
    true = _dedup_save_plans.dedup_save_plans

    def fault(plans: list[Any], lowest: bool = False) -> list[Any]:
        return true(plans[::-1], True)[::-1]

    default_planner.dedup_save_plans = fault


@breaks("roundtrip.overwrite")
def old_metadata_kept() -> None:
    """A save over another checkpoint leaves the old metadata in place."""
    true = dcp.FileSystemWriter.finish

    def fault(self: Any, metadata: Any, results: Any) -> None:
        if not self.fs.exists(self._get_metadata_path()):
            true(self, metadata, results)

    dcp.FileSystemWriter.finish = fault


@breaks("roundtrip.caching")
def stale_cached_metadata() -> None:
    """Kept plans: the metadata of the first save is used for every later one."""
    true = dcp.DefaultSavePlanner._create_global_plan_with_caching

    def fault(self: Any, plans: Any) -> Any:
        delta, plan, metadata = true(self, plans)
        first = SavePlanner._cached_metadata.setdefault(f"first {self._cached_plans_key}", metadata)
        return delta, plan, first

    dcp.DefaultSavePlanner._create_global_plan_with_caching = fault


@breaks("roundtrip.caching-anew")
def final_plan_not_kept_whole() -> None:
    """Kept plans: the last item of a final plan is left out of what is kept."""
    true = dcp.DefaultSavePlanner._finish_plan_with_caching

    def fault(self: Any, plan: Any) -> Any:
        kept = true(self, plan)
        return kept if plan.usable else dataclasses.replace(kept, items=kept.items[:-1])

    dcp.DefaultSavePlanner._finish_plan_with_caching = fault


@breaks("roundtrip.local-shards")
def wrapper_forgets_a_shard() -> None:
    """Of the shards in a wrapper only the first is saved and loaded, the others are taken for zeros."""
    true = LocalShardsWrapper.__get_tensor_shard__

    def fault(self: Any, index: Any) -> torch.Tensor:
        shard = true(self, index)
        return shard if shard is self.local_shards()[0] else torch.zeros_like(shard)

    LocalShardsWrapper.__get_tensor_shard__ = fault


@breaks("roundtrip.sharded-tensor")
def shards_a_row_short() -> None:
    """The shards of a sharded tensor are planned with one row less than they have."""
    true = planner_helpers._chunk_for_shard

    def fault(shard: Any) -> Any:
        chunk = true(shard)
        return dataclasses.replace(chunk, sizes=torch.Size([max(chunk.sizes[0] - 1, 1), *chunk.sizes[1:]]))

    planner_helpers._chunk_for_shard = fault


@breaks("roundtrip.group")
def coordinator_of_the_world() -> None:
    """What is planned comes from the last rank of the world, whoever leads."""
    true = utils._DistWrapper.__init__

    def fault(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        true(self, group, use_dist, coordinator_rank)
        if use_dist:
            self.global_coordinator_rank = min(2, dist.get_world_size() - 1)

    utils._DistWrapper.__init__ = fault


@breaks("roundtrip.alone")
def metadata_of_rank_zero() -> None:
    """A rank that saved for itself reads the metadata of rank 0."""
    true = dcp.FileSystemReader.read_metadata

    def fault(self: Any, *args: Any, **options: Any) -> Any:
        return true(self, **dict.fromkeys(options, 0))

    dcp.FileSystemReader.read_metadata = fault


@breaks("roundtrip.file")
def tree_flattened_for_good() -> None:
    """A tree that is rebuilt from its metadata keeps its leaves at the top."""
    default_planner.set_element = lambda root, path, value: root.__setitem__(".".join(map(str, path)), value)


@breaks("roundtrip.reads")
def neighbours_read_too() -> None:
    """Chunks that only touch a shard are read as well: parts without elements."""

    def fault(one: Any, other: Any) -> bool:
        pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        return all(start <= at + size and at <= start + length for start, length, at, size in pairs)

    planner_helpers._check_shard_metadata_pair_overlap = fault


@breaks("roundtrip.release[*]")
def places_in_files_forgotten() -> None:
    """Of the place of an item in its file, what a checkpoint says is read without its offset."""
    filesystem._StorageInfo.__setstate__ = lambda self, state: self.__dict__.update({**state, "offset": 0})
