"""Output for GitHub Actions: an annotation for each new finding, and ``report.md`` as the step's summary."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

from shardlaw.conformance.report.run_report import FindingLine, RunReport


def error_lines(report: RunReport, folder: Path) -> list[str]:
    """An ``::error`` line for each new finding, with its reproducer or its file."""
    return [_annotation(found, folder) for found in report.new()]


def _annotation(found: FindingLine, folder: Path) -> str:
    file = folder / (found.reproducer or f"findings/{found.id}.json")
    shown = [found.text, found.message, f"python {file}" if found.reproducer else found.note]
    title = f"shardlaw: {found.kind} {found.id}"
    return f"::error file={_escape_property(str(file))},title={_escape_property(title)}::{_escape_data(chr(10).join(filter(None, shown)))}"


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def annotate(report: RunReport, folder: Path, file: IO[str] | None = None) -> None:
    """Print the annotations if ``GITHUB_ACTIONS`` is set, and append ``report.md`` to the file that ``GITHUB_STEP_SUMMARY`` names."""
    out = file or sys.stdout
    if os.environ.get("GITHUB_ACTIONS"):
        for line in error_lines(report, folder):
            print(line, file=out)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            text = (folder / "report.md").read_text("utf-8")
            with open(summary, "a", encoding="utf-8") as step:
                step.write(text + "\n")
        except OSError as error:
            print(f"shardlaw: no step summary: {error.filename}: {error.strerror}", file=sys.stderr)
