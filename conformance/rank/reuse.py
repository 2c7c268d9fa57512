"""What a rank reuses, in the first pass of a law, of what it has worked out in earlier cases.

torch finds the shape, strides and dtype of an op's result by running it on fake tensors, for each layout of its operands anew. They depend
on the op and on the shapes, strides and dtypes of what it is given, not on how that is sharded: a rank asks once for each. With
:data:`PLANS` its world's ranks also share whole plans (:mod:`shardlaw.conformance.rank.shared_plans`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlaw.conformance import compat
from shardlaw.conformance import compat_plans as plans

METADATA, PLANS = "metadata", "plans"
REMEMBERED = 4096
ATOMS = {type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


class RememberedMetadata:
    """The metadata of results that one rank has found."""

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None
        self._found: dict[Any, Any] = {}

    def begin(self, *, wanted: bool) -> None:
        """Remember from here on, or leave torch as it was."""
        if wanted and self._undo is None:
            self._undo = plans.find_metadata_by(self._find)
        elif not wanted and self._undo is not None:
            self._undo()
            self._undo = None

    def _find(self, true: Callable[[Any], Any], schema: Any) -> Any:
        try:
            key = schema.op, _told(schema.args_schema), _told(schema.kwargs_schema), torch.get_default_dtype()
            if key in self._found:
                return self._found[key]
        except TypeError:  # something that has a state or an identity, or a symbolic size
            return true(schema)
        if len(self._found) >= REMEMBERED:
            self._found.clear()
        found = self._found[key] = true(schema)
        return found


def _told(value: Any) -> Any:
    """A value as what the metadata of a result depends on. Raises ``TypeError`` for what is no plain data."""
    kind = type(value)
    if kind in ATOMS:
        return kind, value
    if kind is compat.DTensorSpec:
        return value.tensor_meta, value.mesh.device_type
    if kind is dict:
        return kind, tuple((key, _told(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(_told, value))
    raise TypeError(kind)
