"""Reports made by hand, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.report.run_report import ExpectationLine, FindingLine, LawLine, RunReport, TargetLine, Totals
from shardlaw.conformance.run.finding_file import to_json

CASE = "op.forward[mean] mesh=2 x=5x6:S(0) steps=b=mean(x)"


def law(law_id: str, outcome: str = "held", cases: int = 10, **more: Any) -> LawLine:
    chapter = law_id.partition(".")[0]
    return LawLine(id=law_id, chapter=chapter, tier="core", clause=f"What {law_id} says.", outcome=outcome, cases=cases, **more)


def finding(finding_id: str = "0badcafe", text: str = CASE, **more: Any) -> FindingLine:
    case = Case.parse(text)
    given = {
        "kind": "wrong-value",
        "status": "new",
        "message": "rank 0: holds other elements",
        "features": ["uneven"],
        "signature": f"{case.law} | wrong-value | local | {finding_id}",
        **more,
    }
    return FindingLine(id=finding_id, law=case.law, text=text, case=case.to_json(), **given)


def expectation(law_id: str, **more: Any) -> ExpectationLine:
    given = {"kind": "wrong-value", "hits": 0, "masked": 0.0, "stale": False, "where": "here/op.toml:3", "reason": "known", **more}
    return ExpectationLine(law=law_id, **given)


def report(laws: list[LawLine], findings: list[FindingLine] | None = None, **more: Any) -> RunReport:
    found = findings or []
    target = {
        "name": "gloo",
        "device": "cpu",
        "backend": "gloo",
        "world_size": 4,
        "torch": "2.13.0",
        "python": "3.11.7",
        "storage": "filesystem",
        **more.pop("target", {}),
    }
    new = sum(line.status == "new" for line in found)
    cases = sum(line.cases for line in laws)
    given = {"seed": 7, "started": "2026-01-01T00:00:00+00:00", "seconds": 2.0, "complete": True, "exit": 1 if new else 0, **more}
    totals = Totals(cases=cases, distinct=cases, drawn=cases, findings=len(found), new=new)
    return RunReport(target=TargetLine(**target), laws=laws, findings=found, totals=totals, **given)


def rank(number: int, expected: str = "[[1.0, 2.0]] float32 1x2", got: str = "[[1.0, 3.0]] float32 1x2", **more: Any) -> dict[str, Any]:
    said = {"rank": number, "outcome": "deviates", "message": "holds other elements", "expected": expected, "got": got}
    return {**said, "stack": "", "output": "", **more}


def stored(folder: Path, made: RunReport, cases: list[str] | None = None, ranks: list[dict[str, Any]] | None = None) -> Path:
    """Write a report as a run would; ``ranks`` is what the ranks said of each of its findings."""
    (folder / "findings").mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(to_json(made))
    if cases is not None:
        (folder / "cases.txt").write_text("".join(f"{line}\n" for line in cases))
    for line in made.findings:
        data = {"schema": 1, "id": line.id, "law": line.law, "case": line.case, "ranks": ranks or []}
        (folder / "findings" / f"{line.id}.json").write_text(json.dumps(data))
        if line.reproducer:
            (folder / line.reproducer).write_text(f"# {line.id}\n")
    return folder
