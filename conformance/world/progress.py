"""What a rank leaves where the driver can read it without asking: a rank that hangs or dies can say nothing any more.

A page of memory that driver and ranks share tells where each rank is, and holds the messages that it has not sent yet: answers travel in
bulk, and those that wait must not be lost with their rank.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

LARGEST_BATCH = 64
ROOM = 32_000  # bytes of messages that a rank may hold back

IDLE, RUNNING, PARKED, RAISED, ANSWERED = 0, 1, 2, 3, 4

_PLACE = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_BOX = _PLACE.size + _LENGTH.size
_SLOT = _BOX + ROOM


@dataclass(frozen=True, slots=True)
class Place:
    """Batch and case at which a rank is, and whether it waits for work, runs the case, waits after an exception, has just raised one, or
    has answered and waits for the others."""

    batch: int
    index: int
    state: int


class Page:
    """One slot for each rank: its :class:`Place`, and the bytes that it is going to send."""

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

    def enter(self, rank: int, batch: int, index: int, state: int) -> None:
        """Say where ``rank`` is."""
        _PLACE.pack_into(self._memory, rank * _SLOT, batch, index, state)

    def keep(self, rank: int, message: bytes) -> bool:
        """Hold a message back; false where there is no room for it."""
        if self._used + len(message) > ROOM:
            return False
        start = rank * _SLOT + _BOX + self._used
        self._memory[start : start + len(message)] = message
        self._used += len(message)
        # the length comes last: what it covers is whole
        _LENGTH.pack_into(self._memory, rank * _SLOT + _PLACE.size, self._used)
        return True

    def sent(self, rank: int) -> None:
        """What was held back has been sent."""
        self._used = 0
        _LENGTH.pack_into(self._memory, rank * _SLOT + _PLACE.size, 0)

    def has_done(self, rank: int, batch: int, index: int) -> bool:
        """Whether ``rank`` runs a case no more."""
        place = self.place(rank)
        return (place.batch, place.index, place.state != RUNNING) > (batch, index, False)

    # The driver's side

    def place(self, rank: int) -> Place:
        return Place(*_PLACE.unpack_from(self._memory, rank * _SLOT))

    def unsent(self, rank: int) -> bytes:
        """The messages that ``rank`` holds back, in the order in which it would send them."""
        (length,) = _LENGTH.unpack_from(self._memory, rank * _SLOT + _PLACE.size)
        start = rank * _SLOT + _BOX
        return self._memory[start : start + min(length, ROOM)]

    def close(self) -> None:
        self._memory.close()
