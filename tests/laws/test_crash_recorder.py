"""What the recorder of crashes takes for a meeting of ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils import store as stores

from shardlaw.conformance.laws.crash.recorder import watch_collectives


def test_a_barrier_over_a_store_is_a_meeting_of_all() -> None:
    """Some engines of checkpoints wait so, past the collectives of torch.distributed."""
    noted = list[tuple[Any, ...]]()
    with watch_collectives(lambda *step: noted.append(step)):
        stores.barrier(dist.HashStore(), world_size=1, key_prefix="saved", barrier_timeout=5)
    assert noted == [("meet", "", "all", 0)]
    stores.barrier(dist.HashStore(), world_size=1, key_prefix="after", barrier_timeout=5)
    assert len(noted) == 1
