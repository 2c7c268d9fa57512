"""Placements: how a tensor lies along one mesh dim.

There is one placement for each mesh dim. ``R`` keeps the whole tensor on every rank; ``S(d)`` cuts tensor dim ``d``
into consecutive runs; ``_S(d,f)`` cuts it into ``f`` runs first and each of those among the ranks; ``P(op)`` leaves on
every rank a contribution, and the value is their reduction by ``op``; ``M(d)`` is the pending sum of a row lookup in a
table sharded on dim ``d``, to which each rank contributes its own rows.

:mod:`shardlaw.reference.layout` defines which elements each rank then has.

Source: the documentation of ``torch.distributed.tensor``, "Placements".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardlaw.reference.notation import NotationError, split_outside

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


@dataclass(frozen=True)
class Replicate:
    """Every rank of the mesh dim holds the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Tensor dim ``dim`` is cut into consecutive runs of ``ceil(n / ranks)``; the last ones may be short or empty."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class StridedShard:
    """Tensor dim ``dim`` is cut into ``split_factor`` runs, and each run among the ranks."""

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"_S({self.dim},{self.split_factor})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a contribution to all elements; the value is their reduction by ``op``."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True)
class MaskPartial:
    """A pending sum of masked row lookups in a table that is sharded on dim ``dim``.

    For rows that a rank does not have its contribution is unspecified until the sum is done: compare the sum, not the contributions.
    """

    dim: int = 0

    def __str__(self) -> str:
        return f"M({self.dim})"


Placement = Replicate | Shard | StridedShard | Partial | MaskPartial
Placements = tuple[Placement, ...]
EXAMPLES = "R, S(0), _S(0,2), P(sum) or M(0)"


def parse_placement(text: str) -> Placement:
    """The inverse of ``str``. Raises :class:`NotationError`."""
    if text == "R":
        return Replicate()
    if match := re.fullmatch(r"S\((-?\d+)\)", text, re.ASCII):
        return Shard(int(match[1]))
    if match := re.fullmatch(r"_S\((-?\d+),([1-9]\d*)\)", text, re.ASCII):
        return StridedShard(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"M\((\d+)\)", text, re.ASCII):
        return MaskPartial(int(match[1]))
    if (match := re.fullmatch(r"P\((\w+)\)", text)) and match[1] in REDUCE_OPS:
        return Partial(match[1])
    if text.startswith("P("):
        raise NotationError(f"placement {text!r}: want P(OP) with OP one of {', '.join(REDUCE_OPS)}")
    raise NotationError(f"placement {text!r}: want {EXAMPLES}")


def parse_placements(text: str) -> Placements:
    """``"S(0),R"`` → one placement a mesh dim, split on commas outside brackets. Raises :class:`NotationError`."""
    items = [item.strip() for item in split_outside(text)]
    if not items:
        raise NotationError(f"placements {text!r}: want one for each mesh dim, such as S(0),R")
    return tuple(map(parse_placement, items))


def format_placements(placements: Placements) -> str:
    """The canonical text: the inverse of :func:`parse_placements`."""
    return ",".join(map(str, placements))


def is_reduction(placement: Placement) -> bool:
    """Whether ranks along this mesh dim hold contributions rather than elements."""
    return isinstance(placement, (Partial, MaskPartial))


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that this placement cuts, or ``None``."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None
