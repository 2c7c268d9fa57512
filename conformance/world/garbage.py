"""How often Python looks for garbage."""

from __future__ import annotations

import atexit
import gc

YOUNG_OBJECTS = 50_000  # Python's own threshold is below 3,000


def collect_rarely() -> None:
    """Look for garbage less often, and not when the process ends. Importing torch makes hundreds of thousands of objects, all of which
    stay: usual collections go through them again and again."""
    gc.set_threshold(YOUNG_OBJECTS)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
