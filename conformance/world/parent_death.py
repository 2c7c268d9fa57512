"""End a process when its parent ends. Imports nothing slow."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Have the kernel send this process signal ``number`` when the parent's thread that started it ends. Does nothing where the system
    lacks ``prctl``."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def exit_with_driver(driver: int, exit: Callable[[], object]) -> None:
    """Call ``exit`` once the parent, process ``driver``, has ended. Ctrl-C is ignored: the driver handles it."""

    def on_sigterm(_number: int, _frame: object) -> None:
        # the signal also comes when only the driver's thread that started this process has ended
        if os.getppid() != driver:
            exit()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_sigterm)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != driver:
        exit()
