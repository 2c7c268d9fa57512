"""``report.html``: the whole report as one page.

It loads nothing. Its one script, allowed by hash in the page's content security policy, searches, filters and copies; without scripts the
page is still complete.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardlaw.conformance.law.features.features import FEATURES
from shardlaw.conformance.report.layouts import LayoutPicture, draw_layouts
from shardlaw.conformance.report.markdown import common_lines, declared_lines, headline
from shardlaw.conformance.report.pictures import AnswerView, group_answers
from shardlaw.conformance.report.run_report import EXIT_MEANINGS, OUTCOMES, FindingLine, LawLine, RunReport, UnconfirmedLine
from shardlaw.conformance.report.templates import FOLDER, render_template
from shardlaw.conformance.run.finding_file import is_finding_id

if TYPE_CHECKING:
    from shardlaw.conformance.report.comparison import Comparison

SHADES = 4
SHOWN_FEATURES = 10
MAPPED_FEATURES = 24
MAX_SCRIPT_CHARS = 300_000  # of all reproducer scripts in a page; the others are only linked
SILENT = ("wrong-value", "wrong-layout", "wrong-metadata")


@dataclass(frozen=True)
class FindingView:
    """A finding as the page shows it; ``after`` are the texts of the cases in its history."""

    anchor: str
    id: str
    kind: str
    law: str
    clause: str
    text: str
    message: str
    note: str = ""
    features: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ranks: tuple[AnswerView, ...] = ()
    script: str = ""
    script_text: str = ""
    where: str = ""
    next_places: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    layouts: tuple[LayoutPicture, ...] = ()
    source: str = ""
    replay: str = ""

    @property
    def chapter(self) -> str:
        return self.law.partition(".")[0]

    @property
    def loud(self) -> str:
        """``silent`` or ``loud``: whether a user notices the deviation."""
        return "silent" if self.kind in SILENT else "loud"


@dataclass(frozen=True)
class LawRow:
    """A row of the table of laws.

    ``features`` are those of the deviating cases (name, deviating, all, shade), largest share first. ``first``: the law is the first of its
    chapter. ``finding``: the anchor of its finding, or empty.
    """

    law: LawLine
    features: tuple[tuple[str, int, int, int], ...]
    first: bool
    finding: str


@dataclass(frozen=True)
class FindingGroup:
    """The new findings of one cause, or the expected findings of one reason."""

    anchor: str
    title: str
    findings: tuple[FindingView, ...]

    @property
    def kinds(self) -> str:
        return ", ".join(dict.fromkeys(found.kind for found in self.findings))

    @property
    def loud(self) -> str:
        return " and ".join(sorted({found.loud for found in self.findings}))

    @property
    def laws(self) -> str:
        return ", ".join(dict.fromkeys(found.law for found in self.findings))


@dataclass(frozen=True)
class MapRow:
    """A chapter in the map: for each feature its name, how many cases deviate, how many have it, and the shade, 0 to 4."""

    chapter: str
    cells: tuple[tuple[str, int, int, int], ...]


def render_html(report: RunReport, folder: Path, since: Comparison | None = None, shown_folder: str = "") -> str:
    """Render the page. ``folder`` is the report's folder, from which findings and scripts are read; ``shown_folder`` is its name in the
    commands on the page (default: ``folder``). ``since``: the comparison with an earlier report."""
    clauses = {law.id: (law.clause, law.source) for law in report.laws}
    shown = [_finding_view(found, clauses, folder, shown_folder or str(folder)) for found in report.findings]
    by_id = {view.id: view for view in shown}
    causes = _add_scripts(
        [
            FindingGroup(
                f"cause-{at}",
                found[0].where or f"{found[0].kind} of {found[0].law}",
                tuple(replace(by_id[line.id], where=line.where, next_places=tuple(line.next_places)) for line in found),
            )
            for at, found in enumerate(report.causes(), 1)
        ],
        folder,
    )
    expected = _group_by_reason(view for line, view in zip(report.findings, shown, strict=True) if line.status == "expected")
    unconfirmed = [_unconfirmed_view(line, clauses) for line in report.unconfirmed]
    rows = _law_rows(report.laws, causes, expected)
    refusals = [(law.id, text, count) for law in report.laws for text, count in law.refusals.items()]
    sections = {
        "since": "what changed" if since else "",
        "causes": f"causes ({len(causes)})",
        "findings": f"new findings ({report.totals.new})",
        "map": "map of what deviates",
        "chapters": "chapters",
        "unconfirmed": f"unconfirmed ({len(unconfirmed)})" if unconfirmed else "",
        "errors": f"errors of the harness ({len(report.errors)})" if report.errors else "",
        "expected": f"known ({len(expected)})" if expected else "",
        "warnings": f"warnings ({len(report.warnings)})" if report.warnings else "",
        "expectations": f"expectations ({len(report.expectations)})" if report.expectations else "",
        "laws": f"laws ({len(report.laws)})",
        "refusals": f"refusals ({len(refusals)})" if refusals else "",
        "features": "features",
        "missing": "not reached",
        "legend": "legend",
    }
    script = (FOLDER / "report.js").read_text("utf-8")
    return render_template(
        "report.html.j2",
        report=report,
        headline=headline(report),
        meaning=EXIT_MEANINGS.get(report.exit if report.exit is not None else 3, ""),
        contents=[(name, title) for name, title in sections.items() if title],
        outcomes=OUTCOMES,
        chapters=list(report.chapters().items()),
        numbers={name: at for at, name in enumerate(report.chapters(), 1)},
        causes=causes,
        choices=_filter_choices(report, shown, rows),
        shared=common_lines(report),
        since=since,
        anchors={view.id: view.anchor for view in shown},
        unconfirmed=unconfirmed,
        expected=expected,
        rows=rows,
        map=_feature_map(report.laws),
        refusals=refusals,
        features=_feature_counts(report.laws),
        declared=declared_lines(report),
        reasons=list(report.untested().items()),
        missing=[(name, FEATURES.get(name, "")) for name in report.features_missing],
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _finding_view(found: FindingLine, clauses: Mapping[str, tuple[str, str]], folder: Path, shown_folder: str) -> FindingView:
    # the report may come from somebody else: link and include only files of findings
    script = found.reproducer or ""
    script = script if re.fullmatch(r"findings/[0-9a-f]{8}\.py", script) else ""
    has_id = is_finding_id(found.id)
    # the answers of expected findings, of which there may be hundreds, stay in their files
    ranks = group_answers(_read_answers(folder / "findings" / f"{found.id}.json")) if has_id and found.status == "new" else []
    return FindingView(
        anchor=f"finding-{found.id}",
        id=found.id,
        kind=found.kind,
        law=found.law,
        clause=clauses.get(found.law, ("", ""))[0],
        text=found.text,
        message=found.message,
        note=found.note,
        where=found.where,
        next_places=tuple(found.next_places),
        features=tuple(found.features),
        after=_history_texts(found.case),
        ranks=tuple(ranks),
        script=script,
        waits=tuple(found.waits),
        layouts=draw_layouts(found.case) if found.status == "new" else (),
        source=clauses.get(found.law, ("", ""))[1],
        replay=f"shardlaw replay {shown_folder}/findings/{found.id}.json" if has_id else "",
    )


def _unconfirmed_view(line: UnconfirmedLine, clauses: Mapping[str, tuple[str, str]]) -> FindingView:
    ranks = tuple(group_answers(line.ranks))
    clause = clauses.get(line.law, ("", ""))[0]
    return FindingView("", "", line.kind, line.law, clause, line.text, line.message, after=_history_texts(line.case), ranks=ranks)


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _read_answers(path: Path) -> Sequence[Mapping[str, Any]]:
    """Read the ranks' answers from a finding's file; empty if it cannot be read."""
    try:
        data = msgspec.json.decode(path.read_bytes())
        ranks = data["ranks"]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return []
    return [answer for answer in ranks if isinstance(answer, dict)] if isinstance(ranks, list) else []


def _history_texts(case: Mapping[str, Any]) -> tuple[str, ...]:
    from shardlaw.conformance.law.case import Case
    from shardlaw.reference.notation import NotationError

    try:
        return tuple(earlier.text for earlier in Case.from_json(dict(case)).after)
    except NotationError:
        return ()


def _add_scripts(causes: Sequence[FindingGroup], folder: Path) -> list[FindingGroup]:
    """Add script texts to the findings, up to ``MAX_SCRIPT_CHARS``: first to the first finding of each cause, then to the others."""
    remaining = MAX_SCRIPT_CHARS
    texts: dict[str, str] = {}
    for found in [*(cause.findings[0] for cause in causes), *(found for cause in causes for found in cause.findings[1:])]:
        text = _read_text(folder / found.script) if found.script else ""
        if len(text) <= remaining:
            texts[found.id] = text
            remaining -= len(text)

    def with_text(view: FindingView) -> FindingView:
        return replace(view, script_text=texts.get(view.id, ""))

    return [replace(cause, findings=tuple(map(with_text, cause.findings))) for cause in causes]


def _law_rows(laws: Sequence[LawLine], causes: Sequence[FindingGroup], expected: Sequence[FindingGroup]) -> list[LawRow]:
    """The rows of laws, grouped by chapter. A law with deviations links to a finding of its own, or to the expected group of a reason."""
    chapters: dict[str, list[LawLine]] = {}
    for law in laws:
        chapters.setdefault(law.chapter, []).append(law)
    own = {found.law: found.anchor for group in [*expected, *causes] for found in reversed(group.findings)}
    known = {group.title: group.anchor for group in expected}

    def anchor(law: LawLine) -> str:
        return own.get(law.id) or next((known[reason] for reason in law.reasons if reason in known), "")

    return [
        LawRow(law, _deviating_features(law), at == 0, anchor(law) if law.wrong else "")
        for members in chapters.values()
        for at, law in enumerate(members)
    ]


def _filter_choices(report: RunReport, shown: Sequence[FindingView], rows: Sequence[LawRow]) -> dict[str, list[str]]:
    """The filters of the page with their values."""
    features = {name for view in shown for name in view.features} | {name for row in rows for name in row.law.deviating}
    return {
        "chapter": list(report.chapters()),
        "kind": sorted({view.kind for view in shown}),
        "loud": ["silent", "loud"],
        "feature": sorted(features),
        "outcome": list(OUTCOMES),
    }


def _feature_map(laws: Sequence[LawLine]) -> tuple[list[str], list[MapRow]]:
    """The most frequent features of deviating cases, without ``op:``, and a row for each chapter that has deviating cases."""
    wrong: dict[str, Counter[str]] = {}
    reached: dict[str, Counter[str]] = {}
    for law in laws:
        if law.deviating:
            wrong.setdefault(law.chapter, Counter()).update(law.deviating)
        reached.setdefault(law.chapter, Counter()).update(law.features)
    every: Counter[str] = sum(wrong.values(), Counter())
    names = [name for name, _ in every.most_common() if not name.startswith("op:")][:MAPPED_FEATURES]
    rows = []
    for chapter, counts in wrong.items():
        of = {name: max(reached[chapter][name], counts[name]) for name in names}
        rows.append(MapRow(chapter, tuple((name, counts[name], of[name], _shade(counts[name], of[name])) for name in names)))
    return names, rows


def _shade(count: int, of: int) -> int:
    """The shade for a share: 0 for none, up to ``SHADES``."""
    return min(SHADES, 1 + int(SHADES * count / max(of, 1))) if count else 0


def _deviating_features(law: LawLine) -> tuple[tuple[str, int, int, int], ...]:
    """The features of a law's deviating cases: name, how many deviate, how many have it, and the shade, 1 to 4."""
    found = [(name, count, law.features.get(name, count)) for name, count in law.deviating.items()]
    found.sort(key=lambda item: (-item[1] / max(item[2], 1), -item[1], item[0]))
    return tuple((name, count, of, _shade(count, of)) for name, count, of in found[:SHOWN_FEATURES])


def _feature_counts(laws: Sequence[LawLine]) -> list[tuple[str, str, int, int]]:
    """Every feature that was reached, in catalogue order: name, meaning, how many cases had it, how many of these deviate."""
    reached: Counter[str] = sum((Counter(law.features) for law in laws), Counter())
    wrong: Counter[str] = sum((Counter(law.deviating) for law in laws), Counter())
    names = [name for name in FEATURES if name in reached]
    return [(name, FEATURES[name], reached[name], wrong[name]) for name in names]


def _group_by_reason(expected: Iterator[FindingView]) -> list[FindingGroup]:
    found: dict[str, list[FindingView]] = {}
    for shown in expected:
        found.setdefault(shown.note, []).append(shown)
    return [FindingGroup(f"known-{at}", reason, tuple(members)) for at, (reason, members) in enumerate(found.items(), 1)]
