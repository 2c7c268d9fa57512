"""What only newer releases of torch have: acts ask for it, and laws take its absence for a refusal."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from shardlaw.conformance.law.case import Case


def require_attribute(owner: Any, name: str) -> Any:
    """The attribute ``name`` of ``owner``. Raises :class:`NotImplementedError` if this release of torch does not have
    it."""
    if not hasattr(owner, name):
        raise NotImplementedError(f"not supported by torch {torch.__version__}: {name}")
    return getattr(owner, name)


def require_options(function: Any, names: Iterable[str]) -> None:
    """Raises :class:`NotImplementedError` if a function does not take these arguments in this release of torch."""
    for name in names:
        if name not in inspect.signature(function).parameters:
            raise NotImplementedError(f"not supported by torch {torch.__version__}: {name}")


def is_unsupported(case: Case, text: str) -> bool:
    """Whether a refusal says that this release of torch lacks an attribute or an argument."""
    return "not supported by torch" in text
