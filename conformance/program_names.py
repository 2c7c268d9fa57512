"""What the names in a program of steps may call (:mod:`conformance.program`), and nothing else."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from conformance import compat
from reference.notation import NotationError

NAMESPACES = ("nn.functional", "linalg", "special", "fft", "masked")
FORBIDDEN_METHODS = ("apply_", "map_", "map2_", "numpy", "share_memory_", "register_hook", "data_ptr", "storage")


def _getitem(base: Any, index: Any) -> Any:
    return base[index]


def _setitem(base: Any, index: Any, value: Any) -> Any:
    base[index] = value
    return base


SPECIAL: dict[str, Callable[..., Any]] = {"getitem": _getitem, "setitem": _setitem, "slice": slice, "tensor": torch.tensor}


class NoFunctionError(NotationError):
    """The installed torch has no function of this name."""


@cache
def _functions() -> frozenset[str]:
    """The functions of ``torch`` that are ops."""
    return frozenset({*torch.functional.__all__, *dir(compat.name("functions"))})


@cache
def function_of(name: str, text: str) -> Callable[..., Any] | None:
    """The function behind a name; ``None`` for the tensor method of the first argument. Raises :class:`NotationError`."""
    if name in SPECIAL or name == "redistribute":
        return SPECIAL.get(name)
    if name.startswith("aten."):
        found: Any = torch.ops.aten
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if isinstance(found, compat.name("OpOverload")):
            return cast(Callable[..., Any], found)
        raise NotationError(f"steps {text!r}: torch.ops.{name} is no overload, such as aten.mean.dim")
    space, _, last = name.rpartition(".")
    if space:
        module: Any = torch
        for part in space.split("."):
            module = getattr(module, part)
        found = getattr(module, last, None)
        if isinstance(found, (types.FunctionType, types.BuiltinFunctionType)) and not last.startswith("_"):
            return found
        raise NoFunctionError(f"steps {text!r}: torch.{space} has no function {last!r}")
    if name in _functions() and not name.startswith("__") and not (name.endswith("_") and hasattr(torch.Tensor, name)):
        return getattr(torch, name)  # type: ignore[no-any-return]
    want_method(name, text)
    return None


def want_method(name: str, text: str) -> None:
    """Raises :class:`NotationError` where no op is the tensor method of this name; ``text`` is the program that calls it."""
    if name.startswith("_") or name in FORBIDDEN_METHODS or not callable(getattr(torch.Tensor, name, None)):
        raise NotationError(f"steps {text!r}: no op is called {name!r}, neither a function of torch nor a tensor method")
