"""Faults of layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _api, _utils, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard

from shardlaw.conformance import compat
from tests.planted.hook import breaks, instead


@breaks("layout.distribute")
def shard_tensor_floor() -> None:
    @instead(Shard, "_custom_chunk")
    def fault(true: Any, tensor: Any, num_chunks: int, dim: int) -> Any:
        run, rest = divmod(tensor.shape[dim], num_chunks)
        return list(tensor.split([run] * (num_chunks - 1) + [run + rest], dim))


@breaks("layout.scatter")
def scatter_skips_unpadding() -> None:
    @instead(Shard, "_maybe_unpad_tensor_with_sizes")
    def fault(true: Any, dim: int, local: Any, *rest: Any) -> Any:
        return local


@breaks("layout.source")
def broadcast_from_first() -> None:
    @instead(Replicate, "_make_replicate_tensor")
    def fault(true: Any, tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: Any = 0) -> Any:
        return true(tensor, mesh, mesh_dim, 0 if src_data_rank else src_data_rank)


@breaks("layout.input-kept")
def scatter_zeroes_input() -> None:
    @instead(Shard, "_shard_tensor")
    def fault(true: Any, self: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        local = true(self, tensor, *args, **options).clone()
        tensor.zero_()
        return local


@breaks("layout.offsets")
def nested_offset_is_local() -> None:
    @instead(_utils, "_get_shard_size_and_offsets")
    def fault(true: Any, *args: Any) -> Any:
        return true(*args[:4], None, *args[5:])


@breaks("layout.chunks")
def chunk_of_whole_tensor() -> None:
    @instead(planner_helpers, "_create_chunk_from_dtensor")
    def fault(true: Any, tensor: Any) -> Any:
        return dataclasses.replace(true(tensor), sizes=tensor.shape, offsets=torch.Size([0] * tensor.ndim))


@breaks("layout.full")
def gather_along_first_dim() -> None:
    @instead(funcol, "all_gather_single")
    def fault(true: Any, tensor: Any, gather_dim: int, group: Any, tag: str = "") -> Any:
        return true(tensor, 0, group, tag)


@breaks("layout.negative-dims")
def negative_dims_count_from_one() -> None:
    def moved(placements: Any) -> Any:
        return [Shard(min(p.dim + 1, 0)) if isinstance(p, Shard) and p.dim < 0 else p for p in placements]

    @instead(DTensor, "from_local")
    def of_locals(true: Any, local: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        return true(local, mesh, placements and moved(placements), **options)

    @instead(DTensor, "redistribute")
    def redistributed(true: Any, self: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        return true(self, mesh, placements and moved(placements), **options)


@breaks("layout.from-local")
def from_local_copies() -> None:
    @instead(DTensor, "from_local")
    def fault(true: Any, local: Any, *args: Any, **options: Any) -> Any:
        return true(local.clone(), *args, **options)


@breaks("layout.infer")
def infer_ignores_second_mesh_dim() -> None:
    @instead(_api, "compute_global_tensor_info")
    def fault(true: Any, tensor: Any, mesh: Any, placements: Any) -> Any:
        return true(tensor, mesh, (*placements[:1], *[Replicate()] * (len(placements) - 1)))


@breaks("layout.run-check")
def run_check_broadcasts_along_first_dim() -> None:
    @instead(_api, "mesh_broadcast")
    def fault(true: Any, tensor: Any, mesh: Any, mesh_dim: int = 0, **options: Any) -> Any:
        return true(tensor, mesh, mesh_dim=0, **options)


@breaks("layout.factory", "layout.factory-kinds")
def factory_ignores_second_mesh_dim() -> None:
    @instead(_api, "compute_local_shape_and_global_offset")
    def fault(true: Any, shape: Any, mesh: Any, placements: Any, **options: Any) -> Any:
        return true(shape, mesh, placements[:1], **options)


@breaks("layout.refusals", "redistribute.mixed-refusals")
def mixed_partials_accepted() -> None:
    @instead(_api, "assert_no_mixed_partial_types")
    def fault(true: Any, placements: Any) -> None:
        return None


@breaks("layout.context")
def context_shards_by_default() -> None:
    @instead(DTensor, "from_local")
    def fault(true: Any, local: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        return true(local, mesh, placements or [Shard(0)], **options)


@breaks("layout.placement-equality")
def strided_equality_ignores_factor() -> None:
    _StridedShard.__eq__ = lambda self, other: isinstance(other, _StridedShard) and self.dim == other.dim  # type: ignore[method-assign]
    _StridedShard.__hash__ = lambda self: hash(self.dim)  # type: ignore[method-assign]


@breaks("layout.partition", "redistribute.linear")
def partition_keeps_whole_value() -> None:
    @instead(Partial, "_partition_value")
    def fault(true: Any, self: Any, tensor: Any, mesh: Any, mesh_dim: int) -> Any:
        return tensor


# Wrappers


@breaks("layout.wrapper[rows]", "layout.wrapper[columns]", "layout.wrapper[grid]")
def wrapper_forgets_offsets() -> None:
    @instead(LocalShardsWrapper, "__new__")
    def fault(true: Any, cls: Any, shards: Any, offsets: Any) -> Any:
        return true(cls, shards, [(0,) * len(offset) for offset in offsets])


@breaks("layout.wrapper[table]")
def wrapper_forgets_elements() -> None:
    @instead(LocalShardsWrapper, "handle_view")
    def fault(true: Any, args: Any, kwargs: Any) -> Any:
        made = true(args, kwargs)
        return LocalShardsWrapper([torch.zeros_like(shard) for shard in made.local_shards()], made.local_offsets())


@breaks("layout.wrapper-ops")
def wrapper_clone_aliases() -> None:
    @instead(LocalShardsWrapper, "handle_clone")
    def fault(true: Any, args: Any, kwargs: Any) -> Any:
        return LocalShardsWrapper(args[0].local_shards(), args[0].local_offsets())


@breaks("layout.wrapper-refusals")
def wrapper_does_anything() -> None:
    true = LocalShardsWrapper.__torch_dispatch__

    def fault(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return true(func, types, args, kwargs)
        except NotImplementedError:
            return args[0]

    LocalShardsWrapper.__torch_dispatch__ = classmethod(fault)  # type: ignore[assignment]


# Layouts out of the ordinary


@breaks("layout.strided")
def split_factors_are_two() -> None:
    @instead(_StridedShard, "_make_shard_tensor")
    def fault(true: Any, *args: Any, split_factor: int = 1) -> Any:
        return true(*args, split_factor=2)


@breaks("layout.order")
def orders_are_written_backwards() -> None:
    @instead(DTensorSpec, "_convert_shard_order_to_StridedShard")
    def fault(true: Any, orders: Any, *rest: Any) -> Any:
        return true(tuple(one._replace(mesh_dims=one.mesh_dims[::-1]) for one in orders), *rest)


@breaks("layout.dtype")
def gather_rounds_to_bytes() -> None:
    @instead(funcol, "all_gather_single")
    def fault(true: Any, tensor: Any, *rest: Any) -> Any:
        return true(tensor.to(torch.int8).to(tensor.dtype) * 0, *rest)


@breaks("layout.memory")
def gather_ignores_strides() -> None:
    @instead(funcol, "all_gather_single")
    def fault(true: Any, tensor: Any, *rest: Any) -> Any:
        return true(tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride()), *rest)


# Modules


@breaks("layout.module")
def module_forgets_buffers() -> None:
    @instead(_api, "distribute_tensor")
    def fault(true: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        return tensor if not tensor.is_floating_point() else true(tensor, *args, **options)


@breaks("layout.module-refusals")
def module_is_distributed_again() -> None:
    @instead(torch.nn.Module, "__setattr__")
    def fault(true: Any, self: Any, name: str, value: Any) -> None:
        if name != "_distribute_module_applied":
            true(self, name, value)


@breaks("layout.parallel")
def colwise_shards_rows() -> None:
    @instead(ColwiseParallel, "_partition_linear_fn")
    def fault(true: Any, self: Any, name: Any, module: Any, mesh: Any) -> None:
        for key, param in list(module.named_parameters()):
            placed = distribute_tensor(param, mesh, [Shard(param.ndim - 1)])
            module.register_parameter(key, torch.nn.Parameter(placed))


@breaks("layout.together")
def whole_is_the_first_shard_twice() -> None:
    """The extent of a whole is taken from one shard, times as many as there are."""

    def fault(shape: Any, mesh: Any, placements: Any) -> Any:
        found = list(shape)
        for place in placements:
            if isinstance(place, Shard):
                found[place.dim] *= mesh.size()
        return torch.Size(found)

    _utils.compute_global_tensor_shape = fault


@breaks("layout.inputs", case="layout.inputs mesh=2 kind=neg way=local")
def negation_is_forgotten() -> None:
    @instead(DTensor, "from_local")
    def fault(true: Any, local: Any, *args: Any, **options: Any) -> Any:
        return true(-local.resolve_neg() if isinstance(local, torch.Tensor) and local.is_neg() else local, *args, **options)


@breaks("layout.old-paths")
def old_path_has_a_function_of_its_own() -> None:
    @instead(compat.old_tensor, "distribute_tensor")
    def fault(true: Any, *args: Any, **options: Any) -> Any:
        return true(*args, **options)


@breaks("layout.copies")
def pickled_without_gradient() -> None:
    @instead(DTensor, "__reduce_ex__")
    def fault(true: Any, self: Any, protocol: Any) -> Any:
        return true(self.detach(), protocol)


@breaks("layout.read")
def nothing_is_within() -> None:
    @instead(torch.Tensor, "__contains__")
    def fault(true: Any, self: Any, element: Any) -> bool:
        return not isinstance(self, DTensor) and true(self, element)


@breaks("layout.compared", case="layout.compared mesh=2 x=4x3:R by=close at=5")
def whatever_is_compared_is_close() -> None:
    @instead(torch.testing, "assert_close")
    def fault(true: Any, *args: Any, **options: Any) -> None:
        return None


@breaks("layout.assigned")
def copies_into_nothing() -> None:
    @instead(DTensor, "copy_")
    def fault(true: Any, self: Any, other: Any, *rest: Any) -> Any:
        return self
