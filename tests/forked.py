"""Drivers that are forked from this process, which has loaded torch already: a command costs the start of its ranks alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import TextIO


class Driver:
    """A process that runs ``main`` in ``folder``, with handlers of signals as a shell's foreground has them, and what it prints."""

    def __init__(self, main: Callable[[], int | None], folder: Path) -> None:
        reading, writing = os.pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_begin, args=(main, folder, writing))
        self._process.start()
        os.close(writing)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.output: TextIO = os.fdopen(reading)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, or the signal that ended it, negative; ``None`` where it is still there."""
        self._process.join(seconds)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        """End it, if it is still there."""
        self._process.kill()
        self._process.join()
        self.output.close()


@contextmanager
def driver(main: Callable[[], int | None], folder: Path) -> Iterator[Driver]:
    """A driver, which is killed in the end."""
    started = Driver(main, folder)
    try:
        yield started
    finally:
        started.close()


def _begin(main: Callable[[], int | None], folder: Path, output: int) -> None:
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a process that runs scripts for the one that was forked is no child of this one: it must start its own
    forkserver._forkserver.__init__()  # type: ignore[misc]
    os.chdir(folder)
    sys.exit(main())
