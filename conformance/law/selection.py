"""Selects laws by ids, globs and exclusions.

``*`` stands for any text and ``?`` for any one character; brackets are literal. A name without its variant selects every
variant (``op.forward`` is ``op.forward`` and every ``op.forward[...]``). A leading ``!`` excludes, whatever the order of the patterns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from shardlaw.conformance.errors import UsageError, nearest, one_of

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law


@cache
def glob(pattern: str) -> re.Pattern[str]:
    """``pattern`` as a regular expression to match a full text; only ``*`` and ``?`` are special."""
    return re.compile("".join({"*": ".*", "?": "."}.get(char) or re.escape(char) for char in pattern), re.DOTALL)


def matches(pattern: str, law_id: str) -> bool:
    """Whether ``pattern`` (without ``!``) matches this id, with its variant or without."""
    found = glob(pattern)
    return found.fullmatch(law_id) is not None or ("[" not in pattern and found.fullmatch(law_id.partition("[")[0]) is not None)


def matches_op(pattern: str, op: str, overloads: Collection[str] = ()) -> bool:
    """Whether an ``--op`` glob matches this op, by its name or by one of its aten overloads (``aten.mean.dim``, ``mean.dim`` or
    ``aten.mean``)."""
    found = glob(pattern)
    names = {op, *overloads, *(name.removeprefix("aten.") for name in overloads), *(name.rpartition(".")[0] for name in overloads)}
    return any(found.fullmatch(name) for name in names)


def select_ids(ids: Sequence[str], patterns: Sequence[str], aliases: dict[str, str] | None = None) -> list[str]:
    """The ids that ``patterns`` select, in the order of ``ids``; all of them for no pattern. ``aliases`` maps old ids to new ones.

    Raises :class:`UsageError` for a pattern that selects nothing, naming the nearest ids, and for patterns that leave nothing.
    """
    wanted: set[str] = set()
    dropped: set[str] = set()
    for pattern in patterns:
        found = _matching_ids(ids, pattern.removeprefix("!"), aliases or {})
        (dropped if pattern.startswith("!") else wanted).update(found)
    if all(pattern.startswith("!") for pattern in patterns):
        wanted = set(ids)
    wanted -= dropped
    chosen = [law_id for law_id in ids if law_id in wanted]
    if patterns and not chosen:
        raise UsageError(f"{' '.join(patterns)}: selects no law")
    return chosen


@lru_cache(maxsize=4)
def _ids_by_name(ids: tuple[str, ...]) -> dict[str, list[str]]:
    """The ids that each pattern without wildcards selects: an id itself, and its name without variant every variant."""
    found: dict[str, list[str]] = {}
    for law_id in ids:
        for name in {law_id, law_id.partition("[")[0]}:
            found.setdefault(name, []).append(law_id)
    return found


def _matching_ids(ids: Sequence[str], pattern: str, aliases: dict[str, str]) -> list[str]:
    if "*" in pattern or "?" in pattern:
        found = [law_id for law_id in ids if matches(pattern, law_id)]
    else:
        found = list(_ids_by_name(tuple(ids)).get(pattern, ()))
    found += [new for old, new in aliases.items() if matches(pattern, old)]
    if found:
        return found
    if any(law_id.startswith(f"{pattern}.") for law_id in ids):
        raise UsageError(f"no law is called {pattern!r}: want '{pattern}.*' for all of this chapter")
    names = {*ids, *(law_id.partition("[")[0] for law_id in ids)}
    raise UsageError(f"no law matches {pattern!r} ({one_of(pattern.strip('*'), names)})")


def select(laws: Sequence[Law], patterns: Sequence[str], ops: Sequence[str] = ()) -> list[Law]:
    """The laws that ``patterns`` select. Where there are ``ops``, a law of ops must match one of them too; without patterns, the other
    laws are left out. Raises :class:`UsageError`."""
    aliases = {alias: law.id for law in laws for alias in law.aliases}
    chosen = set(select_ids([law.id for law in laws], patterns, aliases))
    selected = [law for law in laws if law.id in chosen]
    if not ops:
        return selected
    op_laws = [law for law in selected if is_op_law(law)]
    for pattern in ops:
        if not any(_variant_matches(law, [pattern]) for law in op_laws):
            names = sorted({law.variant for law in op_laws} - {""})
            close = f" (nearest: {', '.join(nearest(pattern, names))})" if nearest(pattern, names) else ""
            raise UsageError(f"--op {pattern}: no selected law takes such an op{close}")
    return [law for law in selected if (_variant_matches(law, ops) if is_op_law(law) else patterns)]


def is_op_law(law: Law) -> bool:
    """Whether a law is about ops, about the one in its variant or about any."""
    return law.chapter == "op" or (law.chapter == "gradient" and bool(law.variant))


def _variant_matches(law: Law, ops: Iterable[str]) -> bool:
    return bool(law.variant) and any(matches_op(pattern, law.variant, aten_overloads(law.variant)) for pattern in ops)


@cache
def aten_overloads(op: str) -> tuple[str, ...]:
    """The aten overloads with the name of an op, as ``aten.NAME.OVERLOAD``. An op may also call overloads of other names."""
    import torch

    name = op.removesuffix(".in-place").removesuffix(".out").rpartition(".")[2]
    packets = [(packet, getattr(torch.ops.aten, packet, None)) for packet in (name, f"{name}_", f"_{name}")]
    return tuple(f"aten.{packet}.{overload}" for packet, found in packets if found is not None for overload in found.overloads())
