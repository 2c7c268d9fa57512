"""Faults of plans and of the arithmetic of layouts, planted one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed import _mesh_layout
from torch.distributed.checkpoint import _dedup_save_plans, _nested_dict, default_planner, planner_helpers
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import Shard, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from tests.planted.hook import breaks, instead


def everywhere(name: str) -> Any:
    """Replace ``dedup_save_plans`` where it is made and where it is used."""

    def replace(fault: Any) -> None:
        for module in (_dedup_save_plans, default_planner):
            instead(module, name)(fault)

    return replace


# Save plans


@breaks("plan.dedup")
def duplicates_dropped() -> None:
    @everywhere("dedup_save_plans")
    def fault(true: Any, plans: list[SavePlan], *args: Any) -> Any:
        held = [item.index for plan in plans for item in plan.items]
        return [dataclasses.replace(plan, items=[item for item in plan.items if held.count(item.index) == 1]) for plan in plans]


@breaks("plan.balance", "plan.scale[balance]")
def first_rank_writes_all() -> None:
    @everywhere("dedup_save_plans")
    def fault(true: Any, plans: list[SavePlan], *args: Any) -> Any:
        return true(plans, True)


@breaks("plan.deterministic")
def shared_out_in_turn() -> None:
    turn = [0]

    @everywhere("dedup_save_plans")
    def fault(true: Any, plans: list[SavePlan], *args: Any) -> Any:
        turn[0] += 1
        return true(plans[::-1])[::-1] if turn[0] == 1 else true(plans)


@breaks("plan.global")
def first_dtype_for_all() -> None:
    @instead(default_planner, "create_default_global_save_plan")
    def fault(true: Any, *args: Any, **options: Any) -> Any:
        plans, metadata = true(*args, **options)
        for entry in metadata.state_dict_metadata.values():
            if not isinstance(entry, BytesStorageMetadata):
                entry.properties = dataclasses.replace(entry.properties, dtype=torch.float32)
        return plans, metadata


@breaks("plan.scale[save]")
def last_chunk_not_described() -> None:
    @instead(DefaultSavePlanner, "create_global_plan")
    def fault(true: Any, *args: Any) -> Any:
        plans, metadata = true(*args)
        for entry in metadata.state_dict_metadata.values():
            del entry.chunks[-1:]
        return plans, metadata


@breaks("plan.empty-chunks")
def touching_is_overlap() -> None:
    @instead(default_planner, "_check_box_overlap")
    def fault(true: Any, one: Any, other: Any) -> bool:
        pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        return all(start <= at + size and at <= start + length for start, length, at, size in pairs)


@breaks(
    "plan.validates[gap]",
    "plan.validates[overlap]",
    "plan.validates[shifted]",
    "plan.validates[grown]",
    "plan.validates[duplicated]",
    "plan.validates[outside]",
    "plan.validates[emptied]",
    "plan.validates[before]",
)
def any_plan_is_valid() -> None:
    default_planner._validate_global_plan = lambda plans, metadata: []


@breaks("plan.rank-permutation")
def paths_of_rank_zero() -> None:
    @instead(DefaultSavePlanner, "_create_global_plan")
    def fault(true: Any, self: Any, plans: list[SavePlan]) -> Any:
        shared, metadata = true(self, plans)
        return shared, dataclasses.replace(metadata, planner_data=plans[0].planner_data)


@breaks("plan.write-items")
def part_of_first_mesh_dim() -> None:
    @instead(planner_helpers, "compute_local_shape_and_global_offset")
    def fault(true: Any, shape: Any, mesh: Any, placements: Any) -> Any:
        return true(shape, mesh, placements[:1])


# Load plans


@breaks("plan.reshard", "plan.scale[reshard]")
def saved_offset_ignored() -> None:
    @instead(planner_helpers, "_shards_get_overlap_region_wrt_saved_tensor")
    def fault(true: Any, saved_shard: Any, current_shard: Any) -> Any:
        return [(dim, saved, 0, length) for dim, saved, _, length in true(saved_shard, current_shard)]


@breaks("plan.read-items", "plan.read-refuses")
def first_chunk_only() -> None:
    @instead(planner_helpers, "create_read_items_for_chunk_list")
    def fault(true: Any, *args: Any) -> Any:
        return true(*args)[:1]

    from shardlaw.conformance.laws.plan import load as plan_load

    plan_load.create_read_items_for_chunk_list = planner_helpers.create_read_items_for_chunk_list


@breaks("plan.refuses[missing]")
def never_strict() -> None:
    @instead(default_planner, "create_default_local_load_plan")
    def fault(true: Any, state: Any, metadata: Any, strict: bool = True) -> Any:
        return true(state, metadata, False)


@breaks("plan.partial")
def always_strict() -> None:
    @instead(default_planner, "create_default_local_load_plan")
    def fault(true: Any, state: Any, metadata: Any, strict: bool = True) -> Any:
        return true(state, metadata, True)


@breaks("plan.refuses[size]")
def sizes_by_volume() -> None:
    @instead(default_planner, "create_default_local_load_plan")
    def fault(true: Any, state: Any, metadata: Any, strict: bool = True) -> Any:
        for name, value in state.items():
            entry = metadata.state_dict_metadata.get(name)
            if isinstance(value, torch.Tensor) and hasattr(entry, "size") and entry.size.numel() == value.numel():
                entry.size = value.size()
        return true(state, metadata, strict)


@breaks("plan.refuses[kind]")
def values_read_as_bytes() -> None:
    @instead(default_planner, "_create_read_items")
    def fault(true: Any, name: str, entry: Any, value: Any) -> Any:
        return true(name, entry if isinstance(value, torch.Tensor) else BytesStorageMetadata(), value)


# States


@breaks("plan.flatten")
def positions_are_keys() -> None:
    @instead(_nested_dict, "flatten_state_dict")
    def fault(true: Any, state: Any) -> Any:
        flat, paths = true(state)
        return flat, {name: tuple(map(str, path)) for name, path in paths.items()}


@breaks("plan.cached")
def first_metadata_for_good() -> None:
    @instead(DefaultSavePlanner, "_create_global_plan_with_caching")
    def fault(true: Any, self: Any, plans: Any) -> Any:
        kept = SavePlanner._cached_metadata.get(self._cached_plans_key)
        sent, shared, metadata = true(self, plans)
        return sent, shared, kept or metadata


@breaks("plan.hints")
def hints_make_places() -> None:
    @instead(MetadataIndex, "__eq__")
    def fault(true: Any, self: Any, other: Any) -> Any:
        return true(self, other) is True and self.index == other.index


# The arithmetic of layouts


@breaks("layout.math[offsets]")
def math_of_the_first_mesh_dim() -> None:
    @instead(_utils, "_compute_local_shape_and_global_offset")
    def fault(true: Any, shape: Any, mesh_shape: Any, coordinate: Any, placements: Any, *args: Any) -> Any:
        return true(shape, mesh_shape, coordinate, placements[:1], *args)


@breaks("layout.math[split]")
def pieces_in_reverse() -> None:
    @instead(Shard, "_split_tensor")
    def fault(true: Any, self: Any, tensor: Any, num_chunks: int, **options: Any) -> Any:
        pieces, pads = true(self, tensor, num_chunks, **options)
        return pieces[::-1], pads


@breaks("layout.math[global]")
def global_shape_of_one_mesh_dim() -> None:
    @instead(_utils, "compute_global_tensor_info")
    def fault(true: Any, tensor: Any, mesh: Any, placements: Any) -> Any:
        return list(tensor.shape), true(tensor, mesh, placements)[1]


@breaks("layout.math[orders]")
def orders_ascend() -> None:
    @instead(DTensorSpec, "_convert_shard_order_to_StridedShard")
    def fault(true: Any, shard_order: Any, placements: Any, mesh: Any) -> Any:
        return true(tuple(entry._replace(mesh_dims=tuple(sorted(entry.mesh_dims))) for entry in shard_order), placements, mesh)


@breaks("layout.math[mesh]")
def complement_of_the_whole() -> None:
    @instead(_mesh_layout._FlatLayout, "complement")
    def fault(true: Any, self: Any, world_size: int) -> Any:
        return true(self, 2 * world_size)
