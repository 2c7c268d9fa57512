"""``shardlaw compare``: two reports side by side. Two nights, two versions of torch, or a target of one's own against ``gloo``."""

from __future__ import annotations

from pathlib import Path

from shardlaw.conformance.report.comparison import compared
from shardlaw.conformance.run.finding_file import to_json


def compare(first: Path, second: Path, as_json: bool = False) -> int:
    """Print what differs; returns 1 where the second report says anything worse than the first, else 0. Raises :class:`UsageError`."""
    found = compared(first, second)
    if as_json:
        print(to_json(found), end="")
    else:
        from shardlaw.conformance.report.side_by_side import show
        from shardlaw.conformance.report.terminal import console

        show(console(), found)
    return found.exit
