"""The metadata of op results, which a rank reuses from earlier cases in the first pass of a law.

torch finds the shape, strides and dtype of an op's result by running the op on fake tensors, again for each layout of its operands. They
depend on the op and on the shapes, strides and dtypes of its arguments, not on how these are sharded: a rank computes them once and
writes them to a file for the other ranks of its pool. One key in :data:`CHECK_EVERY` each rank computes itself. Within a case, specs and
redistribution costs are cached too. The ranks of a world also share whole plans (:mod:`shardlaw.conformance.rank.shared_plans`).
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

MAX_ENTRIES = 4096  # in each rank's cache, and written by each rank
CHECK_EVERY = 16  # one key in so many is never read from other ranks


class MetadataCache:
    """Metadata of results, by op and arguments. The folder at ``path`` holds a file for each entry, which the ranks of a pool share."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._undo: tuple[Callable[[], None], ...] = ()
        self._forget: Callable[[], None] | None = None
        self._found: dict[Any, Any] = {}
        self._writes_left = MAX_ENTRIES

    def begin_case(self, *, reuse: bool) -> None:
        """Start a case: with ``reuse``, torch uses the cache from here on, else it runs unchanged."""
        if self._forget is not None:
            self._forget()
        if reuse and not self._undo:
            self._forget, undo = plans.cache_within_plans()
            self._undo = undo, plans.override_metadata(self._find)
        elif not reuse and self._undo:
            for undo in self._undo:
                undo()
            self._undo, self._forget = (), None

    def _find(self, original: Callable[[Any], Any], schema: Any) -> Any:
        try:
            question = str(schema.op), _freeze_value(schema.args_schema), _freeze_value(schema.kwargs_schema), torch.get_default_dtype()
            if question in self._found:
                return self._found[question]
        except TypeError:  # an argument with state or identity, or a symbolic size
            return original(schema)
        if len(self._found) >= MAX_ENTRIES:
            self._found.clear()
        key = hashlib.blake2b(repr(question).encode(), digest_size=16)
        found = self._read_shared(key.hexdigest()) if key.digest()[0] % CHECK_EVERY else None
        if found is None:
            found = original(schema)
            self._write_shared(key.hexdigest(), found)
        self._found[question] = found
        return found

    def _read_shared(self, key: str) -> Any:
        """The metadata that some rank has written for ``key``; ``None`` if none has."""
        try:
            with open(os.path.join(self._path, key), "rb") as file:
                return pickle.load(file)
        except OSError:
            return None

    def _write_shared(self, key: str, found: Any) -> None:
        """Write metadata for the other ranks, atomically: a rank may be killed at any moment."""
        name = os.path.join(self._path, key)
        if not self._writes_left or os.path.exists(name):
            return
        with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            data = pickle.dumps(found)
            os.makedirs(self._path, exist_ok=True)
            with open(f"{name}.{os.getpid()}", "wb") as file:
                file.write(data)
            os.rename(file.name, name)
            self._writes_left -= 1


def _freeze_value(value: Any) -> Any:
    """The part of an argument on which the metadata of a result depends, hashable. Raises ``TypeError`` for what is no plain data."""
    kind = type(value)
    if kind in plans.PLAIN_TYPES:
        return kind, value
    if kind is plans.spec_type():
        return value.tensor_meta, value.mesh.device_type
    if kind is dict:
        return kind, tuple((key, _freeze_value(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(_freeze_value, value))
    raise TypeError(kind)
