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
SHOWN_FEATURES = 10
SILENT = ("wrong-value", "wrong-layout", "wrong-metadata")


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
    waits: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    source: str = ""
    replay: str = ""

    @property
    def chapter(self) -> str:
        return self.law.partition(".")[0]

    @property
    def loud(self) -> str:
        """Whether somebody who meets it is told."""
        return "silent" if self.kind in SILENT else "loud"


@dataclass(frozen=True)
class Row:
    """One law: the features of its cases that deviate, those first of whose cases the largest share does; ``first``: of its chapter."""

    law: LawLine
    features: tuple[tuple[str, int, int, int], ...]
    first: bool


@dataclass(frozen=True)
class Cause:
    """New findings of one cause, or expected ones of one reason."""

    title: str
    findings: tuple[Shown, ...]


def html(report: RunReport, folder: Path) -> str:
    """The page; ``folder`` is where the report lies, whose findings it shows."""
    clauses = {law.id: (law.clause, law.source) for law in report.laws}
    shown = [_shown(found, clauses, folder) for found in report.findings]
    new: list[Shown] = []
    expected: list[Shown] = []
    for line, found in zip(report.findings, shown, strict=True):
        (expected if line.status == "expected" else new).append(found)
    by_anchor = {one.anchor: one for one in shown}
    unconfirmed = [_unconfirmed(line, clauses) for line in report.unconfirmed]
    sections = {
        "findings": f"new findings ({len(new)})",
        "chapters": "chapters",
        "unconfirmed": f"unconfirmed ({len(unconfirmed)})" if unconfirmed else "",
        "errors": f"errors of the harness ({len(report.errors)})" if report.errors else "",
        "expected": f"expected findings ({len(expected)})" if expected else "",
        "warnings": f"warnings ({len(report.warnings)})" if report.warnings else "",
        "expectations": f"expectations ({len(report.expectations)})" if report.expectations else "",
        "laws": f"laws, and what deviates ({len(report.laws)})",
        "features": "features",
        "missing": "not reached",
        "legend": "legend",
    }
    return rendered(
        "report.html.j2",
        report=report,
        headline=headline(report),
        meaning=MEANING.get(report.exit if report.exit is not None else 3, ""),
        contents=[(name, title) for name, title in sections.items() if title],
        outcomes=OUTCOMES,
        chapters=list(report.chapters().items()),
        numbers={name: at for at, name in enumerate(report.chapters(), 1)},
        causes=[
            Cause(found[0].where or found[0].law, tuple(by_anchor[f"finding-{line.id}"] for line in found)) for found in report.causes()
        ],
        filters={
            "chapter": sorted({one.chapter for one in shown}),
            "kind": sorted({one.kind for one in shown}),
            "loud": ["loud", "silent"],
        },
        new=new,
        shared=in_common(report),
        unconfirmed=unconfirmed,
        expected=_by_reason(expected),
        rows=_rows(report.laws),
        features=_features(report.laws),
        declared=declared(report) if report.target.cannot else [],
        reasons=list(report.untested().items()),
        missing=[(name, FEATURES.get(name, "")) for name in report.features_missing],
    )


def _shown(found: FindingLine, clauses: Mapping[str, tuple[str, str]], folder: Path) -> Shown:
    # a page of somebody else's report must not lead to, or hold, any other file
    script = found.reproducer or ""
    script = script if re.fullmatch(r"findings/[0-9a-f]{8}\.py", script) else ""
    named = re.fullmatch(r"[0-9a-f]{8}", found.id)
    # what every rank of a known one said stands in its file: there may be hundreds of them
    ranks = told_by(_ranks(folder / "findings" / f"{found.id}.json")) if named and found.status == "new" else []
    return Shown(
        anchor=f"finding-{found.id}",
        id=found.id,
        kind=found.kind,
        law=found.law,
        clause=clauses.get(found.law, ("", ""))[0],
        text=found.text,
        message=found.message,
        note=found.note,
        where=found.where,
        features=tuple(found.features),
        after=_after(found.case),
        ranks=tuple(ranks),
        script=script,
        script_text=_read(folder / script) if script else "",
        waits=tuple(found.waits),
        layouts=_layouts(found.case) if found.status == "new" else (),
        source=clauses.get(found.law, ("", ""))[1],
        replay=f"shardlaw replay {folder}/findings/{found.id}.json" if named else "",
    )


def _unconfirmed(line: UnconfirmedLine, clauses: Mapping[str, tuple[str, str]]) -> Shown:
    ranks = tuple(told_by(line.ranks))
    clause = clauses.get(line.law, ("", ""))[0]
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


def _rows(laws: Sequence[LawLine]) -> list[Row]:
    """The laws, those of a chapter together."""
    chapters: dict[str, list[LawLine]] = {}
    for law in laws:
        chapters.setdefault(law.chapter, []).append(law)
    return [Row(law, _deviating(law), at == 0) for members in chapters.values() for at, law in enumerate(members)]


def _deviating(law: LawLine) -> tuple[tuple[str, int, int, int], ...]:
    """Of a law with cases that deviate the features of these: how many deviate, of how many, and how dark to draw that, 1 to 4."""
    found = [(name, count, law.features.get(name, count)) for name, count in law.deviating.items()]
    found.sort(key=lambda item: (-item[1] / max(item[2], 1), -item[1], item[0]))
    return tuple((name, count, of, min(SHADES, 1 + int(SHADES * count / max(of, 1)))) for name, count, of in found[:SHOWN_FEATURES])


def _features(laws: Sequence[LawLine]) -> list[tuple[str, str, int, int]]:
    """Every feature that was reached, in the order of the catalogue: what it is, how many cases had it, how many of them deviate."""
    reached: Counter[str] = sum((Counter(law.features) for law in laws), Counter())
    wrong: Counter[str] = sum((Counter(law.deviating) for law in laws), Counter())
    names = [name for name in FEATURES if name in reached]
    return [(name, FEATURES[name], reached[name], wrong[name]) for name in names]


def _by_reason(expected: Sequence[Shown]) -> list[Cause]:
    found: dict[str, list[Shown]] = {}
    for shown in expected:
        found.setdefault(shown.note, []).append(shown)
    return [Cause(reason, tuple(members)) for reason, members in found.items()]


def _layouts(case: Mapping[str, Any]) -> tuple[str, ...]:
    """The commands that draw who holds what of the tensors of a case."""
    from shardlaw.reference.notation import NotationError
    from shardlaw.reference.placement import format_placements
    from shardlaw.reference.tensors import TensorSpec

    fields = case.get("fields")
    if not isinstance(fields, dict) or not isinstance(fields.get("mesh"), str):
        return ()
    lines = []
    for name, text in fields.items():
        if not (re.fullmatch(r"[a-z]\d?", str(name)) and isinstance(text, str) and ":" in text):
            continue
        try:
            spec = TensorSpec.parse(text)
        except (NotationError, ValueError):
            continue
        if spec.placements:
            place = format_placements(spec.placements)
            shape = "x".join(map(str, spec.shape)) or "()"
            lines.append(f"shardlaw show '{shape}' --mesh '{fields['mesh']}' --place '{place}'")
    return tuple(lines)
