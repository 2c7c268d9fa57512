"""Writes ``docs/ops.md`` from the reports of a run of the op chapter.

    python -m shardlaw run op.forward op.backward --profile ci --shard I/4 --report /tmp/opsI        for I from 1 to 4
    python -m benchmarks.op_table /tmp/ops1 /tmp/ops2 /tmp/ops3 /tmp/ops4 > docs/ops.md

Several reports, of the shards of one run say, are added up. Which ops of OpInfo have no law, and why, is asked of the installed torch.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.laws.op import opinfo
from shardlaw.conformance.report.run_report import RunReport, read_report
from shardlaw.strategies.op_catalogue import OPS

KINDS = ("forward", "backward", "in-place", "2-D mesh", "uneven", "Partial")
HEAD = """# What DTensor does with ops

Written by `python -m benchmarks.op_table REPORT ...` from {reports} of `op.forward` and `op.backward` under profile {profile}{early}:
{cases} cases, torch {torch}, world size {world}, in {seconds} s.

Each cell counts cases: held / deviates / refused. A case deviates where its result is not that of the plain op, where ranks do
different things, or where it raises without speaking of sharding; all of these are known, an entry of
`conformance/expectations/` gives the reason. A case is refused where every rank says alike that this cannot be sharded: it counts as
unsupported, never as held. *forward* and *backward* count every case of the op; *in-place* those that write into an operand; *2-D mesh*
those on meshes of two or three dims; *uneven* those with a shard that is smaller than another, or empty; *Partial* those with an operand
whose reduction is pending.
"""


def main(paths: list[str]) -> None:
    reports = [read_report(Path(path)) for path in paths]
    table = counted(line for path in paths for line in (Path(path) / "cases.txt").read_text().splitlines())
    print("\n".join([*head(reports), *rows(table), *unsupported(reports), *without_law()]))


def op_name(variant: str) -> str:
    """The op that a law is about, without what it does with its operand."""
    return variant.replace(".in-place", "")


def counted(lines: Iterable[str]) -> dict[str, dict[str, Counter[str]]]:
    """How many cases of each op and kind came to which status, from lines of ``cases.txt``."""
    table: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    laws = catalogue()
    for line in lines:
        status, _, text = line.split(" ", 2)
        case = Case.parse(text)
        law = laws.get(case.law)
        if law is None or law.name not in ("op.forward", "op.backward") or status == "rejected":
            continue
        said = status if status in ("held", "refused") else "deviates"
        for kind in kinds(case, features_of(case, law)):
            table[op_name(law.variant)][kind][said] += 1
    return table


def kinds(case: Case, features: frozenset[str]) -> Iterator[str]:
    yield "backward" if case.law.startswith("op.backward") else "forward"
    if "in-place" in features:
        yield "in-place"
    if features & {"mesh-2d", "mesh-3d"}:
        yield "2-D mesh"
    if features & {"uneven", "empty-shard"}:
        yield "uneven"
    if any(feature.startswith("partial:") for feature in features):
        yield "Partial"


def cell(counts: Counter[str]) -> str:
    return f"{counts['held']} / {counts['deviates']} / {counts['refused']}" if counts else ""


def head(reports: list[RunReport]) -> Iterator[str]:
    first = reports[0]
    yield HEAD.format(
        reports=f"{'one report' if len(reports) == 1 else f'{len(reports)} reports'}{parts(reports)}",
        profile=first.profile,
        early="" if all(report.complete for report in reports) else " (of runs that were ended early)",
        torch=first.target.torch,
        world=first.target.world_size,
        cases=sum(report.totals.cases for report in reports),
        seconds=" + ".join(f"{report.seconds:.0f}" for report in reports),
    )


def parts(reports: list[RunReport]) -> str:
    """Which parts of a run they are, where they are parts."""
    shards = [report.shard for report in reports if report.shard != "1/1"]
    return f" (parts {', '.join(shards)})" if shards else ""


def rows(table: dict[str, dict[str, Counter[str]]]) -> Iterator[str]:
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for found in table.values():
        for kind, counts in found.items():
            total[kind].update(counts)
    yield f"| op | {' | '.join(KINDS)} |"
    yield f"| --- |{' --- |' * len(KINDS)}"
    yield f"| **all {len(table)}** | {' | '.join(cell(total[kind]) for kind in KINDS)} |"
    for name in sorted(table, key=lambda name: (name.rpartition(".")[2].strip("_"), name)):
        yield f"| {name} | {' | '.join(cell(table[name][kind]) for kind in KINDS)} |"


def unsupported(reports: list[RunReport]) -> Iterator[str]:
    """The laws of which every case was refused, in every report."""
    judged: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for report in reports:
        for law in report.laws:
            judged[law.id] += law.cases
            refused[law.id] += law.refused
    never = sorted(law for law in judged if law.startswith(("op.forward[", "op.backward[")) and 0 < judged[law] == refused[law])
    yield f"\n## Unsupported\n\nEvery case of these {len(never)} was refused, on every rank alike; a run counts them as untested.\n"
    yield ", ".join(f"`{law}`" for law in never) + "."


def without_law() -> Iterator[str]:
    """The OpInfos of the installed torch that have no law, by reason."""
    laws = catalogue()
    reasons: dict[str, list[str]] = defaultdict(list)
    for name in opinfo.database():
        if name not in OPS and f"op.forward[{name}]" not in laws:
            reason = opinfo.read(name).reason or "no sample holds on two ranks: refused, or deviating, in every layout tried"
            reasons[reason.partition(": aten")[0]].append(name)
    yield f"\n## OpInfos without a law\n\n{sum(map(len, reasons.values()))} of {len(opinfo.database())}, by reason.\n"
    for reason in sorted(reasons, key=lambda reason: -len(reasons[reason])):
        told = "DTensor claims no rule for an overload that runs" if reason == "not claimed" else reason
        yield f"- {told} ({len(reasons[reason])}): {', '.join(f'`{name}`' for name in sorted(reasons[reason]))}"


if __name__ == "__main__":
    main(sys.argv[1:])
