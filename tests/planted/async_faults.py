"""Faults of saves in the background."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import _async_thread_executor as executor

from tests.planted.hook import breaks, instead


@breaks("roundtrip.at-once")
def saves_take_the_default_group() -> None:
    @instead(executor._ThreadBasedAsyncCheckpointExecutor, "execute_save")
    def fault(true: Any, self: Any, state: Any, **options: Any) -> Any:
        return true(self, state, **{**options, "process_group": None})
