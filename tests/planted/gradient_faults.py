"""Faults of gradients, planted one at a time."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.planted.hook import breaks, instead


@breaks(
    "gradient.redistribute",
    "gradient.adjoint",
    "gradient.graph",
    "gradient.parameter",
    "module.backward[mlp]",
    "module.backward[stacked]",
    "module.backward[norm]",
    "module.backward[tied]",
    "module.backward[attention]",
    "module.backward[transformer]",
    "module.step",
    "module.experts",
    "module.compiled-model",
)
def backward_counts_twice() -> None:
    @instead(_redistribute, "_redistribute_backward")
    def fault(true: Any, grad_output: Any, previous_spec: Any, **options: Any) -> Any:
        local, spec = true(grad_output, previous_spec, **options)
        return local + local, spec


@breaks("gradient.full-tensor", "gradient.to-local")
def grad_placements_ignored() -> None:
    @instead(_api._ToTorchTensor, "forward")
    def fault(true: Any, ctx: Any, tensor: Any, grad_placements: Any) -> Any:
        return true(ctx, tensor, None)


@breaks("gradient.accumulate")
def backward_overwrites() -> None:
    seen: set[int] = set()

    @instead(_redistribute, "_redistribute_backward")
    def fault(true: Any, grad_output: Any, previous_spec: Any, **options: Any) -> Any:
        local, spec = true(grad_output, previous_spec, **options)
        first = id(previous_spec) not in seen
        seen.add(id(previous_spec))
        return (local if first else torch.zeros_like(local)), spec


@breaks("gradient.second")
def second_backward_is_zero() -> None:
    @instead(_redistribute.NestedRedistribute, "backward")
    def fault(true: Any, ctx: Any, grad: Any) -> Any:
        return tuple(out if out is None else out * 0 for out in true(ctx, grad))


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


@breaks("gradient.function")
def goes_back_from_twice() -> None:
    @instead(DTensor, "backward")
    def fault(true: Any, self: Any, *rest: Any) -> Any:
        return true(self * 2, *rest)


@breaks("gradient.saved-operand", "gradient.shared-memory")
def writes_are_not_counted() -> None:
    @instead(DTensor, "mul_")
    def fault(true: Any, self: Any, *rest: Any) -> Any:
        with torch.autograd._unsafe_preserve_version_counter(self):
            return true(self, *rest)


@breaks("gradient.entered")
def entrance_is_differentiable_once() -> None:
    @instead(_api._FromTorchTensor, "backward")
    def fault(true: Any, ctx: Any, grad: Any) -> Any:
        return true(ctx, None if grad is None else grad.detach())


@breaks("gradient.transforms")
def pending_sums_are_taken_for_replicas() -> None:
    """Every result with a pending sum claims to be replicated."""

    @instead(ShardingPropagator, "propagate_op_sharding_non_cached")
    def fault(true: Any, self: Any, schema: Any) -> Any:
        found = true(self, schema)
        spec = found.output_spec
        if isinstance(spec, DTensorSpec):
            spec.placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
        return found


@breaks(
    "gradient.contexts",
    case="gradient.contexts mesh=2 x=4x6:S(1):float32:small w=5x6:S(1):float32:small way=forward-in-thread",
)
def other_threads_do_not_redistribute() -> None:
    @instead(_dispatch, "redistribute_local_tensor")
    def fault(true: Any, local: Any, *args: Any, **options: Any) -> Any:
        main = threading.current_thread() is threading.main_thread()
        return true(local, *args, **options) if main else local
