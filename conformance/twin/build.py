"""Builds a model and its batches with the values of a plan: as they are drawn, exact, or changed by one unit in the last place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardlaw.conformance import compat
from shardlaw.conformance.twin.spec import Plan, Twin

DTYPES = {"exact": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
Change = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A structure of tuples, lists and dicts with ``change`` applied to each of its tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        copy = value.copy()
        for key in copy:
            copy[key] = map_tensors(copy[key], change)
        return copy
    if isinstance(value, tuple) and type(value) is not tuple and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(*(map_tensors(item, change) for item in value))  # a named tuple
    return type(value)(map_tensors(item, change) for item in value) if type(value) in (tuple, list) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in order."""
    found: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def build_model(twin: Twin, plan: Plan, change: Change) -> torch.nn.Module:
    """The whole module under the plan's seed, with the plan's values, to which ``change`` is applied. Dropout is off, unless the plan has
    it on."""
    torch.manual_seed(plan.seed)
    module = twin.model(**plan.sizes)
    disable_dropout(module, plan.dropout)
    generator = torch.Generator().manual_seed(plan.seed)
    with torch.no_grad():
        for parameter in module.parameters():
            value = exact_values(parameter.data, generator) if plan.values == "exact" else parameter.data
            parameter.data = change(value.to(DTYPES[plan.values])) if value.is_floating_point() else value
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = change_buffer(buffer.data.to(DTYPES[plan.values]), change)
    return module


def disable_dropout(module: torch.nn.Module, dropout: bool = False) -> None:
    """Switch dropout off: set to 0 the ``p`` of torch's dropout modules and the number ``dropout`` of any module. With ``dropout``,
    ``torch.nn.Dropout`` stays on."""
    for part in module.modules():
        if dropout and isinstance(part, torch.nn.Dropout):
            continue
        if type(part).__module__ == torch.nn.Dropout.__module__ or isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # type: ignore[assignment]
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # type: ignore[assignment]


def build_batch(twin: Twin, plan: Plan, step: int, change: Change) -> Any:
    """The whole batch of a step, with the plan's values, to which ``change`` is applied."""
    torch.manual_seed(1_000_003 * (plan.seed + 1) + step)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        value = (tensor * 2).round().clamp(-4, 4) / 4 if plan.values == "exact" else tensor
        return change(value.to(DTYPES[plan.values]))

    return map_tensors(twin.batch(step, **plan.sizes), cast)


def exact_values(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values whose sums and products are exact: quarters from -2/4 to 2/4. A constant tensor other than zero, such as the weight of
    a norm, becomes 1/2, 1 or 2 times its value."""
    if value.numel() and bool((value == value.flatten()[0]).all()) and bool(value.flatten()[0] != 0):
        return value * torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, value.shape, generator=generator)].to(value.dtype)
    return (torch.randint(-2, 3, value.shape, generator=generator) / 4).to(value.dtype)


def unchanged(value: torch.Tensor) -> torch.Tensor:
    """No change."""
    return value


def to_float64(value: torch.Tensor) -> torch.Tensor:
    """The tensor in float64."""
    return value.double()


def change_buffer(value: torch.Tensor, change: Change) -> torch.Tensor:
    """A buffer, in float64 where everything is. It is a constant: no other change is applied."""
    return value.double() if change is to_float64 else value


@contextmanager
def float64_casts(change: Change) -> Iterator[None]:
    """In a float64 run, let the model's own casts to narrower dtypes, such as those inside a norm, go to float64 too. Otherwise this run
    would round where the first one does, and the difference would not show it."""
    if change is not to_float64:
        yield
        return

    class Wide(compat.name("TorchDispatchMode")):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if kwargs.get("dtype") in BITS and tensors_in(args):
                kwargs = {**kwargs, "dtype": torch.float64}
            return func(*args, **kwargs)

    with Wide():
        yield


def move_by_ulp(generator: torch.Generator) -> Change:
    """A change that moves each element up or down by one unit in the last place, at random. Zeros stay: they may be masks or padding."""

    def move(value: torch.Tensor) -> torch.Tensor:
        if value.dtype not in BITS or not value.numel():
            return value
        moved = value.contiguous().clone()
        step = 2 * torch.randint(0, 2, moved.shape, generator=generator) - 1
        bits = moved.view(BITS[value.dtype])
        bits += torch.where(moved == 0, 0, step).to(bits.dtype)
        return moved

    return move
