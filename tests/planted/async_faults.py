"""Faults of saves in the background."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import _async_thread_executor as executor

from tests.planted.hook import breaks, instead


@breaks("roundtrip.at-once")
def saves_write_what_the_first_was_given() -> None:
    given: list[Any] = []

    @instead(executor._ThreadBasedAsyncCheckpointExecutor, "execute_save")
    def fault(true: Any, self: Any, state: Any, **options: Any) -> Any:
        given.append(state)
        return true(self, given[0], **options)
