"""The sums of a report, and the counts of its expectations. Loads no torch: a run prints its first line before it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shardlaw.conformance.report.run_report import ExpectationLine, FindingLine, LawLine, Totals, UnconfirmedLine

if TYPE_CHECKING:
    from shardlaw.conformance.run.entry import Entry
    from shardlaw.conformance.run.expectations import Expectations


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
