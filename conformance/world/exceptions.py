"""A rank's exceptions as data, to send to the driver."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from types import TracebackType

from shardlaw.conformance.law.verdict import Raised

MAX_TEXT = 4000
MAX_FRAMES = 40
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")


def describe_error(error: BaseException) -> Raised:
    """The class, text and stack of an exception, each cut to a limit."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(no text: {type(second).__name__})"
    text = text[:MAX_TEXT].encode(errors="backslashreplace").decode()
    return Raised(type(error).__name__, text, "\n".join(_frames(error.__traceback__))[: 2 * MAX_TEXT])


def is_raised_by_harness(error: BaseException) -> bool:
    """Whether a line of this package raised the exception."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and os.path.realpath(frames[-1]).startswith(PACKAGE)


def _frames(trace: TracebackType | None) -> Iterator[str]:
    # no source lines: reading them costs more than a case
    for frame, line in list(traceback.walk_tb(trace))[-MAX_FRAMES:]:
        yield f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
