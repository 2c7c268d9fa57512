"""Plants a fault in a rank process: each function of a ``*_faults`` module of this folder plants one when it is called, before the
process group starts.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def planted() -> None:
    """Plant what the file ``PLANTED_FAULT_FILE`` names, if it names anything, so that one pool can serve all faults."""
    named = Path(os.environ["PLANTED_FAULT_FILE"]).read_text().strip()
    if named:
        rooms = (importlib.import_module(f"tests.planted.{path.stem}") for path in sorted(Path(__file__).parent.glob("*_faults.py")))
        next(room for room in rooms if getattr(vars(room).get(named), "__module__", "") == room.__name__).__dict__[named]()


def instead(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace an attribute by a function that is given the true one first."""
    static = isinstance(vars(owner).get(name), staticmethod)
    true = getattr(owner, name)

    def replace(fault: Callable[..., Any]) -> None:
        @functools.wraps(true)
        def faulty(*args: Any, **options: Any) -> Any:
            return fault(true, *args, **options)

        setattr(owner, name, staticmethod(faulty) if static else faulty)

    return replace
