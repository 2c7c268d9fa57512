"""Faults of layouts and gradients beyond those of :mod:`tests.planted.placement_faults`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Replicate, Shard, _api, _redistribute, _utils, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard

from tests.planted.hook import breaks, instead

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


# Gradients


@breaks("gradient.from-local")
def entrance_ignores_declared_gradient() -> None:
    @instead(_api._FromTorchTensor, "forward")
    def fault(true: Any, ctx: Any, *args: Any) -> Any:
        return true(ctx, *args[:-1], None)


@breaks("gradient.arriving")
def contributions_arrive_as_replicas() -> None:
    @instead(_redistribute.Redistribute, "backward")
    def fault(true: Any, ctx: Any, grad: Any) -> Any:
        claimed = [Replicate() if p.is_partial() else p for p in grad.placements]
        return true(ctx, DTensor.from_local(grad.to_local(), grad.device_mesh, claimed, shape=grad.shape, stride=grad.stride()))


@breaks("gradient.dtype")
def gradient_keeps_traveling_dtype() -> None:
    @instead(DTensor, "redistribute")
    def fault(true: Any, self: Any, *args: Any, backward_dtype: Any = None, **options: Any) -> Any:
        return true(self, *args, backward_dtype=torch.bfloat16, **options)


@breaks("gradient.second-ways")
def exit_is_differentiable_once() -> None:
    @instead(_api._ToTorchTensor, "backward")
    def fault(true: Any, ctx: Any, grad: Any) -> Any:
        return true(ctx, None if grad is None else grad.detach())


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
