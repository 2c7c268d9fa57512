"""What every contender runs: ten ops on float32 matrices, each with every choice of replicate and shard for each input.

Every size is used once in a process: a first pass over the cases of some sizes meets every sharding rule cold (distinct metadata), a second
one meets them warm (repeated).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PLACES = ("R", "S(0)", "S(1)")
ALIKE = tuple(" ".join(pair) for pair in itertools.product(PLACES, repeat=2) if pair[0] == pair[1] or "R" in pair)


@dataclass(frozen=True)
class Op:
    """One op: its function on tensors, how many it takes, how our programs spell it, and which input placements need no communication."""

    run: Callable[..., Any]
    inputs: int
    steps: str
    free: tuple[str, ...] = PLACES


OPS = {
    "add": Op(torch.add, 2, "add(a,b)", ALIKE),
    "mul": Op(torch.mul, 2, "mul(a,b)", ALIKE),
    "mm": Op(torch.mm, 2, "mm(a,b)", ("R R", "S(0) R", "R S(1)", "S(1) S(0)")),
    "nn.functional.relu": Op(torch.relu, 1, "nn.functional.relu(a)"),
    "exp": Op(torch.exp, 1, "exp(a)"),
    "sum": Op(lambda a: torch.sum(a, 0), 1, "sum(a,0)"),
    "mean": Op(lambda a: torch.mean(a, 1), 1, "mean(a,1)"),
    "nn.functional.softmax": Op(lambda a: torch.softmax(a, 1), 1, "nn.functional.softmax(a,1)", ("R", "S(0)")),
    "t": Op(torch.t, 1, "t(a)"),
    "amax": Op(lambda a: torch.amax(a, 0), 1, "amax(a,0)"),
}


@dataclass(frozen=True)
class Point:
    """One op with one choice of input placements, on matrices of ``rows`` by ``rows``."""

    op: str
    rows: int
    places: tuple[str, ...]

    def inputs(self) -> list[torch.Tensor]:
        """Small whole numbers, so that every order of summation gives the same."""
        elements = torch.arange(self.rows * self.rows, dtype=torch.float32).reshape(self.rows, self.rows)
        return [(elements + at) % 7 - 3 for at in range(len(self.places))]


def points(rows: int, *, free: bool = False) -> list[Point]:
    """All choices at one size; with ``free`` those that need no communication."""
    return [
        Point(name, rows, places)
        for name, op in OPS.items()
        for places in itertools.product(PLACES, repeat=op.inputs)
        if not free or " ".join(places) in op.free
    ]


SIZES_A_PASS = 4
KINDS = ("all", "free")
WARM_UP = 7  # a size that no pass has


def passes(kind: str, rounds: int) -> list[list[Point]]:
    """The points of each of some passes. No two passes, of whatever kind, share a size."""
    first = 1 + KINDS.index(kind) * rounds * SIZES_A_PASS
    numbers = [range(first + at * SIZES_A_PASS, first + (at + 1) * SIZES_A_PASS) for at in range(rounds)]
    return [[point for number in chosen for point in points(4 + 4 * number, free=kind == "free")] for chosen in numbers]
