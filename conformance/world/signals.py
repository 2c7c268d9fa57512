"""Ctrl-C and SIGTERM, which stop a command.

The first signal raises :class:`Stopped`, wherever the driver is. Python drops an exception that is raised in a finalizer, so the signal is
recorded too, and loops call :func:`raise_if_stopped`. Signals that come during the clean-up are ignored; the third one ends the process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SIGNALS = 3


class Stopped(KeyboardInterrupt):
    """A signal came."""


_received: list[int] = []
_is_acknowledged = False


def raise_if_stopped() -> None:
    """Raises :class:`Stopped` if a signal has come that is not acknowledged."""
    if _received and not _is_acknowledged:
        raise Stopped


def is_stop_requested() -> bool:
    """Whether a signal has come."""
    return bool(_received)


def acknowledge_stop() -> int:
    """Call it after catching :class:`Stopped`, before cleaning up: :func:`raise_if_stopped` then raises no more. Returns the exit code, 130
    or 143."""
    global _is_acknowledged
    _is_acknowledged = True
    return 128 + (_received[0] if _received else signal.SIGINT)


def _on_signal(number: int, frame: object) -> None:
    _received.append(number)
    if len(_received) >= MAX_SIGNALS:
        os._exit(128 + number)
    if len(_received) == 1:
        raise Stopped


@contextmanager
def handle_signals() -> Iterator[None]:
    """Handle SIGINT and SIGTERM in the block as the module describes, and restore their handlers after it."""
    global _is_acknowledged
    _received.clear()
    _is_acknowledged = False
    before = {number: signal.signal(number, _on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
