"""How a person stops a command: Ctrl-C or SIGTERM.

A signal raises :class:`Stopped` once, wherever the driver is. Python throws away what is raised inside a finalizer, so the signal is
remembered too, and whoever works in a loop calls :func:`check`. Signals that come while a command cleans up wait; the third one ends it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

MOST_PATIENT = 3


class Stopped(KeyboardInterrupt):
    """A signal came."""


_met: list[int] = []
_seen_to = False


def check() -> None:
    """Raises :class:`Stopped` where a signal came that nobody has seen to."""
    if _met and not _seen_to:
        raise Stopped


def is_asked() -> bool:
    """Whether a signal has come."""
    return bool(_met)


def seen_to() -> int:
    """For whoever caught it, before cleaning up: :func:`check` raises no more. Returns the exit code, 130 or 143."""
    global _seen_to
    _seen_to = True
    return 128 + (_met[0] if _met else signal.SIGINT)


def _hear(number: int, frame: object) -> None:
    _met.append(number)
    if len(_met) >= MOST_PATIENT:
        os._exit(128 + number)
    if len(_met) == 1:
        raise Stopped


@contextmanager
def listening() -> Iterator[None]:
    """Hear SIGINT and SIGTERM as above, while this lasts."""
    global _seen_to
    _met.clear()
    _seen_to = False
    before = {number: signal.signal(number, _hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
