"""Private names of torch behind the process groups of gloo: groups of a rank that share what carries their messages."""

from __future__ import annotations

import os
from typing import Any

from shardlaw.conformance.compat import private


def share_device() -> None:
    """Let all gloo groups that this process makes from now on use one device. torch makes a device for each, and with it a thread that
    wakes up a hundred times a second as long as its group lives. Without effect where the installed torch has no gloo, and where somebody
    chose the network interfaces: torch makes a device for each of them."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        c10d = private("make gloo groups share a device", "torch.distributed.distributed_c10d:")
        whole, options, new_device = c10d.ProcessGroupGloo, c10d.ProcessGroupGloo._Options, c10d.ProcessGroupGloo.create_default_device
    except (ImportError, AttributeError):
        return
    device = new_device()

    class AnyGloo(type(whole)):  # type: ignore[misc]
        def __instancecheck__(self, one: Any) -> bool:  # what torch hands back of a group is of the class that it knows
            return isinstance(one, whole)

    class OnOneDevice(whole, metaclass=AnyGloo):  # type: ignore[misc,valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            asked = options()
            asked._devices, asked._timeout = [device], timeout
            asked._threads = 2  # as torch has of each
            super().__init__(store, rank, size, asked)

    c10d.ProcessGroupGloo = OnOneDevice
