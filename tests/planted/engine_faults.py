"""Faults of engines that stand for ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed import _local_tensor

from tests.planted.hook import breaks, instead


@breaks("engine.simulated")
def a_part_is_turned_round() -> None:
    @instead(_local_tensor, "tensor_map")
    def fault(true: Any, tensor: Any, see: Any) -> Any:
        return true(tensor, lambda rank, part: see(rank, part.flip(0)))
