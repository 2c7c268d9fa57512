"""The inputs of each member of a group to a collective, and the outputs that it must get, by the reference.

A :class:`CollectiveSpec` is what a case says of one collective; :func:`member_data` computes the data of every member.
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
class CollectiveSpec:
    """One collective among ``size`` members.

    ``root`` is a position in the group. ``extents``: the number of rows of each member; ``splits``: how many rows each
    member sends to each. ``form``: how one tensor stands for a list of tensors. ``memory`` and ``out``: the memory
    layout of inputs and outputs. ``index``: the position among the calls of the case, whose inputs differ.
    """

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
    index: int

    @classmethod
    def from_case(cls, case: Case, name: str, size: int, index: int = 0) -> CollectiveSpec:
        tensor = case.tensor("x")
        if tensor.fill not in ("distinct", "wide", "edges"):
            raise NotationError(f"x={tensor}: want distinct, wide or edges values")
        return cls(
            name,
            size,
            tensor.shape,
            DTYPES[tensor.dtype],
            tensor.fill,
            tensor.memory,
            out=case.get("out", "plain"),
            op=case.get("op", "sum"),
            root=case.integer("root", 0),
            form=case.get("form", "joined"),
            extents=parse_ints(case.get("extents", "")),
            splits=tuple(map(parse_ints, case.get("splits").split("/"))) if "splits" in case else (),
            seed=case.seed,
            index=index,
        )

    @property
    def is_defined(self) -> bool:
        """False where a reduction by ``op`` is not defined for the dtype."""
        return self.name not in REDUCING or collective.is_reducible(self.dtype, self.op)

    @property
    def span(self) -> int:
        """The number of elements of the largest input."""
        rows = (*self.extents, *(count for row in self.splits for count in row))
        return max(rows, default=self.shape[0] if self.shape else 1) * math.prod(self.shape[1:])

    def shape_of(self, position: int) -> Shape:
        """The shape of a member's tensor."""
        return (self.extents[position], *self.shape[1:]) if self.extents else self.shape

    def payload(self, position: int, shape: Shape | None = None) -> torch.Tensor:
        """The tensor number ``position`` that is moved and not reduced."""
        number = position + self.index * self.size**2
        shape = self.shape if shape is None else shape
        return lay_out(payload(shape, self.dtype, number, self.span, self.fill), self.memory)

    def contribution(self, position: int, part: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """What a member contributes to the reduction number ``part``."""
        seed, op = 10000 * self.index + 1000 * self.seed + 100 * part + 1, self.op if self.is_defined else "sum"
        shape = self.shape if shape is None else shape
        local = contribution(shape, self.dtype, op, self.size, seed, position % self.size, self.fill)
        return lay_out(local, self.memory)

    def concatenate(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """The parts in one tensor, in their memory layout unless that is expanded: rows differ."""
        joined, plain = collective.concatenate(parts, dim), all(part.is_contiguous() for part in parts)
        return joined if plain or self.memory == "expanded" else lay_out(joined, self.memory)

    def due_value(self, expected: torch.Tensor) -> Any:
        """An expected output as a due value: averages over 3, 5, 6 or 7 members round."""
        return expected if self.op != "avg" or self.size in (1, 2, 4, 8) else Near(expected)


def parse_ints(text: str) -> tuple[int, ...]:
    """``1.2.0`` as numbers."""
    return tuple(map(int, text.split("."))) if text else ()


@dataclass(frozen=True)
class MemberData:
    """The inputs of one member, and its expected outputs; ``None`` where nothing is promised of them."""

    inputs: Row
    expected: Row | None


@lru_cache(64)
def member_data(spec: CollectiveSpec) -> list[MemberData]:
    """The data of every member, by its position. Raises ``IndexError`` or ``RuntimeError`` for a spec without a
    meaning."""
    members, op, root = range(spec.size), spec.op if spec.is_defined else "sum", spec.root
    expected: Sequence[Sequence[torch.Tensor] | None]
    match spec.name:
        case "all_reduce" | "reduce":
            inputs = one_each([spec.contribution(at) for at in members])
            total = collective.all_reduce([x for (x,) in inputs], op)
            expected = [None if spec.name == "reduce" and at != root else [total[at]] for at in members]
        case "broadcast":
            inputs = one_each([spec.payload(at) for at in members])
            expected = collective.broadcast(inputs, root)
        case "all_gather" | "all_gather_single" | "gather":
            row = [spec.payload(at, spec.shape_of(at)) for at in members]
            joined = [collective.stack(row) if spec.form == "stacked" else collective.concatenate(row)]
            inputs, expected = one_each(row), [joined if spec.name == "all_gather_single" else row] * spec.size
            expected = [got or [] for got in collective.gather(row, root)] if spec.name == "gather" else expected
        case "scatter":
            row = [spec.payload(root * spec.size + at, spec.shape_of(at)) for at in members]
            inputs = [row if at == root else [] for at in members]
            expected = one_each(collective.scatter(inputs, root))
        case "reduce_scatter" | "reduce_scatter_single":
            inputs = [[spec.contribution(at, to, spec.shape_of(to)) for to in members] for at in members]
            expected = one_each(collective.reduce_scatter(inputs, op))
            if spec.name == "reduce_scatter_single":
                join = collective.stack if spec.form == "stacked" else collective.concatenate
                inputs = [[lay_out(join(row), spec.memory)] for row in inputs]
        case "all_to_all":
            table = spec.splits or ((None,) * spec.size,) * spec.size
            shapes = [[spec.shape if rows is None else (rows, *spec.shape[1:]) for rows in row] for row in table]
            inputs = [[spec.payload(at * spec.size + to, shapes[at][to]) for to in members] for at in members]
            expected = collective.all_to_all(inputs)
        case _:
            counts = [sum(split) for split in spec.splits] or [spec.size * spec.shape[0]] * spec.size
            first, span = spec.index * spec.size, spec.size * max(spec.span, math.prod(spec.shape))
            row = [
                payload((count, *spec.shape[1:]), spec.dtype, first + at, span, spec.fill)
                for at, count in enumerate(counts)
            ]
            inputs = one_each([lay_out(x, spec.memory) for x in row])
            expected = one_each(collective.all_to_all_single([x for (x,) in inputs], spec.splits or None))
    return [MemberData(row, got if got is None else list(got)) for row, got in zip(inputs, expected, strict=True)]


def one_each(values: Sequence[torch.Tensor]) -> list[Row]:
    """A list of one tensor for each member."""
    return [[value] for value in values]
