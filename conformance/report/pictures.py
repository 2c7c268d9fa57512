"""What ranks expected and got as small grids, with the elements that differ marked.

The grids are parsed from the texts in a finding's file: ``[[1.0, 2.0]] float32 1x2``, of a large tensor only the first elements
(:func:`shardlaw.conformance.rank.context.describe_value`). A value that is no such text is shown as text.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlaw.reference.notation import NotationError, Shape, format_shape, parse_shape

MAX_ROWS = 12
MAX_COLUMNS = 12
MAX_SLICES = 6
MAX_ELEMENT_WIDTH = 9

TENSOR = re.compile(r"(?P<elements>\[[^;]*?\]|[^\s\[\];]+)(?P<cut> \.\.\.)? (?P<dtype>[a-z][a-z0-9_]*) (?P<shape>\(\)|\d+(?:x\d+)*)")
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")  # of an object in a rank's memory: differs from rank to rank
CONTRIBUTED = re.compile(r"; rank \d+ contributed ")


@dataclass(frozen=True)
class Elements:
    """A local tensor parsed from a text: all its elements in row-major order, or the first of them."""

    shape: Shape
    dtype: str
    elements: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Elements | None:
        """Parse a text; ``None`` if it does not describe a tensor."""
        found = TENSOR.fullmatch(text.strip())
        if found is None:
            return None
        try:
            shape = parse_shape(found["shape"])
        except NotationError:
            return None
        elements = tuple(re.findall(r"[^\[\],\s]+", found["elements"]))
        if len(elements) > math.prod(shape) or (len(elements) < math.prod(shape) and not found["cut"]):
            return None
        return cls(shape, found["dtype"], elements)

    @property
    def title(self) -> str:
        return f"{self.dtype} {format_shape(self.shape)}"


@dataclass(frozen=True)
class Cell:
    """One element: its shortened ``text``, the full text (``whole``), and whether it differs from the other side."""

    text: str
    whole: str
    differs: bool


@dataclass(frozen=True)
class Slice:
    """The last two dims of a tensor as rows of cells, with the indices of the others as ``label``."""

    label: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A local tensor, ready to be shown."""

    title: str
    described: str
    slices: tuple[Slice, ...]
    note: str

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for part in self.slices for row in part.rows for cell in row)


@dataclass(frozen=True)
class AnswerView:
    """The answer that several ranks gave alike: pictures of tensors, other values as texts."""

    ranks: str
    outcome: str
    message: str
    pictures: tuple[tuple[str, Picture], ...]
    texts: tuple[tuple[str, str], ...]
    stack: str
    output: str


def group_answers(ranks: Sequence[Mapping[str, Any]]) -> list[AnswerView]:
    """Group the ranks of a finding by equal answers."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for answer in ranks:
        texts = (str(answer.get(name, "")) for name in ("outcome", "message", "expected", "got", "stack", "output"))
        key = tuple(ADDRESS.sub("0x...", text) for text in texts)
        groups.setdefault(key, []).append(str(answer.get("rank", "?")))
    return [_answer_view(numbers, *key) for key, numbers in groups.items()]


def _answer_view(numbers: Sequence[str], outcome: str, message: str, expected: str, got: str, stack: str, output: str) -> AnswerView:
    reduced, *contributed = CONTRIBUTED.split(got, maxsplit=1)
    sides = {"expected": expected, "got": reduced, **({"contributed": contributed[0]} if contributed else {})}
    tensors = {name: Elements.parse(text) for name, text in sides.items()}
    differing = _differing_positions(tensors["expected"], tensors["got"])
    pictures = [
        (name, _draw_tensor(tensor, frozenset() if name == "contributed" else differing, f"{name} by rank {', '.join(numbers)}"))
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    texts = [(name, text) for name, text in sides.items() if tensors[name] is None and text.strip()]
    ranks = f"rank{'s' * (len(numbers) != 1)} {', '.join(numbers)}"
    return AnswerView(ranks, outcome, message, tuple(pictures), tuple(texts), stack.strip(), output.strip())


def _differing_positions(expected: Elements | None, got: Elements | None) -> frozenset[int]:
    """The row-major positions at which two tensors of one shape differ; empty if the shapes differ."""
    if expected is None or got is None or expected.shape != got.shape:
        return frozenset()
    pairs = zip(expected.elements, got.elements, strict=False)
    return frozenset(at for at, (due, held) in enumerate(pairs) if due != held)


def _draw_tensor(tensor: Elements, differing: frozenset[int], side: str) -> Picture:
    rows, columns = (1, 1, *tensor.shape)[-2:]
    leading = tensor.shape[:-2]
    cells = [Cell(_shorten_element(text, tensor.dtype), text, at in differing) for at, text in enumerate(tensor.elements)]
    slices: list[Slice] = []
    for number, index in enumerate(itertools.product(*map(range, leading))):
        first = number * rows * columns
        if number >= MAX_SLICES or first >= len(cells):
            break
        starts = range(first, min(first + min(rows, MAX_ROWS) * columns, len(cells)), columns)
        label = f"[{', '.join([*map(str, index), ':', ':'])}]" if leading else ""
        slices.append(Slice(label, tuple(tuple(cells[at : at + min(columns, MAX_COLUMNS)]) for at in starts)))
    size, shown = math.prod(tensor.shape), sum(len(row) for part in slices for row in part.rows)
    note = "no elements" if size == 0 else f"{shown} of {size} elements are drawn" if shown < size else ""
    count = f", {len(differing)} differ" if differing else ""
    return Picture(tensor.title, f"{side}: {tensor.title}{count}", tuple(slices), note)


def _shorten_element(text: str, dtype: str) -> str:
    """Shorten the text of an element: ``1`` for ``1.0``, ``T`` for ``True``."""
    if dtype == "bool":
        return text[:1]
    text = text.removesuffix(".0")
    return text if len(text) <= MAX_ELEMENT_WIDTH else f"{text[: MAX_ELEMENT_WIDTH - 1]}…"
