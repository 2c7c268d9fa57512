"""The literal part of a reproducer, which a law writes: what its ranks hold, call and expect."""

from __future__ import annotations

from dataclasses import dataclass


class ScriptError(ValueError):
    """A case that cannot be told as a script: something has no literal, or an import is not torch's."""


@dataclass(frozen=True)
class Stage:
    """One world of a script: ``body`` is the body of ``def stage(rank):``; it returns ``(expected, got)`` for its rank.

    Both are tensors, values that compare with ``==``, or lists and tuples of those; of a rank that returns
    ``(..., None)`` nothing is due. The variable ``folder`` names a temporary folder that all ranks and stages share.
    """

    world: int
    body: tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """The literal part of a reproducer: imports beyond the template's, constants, and one stage for each world.

    The template imports ``torch``, ``torch.distributed as dist``, ``multiprocessing``, ``signal``, ``sys`` and ``tempfile``. Lines carry no
    indent of their own; those that are too long are cut at commas within brackets. ``tolerance`` is the largest absolute
    difference of two elements that still counts as equal. ``definitions`` are functions and classes; ``compares`` names the parts of the
    template's ``agrees`` that are needed.
    """

    stages: tuple[Stage, ...]
    imports: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    tolerance: float = 0.0
    definitions: tuple[str, ...] = ()
    compares: tuple[str, ...] | None = None
