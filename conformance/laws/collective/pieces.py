"""What each member of a group gives to a collective and must get, by the reference.

An :class:`Ask` is what a case says of one collective. From it come the :class:`Pieces` of every member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.reference import collective
from shardlaw.reference.notation import NotationError, Shape
from shardlaw.reference.tensors import DTYPES, lay_out
from shardlaw.strategies.collectives import contribution, payload

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
Row = list[torch.Tensor]


@dataclass(frozen=True)
class Ask:
    """One collective among ``size`` members: ``root`` is a position in the group; ``extents`` are the rows of each
    member, ``splits`` the rows that each sends to each; ``form`` is how a tensor stands for a list; ``out`` is how the
    memory of outputs is laid out, ``turn`` tells calls of one case apart."""

    name: str
    size: int
    shape: Shape
    dtype: torch.dtype
    fill: str
    memory: str
    out: str
    op: str
    root: int
    form: str
    extents: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    seed: int
    turn: int

    @classmethod
    def of(cls, case: Case, name: str, size: int, turn: int = 0) -> Ask:
        spec, out, op = case.tensor("x"), case.get("out", "plain"), case.get("op", "sum")
        root, form, extents = case.integer("root", 0), case.get("form", "joined"), numbers(case.get("extents", ""))
        splits = tuple(numbers(row) for row in case.get("splits").split("/")) if "splits" in case else ()
        dtype = DTYPES[spec.dtype]
        if spec.fill not in ("distinct", "wide", "edges"):
            raise NotationError(f"x={spec}: want distinct, wide or edges values")
        return cls(
            name, size, spec.shape, dtype, spec.fill, spec.memory, out, op, root, form, extents, splits, case.seed, turn
        )

    @property
    def has_meaning(self) -> bool:
        """Whether what is reduced has a reduction by ``op``."""
        return self.name not in REDUCING or collective.is_reducible(self.dtype, self.op)

    @property
    def span(self) -> int:
        """How many elements the largest piece has."""
        rows = (*self.extents, *(count for row in self.splits for count in row))
        return max(rows, default=self.shape[0] if self.shape else 1) * math.prod(self.shape[1:])

    def shape_of(self, position: int) -> Shape:
        """The shape that belongs to a member."""
        return (self.extents[position], *self.shape[1:]) if self.extents else self.shape

    def given(self, position: int, shape: Shape | None = None) -> torch.Tensor:
        """The piece at ``position`` of all that is handed over and not reduced, with its memory laid out."""
        at = position + self.turn * self.size**2
        return lay_out(
            payload(self.shape if shape is None else shape, self.dtype, at, self.span, self.fill), self.memory
        )

    def added(self, position: int, part: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """What a member adds to a reduction, with its memory laid out."""
        seed, op = 10000 * self.turn + 1000 * self.seed + 100 * part + 1, self.op if self.has_meaning else "sum"
        shape = self.shape if shape is None else shape
        added = contribution(shape, self.dtype, op, self.size, seed, position % self.size, self.fill)
        return lay_out(added, self.memory)

    def joined(self, pieces: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """Pieces joined along a dim, in memory laid out as theirs; not expanded, as rows differ."""
        whole, plain = collective.concatenate(pieces, dim), all(piece.is_contiguous() for piece in pieces)
        return whole if plain or self.memory == "expanded" else lay_out(whole, self.memory)

    def rounded(self, want: torch.Tensor) -> Any:
        """A reduction as a due value: averages are exact among as many members as a power of two."""
        return want if self.op != "avg" or self.size in (1, 2, 4, 8) else Near(want)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("."))) if text else ()


@dataclass(frozen=True)
class Pieces:
    """What one member gives and must get; ``wanted`` is ``None`` where nothing is promised."""

    given: Row
    wanted: Row | None


@lru_cache(64)
def pieces(ask: Ask) -> list[Pieces]:
    """What every member gives and must get, by its position."""
    places, op, root = range(ask.size), ask.op if ask.has_meaning else "sum", ask.root
    wanted: Sequence[Sequence[torch.Tensor] | None]
    match ask.name:
        case "all_reduce" | "reduce":
            given = alone([ask.added(at) for at in places])
            total = collective.all_reduce([x for (x,) in given], op)
            wanted = [None if ask.name == "reduce" and at != root else [total[at]] for at in places]
        case "broadcast":
            given = alone([ask.given(at) for at in places])
            wanted = collective.broadcast(given, root)
        case "all_gather" | "all_gather_single" | "gather":
            row = [ask.given(at, ask.shape_of(at)) for at in places]
            whole = [collective.stack(row) if ask.form == "stacked" else collective.concatenate(row)]
            given, wanted = alone(row), [whole if ask.name == "all_gather_single" else row] * ask.size
            wanted = [want or [] for want in collective.gather(row, root)] if ask.name == "gather" else wanted
        case "scatter":
            row = [ask.given(root * ask.size + at, ask.shape_of(at)) for at in places]
            given = [row if at == root else [] for at in places]
            wanted = alone(collective.scatter(given, root))
        case "reduce_scatter" | "reduce_scatter_single":
            given = [[ask.added(at, to, ask.shape_of(to)) for to in places] for at in places]
            wanted = alone(collective.reduce_scatter(given, op))
            if ask.name == "reduce_scatter_single":
                join = collective.stack if ask.form == "stacked" else collective.concatenate
                given = [[lay_out(join(row), ask.memory)] for row in given]
        case "all_to_all":
            table = ask.splits or ((None,) * ask.size,) * ask.size
            shapes = [[ask.shape if rows is None else (rows, *ask.shape[1:]) for rows in row] for row in table]
            given = [[ask.given(at * ask.size + to, shapes[at][to]) for to in places] for at in places]
            wanted = collective.all_to_all(given)
        case _:
            counts = [sum(split) for split in ask.splits] or [ask.size * ask.shape[0]] * ask.size
            first, span = ask.turn * ask.size, ask.size * max(ask.span, math.prod(ask.shape))
            row = [
                payload((count, *ask.shape[1:]), ask.dtype, first + at, span, ask.fill)
                for at, count in enumerate(counts)
            ]
            given = alone([lay_out(x, ask.memory) for x in row])
            wanted = alone(collective.all_to_all_single([x for (x,) in given], ask.splits or None))
    return [Pieces(row, None if want is None else list(want)) for row, want in zip(given, wanted, strict=True)]


def alone(values: Sequence[torch.Tensor]) -> list[Row]:
    return [[value] for value in values]
