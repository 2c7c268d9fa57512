"""Where every rank of a world is, in memory that the driver reads without asking: a rank that hangs or dies can say nothing any more."""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

LARGEST_BATCH = 64

IDLE, RUNNING, PARKED = 0, 1, 2

_PLACE = struct.Struct("<III")
_SLOT = 128


class Place(NamedTuple):
    """Batch and case at which a rank is, and whether it waits for work, runs the case, or waits after an exception."""

    batch: int
    index: int
    state: int


class Page:
    """One slot for each rank: its :class:`Place`, and for each case of the batch whether its check has ended without anything to say."""

    def __init__(self, path: str, size: int, *, create: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, size * _SLOT)
            self._memory = mmap.mmap(descriptor, size * _SLOT)
        finally:
            os.close(descriptor)

    def enter(self, rank: int, batch: int, index: int, state: int) -> None:
        """Say where ``rank`` is."""
        _PLACE.pack_into(self._memory, rank * _SLOT, batch, index, state)

    def begin(self, rank: int) -> None:
        """Forget what was held: a new batch begins."""
        start = rank * _SLOT + _PLACE.size
        self._memory[start : start + LARGEST_BATCH] = bytes(LARGEST_BATCH)

    def hold(self, rank: int, index: int) -> None:
        """The case at ``index`` held on ``rank``; its answer may still be waiting to be sent."""
        self._memory[rank * _SLOT + _PLACE.size + index] = 1

    def place(self, rank: int) -> Place:
        return Place(*_PLACE.unpack_from(self._memory, rank * _SLOT))

    def held(self, rank: int, index: int) -> bool:
        return bool(self._memory[rank * _SLOT + _PLACE.size + index])

    def close(self) -> None:
        self._memory.close()
