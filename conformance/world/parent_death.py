"""How a process makes sure that it does not outlive the one that it works for. Imports nothing that takes time."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Ask the kernel for a signal when the parent's thread that made this process ends. Does nothing where there is no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def follow(driver: int, end: Callable[[], object]) -> None:
    """Call ``end`` once process ``driver``, the parent, has gone; leave interrupts from the keyboard to it."""

    def told(_number: int, _frame: object) -> None:
        # the signal also comes when only the driver's thread that made this process has ended
        if os.getppid() != driver:
            end()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, told)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != driver:
        end()
