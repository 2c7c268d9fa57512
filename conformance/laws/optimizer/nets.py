"""Models of which a state has more than parameters in place, their optimizers, and the wrappers that may be around
them: plain torch code.

The tensors of a case are where they are in any :class:`~.checkpoint.models.Model`. ``with`` names what else the model
has:

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
``compile-ddp``, and ``inside`` or ``ddp-inside`` where that is done to ``inner`` alone. With ``recompute`` in front,
what is done to ``inner`` is within a wrapper that computes activations again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.parallel import DistributedDataParallel

from shardlaw.conformance import compat
from shardlaw.conformance.laws.checkpoint.models import Model, frozen, in_model

EXTRA, OTHER_EXTRA = {"count": 3, "name": "saved"}, {"count": 4, "name": "other"}


class ExtraStateModule(nn.Module):
    """A module with an extra state."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class RenamingModule(nn.Module):
    """A module whose states call ``own.weight`` ``weight``."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.own = nn.Module()
        self.own.register_parameter("weight", nn.Parameter(weight))
        module: Any = self
        module.register_state_dict_post_hook(RenamingModule.shorten)
        module.register_load_state_dict_pre_hook(RenamingModule.lengthen)

    def shorten(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}own.weight")

    def lengthen(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}own.weight"] = state.pop(f"{prefix}weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "own"}


class Net(Model):
    """A model of these tensors; ``having`` names what else it has. What no tensor says is different in an
    ``other`` one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], traits: Collection[str] = (), other: bool = False) -> None:
        frozen_names, inner = (
            frozen(tensors) if "frozen" in traits else (),
            ExtraStateModule() if "extra" in traits else None,
        )
        super().__init__(tensors, frozen_names, inner)
        first = next(iter(tensors))
        if inner is not None:
            inner.extra = dict(OTHER_EXTRA if other else EXTRA)
        if "hidden" in traits:
            scratch = torch.full((3,), 2.0 if other else 1.0, device=tensors[first].device)
            self.inner.register_buffer("scratch", scratch, persistent=False)
        if "tied" in traits:
            self.head = nn.Module()
            self.head.register_parameter("weight", getattr(self, first))
        if "same" in traits:
            self.outer = nn.Module()
            self.outer.again = self.inner
        if "renamed" in traits:
            self.kept = RenamingModule(tensors[first].clone())

    def held(self) -> dict[str, Any]:
        """What it holds, by canonical name."""
        return {path.replace(".own", ""): tensor for path, tensor in super().held().items()}

    def given(self, traits: Collection[str] = ()) -> dict[str, nn.Parameter]:
        """The parameters that its optimizer is given, by canonical name."""
        parameters = {path: parameter for path, parameter in self.named_parameters() if path != "kept.own.weight"}
        return dict([*parameters.items()][:-1]) if "idle" in traits else parameters


def by_state_name(
    tensors: Mapping[str, Any], traits: Collection[str] = (), inner_entries: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The tensors, and what else is ``inside`` of the inner module, by all names that a model has for them, those
    at its top first."""
    first = next(iter(tensors.values()))
    entries = {**in_model(tensors), **{f"inner.{name}": value for name, value in (inner_entries or {}).items()}}
    if "same" in traits:
        entries |= {
            path.replace("inner.", "outer.again."): value
            for path, value in entries.items()
            if path.startswith("inner.")
        }
    return (
        entries
        | ({"head.weight": first} if "tied" in traits else {})
        | ({"kept.weight": first} if "renamed" in traits else {})
    )


INNER_WRAPS = {
    "inside": "compile", "ddp-inside": "ddp",
    "recompute": "checkpoint", "recompute-inside": "checkpoint-compile", "recompute-ddp-inside": "checkpoint-ddp",
}  # fmt: skip
WRAPPERS: dict[str, Any] = {
    "ddp": DistributedDataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "checkpoint": lambda model: compat.activation_wrappers.checkpoint_wrapper(model),
}


def wrap_model(model: Any, wrap: str) -> nn.Module:
    """The model with something around it, or around the module inside of it."""
    if wrap in INNER_WRAPS:
        model.inner = wrap_model(model.inner, INNER_WRAPS[wrap])
        return model  # type: ignore[no-any-return]
    for how in reversed(wrap.split("-")) if wrap != "none" else ():
        model = WRAPPERS[how](model)
    return model  # type: ignore[no-any-return]


class NestedStateOptimizer(torch.optim.Optimizer):
    """Keeps what it has seen of a gradient in dicts within dicts, as Shampoo does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["seen"] = {"left": {"0": parameter.grad / 2, "weight": 3}, "right": parameter.grad / 4}


def train_step(optimizer: torch.optim.Optimizer) -> None:
    """One step with the values of the parameters for gradients; the parameters stay what they are."""
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.grad)
            parameter.grad = None


def is_full_state(how: Collection[str]) -> bool:
    """Whether a state is given in whole tensors."""
    return "whole" in how or "broadcast" in how


def state_options(how: Collection[str], **options: Any) -> StateDictOptions:
    """The options under which a state is given."""
    return StateDictOptions(
        full_state_dict=is_full_state(how),
        broadcast_from_rank0="broadcast" in how,
        flatten_optimizer_state_dict="flat" in how,
        cpu_offload="offload" in how,
        **options,
    )
