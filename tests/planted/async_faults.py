"""Faults of saves in the background, and of states that are not waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import _async_thread_executor as executor
from torch.distributed.checkpoint import staging
from torch.distributed.tensor import DTensor

from tests.planted.hook import breaks, instead


@breaks("roundtrip.at-once")
def saves_write_what_the_first_was_given() -> None:
    given: list[Any] = []

    @instead(executor._ThreadBasedAsyncCheckpointExecutor, "execute_save")
    def fault(true: Any, self: Any, state: Any, **options: Any) -> Any:
        given.append(state)
        return true(self, given[0], **options)


class WhenAsked(Future[Any]):
    """A save that is made when its result is asked for: later than whatever its caller does before, however busy the machine is."""

    def __init__(self, save: Callable[[], Any]) -> None:
        super().__init__()
        self._save = save

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._save())
        return super().result(timeout)


@breaks("roundtrip.async", "roundtrip.staged")
def staging_without_copy() -> None:
    """An asynchronous save writes the tensors of the caller, whatever they hold by then."""

    def unstaged(self: Any, state: Any, *args: Any, **options: Any) -> Any:
        return state

    staging.BlockingAsyncStager.stage = unstaged
    dcp.FileSystemWriter.stage = unstaged

    @instead(executor._ThreadBasedAsyncCheckpointExecutor, "execute_save")
    def later(true: Any, self: Any, state: Any, **options: Any) -> Any:
        return WhenAsked(lambda: true(self, state, **options).result())


@breaks("roundtrip.async-options")
def planners_of_background_saves_ignored() -> None:
    @instead(executor._ThreadBasedAsyncCheckpointExecutor, "execute_save")
    def fault(true: Any, self: Any, state: Any, **options: Any) -> Any:
        return true(self, state, **(options | {"planner": None}))


@breaks("roundtrip.staging-ends")
def staging_not_waited_for() -> None:
    staging.DefaultStager.synchronize_staging = lambda self: None


@breaks("roundtrip.staging-fails")
def errors_of_staging_kept_back() -> None:
    """What a staging has raised is not told by the future that says when it is complete."""

    @instead(dcp, "async_save")
    def fault(true: Any, *given: Any, **options: Any) -> Any:
        found = true(*given, **options)
        complete: Future[None] = Future()
        found.staging_completion.add_done_callback(lambda _: complete.set_result(None))
        found.staging_completion = complete
        return found


@breaks("roundtrip.stager-closed")
def own_stager_left_to_the_caller() -> None:
    @instead(dcp, "async_save")
    def fault(true: Any, *given: Any, **options: Any) -> Any:
        stager = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
        return true(*given, **({"async_stager": stager} | options))


@breaks("roundtrip.unfinished")
def unfinished_redistribution_is_lost() -> None:
    @instead(DTensor, "redistribute")
    def fault(true: Any, self: Any, *args: Any, async_op: bool = False, **options: Any) -> Any:
        moved = true(self, *args, async_op=async_op, **options)
        if async_op:
            moved.to_local().zero_()
        return moved
