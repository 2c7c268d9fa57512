"""Models of the tensors of a case and their optimizers: plain torch code, and what is due of it.

The first tensor of a case is at the top of its model, the second in ``inner``, and so on; tensors of floats are
parameters, others are buffers. One step of Adam with betas of a half leaves halves of the gradient and of its square,
exactly.
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
    """A model of these tensors; those that are ``still`` ask for no gradient."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], still: Collection[str] = (), inner: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.inner: Any = inner or nn.Module()
        for path, tensor in in_model(tensors).items():
            home, name = (self.inner if path.startswith(INNER) else self), path[-1]
            if tensor.is_floating_point():
                home.register_parameter(name, nn.Parameter(tensor, requires_grad=name not in still))
            else:
                home.register_buffer(name, tensor)

    def held(self) -> dict[str, Any]:
        """What it holds, by name."""
        parameters, buffers = self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False)
        return {**dict(parameters), **dict(buffers)}


def in_model(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever stands for the tensors of a case, by their names in its model: those at its top first."""
    own = [*tensors.items()]
    return {**dict(own[::2]), **{f"{INNER}{name}": value for name, value in own[1::2]}}


def frozen(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The last one of several parameters."""
    return [name for name, tensor in tensors.items() if tensor.is_floating_point()][1:][-1:]


def grouped(members: Sequence[Any], groups: str = "each", hollow: str | None = None) -> list[list[Any]]:
    """The groups of an optimizer: ``each`` its own, in their order or from the ``back``, or all in ``one``; the
    ``first`` or the ``last`` group may have none."""
    found = [[*members]] if groups == "one" else [[one] for one in (members[::-1] if groups == "back" else members)]
    return [*([[]] if hollow == "first" else []), *found, *([[]] if hollow == "last" else [])]


def adam(
    parameters: Sequence[nn.Parameter], rates: Sequence[float], groups: str = "each", hollow: str | None = None
) -> torch.optim.Optimizer:
    """Adam whose groups have these rates in turn; its averages of small whole numbers are exact."""
    return torch.optim.Adam(with_rates(grouped(parameters, groups, hollow), rates), betas=(0.5, 0.5), foreach=False)


def with_rates(groups: Sequence[Sequence[Any]], rates: Sequence[float]) -> Any:
    return [{"params": group, "lr": rates[at % len(rates)]} for at, group in enumerate(groups)]


def learned(given: Mapping[str, nn.Parameter], *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """What optimizers keep, and of how many parameters that they should not know."""
    states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    trained = {path: parameter for path, parameter in given.items() if parameter.requires_grad}
    kept = {path: flat(states.pop(parameter, {})) for path, parameter in trained.items()}
    return {**averages_and_rates(kept, *optimizers), "strangers": len(states)}


def averages_and_rates(kept: Mapping[str, dict[str, Any]], *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The rate of each group of these optimizers, and what they keep of each parameter, its steps apart."""
    return {
        "rates": [
            float(group["lr"]) if "lr" in group else None
            for optimizer in optimizers
            for group in optimizer.param_groups
        ],
        "steps": {path: steps(state.pop("step", None)) for path, state in kept.items()},
        "averages": kept,
    }


def steps(count: Any) -> float | None:
    return None if count is None else float(count.to_local() if isinstance(count, DTensor) else count)


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, the names of each level joined by dots."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


# What is due

Value = Global | torch.Tensor
Values = Mapping[str, Value]


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value of a due function with other elements, placed alike."""
    return value.holding(change(value.full)) if isinstance(value, Global) else change(value)


def dense(values: Values) -> dict[str, torch.Tensor]:
    """All elements of each."""
    return {name: value.full if isinstance(value, Global) else value for name, value in values.items()}


def parameters_of(values: Values) -> dict[str, Any]:
    """Those of floats, by their names in the model."""
    full = dense(in_model(values))
    return {path: value for path, value in in_model(values).items() if full[path].is_floating_point()}


def keeps(values: Values, rates: Sequence[float], count: float = 1.0, *, deep: bool = False) -> dict[str, Any]:
    """What :func:`learned` must find after one step whose gradients were ``values``."""

    def halves(value: Any) -> dict[str, Any]:
        half = changed(value, lambda grad: grad / 2)
        if deep:
            return {"seen.left.0": half, "seen.left.weight": 3, "seen.right": changed(value, lambda grad: grad / 4)}
        return {"exp_avg": half, "exp_avg_sq": changed(value, lambda grad: grad * grad / 2)}

    averages = {path: halves(value) for path, value in values.items()}
    return {"rates": [*rates], "steps": dict.fromkeys(values, count), "averages": averages, "strangers": Of(0)}


def saved_rates(members: Sequence[Any], groups: str = "each", hollow: str | None = None) -> list[float]:
    """The rates of the groups of an optimizer that is saved."""
    return [RATES[at % len(RATES)] for at in range(len(grouped(members, groups, hollow)))]
