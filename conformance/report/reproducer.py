"""A finding as a script that needs torch alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One world of a script: ``body`` is the body of ``def stage(rank):``; it returns ``(expected, got)`` for its rank.

    Both are tensors, or values that compare with ``==``; a rank with nothing to say returns ``(None, None)``.
    """

    world: int
    body: tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """The literal part of a reproducer: imports beyond the template's, constants, and one stage for each world."""

    stages: tuple[Stage, ...]
    imports: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
