"""The functions and methods of torch that a program of steps (:mod:`shardlaw.conformance.law.program.parse`) may call."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import torch

from shardlaw.conformance import compat
from shardlaw.reference.notation import NotationError

NAMESPACES = ("nn.functional", "linalg", "special", "fft", "masked")
FORBIDDEN_METHODS = ("apply_", "map_", "map2_", "numpy", "share_memory_", "register_hook", "data_ptr", "storage")


class NoFunctionError(NotationError):
    """The installed torch has no function of this name."""


@cache
def _functions() -> frozenset[str]:
    """The names of the ops of the module ``torch``."""
    return frozenset({*torch.functional.__all__, *dir(compat.name("functions"))})


@cache
def place_of(name: str) -> str | None:
    """The path of the function of this name, such as ``torch.linalg.norm``; ``None`` for a tensor method.

    Raises :class:`NotationError`.
    """
    if name.startswith("aten."):
        found: Any = torch.ops.aten
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if isinstance(found, compat.name("OpOverload")):
            return f"torch.ops.{name}"
        raise NotationError(f"torch.ops.{name} is no overload, such as aten.mean.dim")
    space, _, last = name.rpartition(".")
    if space:
        module: Any = torch
        for part in space.split("."):
            module = getattr(module, part)
        found = getattr(module, last, None)
        if isinstance(found, (types.FunctionType, types.BuiltinFunctionType)) and not last.startswith("_"):
            return f"torch.{name}"
        raise NoFunctionError(f"torch.{space} has no function {last!r}")
    if name in _functions() and not name.startswith("__") and not (name.endswith("_") and hasattr(torch.Tensor, name)):
        return f"torch.{name}"
    check_method(name)
    return None


def check_method(name: str) -> None:
    """Raise :class:`NotationError` where a tensor has no method of this name, or one that is no op."""
    if name.startswith("_") or name in FORBIDDEN_METHODS or not callable(getattr(torch.Tensor, name, None)):
        raise NotationError(f"no op is called {name!r}, neither a function of torch nor a tensor method")
