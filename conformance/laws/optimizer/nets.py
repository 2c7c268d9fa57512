"""Models of which a state has more than parameters in place, their optimizers, and the wrappers that may be around
them: plain torch code.

The first tensor of a case is at the top of its model, the second in ``inner``, and so on. ``with`` names what
else the model has:

``tied``     a parameter ``head.weight`` that is the first one
``same``     the module ``inner`` once more, as ``outer.again``
``extra``    an extra state of ``inner``
``hidden``   a buffer in ``inner`` that is not part of its state
``renamed``  a module whose hooks take the name of what is inside of it out of its states, and which says so
``frozen``   the last one of several parameters asks for no gradient
``idle``     the last parameter is not given to the optimizer
``hollow``   the optimizer has a last group without parameters
``scheduled``  its groups have an option that a scheduler added, as long as it is the saved one

``wrap`` is what the model is wrapped in: ``ddp``, ``compile``, ``ddp-compile`` (compiled outside),
``compile-ddp``, and ``inside`` or ``ddp-inside`` where that is done to ``inner`` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

RATES, OTHER_RATES = (0.5, 0.25, 0.125), (0.75, 0.875, 0.375)
EXTRA, OTHER_EXTRA = {"count": 3, "name": "saved"}, {"count": 4, "name": "other"}


class Stating(nn.Module):
    """A module with an extra state."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Renaming(nn.Module):
    """A module whose states call ``own.weight`` ``weight``."""

    def __init__(self, own: torch.Tensor) -> None:
        super().__init__()
        self.own = nn.Module()
        self.own.register_parameter("weight", nn.Parameter(own))
        hooked: Any = self
        hooked.register_state_dict_post_hook(Renaming.shorten)
        hooked.register_load_state_dict_pre_hook(Renaming.lengthen)

    def shorten(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}own.weight")

    def lengthen(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}own.weight"] = state.pop(f"{prefix}weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "own"}


class Net(nn.Module):
    """A model of these tensors; ``having`` names what else it has. What no tensor says is different in an
    ``other`` one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], having: Collection[str] = (), other: bool = False) -> None:
        super().__init__()
        self.inner: Any = Stating() if "extra" in having else nn.Module()
        first, asking = next(iter(tensors)), {*tensors} - {*(frozen(tensors) if "frozen" in having else ())}
        for path, tensor in named(tensors).items():
            home, name = (self.inner if "." in path else self), path[-1]
            if tensor.is_floating_point():
                home.register_parameter(name, nn.Parameter(tensor, requires_grad=name in asking))
            else:
                home.register_buffer(name, tensor)
        if "extra" in having:
            self.inner.extra = dict(OTHER_EXTRA if other else EXTRA)  # type: ignore[assignment]
        if "hidden" in having:
            scratch = torch.full((3,), 2.0 if other else 1.0, device=tensors[first].device)
            self.inner.register_buffer("scratch", scratch, persistent=False)
        if "tied" in having:
            self.head = nn.Module()
            self.head.register_parameter("weight", getattr(self, first))
        if "same" in having:
            self.outer = nn.Module()
            self.outer.again = self.inner
        if "renamed" in having:
            self.kept = Renaming(tensors[first].clone())

    def held(self) -> dict[str, Any]:
        """What it holds, by canonical name."""
        found = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        return {path.replace(".own", ""): tensor for path, tensor in found.items()}

    def given(self, having: Collection[str] = ()) -> dict[str, nn.Parameter]:
        """The parameters that its optimizer is given, by canonical name."""
        found = {path: parameter for path, parameter in self.named_parameters() if path != "kept.own.weight"}
        return dict([*found.items()][:-1]) if "idle" in having else found


def named(
    tensors: Mapping[str, Any], having: Collection[str] = (), inside: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The tensors, and what else is ``inside`` of the inner module, by all names that a model has for them, those
    at its top first."""
    first, own = next(iter(tensors.values())), [*tensors.items()]
    found = {**dict(own[::2]), **{f"inner.{name}": value for name, value in [*own[1::2], *(inside or {}).items()]}}
    if "same" in having:
        found |= {
            path.replace("inner.", "outer.again."): value for path, value in found.items() if path.startswith("inner.")
        }
    return (
        found
        | ({"head.weight": first} if "tied" in having else {})
        | ({"kept.weight": first} if "renamed" in having else {})
    )


def frozen(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The last one of several parameters."""
    return [name for name, tensor in tensors.items() if tensor.is_floating_point()][1:][-1:]


def wrapped(model: Any, wrap: str) -> nn.Module:
    """The model with something around it, or around the module inside of it."""
    if wrap in ("inside", "ddp-inside"):
        model.inner = wrapped(model.inner, "compile" if wrap == "inside" else "ddp")
        return model  # type: ignore[no-any-return]
    for how in reversed(wrap.split("-")) if wrap != "none" else ():
        model = DistributedDataParallel(model) if how == "ddp" else torch.compile(model, backend="eager")
    return model  # type: ignore[no-any-return]


class Deep(torch.optim.Optimizer):
    """Keeps what it has seen of a gradient in dicts within dicts, as Shampoo does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["seen"] = {"left": {"0": parameter.grad / 2, "weight": 3}, "right": parameter.grad / 4}


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


def with_rates(groups: Sequence[Sequence[nn.Parameter]], rates: Sequence[float]) -> Any:
    return [{"params": group, "lr": rates[at % len(rates)]} for at, group in enumerate(groups)]


def learn(optimizer: torch.optim.Optimizer) -> None:
    """One step with the values of the parameters for gradients; the parameters stay what they are."""
    trained = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]
    for parameter in trained:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(parameter.grad)
            parameter.grad = None


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


def options_of(how: Collection[str], **more: Any) -> StateDictOptions:
    """The options under which a state is given."""
    return StateDictOptions(
        full_state_dict="whole" in how or "broadcast" in how,
        broadcast_from_rank0="broadcast" in how,
        flatten_optimizer_state_dict="flat" in how,
        cpu_offload="offload" in how,
        **more,
    )
