"""``report.md``: a report of one screen, to paste into an issue or a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from shardlaw.conformance.report.run_report import EXIT_MEANINGS, OUTCOMES, FindingLine, RunReport
from shardlaw.conformance.report.wording import count_noun, one_line

SHOWN_OTHERS = 4
SHOWN_FINDINGS = 10
SHOWN_REASONS = 5
SHOWN_FEATURES = 12
MANY_FEATURES = 60


def render_markdown(report: RunReport, folder: Path) -> str:
    """The text of the file; ``folder`` is the report's folder as the text shall name it."""
    lines = [*_head_lines(report), *_new_lines(report, folder)]
    if report.totals.unconfirmed:
        lines += ["", f"{count_noun(report.totals.unconfirmed, 'deviation')} did not repeat: see `unconfirmed` in report.json."]
    lines += _list_section("Errors of the harness", [f"{error.law}: {_escape_line(error.message)}" for error in report.errors])
    lines += _list_section("Warnings", map(_escape_line, report.warnings))
    lines += _list_section("Declared", map(_escape_line, declared_lines(report)))
    lines += _list_section("Not reached", _not_reached_lines(report))
    return "\n".join(lines) + "\n"


def _head_lines(report: RunReport) -> list[str]:
    """The title, the request, and a table of chapters."""
    target, totals = report.target, report.totals
    lines = [
        f"# shardlaw {report.harness} on {target.name}: {headline(report)}",
        "",
        f"torch {target.torch}, python {target.python}, {target.device}/{target.backend}, up to {target.world_size} ranks, "
        f"storage {target.storage}, profile {report.profile}, seed {report.seed}"
        + (f", shard {report.shard}" if report.shard != "1/1" else "")
        + f": {totals.cases:,} cases ({totals.distinct:,} distinct) in {report.seconds:.0f} s"
        + report.ended_early
        + ".",
        "",
        f"| chapter | laws | {' | '.join(OUTCOMES)} | cases |",
        f"| --- |{' ---: |' * (len(OUTCOMES) + 2)}",
    ]
    for chapter, count in report.chapters().items():
        lines.append(f"| {chapter} | {count['laws']} | {' | '.join(str(count[outcome]) for outcome in OUTCOMES)} | {count['cases']:,} |")
    return lines


def _new_lines(report: RunReport, folder: Path) -> list[str]:
    """The new findings by cause."""
    causes = report.causes()
    if not causes:
        return []
    lines = ["", "## New findings", ""]
    for at, (found, *others) in enumerate(causes[:SHOWN_FINDINGS], 1):
        lines += _finding_lines(at, found, folder)
        if others:
            names = ", ".join(f"`{other.id}` {other.law}" for other in others[:SHOWN_OTHERS])
            more = f" and {len(others) - SHOWN_OTHERS} more" if len(others) > SHOWN_OTHERS else ""
            lines.append(f"   the same cause: {names}{more}  ")
    if len(causes) > SHOWN_FINDINGS:
        lines.append(f"\nand {len(causes) - SHOWN_FINDINGS} more in `{folder}/findings/`")
    return [*lines, *(text for line in common_lines(report) for text in ("", _escape_line(line)))]


def _not_reached_lines(report: RunReport) -> Iterator[str]:
    """Why laws are untested, and the features that no case had."""
    for reason, laws in list(report.untested().items())[:SHOWN_REASONS]:
        yield f"{count_noun(len(laws), 'law')}, {_escape_line(reason)}: {', '.join(laws[:3])}{', ...' * (len(laws) > 3)}"
    if report.features_missing:
        yield missing_features(report, SHOWN_FEATURES)


def _list_section(title: str, lines: Iterable[str]) -> list[str]:
    """A section with a list; nothing for an empty list."""
    items = [f"- {line}" for line in lines]
    return ["", f"## {title}", "", *items] if items else []


def headline(report: RunReport) -> str:
    """The result in half a line: what was found, or what the exit code means."""
    if report.exit is None:
        return "not finished"
    new = report.totals.new
    found = count_noun(new, "new finding") if new else ""
    if report.exit in (0, 1):
        expected = report.totals.findings - new
        stale = sum(law.outcome == "stale" for law in report.laws)
        parts = [found or "nothing new", f"{expected} expected" if expected else "", f"{stale} stale" if stale else ""]
        return ", ".join(filter(None, parts))
    return ", ".join(filter(None, [EXIT_MEANINGS.get(report.exit, f"exit code {report.exit}"), found]))


def common_lines(report: RunReport) -> list[str]:
    """For several new findings: which one to look at first, and the features that all of them share."""
    new = report.new()
    if len(new) < 2:
        return []
    laws = len({found.law for found in new})
    first = f"{new[0].id} {new[0].text}"
    lines = [f"{len(new)} new findings in {laws} laws; begin with {first}: later laws build on what earlier ones check"] if laws > 1 else []
    shared = sorted(set(new[0].features).intersection(*(found.features for found in new)))
    return [*lines, *([f"all {len(new)} new findings have in common: {', '.join(shared)}"] if shared else [])]


def missing_features(report: RunReport, count: int) -> str:
    """The features that no case had: listed if they are few, else counted, since a run of some laws misses most."""
    names = report.features_missing
    return count_and_list(names, count, "features") if len(names) <= MANY_FEATURES else f"{len(names)} features, listed in report.json"


def declared_lines(report: RunReport) -> list[str]:
    """A line for each capability that the target declares missing: the laws left untested, and whether it works nevertheless."""
    lines = []
    for word, laws in report.declared().items():
        untested = count_and_list(laws, 3, "law untested" if len(laws) == 1 else "laws untested") if laws else "no law of this run needs it"
        by_storage = word == "checkpoint_files" and report.target.storage != "filesystem"
        cannot = f"storage {report.target.storage} is no folder of files" if by_storage else f"cannot {word}"
        lines.append(f"{cannot}: {untested}" + ("; stale: it works on two ranks" if word in report.target.stale else ""))
    return lines


def count_and_list(names: list[str], count: int, what: str) -> str:
    """A count and the first ``count`` names: ``12 features: a, b, ...``."""
    return f"{len(names)} {what if len(names) != 1 else what.removesuffix('s')}: {', '.join(names[:count])}{', ...' * (len(names) > count)}"


def _finding_lines(at: int, found: FindingLine, folder: Path) -> list[str]:
    place = f", where to look: {', then '.join(map(_escape_line, [found.where, *found.next_places]))}" if found.where else ""
    lines = [f"{at}. **{found.kind}** `{found.id}` {found.law}{place}", f"   `{found.text}`", f"   {_escape_line(found.message)}"]
    if found.reproducer:
        lines.append(f"   `python {folder / found.reproducer}` exits 1 while it is there")
    if found.note:
        lines.append(f"   ({_escape_line(found.note)})")
    return [line + "  " for line in lines]


def _escape_line(text: str) -> str:
    """The text on one line, cut at 300 characters, with Markdown's special characters escaped."""
    return "".join(f"\\{char}" if char in "\\`*_<>[]|" else char for char in one_line(text, 300))
