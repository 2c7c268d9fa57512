"""Print a comparison of two reports (``shardlaw compare``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from shardlaw.conformance.report.comparison import ChangedFinding, ChangedRefusal, Comparison, FoundLine, KnownCause, Side
from shardlaw.conformance.report.terminal import STYLES
from shardlaw.conformance.report.wording import one_line

SHOWN_EXPECTED = 8
SHOWN_CASES = 3
SHOWN_LAWS = 12
SHOWN_FEATURES = 24


def print_comparison(out: Console, found: Comparison) -> None:
    """Print a comparison."""
    for name, side in (("first", found.first), ("second", found.second)):
        out.print(Text.assemble((f"{name:6}  ", "bold"), _side_line(side)))
    for name, (before, after) in found.differs.items():
        out.print(Text.assemble(("differs", "yellow"), f"  {name}: {_format_value(before)} -> {_format_value(after)}"))
    _print_findings(out, "new in the second", found.findings.new, "bold red")
    _print_findings(out, "gone", found.findings.gone, "green")
    if found.findings.changed:
        _print_heading(out, f"changed ({len(found.findings.changed)})")
        for pair in found.findings.changed:
            _print_changed(out, pair)
    _print_causes(out, "known causes that are mended", found.causes.mended)
    _print_causes(out, "known causes that came", found.causes.came)
    _print_laws(out, found)
    _print_refusals(out, "newly refused", found.refusals.new)
    _print_refusals(out, "refused no longer", found.refusals.gone)
    _print_features(out, found)
    _print_cases(out, found)
    out.print()
    conclusion = "; ".join([*found.worse, *found.apart]) or "nothing new in the second"
    out.print(Text(f"exit {found.exit}: {conclusion}", style="bold red" if found.exit else "green"))


def _side_line(side: Side) -> str:
    ended = "not finished" if side.exit is None else f"exit {side.exit}"
    return (
        f"{side.path}: {side.target}, torch {side.torch}, profile {side.profile}, seed {side.seed}, {side.started}: "
        f"{side.cases} cases, {ended}"
    )


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)


def _print_heading(out: Console, text: str) -> None:
    out.print()
    out.print(Text(f"{text}:", style="bold"))


def _print_findings(out: Console, title: str, findings: Sequence[FoundLine], style: str) -> None:
    """Print the findings of one report only: all new ones, then a few of the expected."""
    if not findings:
        return
    known = [found for found in findings if found.status == "expected"]
    _print_heading(out, f"{title} ({len(findings)}" + (f", {len(known)} of them expected)" if known else ")"))
    for found in findings:
        if found.status != "expected":
            out.print(Text.assemble("  ", (found.kind, style), f" {found.id} {found.text}"))
            out.print(f"    {one_line(found.message)}")
    for found in known[:SHOWN_EXPECTED]:
        out.print(Text.assemble("  ", (found.kind, "yellow"), f" {found.id} (expected) {found.text}"))
        out.print(f"    {one_line(found.note)}")
    if len(known) > SHOWN_EXPECTED:
        out.print(f"  and {len(known) - SHOWN_EXPECTED} more that are expected: see --json")


def _print_changed(out: Console, pair: ChangedFinding) -> None:
    first, second = pair.first, pair.second
    name = second.id if first.id == second.id else f"{first.id} -> {second.id}"
    out.print(Text.assemble("  ", (second.kind, "yellow"), f" {name} {second.text}"))
    for changed in pair.changed:
        out.print(f"    {changed}: {one_line(getattr(first, changed))} -> {one_line(getattr(second, changed))}")


def _print_causes(out: Console, title: str, causes: Sequence[KnownCause]) -> None:
    if causes:
        _print_heading(out, f"{title} ({len(causes)})")
        for cause in causes:
            out.print(Text.assemble("  ", (cause.id, "yellow"), f" {cause.title}"))


def _print_laws(out: Console, found: Comparison) -> None:
    if found.laws.changed:
        _print_heading(out, f"laws with another outcome ({len(found.laws.changed)})")
        groups: dict[tuple[str, str, str], list[str]] = {}
        for law in found.laws.changed:
            groups.setdefault((law.first, law.second, law.reason or ""), []).append(law.id)
        for (before, after, reason), laws in groups.items():
            line = Text.assemble("  ", (before, STYLES.get(before, "")), " -> ", (after, STYLES.get(after, "")))
            out.print(line + Text(f": {_list_names(laws, SHOWN_LAWS)}" + (f" ({one_line(reason)})" if reason else "")))
    for laws, which in ((found.laws.only_first, "first"), (found.laws.only_second, "second")):
        if laws:
            _print_heading(out, f"laws in the {which} only ({len(laws)})")
            out.print(f"  {_list_names(laws, SHOWN_LAWS)}")


def _print_refusals(out: Console, title: str, refusals: Sequence[ChangedRefusal]) -> None:
    if refusals:
        _print_heading(out, f"{title} ({len(refusals)})")
        for refused in refusals:
            out.print(Text.assemble("  ", (refused.law, "yellow"), f" ({refused.cases} cases) {one_line(refused.text)}"))


def _print_features(out: Console, found: Comparison) -> None:
    for names, title in (
        (found.features.lost, "features no longer reached"),
        (found.features.gained, "features reached only in the second"),
    ):
        if names:
            _print_heading(out, f"{title} ({len(names)})")
            out.print(f"  {_list_names(names, SHOWN_FEATURES)}")


def _print_cases(out: Console, found: Comparison) -> None:
    cases = found.cases
    _print_heading(out, "cases")
    if cases is None:
        out.print("  a report lists none: no cases.txt beside it")
        return
    out.print(
        f"  {cases.both} judged in both, {len(cases.only_first)} in the first only, {len(cases.only_second)} in the second only, "
        f"{len(cases.changed)} with another verdict"
    )
    for changed in cases.changed[:SHOWN_CASES]:
        out.print(f"    {changed.first} -> {changed.second} {changed.text}")
    if len(cases.changed) > SHOWN_CASES:
        out.print(f"    and {len(cases.changed) - SHOWN_CASES} more: see --json")
    for texts, which in ((cases.only_first, "first"), (cases.only_second, "second")):
        counts = Counter(text.split(" ", 1)[0] for text in texts)
        for law, count in counts.most_common(SHOWN_CASES):
            example = next(text for text in texts if text.split(" ", 1)[0] == law)
            out.print(f"    {which} only: {count} of {law}, such as {example}")


def _list_names(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (f", and {len(names) - count} more" if len(names) > count else "")
