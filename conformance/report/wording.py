"""Formatting of short texts, for the terminal and the report files."""

from __future__ import annotations


def one_line(text: str, limit: int = 240) -> str:
    """The text on one line, cut to ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def count_noun(number: int, noun: str, plural: str | None = None) -> str:
    """``1 law``, ``2 laws``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
