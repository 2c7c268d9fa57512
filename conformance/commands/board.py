"""``shardlaw board``: a page of certified runs. Each folder is verified; one that fails is marked so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardlaw.conformance.commands.verify import find_problems
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.report.run_report import Certificate, RunReport, report_folder
from shardlaw.conformance.report.templates import render_template
from shardlaw.conformance.report.trend import read_linked_report
from shardlaw.conformance.report.wording import count_noun


@dataclass(frozen=True)
class CauseView:
    """A cause, shown by its smallest finding; ``more`` is the number of its other findings."""

    link: str
    id: str
    kind: str
    law: str
    message: str
    more: int
    note: str


@dataclass(frozen=True)
class RunCell:
    """One certified run."""

    anchor: str
    title: str
    word: str
    mark: str
    counts: str
    line: str
    link: str
    loaded: str
    causes: tuple[CauseView, ...]
    missing: str
    problems: tuple[str, ...]


def render_board(paths: Sequence[Path], beside: Path) -> str:
    """Render the page for the folder ``beside``. Raises :class:`UsageError`."""
    cells: dict[tuple[str, tuple[str, str]], RunCell] = {}
    for at, path in enumerate(paths):
        linked = read_linked_report(path, beside)
        report = linked.report
        if report.certificate is None:
            raise UsageError(f"{path}: its report has no certificate: want the folders of shardlaw run --certify")
        place = report.target.name, (f"{report.certificate.profile}-{report.certificate.release}", report.target.torch)
        if place in cells:
            raise UsageError(f"{path}: a second run of {place[1][0]} on {place[0]} with torch {place[1][1]}: want one")
        wrong = tuple(find_problems(report_folder(path), report, report.certificate))
        cells[place] = _run_cell(f"run-{at + 1}", report, report.certificate, linked.link, wrong)
    columns = sorted({column for _, column in cells})
    targets = sorted({target for target, _ in cells})
    return render_template(
        "board.html.j2",
        title="shardlaw: certified runs",
        columns=columns,
        rows=[(target, [cells.get((target, column)) for column in columns]) for target in targets],
        cells=list(cells.values()),
    )


def _run_cell(anchor: str, report: RunReport, certificate: Certificate, link: str, wrong: tuple[str, ...]) -> RunCell:
    loaded, causes = certificate.loaded, report.causes()
    packages = [re.sub(r"(?<=sha256 [0-9a-f]{12})[0-9a-f]+", "...", f"{name} {said}") for name, said in loaded.packages.items()]
    versions = [f"torch {loaded.torch} ({loaded.torch_git[:12]})", f"python {loaded.python}", loaded.platform, *packages]
    passed = certificate.passed and not wrong
    return RunCell(
        anchor=anchor,
        title=f"{report.target.name}, {certificate.profile}-{certificate.release}, torch {report.target.torch}",
        word="passed" if passed else count_noun(len(causes), "cause") if causes else "not passed",
        mark="passed" if passed else "failed",
        counts=f"{certificate.held} of {certificate.cases} hold"
        + (f", {certificate.missing} declared missing" if certificate.missing else ""),
        line=certificate.line(),
        link=link,
        loaded=f"loaded: {', '.join(versions)}",
        causes=tuple(
            CauseView(f"{link}#finding-{found.id}", found.id, found.kind, found.law, found.message, len(others), found.note)
            for found, *others in causes
        ),
        missing=", ".join(report.target.cannot) if certificate.missing else "",
        problems=wrong,
    )
