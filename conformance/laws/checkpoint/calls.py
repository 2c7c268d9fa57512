"""What the acts on checkpoints call: plain torch code, which scripts have by its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

POISON, OTHER_POISON = 113, 114


class CheckpointFailed(Exception):
    """A save or load that torch gave up on all ranks: the step that failed, and the first rank's error in one line."""

    def __init__(self, error: CheckpointException) -> None:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        self.step, self.failures = error.args[0], error.failures
        first = f"{self.step}: {type(cause).__name__}: {cause}"
        super().__init__(f"{first}\nranks {sorted(self.failures)}; rank {rank}:\n{error}")


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn a ``CheckpointException``, no ``Exception`` and all traceback, into :class:`CheckpointFailed`."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointFailed(error) from error


def save(state: dict[str, Any], writer: Any, planner: Any = None, **how: Any) -> Any:
    """Save a state; returns its metadata. Raises :class:`CheckpointFailed`."""
    with told_plainly():
        return dcp.save(state, storage_writer=writer, planner=planner, **how)


def load(state: dict[str, Any], reader: Any, planner: Any = None, **how: Any) -> dict[str, Any]:
    """Load into a state, and return it. Raises :class:`CheckpointFailed`."""
    with told_plainly():
        dcp.load(state, storage_reader=reader, planner=planner, **how)
    return state


def finish(pending: Any) -> Any:
    """What an asynchronous save gives in the end. Raises :class:`CheckpointFailed`."""
    future: Future[Any] = pending if isinstance(pending, Future) else pending.upload_completion
    with told_plainly():
        return future.result()


def failure(attempt: Callable[[], Any]) -> Any:
    """The exception with which all ranks give a save or a load up. Another error passes: a rank that gets it has left
    the others."""
    try:
        attempt()
    except CheckpointFailed as error:
        return error
    return None


def first_line(error: Any) -> str:
    """The first line of what an error says."""
    return str(error).partition("\n")[0]


class App:
    """An object with state of its own, as an application would put it into a checkpoint."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
        self.loads += 1


def poison(want: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype that differs from ``want`` in every element."""
    if want.dtype == torch.bool:
        return ~want
    return torch.full_like(want, POISON).where(want != POISON, torch.full_like(want, OTHER_POISON))
