"""Compare two reports; the result is plain data.

Findings are paired by id, then by the text of their case, then by signature, since on a busy machine shrinking may end at another case.
Expected findings are also paired by their entry, whose example may differ. The exit code is 1 if the second report is worse in any way, and
2 if it is not and the two runs had different requests: other laws, or other expectations on the same torch and target. What a law does that
only one of the reports has is no news.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shardlaw.conformance.law.verdict import error_pattern
from shardlaw.conformance.report.run_report import ExpectationLine, FindingLine, RunReport, read_case_lines, read_report, report_folder
from shardlaw.conformance.report.wording import count_noun

SCHEMA = 1


class Side(msgspec.Struct, kw_only=True):
    """A summary of one of the two reports."""

    path: str
    target: str
    torch: str
    profile: str
    seed: int
    started: str
    cases: int
    exit: int | None


class FoundLine(msgspec.Struct, kw_only=True):
    """A finding of one report."""

    id: str
    law: str
    kind: str
    status: str
    message: str
    text: str
    note: str


class ChangedFinding(msgspec.Struct, kw_only=True):
    """A finding of both reports; ``changed`` names what differs."""

    first: FoundLine
    second: FoundLine
    changed: list[str]


class ChangedLaw(msgspec.Struct, kw_only=True):
    """A law with different outcomes; ``reason`` says why it is untested in the second report."""

    id: str
    first: str
    second: str
    reason: str | None = None


class ChangedCase(msgspec.Struct, kw_only=True):
    """A case with different verdicts: ``held``, ``refused``, ``rejected`` or the kind of a deviation."""

    text: str
    first: str
    second: str


class Findings(msgspec.Struct, kw_only=True):
    new: list[FoundLine]
    gone: list[FoundLine]
    changed: list[ChangedFinding]


class Laws(msgspec.Struct, kw_only=True):
    changed: list[ChangedLaw]
    only_first: list[str]
    only_second: list[str]


class Features(msgspec.Struct, kw_only=True):
    """``lost`` were reached by the first run alone, ``gained`` by the second."""

    lost: list[str]
    gained: list[str]


class ChangedRefusal(msgspec.Struct, kw_only=True):
    """A refusal in only one of the two reports: its law, its text without numbers and names, and how many cases it has."""

    law: str
    text: str
    cases: int


class Refusals(msgspec.Struct, kw_only=True):
    """``new`` are only in the second report, ``gone`` only in the first. Of laws that both reports judged."""

    new: list[ChangedRefusal]
    gone: list[ChangedRefusal]


class Cases(msgspec.Struct, kw_only=True):
    """How the judged cases of the two reports overlap."""

    both: int
    only_first: list[str]
    only_second: list[str]
    changed: list[ChangedCase]


class KnownCause(msgspec.Struct, kw_only=True):
    """A known cause: its id and title."""

    id: str
    title: str


class Causes(msgspec.Struct, kw_only=True):
    """Known causes that occur in only one of the reports: ``mended`` in the first, ``came`` in the second. Of laws that both judged."""

    mended: list[KnownCause]
    came: list[KnownCause]


class Comparison(msgspec.Struct, kw_only=True):
    """The comparison of two reports. ``differs`` holds, by name, the settings in which the runs differ; ``worse`` says why ``exit`` is 1,
    ``apart`` why it is 2. ``cases`` is null if one of the reports has no ``cases.txt``."""

    schema: int = SCHEMA
    first: Side
    second: Side
    differs: dict[str, list[Any]]
    findings: Findings
    causes: Causes
    laws: Laws
    refusals: Refusals
    features: Features
    cases: Cases | None
    worse: list[str]
    apart: list[str]
    exit: int


def compare_reports(first: Path, second: Path) -> Comparison:
    """Compare two reports, each a folder or its ``report.json``. Raises :class:`UsageError`."""
    old, new = read_report(first), read_report(second)
    findings = _compare_findings(old, new)
    laws = _compare_laws(old, new)
    cases = _compare_cases(_read_verdicts(first), _read_verdicts(second))
    worse = _regressions(old, new, findings, laws, cases)
    apart = _request_differences(old, new, laws)
    reached = set(old.features), set(new.features)
    return Comparison(
        first=_make_side(first, old),
        second=_make_side(second, new),
        differs=_compare_runs(old, new),
        findings=findings,
        causes=Causes(mended=_causes_only_in(old, new), came=_causes_only_in(new, old)),
        laws=laws,
        refusals=Refusals(new=_refusals_only_in(new, old), gone=_refusals_only_in(old, new)),
        features=Features(lost=sorted(reached[0] - reached[1]), gained=sorted(reached[1] - reached[0])),
        cases=cases,
        worse=worse,
        apart=apart,
        exit=1 if worse else 2 if apart else 0,
    )


def _make_side(path: Path, report: RunReport) -> Side:
    return Side(
        path=str(path),
        target=report.target.name,
        torch=report.target.torch,
        profile=report.profile,
        seed=report.seed,
        started=report.started,
        cases=report.totals.cases,
        exit=report.exit,
    )


def _compare_runs(old: RunReport, new: RunReport) -> dict[str, list[Any]]:
    """The settings in which two runs differ."""

    def settings(report: RunReport) -> dict[str, Any]:
        target = report.target
        named = {name: getattr(target, name) for name in ("torch", "device", "backend", "storage", "cannot", "python")}
        return {
            "target": target.name,
            **named,
            "world size": target.world_size,
            "seed": report.seed,
            "profile": report.profile,
            "shard": report.shard,
            "harness": report.harness,
            "stopped by": report.stopped_by,
            "expectations": len(report.expectations),
        }

    before, after = settings(old), settings(new)
    return {name: [before[name], after[name]] for name in before if before[name] != after[name]}


def _compare_findings(old: RunReport, new: RunReport) -> Findings:
    pairs, gone, came = _pair_findings(old.findings, new.findings)
    changed = []
    for before, after in pairs:
        if names := _changed_names(before, after):
            changed.append(ChangedFinding(first=_found_line(before), second=_found_line(after), changed=names))
    return Findings(new=[_found_line(found) for found in came], gone=[_found_line(found) for found in gone], changed=changed)


def _changed_names(before: FindingLine, after: FindingLine) -> list[str]:
    """What differs between two findings. A message is another one if its pattern is: numbers, paths and addresses are others in each run.
    A known fault may be shown by another case, whose message differs."""
    names = [name for name in ("kind", "status") if getattr(before, name) != getattr(after, name)]
    known = before.status == after.status == "expected" and before.text != after.text
    if not known and error_pattern(before.message) != error_pattern(after.message):
        names.append("message")
    return names


def _found_line(found: FindingLine) -> FoundLine:
    return msgspec.convert(found, FoundLine, from_attributes=True)


def _pair_findings(
    old: Sequence[FindingLine], new: Sequence[FindingLine]
) -> tuple[list[tuple[FindingLine, FindingLine]], list[FindingLine], list[FindingLine]]:
    """Pair the findings of two reports. Returns the pairs, the findings of the first only, and those of the second only."""
    gone, came = list(old), list(new)
    pairs: list[tuple[FindingLine, FindingLine]] = []
    keys: tuple[Callable[[FindingLine], object], ...] = (
        lambda found: (found.id, found.text),
        lambda found: found.id,
        lambda found: (found.text, found.kind),
        lambda found: found.text,
        lambda found: found.signature or None,
        lambda found: (Path(found.entry).name, found.note, found.kind) if found.status == "expected" and found.entry else None,
        lambda found: (found.law, found.note, found.kind) if found.status == "expected" else None,
    )
    for key in keys:
        waiting: dict[object, list[FindingLine]] = {}
        for found in gone:
            waiting.setdefault(key(found), []).append(found)
        for after in list(came):
            name = key(after)
            if name is not None and waiting.get(name):
                before = waiting[name].pop(0)
                pairs.append((before, after))
                gone.remove(before)
                came.remove(after)
    return pairs, gone, came


def _causes_only_in(report: RunReport, other: RunReport) -> list[KnownCause]:
    """The causes that occurred in one report and not in the other, which tried a case of theirs or no longer expects them."""
    judged = {law.id for law in other.laws if law.cases}
    lines_by_cause: dict[str, list[ExpectationLine]] = {}
    for line in other.expectations:
        lines_by_cause.setdefault(line.cause, []).append(line)
    met = {line.cause: line.reason for line in report.expectations if line.cause and line.happened and judged.issuperset(line.matched)}
    return [
        KnownCause(id=name, title=title)
        for name, title in met.items()
        if name not in lines_by_cause
        or (any(line.mended for line in lines_by_cause[name]) and not any(line.happened for line in lines_by_cause[name]))
    ]


def _compare_laws(old: RunReport, new: RunReport) -> Laws:
    before, after = {law.id: law for law in old.laws}, {law.id: law for law in new.laws}
    changed = [
        ChangedLaw(id=name, first=law.outcome, second=after[name].outcome, reason=after[name].reason)
        for name, law in before.items()
        if name in after and after[name].outcome != law.outcome
    ]
    return Laws(
        changed=changed,
        only_first=[name for name in before if name not in after],
        only_second=[name for name in after if name not in before],
    )


def _refusals_only_in(report: RunReport, other: RunReport) -> list[ChangedRefusal]:
    """The refusals that one report has and the other lacks, of laws that both judged."""
    judged = {law.id: law.refusals for law in other.laws if law.cases}
    return [
        ChangedRefusal(law=law.id, text=text, cases=count)
        for law in report.laws
        if law.id in judged
        for text, count in law.refusals.items()
        if text not in judged[law.id]
    ]


def _regressions(old: RunReport, new: RunReport, findings: Findings, laws: Laws, cases: Cases | None) -> list[str]:
    """Say what is worse in the second report; what it expects, or its target declares missing, is not."""
    cannot = set(new.target.cannot) - set(old.target.cannot)
    came = [found for found in findings.new if found.status == "new" and found.law not in laws.only_second]
    turned = [pair for pair in findings.changed if pair.second.status == "new" and ("kind" in pair.changed or "status" in pair.changed)]
    known = {found.law for found in came} | {pair.second.law for pair in turned}
    deviating = [law for law in laws.changed if law.second == "deviates" and law.id not in known]
    silent = [law for law in laws.changed if law.second == "untested" and not (cannot and "cannot do" in (law.reason or ""))]
    refused = [case for case in cases.changed if case.second == "refused"] if cases else []
    counts = [
        (len(came), "new finding", "new findings"),
        (len(turned), "finding that was expected or of another kind", "findings that were expected or of another kind"),
        (len(deviating), "law that deviates now", "laws that deviate now"),
        (len(refused), "case that is refused now", "cases that are refused now"),
        (len(silent), "law that says nothing any more", "laws that say nothing any more"),
    ]
    worse = [count_noun(*count) for count in counts if count[0]]
    return worse + ["the second run was not finished"] * (old.complete and not new.complete)


def _request_differences(old: RunReport, new: RunReport, laws: Laws) -> list[str]:
    """Say in what the requests of the two runs differ."""
    sides = (("first", laws.only_first), ("second", laws.only_second))
    apart = [count_noun(len(only), f"law in the {side} only", f"laws in the {side} only") for side, only in sides if only]
    before, after = len(old.expectations), len(new.expectations)
    same_target = (old.target.torch, old.target.name) == (new.target.torch, new.target.name)
    if same_target and not apart and before != after:
        empty = "first" if not before else "second" if not after else ""
        why = f" (the {empty} was told to expect nothing: --no-expect)" if empty else ""
        apart.append(f"{before} expectations in the first, {after} in the second{why}")
    return apart


def _read_verdicts(path: Path) -> dict[str, str] | None:
    """The verdicts in ``cases.txt`` by case text; ``None`` if the file is missing."""
    lines = read_case_lines(report_folder(path))
    if lines is None:
        return None
    words = (line.split(" ", 2) for line in lines)
    return {parts[2]: parts[0] for parts in words if len(parts) == 3}


def _compare_cases(first: dict[str, str] | None, second: dict[str, str] | None) -> Cases | None:
    if first is None or second is None:
        return None
    return Cases(
        both=sum(text in second for text in first),
        only_first=[text for text in first if text not in second],
        only_second=[text for text in second if text not in first],
        changed=[ChangedCase(text=text, first=said, second=second[text]) for text, said in first.items() if second.get(text, said) != said],
    )
