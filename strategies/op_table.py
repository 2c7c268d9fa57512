"""Reads tables of ops.

An op is a line with its name and properties, followed by indented lines with arguments and calls on them::

    mm pairs small float32,int64
        a=m,k b=k,n | mm(a,b)
        a=m,n n>=1  | mm(a,t(a))

Words after the name: a fill (``small``), dtypes (``floats``, ``numbers``, ``any``, ``integers``, or names joined by commas), ``inexact``,
``pairs``, ``light``, ``no-zeros``, ``flat``, ``shallow``, ``square``, ``refuses-pending``, ``refuses-any``; and two that add
calls: ``unary`` (on a 2-D and on a 0-d tensor) and ``binary`` (on two tensors of one shape, broadcast either way, 0-d, the same one twice).
Words between arguments and ``|``: a smallest size (``n>=1``), a fill or dtypes other than the op's. Calls hold no spaces; a line that
starts with ``|`` holds further ones on the same arguments. ``#`` starts a comment line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardlaw.reference.tensors import DTYPES, FILLS
from shardlaw.strategies.ops import ANY, FLOATS, INTEGERS, NUMBERS, Arg, Op, Refuses, Variant

CLASSES = {"floats": FLOATS, "numbers": NUMBERS, "any": ANY, "integers": INTEGERS}
FLAGS = ("inexact", "pairs", "light", "no-zeros", "flat", "shallow", "square", "refuses-pending", "refuses-any", "unary", "binary")
BINARY = ("a=m,n b=m,n", "a=m,n b=n", "a=m,1 b=1,n", "a=n b=m,n", "a=m,n b=()")


class TableError(ValueError):
    """A line of a table of ops that cannot be read."""


def read_ops(table: str) -> tuple[Op, ...]:
    """The ops of a table, in order. Raises :class:`TableError` with the line that is wrong."""
    blocks: list[tuple[str, list[str]]] = []
    for line in table.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line[0] != " ":
            blocks.append((line, []))
        elif not blocks:
            raise TableError(f"{line!r} stands before the first op")
        else:
            blocks[-1][1].append(line.strip())
    return tuple(_op(head, lines) for head, lines in blocks)


def _op(head: str, lines: Sequence[str]) -> Op:
    name, *words = head.split()
    fill, dtypes, least, flags = _words(words, head)
    if least:
        raise TableError(f"{head!r}: smallest sizes belong to arguments")
    variants: list[Variant] = []

    def add(args: str, words: Sequence[str], calls: Sequence[str]) -> None:
        own_fill, own_dtypes, least, misplaced = _words(words, head)
        if misplaced:
            raise TableError(f"{head!r}: {misplaced} belongs behind the name")
        parsed = tuple(map(Arg.parse, args.split()))
        for call in calls:
            variants.append(Variant(parsed, call, own_dtypes or dtypes or ("float32",), own_fill or fill or "distinct", least))

    if "unary" in flags:
        add("a=m,n", (), [f"{name}(a)"])
        add("a=()", (), [f"{name}(a)"])
    if "binary" in flags:
        for args in BINARY:
            add(args, (), [f"{name}(a,b)"])
        add("a=m,n", (), [f"{name}(a,a)"])
    args, own = "", list[str]()
    for line in lines:
        left, bar, right = line.partition("|")
        if not bar:
            raise TableError(f"{line!r} of {name}: want ARGUMENTS | CALLS")
        if left.strip():
            args = " ".join(word for word in left.split() if "=" in word and ">=" not in word)
            own = [word for word in left.split() if "=" not in word or ">=" in word]
        add(args, own, right.split())
    refuses: Refuses = "pending" if "refuses-pending" in flags else "any" if "refuses-any" in flags else "never"
    return Op(
        name,
        tuple(variants),
        exact="inexact" not in flags,
        pairs="pairs" in flags,
        light="light" in flags or "unary" in flags,
        zeros="no-zeros" not in flags,
        flat="flat" in flags,
        shallow="shallow" in flags,
        square="square" in flags,
        refuses=refuses,
    )


def _words(words: Sequence[str], where: str) -> tuple[str, tuple[str, ...], tuple[tuple[str, int], ...], set[str]]:
    """Fill, dtypes, smallest sizes and flags among words."""
    fill, dtypes, least, flags = "", tuple[str, ...](), list[tuple[str, int]](), set[str]()
    for word in words:
        if word in FLAGS:
            flags.add(word)
        elif word in CLASSES:
            dtypes = CLASSES[word]
        elif word in FILLS:
            fill = word
        elif match := re.fullmatch(r"([a-z])>=(\d+)", word):
            least.append((match[1], int(match[2])))
        elif all(name in DTYPES for name in word.split(",")):
            dtypes = tuple(word.split(","))
        else:
            raise TableError(f"{where!r}: {word!r} is no fill, dtypes, size or flag")
    return fill, dtypes, tuple(least), flags
