"""Memory that the driver shares with the ranks of a world, to read their progress after they hang or die.

It holds the position of each rank, and the messages that the rank has not sent yet: answers are sent in bulk, and buffered ones must not
be lost with their rank.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

MAX_BATCH_CASES = 64
BUFFER_BYTES = 32_000  # of unsent messages, for each rank

IDLE, RUNNING, PARKED, RAISED, ANSWERED = 0, 1, 2, 3, 4

_POSITION = struct.Struct("<IIII")
_LENGTH = struct.Struct("<I")
_BOX = _POSITION.size + _LENGTH.size
_SLOT = _BOX + BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class Position:
    """The batch and case that a rank is at, and its state: it waits for work (``IDLE``), runs the case (``RUNNING``), has just raised
    (``RAISED``), waits after that (``PARKED``), or has answered and waits for the others (``ANSWERED``). ``verified``: how many process
    groups a parked rank has found sound, of perhaps hundreds."""

    batch: int
    index: int
    state: int
    verified: int = 0


class ProgressPage:
    """One slot for each rank: its :class:`Position` and its unsent messages. ``create``: the driver makes the file, ranks open it."""

    def __init__(self, path: str, size: int, *, create: bool = False) -> None:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(descriptor, size * _SLOT)
            self._memory = mmap.mmap(descriptor, size * _SLOT)
        finally:
            os.close(descriptor)
        self._used = 0

    # The rank's side

    def set_position(self, rank: int, batch: int, index: int, state: int, verified: int = 0) -> None:
        """Record where ``rank`` is."""
        _POSITION.pack_into(self._memory, rank * _SLOT, batch, index, state, verified)

    def buffer(self, rank: int, message: bytes) -> bool:
        """Add a message to the unsent ones; false where there is no room for it."""
        if self._used + len(message) > BUFFER_BYTES:
            return False
        start = rank * _SLOT + _BOX + self._used
        self._memory[start : start + len(message)] = message
        self._used += len(message)
        # written last, so that it never covers a message in part
        _LENGTH.pack_into(self._memory, rank * _SLOT + _POSITION.size, self._used)
        return True

    def clear_buffer(self, rank: int) -> None:
        """Drop the unsent messages, once they are sent."""
        self._used = 0
        _LENGTH.pack_into(self._memory, rank * _SLOT + _POSITION.size, 0)

    def has_finished(self, rank: int, batch: int, index: int) -> bool:
        """Whether ``rank`` no longer runs the case."""
        place = self.position(rank)
        return (place.batch, place.index, place.state != RUNNING) > (batch, index, False)

    # The driver's side

    def position(self, rank: int) -> Position:
        return Position(*_POSITION.unpack_from(self._memory, rank * _SLOT))

    def unsent(self, rank: int) -> bytes:
        """The messages that ``rank`` has not sent, in order."""
        (length,) = _LENGTH.unpack_from(self._memory, rank * _SLOT + _POSITION.size)
        start = rank * _SLOT + _BOX
        return self._memory[start : start + min(length, BUFFER_BYTES)]

    def close(self) -> None:
        self._memory.close()
