"""The device that a rank works on: what it still does, and whether it does anything more."""

from __future__ import annotations

import torch


def synchronize(device: str) -> None:
    """Wait for what a device still does: errors that it tells of late belong to the case that was just run."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def is_lost(device: str) -> bool:
    """Whether a device does nothing more for this process, as CUDA's after an assertion of a kernel failed."""
    try:
        synchronize(device)
    except Exception:
        return True
    return False
