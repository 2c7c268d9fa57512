"""What laws of torch.compile need around a case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardlaw.conformance import compat


def reset_compiler() -> None:
    """Drop everything compiled, and how ops are sharded: after a failed compilation it makes later ops fail."""
    torch.compiler.reset()
    compat.op_plans()


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Compile anew, and leave nothing to others."""
    reset_compiler()
    try:
        yield
    finally:
        reset_compiler()
