"""``shardlaw expect update``: write the new findings of a report as expectations, each with a reason to fill in.

As few entries as possible are written that together account for all findings. An entry is about a law, its variants, its chapter or all
laws, and about one error or all of its class, and names the fewest features that separate deviating cases from holding ones
(:mod:`shardlaw.conformance.report.separate`); or it is about all findings at one place in torch, or with one collective that a backend does
wrong. Entries are appended to the file; nothing in it is changed. Stale and too wide entries of the report are listed.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardlaw.conformance.compat.trace import identifies_cause
from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.condition import case_facts
from shardlaw.conformance.law.selection import matches
from shardlaw.conformance.law.verdict import KINDS, collectives_in, error_pattern, place_names
from shardlaw.conformance.report.run_report import FindingLine, RunReport, read_report, report_folder
from shardlaw.conformance.report.separate import RANK_FEATURES, CaseTable, is_allowed, law_patterns, read_tables, separating_features
from shardlaw.conformance.report.wording import count_noun, one_line
from shardlaw.conformance.run.entry import ANY_KIND, EMPTY_REASON, MIN_CASES, SIGNED_KINDS, Entry, error_part
from shardlaw.conformance.run.expectation_file import read_entries
from shardlaw.conformance.run.expectations import MAX_HOLDING_SHARE
from shardlaw.conformance.run.finding_file import is_finding_id
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law

DEFAULT_FILE = Path("shardlaw-expect.toml")
# features that say little about a cause: named only if the entry would be too wide without
LAST_FEATURES = ("world:", "op:")
COMMENT_WIDTH = 300


def update(report_path: Path, output: Path = DEFAULT_FILE) -> int:
    """Write entries for the new findings of a report; returns the exit code. Raises :class:`UsageError`."""
    from shardlaw.conformance.laws import catalogue

    report = read_report(report_path)
    folder = report_folder(report_path)
    laws = catalogue()
    aliases = {alias: law.id for law in laws.values() for alias in law.aliases}
    versions = _version_range(report, report_path)
    for found in report.new():
        _check_finding(found, {*laws, *aliases}, report_path)
    if os.path.exists(output) and not os.path.isfile(output):
        raise UsageError(f"-o {output}: cannot be written: want a file")
    existing = read_entries(output, list(laws), aliases, drafts=True) if os.path.exists(output) else []
    lines, unmatched = [], list[FindingLine]()
    for found in report.new():
        law = laws[aliases.get(found.law, found.law)]
        entry = _find_entry(found, law, existing, report)
        if entry is not None:
            verb = "accounts for" if _accounts_for(entry, found, law, report) else "names, but does not match,"
            lines.append(f"{entry.where}: {verb} {found.id}: no entry added")
        else:
            unmatched.append(msgspec.structs.replace(found, law=law.id))
    drafts = _choose_drafts(unmatched, read_tables(folder / "cases.txt")) if unmatched else []
    starts = _append_blocks(output, [_entry_lines(draft, versions, report, folder) for draft in drafts])
    for draft, line in zip(drafts, starts, strict=True):
        lines += [f"{output}:{line}: {found.kind} {found.id} {found.text}" for found in draft.found]
    print(*lines, *_doubtful_entries(report), _conclusion(output, len(drafts), existing), sep="\n")
    return 0


@dataclass(frozen=True)
class Draft:
    """An entry to write.

    ``features`` may include field values as ``NAME=WORD``. With ``at`` the entry matches every kind of deviation at that place. ``share``
    is the share of the law's cases that it matches and that hold. ``found`` are the findings that it accounts for."""

    law: str
    kind: str
    features: tuple[str, ...] = ()
    signature: str = ""
    at: str = ""
    share: float = 0.0
    found: list[FindingLine] = field(default_factory=list, compare=False)

    def accounts_for(self, found: FindingLine) -> bool:
        """Whether the entry would match a finding."""
        if self.at:
            return self.at in found.spots
        same = matches(self.law, found.law) and found.kind == self.kind and {*self.features} <= {*_features_and_facts(found)}
        return same and self.signature in (_signature(found), _error_class(found))


def _choose_drafts(findings: Sequence[FindingLine], cases: Mapping[str, CaseTable]) -> list[Draft]:
    """Choose few entries that account for all findings, greedily: each time the one that covers most of the rest, the narrowest first."""
    drafts = list(dict.fromkeys(draft for found in findings for draft in _candidate_drafts(found, cases)))
    drafts += [Draft("*", ANY_KIND, at=spot) for spot in _shared_spots(findings)]
    drafts.sort(key=lambda draft: ("*" in draft.law) + (draft.law == "*") + bool(draft.at))
    matched = {draft: {at for at, found in enumerate(findings) if draft.accounts_for(found)} for draft in drafts}
    uncovered, chosen = {*range(len(findings))}, list[Draft]()
    while uncovered:
        best = max(drafts, key=lambda draft: len(matched[draft] & uncovered))
        best.found.extend(findings[at] for at in sorted(matched[best] & uncovered))
        uncovered -= matched[best]
        chosen.append(best)
    return sorted(chosen, key=lambda draft: findings.index(draft.found[0]))


def _shared_spots(findings: Sequence[FindingLine]) -> list[str]:
    """The places for entries with ``at``: collectives of a backend and places in torch, without duplicates."""
    wrong = [name for found in findings if found.in_back_end for name in collectives_in(found.features)]
    first = [spot for found in findings if identifies_cause(found.where) and not found.in_back_end for spot in place_names(found.where, ())]
    return list(dict.fromkeys([*wrong, *first]))


def _candidate_drafts(found: FindingLine, cases: Mapping[str, CaseTable]) -> Iterator[Draft]:
    """Yield the entries that a finding may get, the most specific first."""
    choices = separating_features(_features_and_facts(found), found.kind, cases.get(found.law, CaseTable(())))
    signatures = dict.fromkeys((_signature(found), _error_class(found)))
    for pattern in law_patterns(found.law):
        for features in choices:
            if pattern == found.law or is_allowed(pattern, features, found.kind, cases):
                yield from (Draft(pattern, found.kind, features, signature) for signature in signatures)
    if not choices:
        narrow, share = _fallback_features(found, cases.get(found.law, CaseTable(())))
        yield Draft(found.law, found.kind, tuple(narrow), _signature(found), share=share)


def _features_and_facts(found: FindingLine) -> list[str]:
    """The features of a finding and the ``NAME=WORD`` facts of its case; no facts with a history, since then the entry has no case."""
    case = Case.from_json(found.case)
    return [*found.features, *(() if case.after else sorted(case_facts(case)))]


def _error_class(found: FindingLine) -> str:
    """The class of the error as a signature, for cases whose error texts differ; for other kinds the whole signature."""
    name = re.match(r"[A-Za-z_.]+(?=: )", error_part(found.signature).strip())
    return name[0] if name and found.kind in ("raised", "divergence") else _signature(found)


def _version_range(report: RunReport, path: Path) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        major, minor = (*Version(report.target.torch).release, 0)[:2]
    except InvalidVersion:
        raise UsageError(f"{path}: no report of shardlaw: torch {report.target.torch!r} is no version") from None
    return f">={major}.{minor},<{major}.{minor + 1}"


def _check_finding(found: FindingLine, laws: set[str], path: Path) -> None:
    """Raise :class:`UsageError` for a finding that no entry can describe."""
    from shardlaw.conformance.law.features.features import FEATURES, is_known

    def refuse(message: str) -> UsageError:
        return UsageError(f"{path}: finding {found.id!r}: {message}")

    if not is_finding_id(found.id):
        raise refuse("want an id of 8 hex digits")
    if found.law not in laws:
        raise refuse(f"no law here is called {found.law!r} ({one_of(found.law, laws)})")
    if found.kind not in KINDS:
        raise refuse(f"unknown kind {found.kind!r} ({one_of(found.kind, KINDS)})")
    for feature in found.features:
        if not is_known(feature):
            raise refuse(f"unknown feature {feature!r} ({one_of(feature, FEATURES)})")
    try:
        Case.from_json(found.case)
    except NotationError as error:
        raise refuse(str(error)) from None
    if found.kind in SIGNED_KINDS and found.signature.count(" | ") < 3:
        raise refuse(f"a finding of kind {found.kind!r} without a signature")


def _find_entry(found: FindingLine, law: Law, existing: Sequence[Entry], report: RunReport) -> Entry | None:
    """The existing entry that accounts for a finding, or else one that names its id."""
    matching = [entry for entry in existing if _accounts_for(entry, found, law, report)]
    naming = [entry for entry in existing if entry.finding == found.id]
    return next(iter([*matching, *naming]), None)


def _accounts_for(entry: Entry, found: FindingLine, law: Law, report: RunReport) -> bool:
    here = law.id in entry.laws and entry.applies_to(report.target.torch, report.target.name)
    return here and entry.matches(
        Case.from_json(found.case), found.kind, frozenset(found.features), error_part(found.signature), found.spots
    )


def _entry_lines(draft: Draft, versions: str, report: RunReport, folder: Path) -> list[str]:
    """The lines of an entry, after comments that help to find its reason."""
    first, *others = draft.found
    after = len(first.case.get("after", ()))
    shown = f"shown by {folder / first.reproducer}" if first.reproducer else first.note or "no reproducer"
    comments = [first.message, first.text + (f" (after {after} other cases)" if after else ""), shown]
    comments += [f"and {other.id} {other.text}" for other in others]
    if draft.share > MAX_HOLDING_SHARE:
        comments.append(f"matches cases that hold, {draft.share:.0%} of those of its law: refused unless it says wide = true")
    features, words = [name for name in draft.features if "=" not in name], [name for name in draft.features if "=" in name]
    keys: dict[str, str | list[str] | dict[str, str]] = {"law": draft.law, "kind": draft.kind}
    if not draft.at:
        keys["features"] = features
    if words:
        keys["where"] = dict(name.split("=", 1) for name in words)
    if draft.at:
        keys["at"] = draft.at
    if draft.signature:
        keys["signature"] = draft.signature
    keys["torch"] = versions
    if report.target.name != "gloo":
        keys["target"] = report.target.name
    keys["finding"] = first.id
    if not after:
        keys["case"] = first.text
    keys["reason"] = EMPTY_REASON
    return [
        *(f"# {_printable(text)}" for text in comments),
        "[[expect]]",
        *(f"{key} = {_format_toml(value)}" for key, value in keys.items()),
    ]


def _fallback_features(found: FindingLine, cases: CaseTable) -> tuple[list[str], float]:
    """Features for an entry if none separate, and the share of the law's cases that have them and hold (0: unknown)."""
    features = [feature for feature in found.features if not feature.startswith(LAST_FEATURES)]
    share = _holding_share(features, found.kind, cases)
    for family in LAST_FEATURES:
        if features and share <= MAX_HOLDING_SHARE:
            break
        more = [feature for feature in found.features if feature.startswith(family)]
        features = sorted([*features, *more])
        share = 0.0 if family == "op:" and more else _holding_share(features, found.kind, cases)
    return features, share


def _holding_share(features: Sequence[str], kind: str, cases: CaseTable) -> float:
    """The share of a law's cases that have these features and do not deviate with this kind; 0 if there are too few cases."""
    if cases.total < MIN_CASES:
        return 0.0
    return cases.count_cases([name for name in features if not name.startswith(RANK_FEATURES)], kind)[1] / cases.total


def _signature(found: FindingLine) -> str:
    """The signature for an entry: the finding's error text, or its longest part that is free of numbers and names."""
    error = error_part(found.signature).strip()
    parts = [error, *re.split(r"[\[\](){}'\"]", error)]
    fitting = [part.strip() for part in parts if part.strip() and error_pattern(part) == part.strip() and part.count(" | ") < 3]
    return fitting[0] if fitting[:1] == [error] else max(fitting, key=len, default="*" if found.kind in SIGNED_KINDS else "")


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in one_line(text, COMMENT_WIDTH))


def _format_toml(value: str | list[str] | dict[str, str]) -> str:
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{name if name.isidentifier() else _format_toml(name)} = {_format_toml(text)}" for name, text in value.items())
            + " }"
        )
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _append_blocks(path: Path, blocks: Sequence[Sequence[str]]) -> list[int]:
    """Append blocks of lines to a file, which is created if missing; returns the line number of each block's table."""
    if not blocks:
        return []
    old = path.read_bytes() if os.path.exists(path) else f"# For: shardlaw run --expect {_printable(str(path))}\n".encode()
    text, end = old.decode(), "\r\n" if b"\r\n" in old else "\n"
    added = "" if text.endswith("\n") or not text else end
    starts = []
    for block in blocks:
        added += end if text + added else ""
        starts.append((text + added).count("\n") + 1 + block.index("[[expect]]"))
        added += "".join(line + end for line in block)
    try:
        tomllib.loads(text.replace("\r\n", "\n") + added.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"-o {path}: cannot be added to: want [[cause]] and [[expect]] tables alone: {error}") from None
    try:
        new = b"" if os.path.exists(path) else old
        with open(path, "ab") as file:
            file.write(new + added.encode())
    except OSError as error:
        raise UsageError(f"-o {path}: cannot be written: {error.strerror}") from None
    return starts


def _doubtful_entries(report: RunReport) -> Iterator[str]:
    """Yield a line for each stale or too wide entry of the run."""
    for line in report.expectations:
        what = f"{line.kind} of {line.law}" + (f" with {', '.join(line.features)}" if line.features else "")
        if line.stale:
            why = "and its case holds" if line.mended else "though its features were reached"
            yield f"{line.where}: stale: {what} did not happen, {why}"
        if line.refused:
            warnings = [warning for warning in report.warnings if warning.startswith(f"{line.where}: ")]
            yield from warnings[:1] or [f"{line.where}: too wide: {what}: name more features or say wide = true"]


def _conclusion(output: Path, written: int, existing: Sequence[Entry]) -> str:
    drafts = written + sum(not entry.has_reason for entry in existing)
    count = f"{count_noun(written, 'entry', 'entries')} written to {output}" if written else "nothing to write"
    if not drafts:
        return count
    those = f"{count_noun(drafts, 'entry', 'entries')} of {output} {'has' if drafts == 1 else 'have'}"
    return f'{count}; {those} reason = "{EMPTY_REASON}": say there what causes the finding, then: shardlaw run --expect {output}'
