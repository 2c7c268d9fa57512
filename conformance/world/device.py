"""The device of a rank: wait for its pending work, and find out whether it is lost."""

from __future__ import annotations

import torch


def synchronize(device: str) -> None:
    """Wait for the pending work of a device, so that errors which it reports late are raised within the case that caused them."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def is_lost(device: str) -> bool:
    """Whether a device refuses all further work of this process, as CUDA does after a kernel's assertion has failed."""
    try:
        synchronize(device)
    except Exception:
        return True
    return False
