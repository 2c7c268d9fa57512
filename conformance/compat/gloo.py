"""Let the gloo process groups of a rank share a device, through private names of torch."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from shardlaw.conformance.compat import find_private


def share_device() -> None:
    """Make all later gloo groups of this process share one device for each interface of ``GLOO_SOCKET_IFNAME``, or one in all.

    torch creates a device for each group, with a thread that wakes up a hundred times a second while the group lives. Does nothing where
    the installed torch has no gloo.
    """
    try:
        c10d = find_private("make gloo groups share a device", "torch.distributed.distributed_c10d:")
        original = c10d.ProcessGroupGloo
        new_options, create_device, create_default = original._Options, original.create_device, original.create_default_device
    except (ImportError, AttributeError):
        return

    @cache
    def devices() -> list[Any]:
        interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        return [create_device(interface=name) for name in interfaces] or [create_default()]

    class SharedDeviceMeta(type(original)):  # type: ignore[misc]
        def __instancecheck__(self, instance: Any) -> bool:  # groups that C++ returns are of the original class
            return isinstance(instance, original) if self is SharedDeviceGloo else super().__instancecheck__(instance)

    class SharedDeviceGloo(original, metaclass=SharedDeviceMeta):  # type: ignore[misc,valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any = None, **more: Any) -> None:
            if any(more.values()) or not isinstance(
                timeout, (timedelta, type(None))
            ):  # the caller's options, or arguments of a later torch
                super().__init__(store, rank, size, timeout, **more)
                return
            options = new_options()
            options._devices, options._threads = devices(), 2 * len(devices())
            options._timeout = options._timeout if timeout is None else timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = dist.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]
