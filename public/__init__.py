"""The public API of Shardlaw: :func:`check`, :class:`Worlds` and the types that they use.

Names are imported on first use, so that ``import shardlaw`` is fast. ``docs/library.md`` shows how to use them. The other public packages
are :mod:`shardlaw.reference`, the executable specification, and :mod:`shardlaw.strategies`, Hypothesis strategies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlaw.conformance.api import DeviationError, Outcome, Ranks, Worlds, check, close, explain
    from shardlaw.conformance.errors import UsageError
    from shardlaw.conformance.law.act import fields, law, texts
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.due import Alike, AtMost, Claimed, Either, Global, Meaningless, Near, Of, Refused, caught
    from shardlaw.conformance.law.fields import (
        Between,
        Device,
        Folder,
        LocalTensor,
        NamedMesh,
        Placements,
        Rank,
        Seed,
        Shape,
        WorldSize,
    )
    from shardlaw.conformance.law.law import Law, Limits
    from shardlaw.conformance.law.script import Script, Stage
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Answer, Verdict
    from shardlaw.conformance.rank.context import RankContext
    from shardlaw.conformance.twin.session import twin
    from shardlaw.conformance.twin.spec import Twin

__version__ = "0.1.0"

__all__ = [
    "Alike",
    "Answer",
    "AtMost",
    "Between",
    "Case",
    "Claimed",
    "DeviationError",
    "Device",
    "Either",
    "Folder",
    "Global",
    "Law",
    "Limits",
    "LocalTensor",
    "Meaningless",
    "NamedMesh",
    "Near",
    "Of",
    "Outcome",
    "Placements",
    "Rank",
    "RankContext",
    "Ranks",
    "Refused",
    "Script",
    "Seed",
    "Shape",
    "Stage",
    "Target",
    "Twin",
    "UsageError",
    "Verdict",
    "WorldSize",
    "Worlds",
    "caught",
    "check",
    "close",
    "explain",
    "fields",
    "law",
    "texts",
    "twin",
]

_NAMES_BY_MODULE = {
    "api": ("DeviationError", "Outcome", "Ranks", "Worlds", "check", "close", "explain"),
    "errors": ("UsageError",),
    "law.act": ("fields", "law", "texts"),
    "law.case": ("Case",),
    "law.due": ("Alike", "AtMost", "Claimed", "Either", "Global", "Meaningless", "Near", "Of", "Refused", "caught"),
    "law.fields": ("Between", "Device", "Folder", "LocalTensor", "NamedMesh", "Placements", "Rank", "Seed", "Shape", "WorldSize"),
    "law.law": ("Law", "Limits"),
    "law.script": ("Script", "Stage"),
    "law.target": ("Target",),
    "law.verdict": ("Answer", "Verdict"),
    "rank.context": ("RankContext",),
    "twin.session": ("twin",),
    "twin.spec": ("Twin",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(importlib.import_module(f"shardlaw.conformance.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
