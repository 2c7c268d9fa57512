"""Live worlds: rank processes that start once, run many cases, and are replaced when they die, hang or fall out of step.

:class:`Pool` is the entry point. Behind it a launcher starts ranks, a protocol carries messages, and a watch decides when a rank hangs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlaw.conformance.world.launch import WorldError
    from shardlaw.conformance.world.pool import Pool

__all__ = ["Pool", "WorldError"]


def __getattr__(name: str) -> Any:
    # the server and the ranks live in this package too, and must not import the driver's side first
    if name == "Pool":
        from shardlaw.conformance.world.pool import Pool

        return Pool
    if name == "WorldError":
        from shardlaw.conformance.world.launch import WorldError

        return WorldError
    raise AttributeError(name)
