"""What a program of steps is made of (:mod:`conformance.program`): a small tree of names, literals and calls. Printing it is canonical."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A tensor of the case, or the result of an earlier step."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Literal:
    """A number, ``True``, ``None``, a string or ``...``."""

    value: Any

    def __str__(self) -> str:
        if self.value is ...:
            return "..."
        if isinstance(self.value, float) and not math.isfinite(self.value):
            return str(self.value)
        return repr(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True)
class Dtype:
    """``torch.int64`` and its like."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class Row:
    """A tuple or a list."""

    items: tuple[Node, ...]
    tuple_: bool

    def __str__(self) -> str:
        inner = ",".join(map(str, self.items))
        if not self.tuple_:
            return f"[{inner}]"
        return f"({inner},)" if len(self.items) == 1 else f"({inner})"


@dataclass(frozen=True)
class Call:
    """A function by name, or (``base`` set) a method of ``base``."""

    function: str
    args: tuple[Node, ...]
    kwargs: tuple[tuple[str, Node], ...] = ()
    base: Node | None = None

    def __str__(self) -> str:
        given = ",".join([*map(str, self.args), *(f"{key}={value}" for key, value in self.kwargs)])
        return f"{'' if self.base is None else f'{self.base}.'}{self.function}({given})"


@dataclass(frozen=True)
class Attribute:
    """``a.T`` and its like."""

    base: Node
    name: str

    def __str__(self) -> str:
        return f"{self.base}.{self.name}"


Node = Name | Literal | Dtype | Row | Call | Attribute


@dataclass(frozen=True)
class Step:
    """One expression, and the name of its result where it has one."""

    node: Node
    target: str = ""

    def __str__(self) -> str:
        return f"{self.target}={self.node}" if self.target else str(self.node)


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it, in the order of the text."""
    yield node
    children: tuple[Node, ...] = ()
    if isinstance(node, Row):
        children = node.items
    elif isinstance(node, Attribute):
        children = (node.base,)
    elif isinstance(node, Call):
        children = (*((node.base,) if node.base is not None else ()), *node.args, *(value for _, value in node.kwargs))
    for child in children:
        yield from walk(child)
