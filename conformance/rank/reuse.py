"""What a rank reuses, in the first pass of a law, of what it has worked out in earlier cases.

torch finds the shape, strides and dtype of an op's result by running it on fake tensors, for each layout of its operands anew. They depend
on the op and on the shapes, strides and dtypes of what it is given, not on how that is sharded: a rank asks once for each, and what one
rank of a pool has found the others take, but for one question in :data:`CHECKED`, which each rank asks torch itself. Within a case it also
remembers what one plan asks again and again of the same specs. The ranks of a world share whole plans besides
(:mod:`shardlaw.conformance.rank.shared_plans`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from shardlaw.conformance.compat import plans

REMEMBERED = 4096  # of each rank, and as many at most that it leaves for others
CHECKED = 16
ATOMS = {type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


class Remembered:
    """What a rank remembers; the folder at ``path`` takes the metadata of results that are new to the ranks of a pool, a file each."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._undo: tuple[Callable[[], None], ...] = ()
        self._forget: Callable[[], None] | None = None
        self._found: dict[Any, Any] = {}
        self._left = REMEMBERED

    def begin(self, *, wanted: bool) -> None:
        """A case begins: take from here on what was found, or leave torch as it was."""
        if self._forget is not None:
            self._forget()
        if wanted and not self._undo:
            self._forget, undo = plans.remember_within_plans()
            self._undo = undo, plans.find_metadata_by(self._find)
        elif not wanted and self._undo:
            for undo in self._undo:
                undo()
            self._undo, self._forget = (), None

    def _find(self, true: Callable[[Any], Any], schema: Any) -> Any:
        try:
            told = str(schema.op), _told(schema.args_schema), _told(schema.kwargs_schema), torch.get_default_dtype()
            if told in self._found:
                return self._found[told]
        except TypeError:  # something that has a state or an identity, or a symbolic size
            return true(schema)
        if len(self._found) >= REMEMBERED:
            self._found.clear()
        key = hashlib.blake2b(repr(told).encode(), digest_size=16)
        found = self._looked_up(key.hexdigest()) if key.digest()[0] % CHECKED else None
        if found is None:
            found = true(schema)
            self._publish(key.hexdigest(), found)
        self._found[told] = found
        return found

    def _looked_up(self, key: str) -> Any:
        """What some rank has found, and written down; ``None`` for nothing."""
        try:
            with open(os.path.join(self._path, key), "rb") as file:
                return pickle.load(file)
        except OSError:
            return None

    def _publish(self, key: str, found: Any) -> None:
        """Write down what was found, whole or not at all: a rank may be killed at any moment."""
        name = os.path.join(self._path, key)
        if not self._left or os.path.exists(name):
            return
        with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            data = pickle.dumps(found)
            os.makedirs(self._path, exist_ok=True)
            with open(f"{name}.{os.getpid()}", "wb") as file:
                file.write(data)
            os.rename(file.name, name)
            self._left -= 1


def _told(value: Any) -> Any:
    """A value as what the metadata of a result depends on. Raises ``TypeError`` for what is no plain data."""
    kind = type(value)
    if kind in ATOMS:
        return kind, value
    if kind is plans.spec_type():
        return value.tensor_meta, value.mesh.device_type
    if kind is dict:
        return kind, tuple((key, _told(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(_told, value))
    raise TypeError(kind)
