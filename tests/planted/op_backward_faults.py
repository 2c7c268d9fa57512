"""Faults of gradients of sharded ops, of ``out=`` and of views, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from shardlaw.conformance.law.program.calls import VIEWS
from tests.planted.hook import breaks


@breaks("op.backward[*]", "op.program-backward")
def leaf_gradients_shifted() -> None:
    """The gradient of a sharded leaf is one too large on every rank."""
    true: Any = torch.Tensor.grad

    def shifted(self: DTensor) -> Any:
        found = true.__get__(self)
        if found is None:
            return None
        with torch.no_grad():
            return DTensor.from_local(found.to_local() + 1, found.device_mesh, found.placements, shape=found.shape, stride=found.stride())

    DTensor.grad = property(shifted)  # type: ignore[assignment]


def _instead_of_functions(fault: Callable[..., Any]) -> None:
    """Every function of a sharded tensor goes through ``fault(function, args, kwargs)``."""

    def through(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return fault(func, args, kwargs or {})

    DTensor.__torch_function__ = classmethod(through)  # type: ignore[method-assign,assignment]


@breaks(
    "op.out[add]",
    "op.out[mul]",
    "op.out[exp]",
    "op.out[neg]",
    "op.out[mm]",
    "op.out[sum]",
    "op.out[mean]",
    "op.out[amax]",
    "op.out[cumsum]",
    "op.out[cat]",
    "op.out[stack]",
    "op.out[clamp]",
    "op.out[maximum]",
    "op.out[eq]",
    "op.out[index_select]",
    "op.out[frexp]",
    "op.out[max]",
    "op.out[min]",
    "op.out[kthvalue]",
    "op.out[amin]",
    "op.out[prod]",
    "op.out[any]",
)
def given_tensors_not_written() -> None:
    """A result is written into a copy of the tensor that is given for it."""

    def fault(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **({**kwargs, "out": tree_map(torch.clone, kwargs["out"])} if "out" in kwargs else kwargs))

    _instead_of_functions(fault)


@breaks("op.alias")
def views_are_copies() -> None:
    """A view of a sharded tensor is a tensor of its own."""

    def fault(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        return found.clone() if getattr(func, "__name__", "") in VIEWS else found

    _instead_of_functions(fault)
