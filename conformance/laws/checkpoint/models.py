"""Models of the tensors of a case, and optimizers: plain torch code, and its due values.

The tensors of a case alternate between the top of its model and the submodule ``inner``. Floating-point tensors are
parameters, others are buffers. After one step of Adam with betas of 0.5 the averages are exactly half of the gradient
and half of its square.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.due import Global, Of

RATES, OTHER_RATES = (0.5, 0.25, 0.125), (0.75, 0.875, 0.375)
INNER = "inner."


class Model(nn.Module):
    """A model of these tensors; those named in ``frozen`` require no gradient."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], frozen: Collection[str] = (), inner: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.inner: Any = inner or nn.Module()
        for path, tensor in in_model(tensors).items():
            module, name = (self.inner if path.startswith(INNER) else self), path[-1]
            if tensor.is_floating_point():
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=name not in frozen))
            else:
                module.register_buffer(name, tensor)

    def held(self) -> dict[str, Any]:
        """The parameters and buffers, by name."""
        parameters, buffers = self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False)
        return {**dict(parameters), **dict(buffers)}


def in_model(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The values for the tensors of a case, by their paths in its model: those at its top first."""
    items = [*tensors.items()]
    return {**dict(items[::2]), **{f"{INNER}{name}": value for name, value in items[1::2]}}


def frozen(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The name of the last parameter, where there are several."""
    return [name for name, tensor in tensors.items() if tensor.is_floating_point()][1:][-1:]


def grouped(members: Sequence[Any], groups: str = "each", hollow: str | None = None) -> list[list[Any]]:
    """The param groups of an optimizer: ``each`` member in its own, in reverse order with ``back``, or all in ``one``.
    ``hollow``: an empty group that comes ``first`` or ``last``."""
    ordered = members[::-1] if groups == "back" else members
    param_groups = [[*members]] if groups == "one" else [[member] for member in ordered]
    return [*([[]] if hollow == "first" else []), *param_groups, *([[]] if hollow == "last" else [])]


def adam(
    parameters: Sequence[nn.Parameter], rates: Sequence[float], groups: str = "each", hollow: str | None = None
) -> torch.optim.Optimizer:
    """Adam whose param groups have these learning rates in turn; its averages of small integers are exact."""
    return torch.optim.Adam(with_rates(grouped(parameters, groups, hollow), rates), betas=(0.5, 0.5), foreach=False)


def with_rates(groups: Sequence[Sequence[Any]], rates: Sequence[float]) -> Any:
    """Param groups with these learning rates in turn."""
    return [{"params": group, "lr": rates[at % len(rates)]} for at, group in enumerate(groups)]


def learned(parameters: Mapping[str, nn.Parameter], *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The learning rates and states of optimizers, and the number of their other parameters, under ``strangers``."""
    states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    trained = {path: parameter for path, parameter in parameters.items() if parameter.requires_grad}
    flat_states = {path: flat(states.pop(parameter, {})) for path, parameter in trained.items()}
    return {**averages_and_rates(flat_states, *optimizers), "strangers": len(states)}


def averages_and_rates(states: Mapping[str, dict[str, Any]], *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The learning rate of each param group, and the steps and the other state of each parameter."""
    return {
        "rates": [
            float(group["lr"]) if "lr" in group else None
            for optimizer in optimizers
            for group in optimizer.param_groups
        ],
        "steps": {path: steps(state.pop("step", None)) for path, state in states.items()},
        "averages": states,
    }


def steps(count: Any) -> float | None:
    return None if count is None else float(count.to_local() if isinstance(count, DTensor) else count)


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict, with keys joined by dots; those that are no texts in brackets."""
    flattened: dict[str, Any] = {}
    for own_key, value in state.items():
        key = own_key if isinstance(own_key, str) else f"[{own_key!r}]"
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flattened


Value = Global | torch.Tensor
Values = Mapping[str, Value]


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A due value with changed elements and the same layout."""
    return value.holding(change(value.full)) if isinstance(value, Global) else change(value)


def dense(values: Values) -> dict[str, torch.Tensor]:
    """The full tensors."""
    return {name: value.full if isinstance(value, Global) else value for name, value in values.items()}


def parameters_of(values: Values) -> dict[str, Any]:
    """The floating-point values, by their paths in the model."""
    full = dense(in_model(values))
    return {path: value for path, value in in_model(values).items() if full[path].is_floating_point()}


def keeps(values: Values, rates: Sequence[float], count: float = 1.0, *, deep: str | None = None) -> dict[str, Any]:
    """The due :func:`learned` after one step with the gradients ``values``; ``deep``: with nested states,
    in one of which is this key."""

    def halves(value: Any) -> dict[str, Any]:
        half = changed(value, lambda grad: grad / 2)
        if deep:
            quarter = changed(value, lambda grad: grad / 4)
            return {f"seen.left.{deep}": half, "seen.left.weight": 3, "seen.right": quarter}
        return {"exp_avg": half, "exp_avg_sq": changed(value, lambda grad: grad * grad / 2)}

    averages = {path: halves(value) for path, value in values.items()}
    return {"rates": [*rates], "steps": dict.fromkeys(values, count), "averages": averages, "strangers": Of(0)}


def saved_rates(members: Sequence[Any], groups: str = "each", hollow: str | None = None) -> list[float]:
    """The learning rates of the param groups of the optimizer that is saved."""
    return [RATES[at % len(RATES)] for at in range(len(grouped(members, groups, hollow)))]
