"""The catalogue as text or JSON."""

from __future__ import annotations

import json
import textwrap
from typing import Any

WIDTH = 100


def list_laws(patterns: tuple[str, ...], as_json: bool) -> str:
    """The laws that the patterns select. Raises :class:`~shardlaw.conformance.errors.UsageError`."""
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.selection import select
    from shardlaw.conformance.laws import catalogue

    def record(law: Law) -> dict[str, Any]:
        return {
            "id": law.id,
            "chapter": law.chapter,
            "tier": law.tier,
            "clause": law.clause,
            "source": law.source,
            "needs": list(law.needs),
            "smallest": law.smallest,
            "weight": law.weight,
            "draws": law.draws,
            "sweeps": law.sweeps,
            "refusal": law.refusal if isinstance(law.refusal, str) else "allowed",
            "control": law.control,
            "aliases": list(law.aliases),
        }

    laws = select(list(catalogue().values()), patterns)
    if as_json:
        return json.dumps([record(law) for law in laws], indent=2)
    lines = []
    for law in laws:
        lines.append(f"{law.id}  ({law.tier})")
        lines += textwrap.wrap(law.clause, WIDTH, initial_indent="    ", subsequent_indent="    ")
        lines += textwrap.wrap(f"source: {law.source}", WIDTH, initial_indent="    ", subsequent_indent="      ")
    return "\n".join([*lines, f"{len(laws)} laws"])


def list_features(as_json: bool) -> str:
    """Every feature, by the line of the input space that it belongs to."""
    from shardlaw.conformance.law.features.feature_lines import LINES

    if as_json:
        return json.dumps(LINES, indent=2)
    width = max(len(name) for names in LINES.values() for name in names)
    lines = []
    for line, names in LINES.items():
        lines += [line, *(f"    {name:{width}}  {meaning}" for name, meaning in names.items())]
    return "\n".join(lines)
