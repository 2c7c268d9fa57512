"""Private names of torch behind the process groups of gloo: groups of a rank that share what carries their messages."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from shardlaw.conformance.compat import private


def share_device() -> None:
    """Let all gloo groups that this process makes from now on use the same devices: one, or one for each network interface that somebody
    chose. torch makes them anew for each group, and with each a thread that wakes up a hundred times a second as long as the group lives.
    Without effect where the installed torch has no gloo."""
    try:
        c10d = private("make gloo groups share a device", "torch.distributed.distributed_c10d:")
        whole = c10d.ProcessGroupGloo
        new_options, of_interface, of_host = whole._Options, whole.create_device, whole.create_default_device
    except (ImportError, AttributeError):
        return

    @cache
    def devices() -> list[Any]:
        interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        return [of_interface(interface=name) for name in interfaces] or [of_host()]

    class AnyGloo(type(whole)):  # type: ignore[misc]
        def __instancecheck__(self, one: Any) -> bool:  # what torch hands back of a group is of the class that it knows
            return isinstance(one, whole) if self is OnOneDevice else super().__instancecheck__(one)

    class OnOneDevice(whole, metaclass=AnyGloo):  # type: ignore[misc,valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any = None, **more: Any) -> None:
            if any(more.values()) or not isinstance(timeout, (timedelta, type(None))):  # options of one's own, or what a later release has
                super().__init__(store, rank, size, timeout, **more)
                return
            asked = new_options()
            asked._devices, asked._threads = devices(), 2 * len(devices())
            asked._timeout = asked._timeout if timeout is None else timeout
            super().__init__(store, rank, size, asked)

    c10d.ProcessGroupGloo = dist.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]
