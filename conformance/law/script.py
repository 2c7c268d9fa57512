"""The part of a reproducer that depends on the case, as plain data: what ranks hold, call and expect."""

from __future__ import annotations

from dataclasses import dataclass


class ScriptError(ValueError):
    """A case that cannot become a script: a value has no literal, or an import is neither torch nor the standard library."""


@dataclass(frozen=True)
class Stage:
    """One world of a script: ``body`` is the body of ``def stage(rank):``; it returns ``(expected, got)`` for its rank.

    Both are tensors, values that compare with ``==``, or lists and tuples of these. A rank that returns ``(..., None)`` is not compared.
    The variable ``folder`` is the path of a temporary folder that all ranks and stages share.
    """

    world: int
    body: tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """The part of a reproducer that depends on the case: imports, constants, and one stage for each world.

    The template imports ``torch``, ``torch.distributed as dist``, ``multiprocessing``, ``signal``, ``sys`` and ``tempfile``. Lines are not
    indented; the template breaks long ones at commas within brackets. ``tolerance`` is the largest absolute difference at which two
    elements count as equal. ``definitions`` are the sources of functions and classes; ``compares`` names the parts of the template's
    ``agrees`` that the script needs, None all of them.
    """

    stages: tuple[Stage, ...]
    imports: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    tolerance: float = 0.0
    definitions: tuple[str, ...] = ()
    compares: tuple[str, ...] | None = None
