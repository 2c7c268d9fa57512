"""Combine the reports of one request: of its shards, or of a run and the one that resumed it.

Counts are added up; which expectations are stale or too wide is decided again from the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardlaw.conformance.report.run_report import ExpectationLine, LawLine, RunReport
from shardlaw.conformance.report.sums import add_counts
from shardlaw.conformance.run.entry import Entry
from shardlaw.conformance.run.expectations import Expectations
from shardlaw.conformance.run.shares import smoke_shares as chosen_laws


def sum_expectations(
    groups: Sequence[Sequence[ExpectationLine]], laws: Sequence[LawLine], chosen: bool
) -> tuple[Expectations, list[ExpectationLine], list[str]]:
    """Sum the counts of expectations: each of ``groups`` has the lines of one of them in all reports. Returns the expectations, a line for
    each, and the warnings of those that are too wide. ``laws`` are the combined ones; ``chosen``: they tried the cases of ``smoke.txt``."""
    entries = [_sum_entry(lines) for lines in groups]
    known = Expectations(entries, {law.id: law.cases + law.skipped_expected for law in laws}, chosen_laws() if chosen else ())
    too_wide = {found.entry: str(found) for found in known.too_wide()}
    lines_of_all = [add_counts(lines[0], entry, known, entry in too_wide) for entry, lines in zip(entries, groups, strict=True)]
    return known, lines_of_all, list(too_wide.values())


def _sum_entry(lines: Sequence[ExpectationLine]) -> Entry:
    """The entry of one expectation with the sums of its counts."""
    first = lines[0]
    matched: Counter[str] = sum((Counter(line.matched) for line in lines), Counter())
    where, _, number = first.where.rpartition(":")
    return Entry(
        law=first.law,
        kind=first.kind,
        reason=first.reason,
        features=frozenset(first.features),
        finding=first.finding,
        wide=first.wide,
        rare=first.rare,
        case=first.case,
        mended=any(line.mended for line in lines),
        file=Path(where or first.where),
        line=int(number) if where and number.isdecimal() else 0,
        laws=tuple(matched),
        hits=sum(line.hits for line in lines),
        deviated=sum((Counter(line.deviated) for line in lines), Counter()),
        matched=matched,
    )


def other_warnings(reports: Sequence[RunReport]) -> Iterator[str]:
    """The warnings of the reports, except those of too wide entries, which are decided from the sums."""
    wheres = tuple(f"{line.where}: matches " for report in reports for line in report.expectations)
    yield from dict.fromkeys(said for report in reports for said in report.warnings if not said.startswith(wheres))
