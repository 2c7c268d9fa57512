"""Faults of sharded ops, planted one at a time: each law of the op chapter meets its own.

Every function plants one fault when it is called in a rank process, before the process group starts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, _nonlinear_redux, _tp_conv
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops import _tensor_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.planted.hook import breaks, instead


def _each_spec(specs: Any) -> list[Any]:
    return [spec for spec in (specs if isinstance(specs, (list, tuple)) else [specs]) if spec is not None]


@breaks("op.forward[*]", "op.local")
def results_claimed_whole() -> None:
    """Every result claims to be replicated, whatever it is."""

    @instead(ShardingPropagator, "propagate_op_sharding_non_cached")
    def fault(true: Any, self: Any, schema: Any) -> Any:
        found = true(self, schema)
        if not schema.is_inplace_op():
            for spec in _each_spec(found.output_spec):
                spec.placements = tuple(Replicate() for _ in spec.placements)
        return found


def strides_of_a_transpose_claimed() -> None:
    """Results claim their strides in reverse. Every op law sees it: see ``test_op_claims``."""

    @instead(ShardingPropagator, "propagate_op_sharding_non_cached")
    def fault(true: Any, self: Any, schema: Any) -> Any:
        found = true(self, schema)
        for spec in _each_spec(found.output_spec):
            spec.tensor_meta = spec.tensor_meta._replace(stride=spec.tensor_meta.stride[::-1])
        return found


def operands_left_under_other_placements() -> None:
    """An op leaves its operands with other placements than they had, and the same local tensors: see ``test_op_claims``."""

    @instead(ShardingPropagator, "propagate_op_sharding_non_cached")
    def fault(true: Any, self: Any, schema: Any) -> Any:
        found = true(self, schema)
        for spec in schema.args_spec:
            spec.placements = tuple(Replicate() for _ in spec.placements)
        return found


def operands_claimed_whole() -> None:
    """The propagator takes every operand for a replicated one. For laws whose results stay where their operands lie:
    see ``test_every_op``."""

    @instead(ShardingPropagator, "propagate_op_sharding_non_cached")
    def fault(true: Any, self: Any, schema: Any) -> Any:
        def whole(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return type(item)(map(whole, item))
            if hasattr(item, "placements"):
                return type(item)(item.mesh, tuple(Replicate() for _ in item.placements), tensor_meta=item.tensor_meta)
            return item

        made = OpSchema(schema.op, whole(schema.args_schema), {k: whole(v) for k, v in schema.kwargs_schema.items()}, schema.schema_info)
        return true(self, made)


@breaks("op.forward[argmax]", "op.forward[argmin]")
def local_indices_returned() -> None:
    """The position of a maximum is the one within the rank's own shard."""

    @instead(_nonlinear_redux, "_convert_to_global_idxs")
    def fault(true: Any, local_idx: Any, *where: Any) -> Any:
        return true(local_idx, *where)[0], local_idx


@breaks(
    "op.forward[nn.functional.conv1d]",
    "op.forward[nn.functional.conv2d]",
    "op.forward[nn.functional.conv1d.options]",
    "op.forward[nn.functional.conv2d.options]",
    "op.forward[nn.functional.conv1d.layouts]",
    "op.forward[nn.functional.conv2d.layouts]",
    "op.forward[nn.functional.conv1d.widths]",
    "op.forward[nn.functional.conv2d.widths]",
    "op.forward[nn.functional.conv3d]",
    "op.forward[nn.functional.conv_transpose1d]",
    "op.forward[nn.functional.conv_transpose2d]",
    "op.forward[nn.functional.conv_transpose3d]",
)
def convolutions_shifted() -> None:
    @instead(_tp_conv, "tp_convolution")
    def fault(true: Any, *args: Any) -> Any:
        return true(*args) + 1


@breaks("op.forward[scatter.longer]", "op.forward[scatter.shorter]")
def results_claimed_pending() -> None:
    """Every result claims to be a contribution to a sum."""

    @instead(ShardingPropagator, "propagate_op_sharding_non_cached")
    def fault(true: Any, self: Any, schema: Any) -> Any:
        found = true(self, schema)
        for spec in _each_spec(found.output_spec):
            spec.placements = tuple(Partial() for _ in spec.placements)
        return found


@breaks("op.forward[foreach.in-place]", "op.overloads")
def changed_operands_shifted() -> None:
    """What an op leaves in the operands that it changes is one too large."""

    @instead(OpDispatcher, "_dispatch_fast_path_python_tail")
    def fault(true: Any, self: Any, op: Any, args: Any, *more: Any) -> Any:
        for operand in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
            operand.to_local().add_(1)
        return true(self, op, args, *more)


@breaks("op.forward[item]")
def item_doubled() -> None:
    @instead(torch.Tensor, "item")
    def fault(true: Any, self: Any) -> Any:
        return 2 * true(self) + 1 if isinstance(self, DTensor) else true(self)


@breaks("op.forward[to]")
def pending_sums_cast() -> None:
    """Contributions are cast to integers one by one."""

    @instead(_tensor_ops, "_partial_needs_reduce_for_dtype_cast")
    def fault(true: Any, *args: Any) -> bool:
        return False


@breaks("op.program")
def pending_sums_kept() -> None:
    """A result that an op makes of pending sums is claimed to be a pending sum."""

    @instead(ShardingPropagator, "propagate_op_sharding_non_cached")
    def fault(true: Any, self: Any, schema: Any) -> Any:
        found = true(self, schema)
        pending = any(isinstance(p, Partial) for spec in schema.args_spec for p in spec.placements)
        if found.needs_redistribute and pending and not found.use_val_from_redistribute_schema:
            found.needs_redistribute = False
            for spec in _each_spec(found.output_spec):
                spec.placements = schema.args_spec[0].placements
        return found


@breaks("op.history")
def cache_ignores_arguments() -> None:
    """Dims, sizes and other numbers are no part of the key under which a propagation is remembered."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for infos in (propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy):
        for op, info in infos.items():
            infos[op] = dataclasses.replace(info, static_argnum=100)


@breaks("op.refuses[mixed]")
def plain_operand_accepted() -> None:
    """A plain tensor is silently taken for a replicated one."""
    DTensor._op_dispatcher._allow_implicit_replication = True


@breaks("op.refuses[meshes]")
def other_mesh_accepted() -> None:
    """A tensor on another mesh is taken for one on the first one's."""

    @instead(OpDispatcher, "unwrap_to_op_info")
    def fault(true: Any, self: Any, op: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, DTensor)]
        moved = [
            DTensor.from_local(arg.to_local(), tensors[0].device_mesh, [Replicate()] * tensors[0].device_mesh.ndim)
            if isinstance(arg, DTensor) and arg.device_mesh != tensors[0].device_mesh
            else arg
            for arg in args
        ]
        return true(self, op, tuple(moved), kwargs, *more, **options)


@breaks("op.refuses[parity]")
def errors_swallowed() -> None:
    """An op that fails gives back its first operand."""

    def swallowing(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return func(*args, **(kwargs or {}))
            except Exception:
                return args[0]

    DTensor.__torch_function__ = classmethod(swallowing)


@breaks("op.refuses[unbind]")
def unbind_of_shards_accepted() -> None:
    @instead(_tensor_ops, "is_tensor_dim_sharded")
    def fault(true: Any, *args: Any, **options: Any) -> bool:
        return False


@breaks("op.restrided")
def strides_reversed() -> None:
    """A tensor with other strides is the tensor, transposed."""
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.as_strided.default] = lambda op, args, kwargs: args[0].t()


@breaks("op.modes")
def inference_counts_twice() -> None:
    """Products are doubled in inference mode."""

    @instead(torch, "mul")
    def fault(true: Any, *args: Any) -> Any:
        return true(true(*args), 2) if torch.is_inference_mode_enabled() else true(*args)
