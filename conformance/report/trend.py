"""``shardlaw trend``: a page with the findings of many runs over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardlaw.conformance.report.run_report import FindingLine, RunReport, read_report, report_folder
from shardlaw.conformance.report.templates import render_template

SHOWN_LAWS = 4


@dataclass(frozen=True)
class LinkedReport:
    """A report, and the link from this page to its page."""

    link: str
    report: RunReport


@dataclass(frozen=True)
class Cell:
    """The result of a run for one cause: ``new``, ``expected``, ``held`` or ``not tried``."""

    word: str
    link: str = ""


@dataclass(frozen=True)
class Row:
    """A cause and its results in all runs."""

    what: str
    laws: str
    cells: tuple[Cell, ...]


def render_trend(paths: Sequence[Path], beside: Path) -> str:
    """Render the page for the folder ``beside``. Raises :class:`UsageError`."""
    nights = sorted((read_linked_report(path, beside) for path in paths), key=lambda night: night.report.started)
    rows = {name: _cause_row(name, nights) for night in nights for name in map(cause_key, night.report.findings)}
    groups: dict[str, list[Row]] = {"came with the last run": [], "there in the last run": [], "gone": []}
    for row in rows.values():
        seen = [bool(cell.link) for cell in row.cells]
        name = "gone" if not seen[-1] else "came with the last run" if len(seen) > 1 and not any(seen[:-1]) else "there in the last run"
        groups[name].append(row)
    return render_template(
        "trend.html.j2",
        title=f"shardlaw: {len(nights)} runs, {nights[0].report.started[:10]} to {nights[-1].report.started[:10]}",
        runs=[_run_column(night) for night in nights],
        groups=[(name, sorted(found, key=lambda row: (row.cells[-1].word != "new", row.what))) for name, found in groups.items() if found],
    )


def read_linked_report(path: Path, beside: Path) -> LinkedReport:
    """Read a report; the link is relative to the folder ``beside``. Raises :class:`UsageError`."""
    report = read_report(path)
    return LinkedReport(Path(os.path.relpath(report_folder(path), beside)).as_posix() + "/report.html", report)


def cause_key(found: FindingLine) -> str:
    """The key that findings of one cause have in every run: the known cause's title, or place and kind, or else the signature."""
    return found.note if found.status == "expected" and found.note else found.cause or found.signature or found.id


def _cause_row(name: str, nights: Sequence[LinkedReport]) -> Row:
    laws = {found.law: None for night in nights for found in night.report.findings if cause_key(found) == name}
    more = f" and {len(laws) - SHOWN_LAWS} more" * (len(laws) > SHOWN_LAWS)
    return Row(name, ", ".join(list(laws)[:SHOWN_LAWS]) + more, tuple(_cause_cell(name, {*laws}, night) for night in nights))


def _cause_cell(name: str, laws: set[str], night: LinkedReport) -> Cell:
    found = next((line for line in night.report.findings if cause_key(line) == name), None)
    if found is not None:
        return Cell(found.status, f"{night.link}#finding-{found.id}")
    return Cell("held" if any(law.cases for law in night.report.laws if law.id in laws) else "not tried")


def _run_column(night: LinkedReport) -> dict[str, object]:
    report = night.report
    return {
        "link": night.link,
        "started": report.started,
        "target": report.target.name,
        "torch": report.target.torch,
        "profile": report.profile,
        "seed": report.seed,
        "cases": report.totals.cases,
        "deviating": sum(law.outcome == "deviates" for law in report.laws),
        "new": report.totals.new,
        "expected": report.totals.findings - report.totals.new,
        "exit": "not finished" if report.exit is None else report.exit,
    }
