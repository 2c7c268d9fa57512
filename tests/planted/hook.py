"""Planted faults: each function of a ``*_faults`` module of this folder plants one in the process that calls it, before the process group
starts, and says with :func:`breaks` which laws must catch it.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault to plant: the function that plants it, and the case that shows it (empty: the control case of the law)."""

    plant: Callable[[], None]
    case: str = ""

    @property
    def name(self) -> str:
        return self.plant.__name__


FAULTS: dict[str, Fault] = {}


def breaks(*laws: str, case: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Says that a fault breaks these laws (ids, or patterns such as ``op.forward[*]``): the law's control, or ``case``, holds without
    it and deviates with it."""

    def of(plant: Callable[[], None]) -> Callable[[], None]:
        for law in laws:
            assert law not in FAULTS, f"two faults are planted for {law}"
            FAULTS[law] = Fault(plant, case)
        return plant

    return of


def files() -> list[Path]:
    """The files of the modules of faults."""
    return sorted(Path(__file__).parent.glob("*_faults.py"))


def module(file: Path) -> Any:
    """The module of faults that a file holds, imported."""
    return importlib.import_module(f"tests.planted.{file.stem}")


@functools.cache
def _patterns() -> list[str]:
    """What planted faults break, with more than one law, the longest first. Imports all faults."""
    for file in files():
        module(file)
    return sorted((pattern for pattern in FAULTS if {*pattern} & {*"*?"}), key=len, reverse=True)


def fault_of(law: str) -> Fault | None:
    """The fault that a law must catch: its own, or that of the longest pattern that fits."""
    patterns = _patterns()
    fitting = law if law in FAULTS else next((pattern for pattern in patterns if fnmatchcase(law, pattern.replace("[", "[[]"))), None)
    return FAULTS[fitting] if fitting else None


def planted() -> None:
    """Plant what the file ``PLANTED_FAULT_FILE`` names, if it names anything, so that one pool can serve all faults."""
    named = Path(os.environ["PLANTED_FAULT_FILE"]).read_text().strip()
    if named:
        plant(named)


def plant(named: str) -> None:
    """Plant the fault of this name in this process, which imports no other faults: many processes plant one."""
    file = next(file for file in files() if f"\ndef {named}(" in file.read_text("utf-8"))
    getattr(module(file), named)()


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
