"""Find where hung ranks wait, from the stacks that they dumped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
PACKAGE = os.path.join(str(Path(__file__).resolve().parents[1]), "")


def wait_place(stack: str) -> str:
    """Describe where the main thread of a rank waits: the function, and the line outside torch that called it."""
    frames = [match for thread in re.split(r"\n\s*\n", stack)[-1:] for match in FRAME.finditer(thread)]  # innermost first
    inside = next((at for at, frame in enumerate(frames) if "torch" in Path(frame["file"]).parts), None)
    if inside is None:
        return f"{_format_frame(frames[0])}" if frames else ""
    outside = next((frame for frame in frames[inside:] if "torch" not in Path(frame["file"]).parts), None)
    call = next((frame for frame in frames[inside:] if "distributed" in Path(frame["file"]).parts), frames[inside])
    return f"in {call['name']} ({Path(call['file']).name}:{call['line']})" + (f", called at {_format_frame(outside)}" if outside else "")


def _format_frame(frame: re.Match[str]) -> str:
    return f"{frame['file'].removeprefix(PACKAGE)}:{frame['line']}"


def describe_waits(ranks: Iterable[Mapping[str, object]]) -> list[str]:
    """A line for each place where silent or crashed ranks wait. ``ranks`` are the answers in a finding's file."""
    places: dict[str, list[str]] = {}
    for answer in ranks:
        if answer.get("outcome") in ("silent", "crashed") and (found := wait_place(str(answer.get("stack") or ""))):
            places.setdefault(found, []).append(str(answer.get("rank")))
    return [f"rank{'s' * (len(who) > 1)} {', '.join(who)} wait{'s' * (len(who) == 1)} {where}" for where, who in places.items()]
