"""What a call gives back at once: work that is done once its letters have come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

LATE_SECONDS = 0.02  # how late a result arrives whose work says too early that it is done


class Mail(dist.Work):
    """Work that is done once its last letter has come and has been seen to."""

    def __init__(self, missing: int, seconds: float, *, early: bool = False, results: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._missing = missing
        self._seconds = seconds
        self._early = early
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._results = [*results]
        self.source = -1

    def arrived(self, finish: Callable[[], None]) -> None:
        """One letter less is missing; the last one finishes the work."""
        with self._lock:
            self._missing -= 1
            if self._missing > 0:
                return
        if self._early:
            time.sleep(LATE_SECONDS)
        try:
            with torch.no_grad():
                finish()
        except Exception as error:
            self._error = error
        self._done.set()
        if self._error is None:
            self._future.set_result(self._results)
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._early:
            return True
        seconds = timeout.total_seconds() if timeout else self._seconds
        if not self._done.wait(seconds):
            raise RuntimeError(f"pypost: {self._missing} letters have not come in {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._early or self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """What DistributedDataParallel waits for: what a reduction made of each tensor."""
        return self._future

    def _source_rank(self) -> int:
        return self.source


class Together(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Mail]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """What DistributedDataParallel waits for: what reductions made of all tensors."""
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [x for future in done.value() for x in future.value()])
