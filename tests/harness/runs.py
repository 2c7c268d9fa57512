"""As much of a run as its report needs, made by hand."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.script import Script, Stage
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Deviation, Raised, Verdict
from shardlaw.conformance.report.run_report import RunReport
from shardlaw.conformance.report.writer import ReportWriter
from shardlaw.conformance.run.expectations import Expectations, TooWideEntry
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.run.state import Finding, HarnessFault, LawResult

SCRIPT = Script((Stage(2, ("return torch.ones(1), torch.zeros(1)",)),))
CASE = Case.parse("op.forward[mean] mesh=2 x=5x6:S(0) steps=b=mean(x) seed=3")


def law(law_id: str, script: Script | None = SCRIPT) -> Law:
    write = None if script is None else lambda case: script
    return Law(law_id, f"What {law_id} says.", "docs", f"{law_id} mesh=2", lambda case, here: None, script=write)


LAWS = {
    one.id: one
    for one in (law("op.forward[mean]"), law("op.forward[sum]", None), law("mesh.groups"), law("mesh.copies"), law("roundtrip.dtensor"))
}


def verdict(case: Case = CASE, **fields: Any) -> Verdict:
    ranks = (
        Answer(0, "deviates", (Deviation("wrong-value", "local", "holds other elements", "[1]", "[2]"),), output="printed\x1b[0m"),
        Answer(1, "raised", raised=Raised("ValueError", "no", "the stack")),
    )
    given = {"kind": "wrong-value", "check": "local", "message": "rank 0: holds other elements", "ranks": ranks, **fields}
    return Verdict(case, "deviates", **given)


def finding(law_id: str = "op.forward[mean]", **fields: Any) -> Finding:
    found = Finding.from_verdict(LAWS[law_id], verdict(replace(CASE, law=law_id)), CASE)
    return replace(found, minimal=True, confirmed=(2, 2), shrink_calls=31, **fields)


@dataclass
class FakeRun:
    """As much of a run as a report needs."""

    writer: ReportWriter
    request: RunRequest = field(default_factory=lambda: RunRequest(seed=7))
    target: Target = field(default_factory=Target)
    results: dict[str, LawResult] = field(default_factory=dict)
    expectations: Expectations = field(default_factory=Expectations)
    findings: list[Finding] = field(default_factory=list)
    unconfirmed: list[Verdict] = field(default_factory=list)
    errors: list[HarnessFault] = field(default_factory=list)
    features: Counter[str] = field(default_factory=Counter)
    judged: int = 0
    drawn: int = 0
    distinct: set[Case] = field(default_factory=set)
    scouted: dict[Case, Any] = field(default_factory=dict)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: float = field(default_factory=time.monotonic)
    stopped_by: str | None = None
    stale: list[str] = field(default_factory=list)
    failure: Exception | None = None
    certified: None = None

    def too_wide(self) -> list[TooWideEntry]:
        return self.expectations.too_wide()

    def take(self, found: Finding) -> None:
        self.findings.append(found)
        self.writer.add_finding(found, self)  # type: ignore[arg-type]

    def update(self, code: int | None = None) -> RunReport:
        return self.writer.write(self, code)  # type: ignore[arg-type]
