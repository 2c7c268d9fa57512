"""``run --resume`` and ``run --last-failed``: the request for what an earlier run left, and the joint report of both runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import msgspec

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.selection import select_ids
from shardlaw.conformance.report.combine import other_warnings, sum_expectations
from shardlaw.conformance.report.run_report import ExpectationLine, LawLine, RunReport, read_case_lines, read_report
from shardlaw.conformance.report.sums import sum_totals
from shardlaw.conformance.run.finding_file import read_finding_texts
from shardlaw.conformance.run.request import RunRequest

UNFINISHED_REASONS = ("the run was ended before it", "the run broke here", "an error of the harness")


@dataclass(frozen=True)
class EarlierRun:
    """An unfinished run: its report, the ids of its finished laws (``done``), and of these the lines of ``cases.txt`` and the files of
    findings by name."""

    report: RunReport
    done: frozenset[str]
    cases: tuple[str, ...]
    files: dict[str, str]

    def exit_code(self, code: int) -> int:
        """The exit code of both runs together, if the second ends with ``code``: 1 if the first has a new finding; and if only the first
        judged cases, 0 instead of 2."""
        advisory = {law.id for law in self.report.laws if law.tier == "advisory"}
        if code in (0, 2, 3) and any(found.law in self.done - advisory for found in self.report.new()):
            return 1
        return 0 if code == 2 and self.cases else code

    def join(self, after: RunReport) -> RunReport:
        """Join both reports, with the laws in the order of the first."""
        old, lines = self.report, {law.id: law for law in after.laws}
        laws = [lines.get(law.id, law) for law in old.laws]
        order = {law.id: index for index, law in enumerate(laws)}
        both = [*(found for found in old.findings if found.law in self.done), *after.findings]
        findings = sorted(both, key=lambda found: order[found.law])
        unconfirmed = [*(line for line in old.unconfirmed if line.law in self.done), *after.unconfirmed]
        features = sum((Counter(law.features) for law in laws), Counter())
        done_cases = [line.split(" ", 2) for line in self.cases]
        distinct = after.totals.distinct + len({text for word, _, text in done_cases if word != "rejected"})
        drawn = after.totals.drawn + sum(how == "drawn" and word != "rejected" for word, how, _ in done_cases)
        groups: dict[tuple[str, str, str], list[ExpectationLine]] = {}
        for line in [*old.expectations, *after.expectations]:
            groups.setdefault((line.where, line.law, line.kind), []).append(line)
        _, expectations, too_wide = sum_expectations(list(groups.values()), laws, after.chosen)
        return msgspec.structs.replace(
            after,
            started=old.started,
            seconds=round(old.seconds + after.seconds, 2),
            laws=laws,
            findings=findings,
            unconfirmed=unconfirmed,
            errors=[*(error for error in old.errors if error.law in self.done), *after.errors],
            expectations=expectations,
            warnings=[*too_wide, *other_warnings([old, after])],
            features=dict(sorted(features.items())),
            features_missing=[name for name in old.features_missing if name in after.features_missing],
            totals=sum_totals(laws, findings, unconfirmed, distinct, drawn),
        )


def select_last_failed(request: RunRequest) -> RunRequest:
    """Restrict a request to the laws that deviated or broke in the report of its folder, whose findings are tried first. Raises
    :class:`UsageError`."""
    report = _read_earlier("--last-failed", request)
    failed = [law.id for law in report.laws if law.outcome == "deviates" or (law.reason or "").startswith(UNFINISHED_REASONS[1:])]
    if not failed:
        raise UsageError(f"--last-failed: no law deviates in {request.report}: there is nothing to try again")
    return replace(request, laws=tuple(select_ids(failed, request.laws)), ops=(), known=request.known or request.report)


def resume_run(request: RunRequest) -> tuple[RunRequest, EarlierRun]:
    """Restrict a request to the laws that the run in its folder left, and return that run too. Raises :class:`UsageError` if that run is
    finished, or had other options."""
    report = _read_earlier("--resume", request)
    target = report.target
    options = {
        "--target": (request.target, target.name),
        "--world-size": (request.world_size, target.world_size),
        "--profile": (request.profile, report.profile),
        "--seed": (request.seed, report.seed),
        "--shard": (f"{request.shard[0]}/{request.shard[1]}", report.shard),
        "--strict": (request.strict, report.strict),
    }
    for option, (now, before) in options.items():
        if now != before:
            raise UsageError(f"--resume {request.report}: that run had {option} {before}, this one {now}")
    if request.laws or request.ops:
        raise UsageError(f"--resume {request.report}: goes on with the laws of that run: want no LAW and no --op")
    done = frozenset(law.id for law in report.laws if _is_done(law))
    remaining = [law.id for law in report.laws if law.id not in done]
    if not remaining:
        raise UsageError(f"--resume {request.report}: that run was finished: there is nothing left")
    lines = read_case_lines(request.report) or []
    files = read_finding_texts(request.report, (found.id for found in report.findings if found.law in done))
    done_cases = tuple(line for line in lines if line.count(" ") >= 2 and line.split(" ", 3)[2] in done)
    return replace(request, laws=tuple(remaining), resumed_smoke_shares=report.chosen), EarlierRun(report, done, done_cases, files)


def _read_earlier(option: str, request: RunRequest) -> RunReport:
    try:
        return read_report(request.report)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _is_done(law: LawLine) -> bool:
    """Whether a law's turn was completed."""
    return law.outcome != "untested" or (law.reason is not None and not law.reason.startswith(UNFINISHED_REASONS))
