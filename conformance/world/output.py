"""Read the files that hold a rank's output and its stacks."""

from __future__ import annotations

import os

TAIL_BYTES = 4096
HEAD_BYTES = 1 << 16


def read_tail(path: str, since: int = 0) -> str:
    """The end of a text file, from byte ``since`` on, or from its start if it is shorter by now; empty if it cannot be read."""
    for _ in range(5):
        try:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(since if since <= size else 0, size - TAIL_BYTES))
                data = file.read(TAIL_BYTES)
        except OSError:
            return ""
        # the server may have truncated the file between the two reads
        if data or size in (0, since):
            return data.decode(errors="replace")
    return ""


def read_head(path: str) -> str:
    """The beginning of a text file, up to a limit; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES).decode(errors="replace")
    except OSError:
        return ""
