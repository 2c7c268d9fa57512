"""Observe the ranks of a world without their help: a rank that hangs or has died sends no messages."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from shardlaw.conformance.world import watch
from shardlaw.conformance.world.output import read_head, read_tail
from shardlaw.conformance.world.progress import Position, ProgressPage
from shardlaw.conformance.world.watch import Activity

STACK_SECONDS = 0.3


class Observer(Protocol):
    """Observes the ranks of one world for the driver."""

    def position(self, rank: int) -> Position:
        """The batch, case and state that a rank is in."""

    def unsent(self, rank: int) -> bytes:
        """The messages that a rank has buffered and not sent, as of the last :meth:`refresh`."""

    def stacks_and_output(self, rank: int) -> tuple[str, str]:
        """The stacks that a rank has dumped and the end of its output, as of the last :meth:`refresh`."""

    def activity(self) -> Sequence[Activity]:
        """The CPU use of each live rank."""

    def cpu_share(self) -> float:
        """The share of a CPU, at most 1, that a busy rank gets."""

    def refresh(self, dump: Collection[int] = ()) -> None:
        """Update what the other methods return. Ranks in ``dump`` first write the stacks of all their threads."""

    def close(self) -> None:
        """Release everything, and remove the files."""


class LocalObserver:
    """Observes ranks of this machine through shared memory, files in ``folder`` and the process table. ``request_dump()`` signals the ranks
    to dump their stacks."""

    def __init__(self, folder: str, size: int, request_dump: Callable[[], None]) -> None:
        os.mkdir(folder)
        self.folder = folder
        self.pids: dict[int, int] = {}
        self._page = ProgressPage(f"{folder}/progress", size, create=True)
        self._request_dump = request_dump

    def position(self, rank: int) -> Position:
        return self._page.position(rank)

    def unsent(self, rank: int) -> bytes:
        return self._page.unsent(rank)

    def stacks_and_output(self, rank: int) -> tuple[str, str]:
        return read_head(f"{self.folder}/rank-{rank}.stack"), read_tail(f"{self.folder}/rank-{rank}.out")

    def activity(self) -> Sequence[Activity]:
        return watch.read_activity(self.pids)

    def cpu_share(self) -> float:
        return watch.cpu_share()

    def refresh(self, dump: Collection[int] = ()) -> None:
        if not dump:
            return
        sizes = {path: file_size(path) for path in (f"{self.folder}/rank-{rank}.stack" for rank in dump)}
        self._request_dump()
        until = time.monotonic() + STACK_SECONDS / watch.cpu_share()
        while time.monotonic() < until and any(file_size(path) == before for path, before in sizes.items()):
            time.sleep(0.002)
        time.sleep(0.005)  # the last rank may still be writing

    def close(self) -> None:
        self._page.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def file_size(path: str) -> int:
    """The size of a file in bytes; 0 where there is none."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
