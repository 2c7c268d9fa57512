"""What a rank leaves in files: its prints and its stacks."""

from __future__ import annotations

import os

SHOWN = 4096
LONGEST = 1 << 16


def tail(path: str, since: int = 0) -> str:
    """The end of a text file, from byte ``since`` on; from its beginning if it has been cut since."""
    for _ in range(5):
        try:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(since if since <= size else 0, size - SHOWN))
                data = file.read(SHOWN)
        except OSError:
            return ""
        # a file that is being cut down may have lost these bytes meanwhile
        if data or size in (0, since):
            return data.decode(errors="replace")
    return ""


def whole(path: str) -> str:
    """A text file, up to a limit."""
    try:
        with open(path, "rb") as file:
            return file.read(LONGEST).decode(errors="replace")
    except OSError:
        return ""
