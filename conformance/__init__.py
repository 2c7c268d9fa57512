"""How the specification is checked against real processes: laws, worlds, targets, search, findings, reports, commands.

As a library: :func:`check`, :class:`Worlds` and what they speak of, below. Importing the package loads none of it; each name is
fetched when it is first asked for. ``docs/library.md`` shows how to use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.api import DeviationError, Outcome, Ranks, Worlds, check, close, explain
    from conformance.case import Case
    from conformance.errors import UsageError
    from conformance.here import Here
    from conformance.law import Law, Limits
    from conformance.report.reproducer import Script, Stage
    from conformance.target import Target
    from conformance.verdict import Answer, Verdict

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Case",
    "DeviationError",
    "Here",
    "Law",
    "Limits",
    "Outcome",
    "Ranks",
    "Script",
    "Stage",
    "Target",
    "UsageError",
    "Verdict",
    "Worlds",
    "check",
    "close",
    "explain",
]

_ROOMS = {
    "api": ("DeviationError", "Outcome", "Ranks", "Worlds", "check", "close", "explain"),
    "case": ("Case",),
    "errors": ("UsageError",),
    "here": ("Here",),
    "law": ("Law", "Limits"),
    "report.reproducer": ("Script", "Stage"),
    "target": ("Target",),
    "verdict": ("Answer", "Verdict"),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"conformance.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
