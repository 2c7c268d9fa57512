"""Build the report of a run: one line for each law, finding and expectation."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardlaw.conformance.report.certificate import certify_run
from shardlaw.conformance.report.hang_places import describe_waits
from shardlaw.conformance.report.run_report import (
    ErrorLine,
    ExpectationLine,
    FindingLine,
    LawLine,
    RunReport,
    TargetLine,
    UnconfirmedLine,
)
from shardlaw.conformance.report.sums import add_counts, sum_totals
from shardlaw.conformance.run.finding_file import answer_fields

if TYPE_CHECKING:
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.run.entry import Entry
    from shardlaw.conformance.run.state import Finding, LawResult, RunState

# by a finding's id: its reproducer, its note, and whether the script is proven
Scripts = Mapping[str, tuple[str | None, str, str]]


def build_report(run: RunState, exit_code: int | None = None, scripts: Scripts | None = None) -> RunReport:
    """The report of a run so far; with an ``exit_code`` the run has ended."""
    import torch

    from shardlaw.conformance.law.features.features import missed_features

    request, target, results = run.request, run.target, list(run.results.values())
    too_wide = {id(found.entry): str(found) for found in run.too_wide()}
    ours = {result.law.id for result in results}
    entries = [entry for entry in run.expectations.entries if ours.intersection(entry.laws)]
    order = {law: index for index, law in enumerate(run.results)}
    by_law = sorted(run.findings, key=lambda found: (order[found.law], found.status, found.number * (found.status == "new"), found.id))
    findings = [finding_line(found, *(scripts or {}).get(found.id, (None, found.note, ""))) for found in by_law]
    suspects = {place for found in by_law if found.status == "new" for place in found.places}
    for line, found in zip(findings, by_law, strict=True):
        if found.status == "new":
            line.ran, line.similar = {place: count for place, count in sorted(found.ran.items()) if place in suspects}, found.similar
    laws = [_law_line(result, target) for result in results]
    unconfirmed = [_unconfirmed_line(verdict) for verdict in run.unconfirmed]
    return RunReport(
        seed=request.seed,
        profile=request.profile,
        chosen=request.uses_smoke_shares,
        strict=request.strict,
        shard=f"{request.shard[0]}/{request.shard[1]}",
        started=run.started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - run.clock, 2),
        complete=exit_code is not None and exit_code not in (3, 130, 143),
        stopped_by=run.stopped_by,
        ahead=len(run.scouted.keys() - run.distinct) if run.stopped_by else 0,
        exit=exit_code,
        target=TargetLine(
            name=target.name,
            device=target.device,
            backend=target.backend,
            world_size=request.world_size,
            torch=str(torch.__version__),
            python=platform.python_version(),
            storage=target.storage,
            cannot=list(target.cannot),
            stale=list(run.stale),
        ),
        laws=laws,
        findings=findings,
        errors=[ErrorLine(law=error.law, message=error.message, text=error.text) for error in run.errors],
        unconfirmed=unconfirmed,
        certificate=certified[0] if (certified := certify_run(run, exit_code)) is not None else None,
        expectations=[
            add_counts(_expectation_line(entry, str(torch.__version__)), entry, run.expectations, id(entry) in too_wide)
            for entry in entries
        ],
        warnings=list(too_wide.values()),
        features=dict(sorted(run.features.items())),
        features_missing=missed_features(run.features),
        totals=sum_totals(laws, findings, unconfirmed, len(run.distinct), run.drawn),
    )


def _law_line(result: LawResult, target: Target) -> LawLine:
    law = result.law
    return LawLine(
        id=law.id,
        chapter=law.chapter,
        tier=law.tier,
        clause=law.clause,
        outcome=result.outcome,
        cases=result.cases,
        checks=result.checks,
        rejected=result.rejected,
        refused=result.refused,
        expected=result.expected,
        refusals=dict(result.refusals.most_common()),
        skipped_expected=result.skipped_expected,
        swept=result.swept,
        combinations=result.combinations,
        seconds=round(result.seconds, 2),
        reason=result.reason,
        lacks=sorted(set(law.needs) & set(target.cannot)),
        features=dict(sorted(result.features.items())),
        reasons=sorted(result.reasons),
        source=result.law.source if result.wrong else "",
        wrong=result.wrong,
        deviating=dict(sorted(result.deviating.items())),
    )


def finding_line(found: Finding, reproducer: str | None, note: str, script: str) -> FindingLine:
    return FindingLine(
        id=found.id,
        law=found.law,
        kind=found.kind,
        status=found.status,
        message=found.message,
        text=found.case.text,
        case=found.case.to_json(),
        features=sorted(found.features),
        reproducer=reproducer,
        script=script,
        where=found.where,
        places=list(found.places),
        calls=list(found.calls),
        cause=" | ".join(filter(None, found.cause)),
        signature=found.signature,
        minimal=found.minimal,
        confirmed=list(found.confirmed),
        note=note,
        number=found.number,
        entry=found.entry,
        waits=describe_waits(map(answer_fields, found.verdict.ranks)) if found.status == "new" else [],
    )


def _unconfirmed_line(verdict: Verdict) -> UnconfirmedLine:
    return UnconfirmedLine(
        law=verdict.case.law,
        kind=verdict.kind or "",
        message=verdict.message,
        text=verdict.case.text,
        case=verdict.case.to_json(),
        ranks=[answer_fields(answer) for answer in verdict.ranks],
    )


def _expectation_line(entry: Entry, torch_version: str) -> ExpectationLine:
    """The line of an entry, without its counts."""
    return ExpectationLine(
        law=entry.law,
        kind=entry.kind,
        hits=0,
        masked=0.0,
        stale=False,
        features=entry.requirements,
        reason=entry.reason,
        finding=entry.finding,
        where=entry.where,
        wide=entry.wide,
        rare=entry.rare,
        cause=entry.cause.id if entry.cause else "",
        case=entry.case,
        unseen=entry.is_untried_on(torch_version),
    )
