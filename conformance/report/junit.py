"""``junit.xml``: one test case for each law, for CI systems."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from shardlaw.conformance.report.run_report import FindingLine, RunReport
from shardlaw.conformance.report.wording import count_noun

# characters that XML 1.0 forbids, escaped or not
UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(report: RunReport) -> str:
    """The text of the file. A law with new findings fails (under ``--strict`` also a stale one), one with only expected findings is an
    xfail, an untested one is skipped. While the run goes on, only the laws that had their turn are listed."""
    suites = ElementTree.Element("testsuites")
    laws = [law for law in report.laws if report.exit is not None or law.outcome != "untested" or law.reason]
    counts = {outcome: sum(law.outcome == outcome for law in laws) for outcome in ("deviates", "untested", "stale", "expected")}
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        name="shardlaw",
        tests=str(len(laws)),
        failures=str(counts["deviates"] + (counts["stale"] if report.strict else 0)),
        errors="0",
        skipped=str(counts["untested"] + counts["expected"]),
        time=f"{report.seconds:.2f}",
        timestamp=report.started.partition("+")[0],
    )
    for law in laws:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"shardlaw.{law.chapter}", name=_replace_unwritable(law.id), time=f"{law.seconds:.2f}"
        )
        if law.outcome == "deviates":
            found = [finding for finding in report.new() if finding.law == law.id]
            message = count_noun(len(found), "new finding")
            failure = ElementTree.SubElement(case, "failure", message=message, type=found[0].kind if found else "deviates")
            failure.text = _replace_unwritable("\n\n".join([law.clause, *map(_finding_text, found)]))
        elif law.outcome == "expected":  # as pytest writes it
            ElementTree.SubElement(case, "skipped", type="pytest.xfail", message=_replace_unwritable("; ".join(law.reasons) or "expected"))
        elif law.outcome == "untested":
            ElementTree.SubElement(case, "skipped", message=_replace_unwritable(law.reason or "not reached"))
        elif law.outcome == "stale" and report.strict:
            ElementTree.SubElement(case, "failure", message="an expectation for it is stale", type="stale")
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _finding_text(found: FindingLine) -> str:
    lines = [f"{found.kind} {found.id}", found.text, found.message]
    return "\n".join([*lines, *([f"reproducer: {found.reproducer}"] if found.reproducer else []), *([found.note] if found.note else [])])


def _replace_unwritable(text: str) -> str:
    return UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text)
