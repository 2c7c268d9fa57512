"""Python statements made to fit a number of columns, and packed into few lines."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence


class UnfitError(ValueError):
    """A statement that cannot be cut into lines as short as they must be, or that is no Python."""


def fitted(lines: Sequence[str], columns: int, *, pack: bool = False) -> list[str]:
    """The same statements in lines of at most ``columns``, cut within brackets; with ``pack`` in as few lines as they need.

    Raises :class:`UnfitError`.
    """
    kept: list[str] = []
    for group in statements(lines):
        if pack:
            group = [line for line in group if line.strip()]
        long = any(len(line) > columns for line in group)
        if group and (long or (pack and len(group) > 1)):
            kept += _cut(_joined(group), columns)
        else:
            kept += group
    return kept


def statements(lines: Sequence[str]) -> list[list[str]]:
    """The lines of each logical line: one, or as many as its brackets and strings span; blank lines stand alone."""
    source = [line.rstrip() for entry in lines for line in entry.split("\n")]
    groups: list[list[str]] = []
    taken = 0
    for token in _tokens("\n".join(source) + "\n"):
        if token.type == tokenize.NEWLINE:
            while taken < token.start[0] and not source[taken].strip():
                groups.append([source[taken]])
                taken += 1
            groups.append(source[taken : token.end[0]])
            taken = token.end[0]
    return groups + [[line] for line in source[taken:]]


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    try:
        return list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        raise UnfitError(f"not Python: {error}") from None


def _joined(group: Sequence[str]) -> str:
    """One line of what brackets hold together. Raises :class:`UnfitError` where a comment or a long string stands in the way."""
    if len(group) == 1:
        return group[0]
    if any(token.type == tokenize.COMMENT or "\n" in token.string.strip("\n") for token in _tokens("\n".join(group) + "\n")):
        raise UnfitError(f"a comment or a string in the middle of a long statement: {group[0].strip()[:60]}")
    text = group[0]
    for line in group[1:]:
        part = line.strip()
        closing = part[:1] in ")]}"
        if closing and text.endswith(",") and not text.endswith(("(,", "[,")) and part[0] in "]}":
            text = text[:-1]
        text += part if closing or text.endswith(("(", "[", "{")) else f" {part}"
    return text


def _cut(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    indent = len(line) - len(line.lstrip())
    text, depth = line.strip(), 0
    commas, brackets = [], []
    for token in _tokens(text + "\n"):
        if token.type == tokenize.COMMENT:
            raise UnfitError(f"a comment behind a long statement: {text[:60]}")
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if depth and token.string == ",":
                commas.append(token.end[1])
            elif token.string in "([{":
                brackets.append(token.end[1])
    lines, start, lead = [], 0, indent
    further = indent + (8 if text.endswith(":") else 4)
    while len(text) - start + lead > columns:
        room = start + columns - lead
        ends = [at for at in commas if start < at <= room] or [at for at in brackets if start < at <= room]
        if not ends:
            raise UnfitError(f"a line of {len(line)} columns that cannot be cut: {text[:60]}")
        lines.append(" " * lead + text[start : max(ends)].strip())
        start, lead = max(ends), further
        start += len(text[start:]) - len(text[start:].lstrip())
    return [*lines, " " * lead + text[start:]]
