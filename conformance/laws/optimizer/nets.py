"""Models with further traits, a further optimizer, and the wrappers of models: plain torch code.

The tensors of a case are placed as in the ``Model`` of :mod:`shardlaw.conformance.laws.checkpoint.models`. ``with``
names traits of the model:

``tied``     ``head.weight`` is the first parameter
``twice``    ``again`` is the first parameter
``same``     ``outer.again`` is the module ``inner``
``extra``    ``inner`` has an extra state
``hidden``   ``inner`` has a non-persistent buffer
``renamed``  a module ``kept`` drops the name of its submodule in its state, by hooks and ``_fqn_modifiers``
``trained``  its parameter is in the optimizer
``rested``   its parameter does not require a gradient
``frozen``   the last of several parameters does not require a gradient
``idle``     the last parameter is not in the optimizer
``hollow``   the last group of the optimizer has no parameters
``scheduled``  the groups of the saved optimizer have an option that a scheduler added

``wrap`` names the wrappers: ``ddp``, ``compile``, ``ddp-compile`` (``torch.compile`` outermost), ``compile-ddp``; of
``inner`` alone: ``inside`` (compiled), ``ddp-inside``, and ``recompute`` (activation checkpointing), which may precede
these two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

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
    """A module in whose state ``own.weight`` is called ``weight``."""

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
    """A model of these tensors with these traits. The extra state and the buffer of an ``other`` one have other
    values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], traits: Collection[str] = (), other: bool = False) -> None:
        inner = ExtraStateModule() if "extra" in traits else None
        super().__init__(tensors, frozen(tensors) if "frozen" in traits else (), inner)
        first = next(iter(tensors))
        if inner is not None:
            inner.extra = dict(OTHER_EXTRA if other else EXTRA)
        if "hidden" in traits:
            scratch = torch.full((3,), 2.0 if other else 1.0, device=tensors[first].device)
            self.inner.register_buffer("scratch", scratch, persistent=False)
        if "tied" in traits:
            self.head = nn.Module()
            self.head.register_parameter("weight", getattr(self, first))
        if "twice" in traits:
            self.register_parameter("again", getattr(self, first))
        if "same" in traits:
            self.outer = nn.Module()
            self.outer.again = self.inner
        if "renamed" in traits:
            self.kept = RenamingModule(tensors[first].clone())
            self.kept.requires_grad_("rested" not in traits)

    def held(self) -> dict[str, Any]:
        """All parameters and buffers, by canonical name."""
        return {path.replace(".own", ""): tensor for path, tensor in super().held().items()}

    def optimizer_parameters(self, traits: Collection[str] = ()) -> dict[str, nn.Parameter]:
        """The parameters in its optimizer, by canonical name."""
        parameters = dict(self.named_parameters())
        if "trained" not in traits:
            parameters.pop("kept.own.weight", None)
        return dict([*parameters.items()][:-1]) if "idle" in traits else parameters


def by_state_name(
    tensors: Mapping[str, Any], traits: Collection[str] = (), inner_entries: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The tensors and the further ``inner_entries`` of ``inner`` by every name that they have in the state of a model,
    the top-level tensors first."""
    first = next(iter(tensors.values()))
    entries = {**in_model(tensors), **{f"inner.{name}": value for name, value in (inner_entries or {}).items()}}
    if "same" in traits:
        inner_names = [path for path in entries if path.startswith("inner.")]
        entries |= {path.replace("inner.", "outer.again."): entries[path] for path in inner_names}
    if "tied" in traits:
        entries["head.weight"] = first
    if "twice" in traits:
        entries["again"] = first
    if "renamed" in traits:
        entries["kept.weight"] = first
    return entries


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
    """The model with these wrappers around it or around its inner module."""
    if wrap in INNER_WRAPS:
        model.inner = wrap_model(model.inner, INNER_WRAPS[wrap])
        return model  # type: ignore[no-any-return]
    for how in reversed(wrap.split("-")) if wrap != "none" else ():
        model = WRAPPERS[how](model)
    return model  # type: ignore[no-any-return]


class NestedStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is nested dicts, as that of Shampoo, which have ``key`` among their keys."""

    def __init__(self, groups: Any, key: str | int) -> None:
        super().__init__(groups, {"lr": 0.5})
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["seen"] = {"left": {self.key: parameter.grad / 2, "weight": 3}, "right": parameter.grad / 4}


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.5, betas=(0.5, 0.5), foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5, foreach=False),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.5, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.5, alpha=0.5, foreach=False),
    "decayed": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5, weight_decay=0.5, foreach=False),
    "dampened": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5, dampening=0.5, foreach=False),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.5, foreach=False),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.5, foreach=False),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.5, foreach=False),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.5, foreach=False),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.5, foreach=False),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.5, foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.5),
    "muon": lambda parameters: torch.optim.Muon(parameters, lr=0.5),
    "sparse": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.5),
}
WITHOUT_STEPS = ("sgd", "momentum", "decayed", "dampened", "lbfgs", "muon")
Opt = Literal[
    "adam", "sgd", "momentum", "adagrad", "rmsprop",
    "decayed", "dampened", "nadam", "radam", "adamax", "rprop", "asgd", "lbfgs",
    "adadelta", "adafactor", "muon", "sparse",
]  # fmt: skip


def train_step(optimizer: torch.optim.Optimizer) -> None:
    """One step with the parameters' values as gradients; afterwards the parameters have their old values."""
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
    """Whether the options ask for full tensors."""
    return "whole" in how or "broadcast" in how


def state_options(how: Collection[str], **options: Any) -> StateDictOptions:
    """The options of torch for the words of ``how``."""
    return StateDictOptions(
        full_state_dict=is_full_state(how),
        broadcast_from_rank0="broadcast" in how,
        flatten_optimizer_state_dict="flat" in how,
        cpu_offload="offload" in how,
        **options,
    )
