"""The notation of shapes, and the error that all parsers of this package raise.

Printing is canonical, and parsing what was printed gives the same value back. A shape is its sizes joined by ``x``
(``5x6``, ``0x3``, ``7``); the shape of a 0-d tensor is ``()``. The notation of meshes lives in :mod:`shardlaw.reference.mesh`,
that of placements in :mod:`shardlaw.reference.placement`.
"""

from __future__ import annotations

Shape = tuple[int, ...]


class NotationError(ValueError):
    """A text that cannot be parsed. The message quotes it and says what is valid."""


def parse_shape(text: str) -> Shape:
    """``"5x6"`` → ``(5, 6)``, in elements. Raises :class:`NotationError`."""
    if text == "()":
        return ()
    sizes = text.split("x")
    if not all(size.isascii() and size.isdigit() and len(size) < 19 for size in sizes):
        raise NotationError(f"shape {text!r}: want sizes joined by 'x', such as 5x6, or () for a 0-d tensor")
    return tuple(int(size) for size in sizes)


def format_shape(shape: Shape) -> str:
    """The canonical text of a shape: the inverse of :func:`parse_shape`."""
    return "x".join(map(str, shape)) if shape else "()"


def split_outside(text: str, separator: str = ",") -> list[str]:
    """Split ``text`` at every ``separator`` outside brackets and quotes; an empty text has no items."""
    items, depth, start, quote = [], 0, 0, ""
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == separator and depth == 0:
            items.append(text[start:at])
            start = at + 1
    return [*items, text[start:]] if text else items
