"""Exceptions of a rank as data, which travels to the driver."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from types import TracebackType

from shardlaw.conformance.law.verdict import Raised

SHOWN_ERROR = 4000
SHOWN_FRAMES = 40
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")


def describe(error: BaseException) -> Raised:
    """An exception as data."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(no text: {type(second).__name__})"
    text = text[:SHOWN_ERROR].encode(errors="backslashreplace").decode()
    return Raised(type(error).__name__, text, "\n".join(_frames(error.__traceback__))[: 2 * SHOWN_ERROR])


def of_harness(error: BaseException) -> bool:
    """Whether an exception was raised by a line of this package."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and os.path.realpath(frames[-1]).startswith(PACKAGE)


def _frames(trace: TracebackType | None) -> Iterator[str]:
    # no source lines: reading them costs more than a case
    for frame, line in list(traceback.walk_tb(trace))[-SHOWN_FRAMES:]:
        yield f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
