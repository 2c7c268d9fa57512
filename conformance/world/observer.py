"""What is seen of a world's ranks without their help: a rank that hangs or dies can say nothing any more."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from shardlaw.conformance.world import watch
from shardlaw.conformance.world.output import tail, whole
from shardlaw.conformance.world.progress import Page, Place
from shardlaw.conformance.world.watch import Activity

STACK_SECONDS = 0.3


class Observer(Protocol):
    """The ranks of one world, seen from the driver."""

    def place(self, rank: int) -> Place:
        """Where a rank is."""

    def unsent(self, rank: int) -> bytes:
        """The messages that a rank holds back, as of the last :meth:`look`."""

    def left(self, rank: int) -> tuple[str, str]:
        """What a rank has left in files, as of the last :meth:`look`: its stacks, and the end of what it printed."""

    def activity(self) -> Sequence[Activity]:
        """How much of the CPU each rank that lives has used."""

    def share(self) -> float:
        """The part of a CPU, at most 1, that a rank which wants one gets."""

    def look(self, dump: Collection[int] = ()) -> None:
        """Bring everything up to date; ranks in ``dump`` write down the stacks of all their threads first."""

    def close(self) -> None:
        """Forget it all, and remove its files."""


class LocalObserver:
    """Of ranks on this machine: through a page of memory, files in ``folder``, and the process table. ``ask`` makes ranks dump stacks."""

    def __init__(self, folder: str, size: int, ask: Callable[[], None]) -> None:
        os.mkdir(folder)
        self.folder = folder
        self.pids: dict[int, int] = {}
        self._page = Page(f"{folder}/progress", size, create=True)
        self._ask = ask

    def place(self, rank: int) -> Place:
        return self._page.place(rank)

    def unsent(self, rank: int) -> bytes:
        return self._page.unsent(rank)

    def left(self, rank: int) -> tuple[str, str]:
        return whole(f"{self.folder}/rank-{rank}.stack"), tail(f"{self.folder}/rank-{rank}.out")

    def activity(self) -> Sequence[Activity]:
        return watch.activity(self.pids)

    def share(self) -> float:
        return watch.share()

    def look(self, dump: Collection[int] = ()) -> None:
        if not dump:
            return
        sizes = {path: size(path) for path in (f"{self.folder}/rank-{rank}.stack" for rank in dump)}
        self._ask()
        until = time.monotonic() + STACK_SECONDS / watch.share()
        while time.monotonic() < until and any(size(path) == before for path, before in sizes.items()):
            time.sleep(0.002)
        time.sleep(0.005)  # the last of them may still be writing

    def close(self) -> None:
        self._page.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def size(path: str) -> int:
    """The size of a file in bytes; 0 where there is none."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
