"""``report.html``: one file that holds everything a run has to say, to read in a browser. It fetches nothing and runs no script."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shardlaw.conformance.law.features.features import FEATURES
from shardlaw.conformance.report.markdown import declared, headline, in_common
from shardlaw.conformance.report.pictures import Told, told_by
from shardlaw.conformance.report.run_report import MEANING, OUTCOMES, FindingLine, LawLine, RunReport, UnconfirmedLine
from shardlaw.conformance.report.templates import rendered

SHADES = 4


@dataclass(frozen=True)
class Shown:
    """A finding as the page shows it; ``after`` holds the texts of the cases that its world must have served before."""

    anchor: str
    id: str
    kind: str
    law: str
    clause: str
    text: str
    message: str
    note: str
    features: tuple[str, ...]
    after: tuple[str, ...]
    ranks: tuple[Told, ...]
    script: str
    script_text: str
    where: str = ""


@dataclass(frozen=True)
class Row:
    """One law of a map: for each feature of its chapter how many cases reached it, and how dark to draw that, 1 to 4."""

    law: LawLine
    cells: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Map:
    """The laws of a chapter and the features that any of them reached."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def html(report: RunReport, folder: Path) -> str:
    """The page; ``folder`` is where the report lies, whose findings it shows."""
    clauses = {law.id: law.clause for law in report.laws}
    shown = [_shown(found, clauses, folder) for found in report.findings]
    new: list[Shown] = []
    expected: list[Shown] = []
    for line, found in zip(report.findings, shown, strict=True):
        (expected if line.status == "expected" else new).append(found)
    unconfirmed = [_unconfirmed(line, clauses) for line in report.unconfirmed]
    sections = {
        "findings": f"new findings ({len(new)})",
        "chapters": "chapters",
        "unconfirmed": f"unconfirmed ({len(unconfirmed)})" if unconfirmed else "",
        "errors": f"errors of the harness ({len(report.errors)})" if report.errors else "",
        "expected": f"expected findings ({len(expected)})" if expected else "",
        "warnings": f"warnings ({len(report.warnings)})" if report.warnings else "",
        "expectations": f"expectations ({len(report.expectations)})" if report.expectations else "",
        "laws": f"laws and features ({len(report.laws)})",
        "missing": "not reached",
    }
    return rendered(
        "report.html.j2",
        report=report,
        headline=headline(report),
        meaning=MEANING.get(report.exit if report.exit is not None else 3, ""),
        contents=[(name, title) for name, title in sections.items() if title],
        outcomes=OUTCOMES,
        chapters=list(report.chapters().items()),
        new=new,
        shared=in_common(report),
        unconfirmed=unconfirmed,
        expected=expected,
        maps=_maps(report.laws),
        declared=declared(report) if report.target.cannot else [],
        reasons=list(report.untested().items()),
        missing=[(name, FEATURES.get(name, "")) for name in report.features_missing],
    )


def _shown(found: FindingLine, clauses: Mapping[str, str], folder: Path) -> Shown:
    # a page of somebody else's report must not lead to, or hold, any other file
    script = found.reproducer or ""
    script = script if re.fullmatch(r"findings/[0-9a-f]{8}\.py", script) else ""
    ranks = told_by(_ranks(folder / "findings" / f"{found.id}.json")) if re.fullmatch(r"[0-9a-f]{8}", found.id) else []
    return Shown(
        anchor=f"finding-{found.id}",
        id=found.id,
        kind=found.kind,
        law=found.law,
        clause=clauses.get(found.law, ""),
        text=found.text,
        message=found.message,
        note=found.note,
        where=found.where,
        features=tuple(found.features),
        after=_after(found.case),
        ranks=tuple(ranks),
        script=script,
        script_text=_read(folder / script) if script else "",
    )


def _unconfirmed(line: UnconfirmedLine, clauses: Mapping[str, str]) -> Shown:
    ranks = tuple(told_by(line.ranks))
    clause = clauses.get(line.law, "")
    return Shown("", "", line.kind, line.law, clause, line.text, line.message, "", (), _after(line.case), ranks, "", "")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _ranks(path: Path) -> Sequence[Mapping[str, Any]]:
    """What every rank said, from a finding's file; nothing where there is none."""
    try:
        data = msgspec.json.decode(path.read_bytes())
        ranks = data["ranks"]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return []
    return [answer for answer in ranks if isinstance(answer, dict)] if isinstance(ranks, list) else []


def _after(case: Mapping[str, Any]) -> tuple[str, ...]:
    from shardlaw.conformance.law.case import Case
    from shardlaw.reference.notation import NotationError

    try:
        return tuple(earlier.text for earlier in Case.from_json(dict(case)).after)
    except NotationError:
        return ()


def _maps(laws: Sequence[LawLine]) -> list[Map]:
    chapters: dict[str, list[LawLine]] = {}
    for law in laws:
        chapters.setdefault(law.chapter, []).append(law)
    return [_map(name, members) for name, members in chapters.items()]


def _map(name: str, laws: Sequence[LawLine]) -> Map:
    counts = [_by_column(law) for law in laws]
    columns = sorted(set().union(*counts), key=lambda column: (_place(column), column))
    return Map(
        name,
        tuple(columns),
        tuple(
            Row(law, tuple((count[column], _shade(count[column], law.cases)) for column in columns))
            for law, count in zip(laws, counts, strict=True)
        ),
    )


def _by_column(law: LawLine) -> Counter[str]:
    """The features of a law's cases, the overloads of ops as one that counts how many they are."""
    found = Counter({name: count for name, count in law.features.items() if not name.startswith("op:")})
    overloads = sum(name.startswith("op:") for name in law.features)
    if overloads:
        found["op:*"] = overloads
    return found


def _place(column: str) -> int:
    """Where a feature stands in the catalogue."""
    return _PLACES.get(column, len(_PLACES))


_PLACES = {name: at for at, name in enumerate(FEATURES)}


def _shade(count: int, cases: int) -> int:
    return min(SHADES, 1 + int(SHADES * count / max(cases, 1))) if count else 0
