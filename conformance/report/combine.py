"""Combine the reports of one request: of its shards, or of a run and the one that resumed it.

Counts are added up; which expectations are stale or too wide is decided again from the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shardlaw.conformance.report.run_report import ExpectationLine, FindingLine, LawLine, RunReport, Totals, UnconfirmedLine
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


def add_counts(line: ExpectationLine, entry: Entry, known: Expectations, refused: bool) -> ExpectationLine:
    """The line of an expectation with the counts of its entry."""
    return msgspec.structs.replace(
        line,
        hits=entry.hits,
        masked=round(known.masked_share(entry), 4),
        stale=entry.is_stale,
        refused=refused,
        happened=bool(entry.deviated),
        mended=entry.mended,
        matched=dict(entry.matched),
        deviated=dict(entry.deviated),
    )


def other_warnings(reports: Sequence[RunReport]) -> Iterator[str]:
    """The warnings of the reports, except those of too wide entries, which are decided from the sums."""
    wheres = tuple(f"{line.where}: matches " for report in reports for line in report.expectations)
    yield from dict.fromkeys(said for report in reports for said in report.warnings if not said.startswith(wheres))


def sum_totals(
    laws: Sequence[LawLine], findings: Sequence[FindingLine], unconfirmed: Sequence[UnconfirmedLine], distinct: int, drawn: int
) -> Totals:
    return Totals(
        cases=sum(law.cases for law in laws),
        checks=sum(law.checks for law in laws),
        distinct=distinct,
        drawn=drawn,
        rejected=sum(law.rejected for law in laws),
        refused=sum(law.refused for law in laws),
        skipped_expected=sum(law.skipped_expected for law in laws),
        findings=len(findings),
        new=sum(found.status == "new" for found in findings),
        unconfirmed=len(unconfirmed),
    )
