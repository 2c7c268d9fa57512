"""What laws of torch.compile need between cases."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from shardlaw.conformance import compat


def reset_compiler() -> None:
    """Drop everything compiled, and how ops are sharded, where a failed compilation leaves what makes later ops fail.
    tqdm, which compilation uses, starts no monitor thread."""
    if importlib.util.find_spec("tqdm") is not None:
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    torch.compiler.reset()
    compat.op_plans()
