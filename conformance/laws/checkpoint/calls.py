"""Helpers of acts on checkpoints: plain torch code, which scripts copy as source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageWriter

POISON, OTHER_POISON = 113, 114


class CheckpointFailed(Exception):
    """A ``CheckpointException`` as an ``Exception``: the step that failed, and on one line the error of the lowest rank
    that failed."""

    def __init__(self, error: CheckpointException) -> None:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        self.step, self.failures = error.args[0], error.failures
        first = f"{self.step}: {type(cause).__name__}: {cause}"
        super().__init__(f"{first}\nranks {sorted(self.failures)}; rank {rank}:\n{error}")


@contextmanager
def convert_failures() -> Iterator[None]:
    """Turn a ``CheckpointException``, which is not an ``Exception``, into :class:`CheckpointFailed`."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointFailed(error) from error


def save(state: dict[str, Any], writer: Any, planner: Any = None, **options: Any) -> Any:
    """Save a state and return its metadata. Raises :class:`CheckpointFailed`."""
    with convert_failures():
        return dcp.save(state, storage_writer=writer, planner=planner, **options)


def load(state: dict[str, Any], reader: Any, planner: Any = None, **options: Any) -> dict[str, Any]:
    """Load into ``state`` and return it. Raises :class:`CheckpointFailed`."""
    with convert_failures():
        dcp.load(state, storage_reader=reader, planner=planner, **options)
    return state


def wait_for_save(pending: Any) -> Any:
    """Wait for an asynchronous save and return its metadata. Raises :class:`CheckpointFailed`."""
    future: Future[Any] = pending if isinstance(pending, Future) else pending.upload_completion
    with convert_failures():
        return future.result()


def caught_failure(attempt: Callable[[], Any]) -> Any:
    """The :class:`CheckpointFailed` that ``attempt`` raises, or ``None``. Other errors propagate, since one may be
    raised on a single rank."""
    try:
        attempt()
    except CheckpointFailed as error:
        return error
    return None


def first_line(error: Any) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


class PlainWriter(StorageWriter):
    """A writer that hands everything to another one, and does not stage."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def reset(self, checkpoint_id: Any = None) -> None:
        self.writer.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        self.writer.set_up_storage_writer(is_coordinator, *args, **options)

    def prepare_local_plan(self, plan: Any) -> Any:
        return self.writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self.writer.prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self.writer.write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self.writer.finish(metadata, results)

    def storage_meta(self) -> Any:
        return self.writer.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class App:
    """A stateful object of an application, with the number of its loads."""

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
