"""Live worlds: rank processes that are started once, serve many cases, and are replaced when they die, hang or fall out of step.

:class:`Pool` is the way in. Everything else is how: a launcher starts ranks, a protocol speaks to them, a watch decides when one hangs.
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
