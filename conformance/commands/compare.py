"""``shardlaw compare``: compare two reports, such as of two nights, two versions of torch, or a target and ``gloo``."""

from __future__ import annotations

from pathlib import Path

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.report.comparison import Comparison, compare_reports
from shardlaw.conformance.report.run_report import read_report, report_folder
from shardlaw.conformance.run.finding_file import to_json, write_text


def compare(first: Path, second: Path, as_json: bool = False, page: bool = False) -> int:
    """Print the differences and return the exit code: 1 if the second report is worse, else 2 if the requests differ, else 0.

    With ``page`` the second's ``report.html`` is rewritten and includes the comparison. Raises :class:`UsageError`.
    """
    found = compare_reports(first, second)
    if page:
        _write_page(second, found)
    if as_json:
        print(to_json(found), end="")
    else:
        from shardlaw.conformance.report.comparison_text import print_comparison
        from shardlaw.conformance.report.terminal import make_console

        print_comparison(make_console(), found)
    return found.exit


def _write_page(path: Path, found: Comparison) -> None:
    from shardlaw.conformance.report.html import render_html

    folder = report_folder(path)
    try:
        write_text(folder / "report.html", render_html(read_report(path), folder, since=found))
    except OSError as error:
        raise UsageError(f"--page: {folder / 'report.html'} cannot be written: {error.strerror}") from None
