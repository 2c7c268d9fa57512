"""What a rank reuses, in the first pass of a law, of what it has worked out in earlier cases.

torch finds the shape, strides and dtype of an op's result by running it on fake tensors, for each layout of its operands anew. They depend
on the op and on the shapes, strides and dtypes of what it is given, not on how that is sharded: a rank asks once for each, and what one
rank of a pool has found the others take, but for one question in :data:`CHECKED`, which each rank asks torch itself. With :data:`PLANS` a
world's ranks also share whole plans (:mod:`shardlaw.conformance.rank.shared_plans`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from shardlaw.conformance import compat
from shardlaw.conformance import compat_plans as plans

METADATA, PLANS = "metadata", "plans"
REMEMBERED = 4096  # of each rank
CHECKED = 16
LARGEST_FILE = 8 << 20  # bytes
KEY_BYTES = 16
HEAD = struct.Struct(f"={KEY_BYTES}sI")  # of a record: its key, and how many bytes follow
ATOMS = {type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


class RememberedMetadata:
    """The metadata of results that the ranks of a pool have found: the file at ``path`` takes what is new, one record after the other."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._undo: Callable[[], None] | None = None
        self._file: int | None = None
        self._written: dict[bytes, bytes] = {}
        self._found: dict[Any, Any] = {}
        self._unread = b""

    def begin(self, *, wanted: bool) -> None:
        """Take from here on what was found, or leave torch as it was."""
        if wanted and self._undo is None:
            self._undo = plans.find_metadata_by(self._find)
        elif not wanted and self._undo is not None:
            self._undo()
            self._undo = None

    def _find(self, true: Callable[[Any], Any], schema: Any) -> Any:
        try:
            told = str(schema.op), _told(schema.args_schema), _told(schema.kwargs_schema), torch.get_default_dtype()
            if told in self._found:
                return self._found[told]
        except TypeError:  # something that has a state or an identity, or a symbolic size
            return true(schema)
        if len(self._found) >= REMEMBERED:
            self._found.clear()
        key = hashlib.blake2b(repr(told).encode(), digest_size=KEY_BYTES).digest()
        if key[0] % CHECKED and self._looked_up(key):
            found = pickle.loads(self._written[key])
        else:
            found = true(schema)
            self._publish(key, found)
        self._found[told] = found
        return found

    def _looked_up(self, key: bytes) -> bool:
        """Whether some rank has written down what it found."""
        if key not in self._written:
            with suppress(OSError):
                self._read()
        return key in self._written

    def _read(self) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        while more := os.read(self._file, 1 << 20):
            self._unread += more
        at = 0
        while at + HEAD.size <= len(self._unread):
            key, length = HEAD.unpack_from(self._unread, at)
            end = at + HEAD.size + length
            if end > len(self._unread):
                break
            self._written[key] = self._unread[at + HEAD.size : end]
            at = end
        self._unread = self._unread[at:]

    def _publish(self, key: bytes, found: Any) -> None:
        with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            data = pickle.dumps(found)
            self._looked_up(key)
            if self._file is not None and key not in self._written and os.fstat(self._file).st_size < LARGEST_FILE:
                os.write(self._file, HEAD.pack(key, len(data)) + data)


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
