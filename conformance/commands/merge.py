"""``shardlaw merge``: merge the reports of the shards of one run (``--shard I/N``).

Counts are added up; outcomes, stale and too wide expectations and the exit code are decided again from the sums. If a shard is missing, the
merged run counts as not finished.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.report.combine import other_warnings, sum_expectations
from shardlaw.conformance.report.run_report import (
    ExpectationLine,
    FindingLine,
    LawLine,
    RunReport,
    UnconfirmedLine,
    read_case_lines,
    read_report,
    report_folder,
)
from shardlaw.conformance.report.sums import sum_totals
from shardlaw.conformance.report.writer import check_folder, clear_report, write_report
from shardlaw.conformance.run.expectations import Expectations
from shardlaw.conformance.run.finding_file import read_finding_texts, write_text
from shardlaw.conformance.run.request import parse_shard

# counts of a law that are equal in all shards: each shard enumerates all cases
EQUAL_IN_SHARDS = ("swept", "combinations")


@dataclass(frozen=True)
class Shard:
    """The report of one shard, the files of its findings by path, and the lines of its ``cases.txt``."""

    path: Path
    report: RunReport
    number: int
    count: int
    files: dict[str, str]
    cases: list[str] | None

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Read a report, given by folder or file. Raises :class:`UsageError`."""
        report = read_report(path)
        folder = report_folder(path)
        try:
            number, count = parse_shard(report.shard)
        except UsageError:
            raise UsageError(f"{path}: its shard is {report.shard!r}: want the reports of single shards, such as 2/4") from None
        files = read_finding_texts(folder, (found.id for found in report.findings))
        return cls(path, report, number, count, files, read_case_lines(folder))


def merge(paths: Sequence[Path], output: Path) -> int:
    """Write the merged report into ``output`` and print its summary; returns its exit code. Raises :class:`UsageError`."""
    from shardlaw.conformance.report.github import annotate
    from shardlaw.conformance.report.terminal import make_console, print_not_judged, print_summary

    shards = sorted(map(Shard.read, paths), key=lambda shard: shard.number)
    _check_shards(shards)
    check_folder("-o", output)
    if any(os.path.realpath(output) == os.path.realpath(report_folder(shard.path)) for shard in shards):
        raise UsageError(f"-o {output}: is one of the reports: want another folder")
    report, files = merge_shards(shards)
    try:
        clear_report(output)
        (output / "findings").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(output / name, text)
        write_report(output, report)
    except OSError as error:
        raise UsageError(f"-o {output}: cannot be written: {error.strerror}") from None
    print_summary(make_console(), report, str(output))
    print_not_judged(report)
    annotate(report, output)
    assert report.exit is not None
    return report.exit


def _check_shards(shards: Sequence[Shard]) -> None:
    """Raise :class:`UsageError` unless the reports are of different shards of one request."""
    first = shards[0]
    request = _request_fields(first)
    for other in shards[1:]:
        for name, value in _request_fields(other).items():
            if value != request[name]:
                difference = (
                    f": {name} is {value!r}, in {first.path} it is {request[name]!r}"
                    if isinstance(value, (str, int))
                    else f" by its {name}"
                )
                raise UsageError(f"{other.path}: belongs to another run than {first.path}{difference}")
    for shard, other in pairwise(shards):
        if shard.number == other.number:
            raise UsageError(f"{other.path}: is shard {other.number}/{other.count}, and so is {shard.path}: want each shard once")


def _request_fields(shard: Shard) -> dict[str, object]:
    """The values that all shards of one request share, by name."""
    report, target = shard.report, shard.report.target
    return {
        "harness": report.harness,
        "seed": report.seed,
        "profile": report.profile,
        "target": target.name,
        **{name: getattr(target, name) for name in ("device", "backend", "storage", "torch", "python")},
        "world size": target.world_size,
        "number of shards": shard.count,
        "--strict": report.strict,
        "list of what the target cannot do": target.cannot,
        "list of laws": [law.id for law in report.laws],
        "list of expectations": [_entry_key(line) for line in report.expectations],
    }


def _entry_key(line: ExpectationLine) -> tuple[object, ...]:
    return Path(line.where).name, line.law, line.kind, line.features, line.finding, line.reason


def merge_shards(shards: Sequence[Shard]) -> tuple[RunReport, dict[str, str]]:
    """The merged report, and the files of its findings and cases by path in its folder. ``shards`` are in order."""
    reports = [shard.report for shard in shards]
    first, count = reports[0], shards[0].count
    missing = sorted(set(range(1, count + 1)) - {shard.number for shard in shards})
    laws = [_merge_law_lines([report.laws[at] for report in reports]) for at in range(len(first.laws))]
    groups = [[report.expectations[at] for report in reports] for at in range(len(first.expectations))]
    known, expectations, too_wide = sum_expectations(groups, laws, first.chosen)
    findings, files = _merge_findings(shards, [law.id for law in laws])
    for law in laws:
        broken = any(error.law == law.id for report in reports for error in report.errors)
        law.outcome = _outcome(law, findings, known, broken)
        law.reason = _untested_reason(law, reports) if law.outcome == "untested" else None
    features = sum((Counter(report.features) for report in reports), Counter())
    unconfirmed = _merge_unconfirmed(reports)
    distinct, cases = _merge_case_lines(shards, [law.id for law in laws])
    if cases is not None:
        files["cases.txt"] = cases
    report = msgspec.structs.replace(
        first,
        target=max(reports, key=lambda report: report.totals.cases).target,
        shard="1/1" if not missing else f"{','.join(str(shard.number) for shard in shards)}/{count}",
        started=min(report.started for report in reports),
        seconds=round(sum(report.seconds for report in reports), 2),
        complete=not missing and all(report.complete for report in reports),
        stopped_by=_stopped_by(shards, missing),
        laws=laws,
        findings=findings,
        unconfirmed=unconfirmed,
        errors=list({error.law: error for report in reports for error in report.errors}.values()),
        expectations=expectations,
        warnings=[*too_wide, *other_warnings(reports)],
        features=dict(sorted(features.items())),
        features_missing=[name for name in first.features_missing if all(name in report.features_missing for report in reports)],
        totals=sum_totals(laws, findings, unconfirmed, distinct, sum(report.totals.drawn for report in reports)),
    )
    report.exit = _exit_code(reports, report, known, bool(missing))
    return report, files


def _merge_law_lines(lines: Sequence[LawLine]) -> LawLine:
    """Sum the counts of a law over all shards; outcome and reason are set later."""
    counts = {
        field.name: (max if field.name in EQUAL_IN_SHARDS else sum)(getattr(line, field.name) for line in lines)
        for field in msgspec.structs.fields(LawLine)
        if field.type is int
    }
    features: Counter[str] = sum((Counter(line.features) for line in lines), Counter())
    refusals: Counter[str] = sum((Counter(line.refusals) for line in lines), Counter())
    seconds = round(sum(line.seconds for line in lines), 2)
    deviating: Counter[str] = sum((Counter(line.deviating) for line in lines), Counter())
    more = {
        "features": dict(sorted(features.items())),
        "deviating": dict(sorted(deviating.items())),
        "refusals": dict(refusals.most_common()),
        "reasons": sorted({reason for line in lines for reason in line.reasons}),
        "seconds": seconds,
    }
    return msgspec.structs.replace(lines[0], **counts, **more)


def _outcome(law: LawLine, findings: Sequence[FindingLine], known: Expectations, broken: bool) -> str:
    if any(found.law == law.id and found.status == "new" for found in findings):
        return "deviates"
    if not law.cases or broken:
        return "untested"
    if law.expected:
        return "expected"
    if law.refused == law.cases:
        return "untested"
    return "stale" if known.has_stale(law.id) else "held"


def _untested_reason(law: LawLine, reports: Sequence[RunReport]) -> str:
    """Why no shard judged a law."""
    lines = [line for report in reports for line in report.laws if line.id == law.id and line.reason]
    reasons = [line.reason or "" for line in lines if line.cases or not law.cases]
    return "; ".join(dict.fromkeys(reasons)) or "every case is refused, on every rank alike"


def _merge_findings(shards: Sequence[Shard], laws: Sequence[str]) -> tuple[list[FindingLine], dict[str, str]]:
    """Keep one finding for each new signature and each expectation, the first in the law's plan; also return the files of these."""
    first_met: dict[tuple[str, ...], tuple[Shard, FindingLine]] = {}
    order = {law_id: at for at, law_id in enumerate(laws)}
    met = [(shard, found) for shard in shards for found in shard.report.findings]
    for shard, found in sorted(met, key=lambda item: _report_order(item[1], order)):
        first_met.setdefault(_merge_key(found), (shard, found))
    files = {}
    for shard, found in first_met.values():
        for suffix in ("json", "py"):
            name = f"findings/{found.id}.{suffix}"
            if name in shard.files:
                files[name] = shard.files[name]
    return [_drop_missing_script(found, files) for _, found in first_met.values()], files


def _report_order(found: FindingLine, order: dict[str, int]) -> tuple[int, bool, int]:
    """The order of findings in a report: by law, expected before new, by number of the first case."""
    return order.get(found.law, len(order)), found.status == "new", found.number


def _merge_key(found: FindingLine) -> tuple[str, ...]:
    """The key that equal findings of two shards share."""
    if found.status == "expected":
        return ("expected", Path(found.entry).name or found.law, found.kind, found.note)
    return ("new", found.signature or found.id, found.law)


def _drop_missing_script(found: FindingLine, files: dict[str, str]) -> FindingLine:
    if found.reproducer is None or f"findings/{found.id}.py" in files:
        return found
    note = "; ".join(filter(None, [found.note, "its script is not among the reports"]))
    return msgspec.structs.replace(found, reproducer=None, note=note)


def _merge_unconfirmed(reports: Sequence[RunReport]) -> list[UnconfirmedLine]:
    seen: dict[tuple[str, str], UnconfirmedLine] = {}
    for report in reports:
        for line in report.unconfirmed:
            seen.setdefault((line.kind, line.text), line)
    return list(seen.values())


def _merge_case_lines(shards: Sequence[Shard], laws: Sequence[str]) -> tuple[int, str | None]:
    """The number of distinct judged cases, and the merged ``cases.txt`` in the order of laws (``None`` if a shard has none)."""
    if any(shard.cases is None for shard in shards):
        return sum(shard.report.totals.distinct for shard in shards), None
    order = {law_id: at for at, law_id in enumerate(laws)}
    lines = [line for shard in shards for line in shard.cases or ()]
    split = [line.split(" ", 3) for line in lines]
    distinct = {tuple(words[2:]) for words in split if words[0] != "rejected"}
    by_law = sorted(range(len(lines)), key=lambda at: order.get(split[at][2] if len(split[at]) > 2 else "", len(order)))
    return len(distinct), "".join(f"{lines[at]}\n" for at in by_law)


def _stopped_by(shards: Sequence[Shard], missing: Sequence[int]) -> str | None:
    if missing:
        return f"shards that are not here: {', '.join(f'{number}/{shards[0].count}' for number in missing)}"
    return next((shard.report.stopped_by for shard in shards if shard.report.stopped_by), None)


def _exit_code(reports: Sequence[RunReport], merged: RunReport, known: Expectations, missing: bool) -> int:
    """The first that applies: interrupted, no case judged, a new finding (``--strict``: or a stale expectation), not finished."""
    interrupted = [report.exit for report in reports if report.exit in (130, 143)]
    if interrupted:
        return interrupted[0] or 130
    if not merged.totals.cases:
        return 2
    advisory = {law.id for law in merged.laws if law.tier == "advisory"}
    stale = bool(known.too_wide()) or any(known.has_stale(law.id) for law in merged.laws)
    if any(found.law not in advisory for found in merged.new()) or (merged.strict and stale):
        return 1
    return 3 if missing or any(map(_was_not_finished, reports)) else 0


def _was_not_finished(report: RunReport) -> bool:
    """Whether a run broke. One that broke before any case was judged ends with 2, as does one without cases."""
    return report.exit in (None, 3) or (report.exit == 2 and report.stopped_by not in (None, "budget"))
