"""The laws that a release of torch supports wholly: ``python -m benchmarks.supported REPORT...`` prints those that allow refusals and of
which no case of these runs (folders of reports, all of one torch) was refused, or of a smoke run none. What it prints is
``expectations/supported-X.txt``."""

from __future__ import annotations

import sys
from pathlib import Path

from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.report.run_report import read_report


def main(folders: list[str]) -> None:
    judged, refusing, beyond, torch = set(), set(), set(), set()
    for report in map(read_report, map(Path, folders)):
        torch.add(report.target.torch)
        judged |= {law.id for law in report.laws if law.cases}
        (refusing if report.profile == "smoke" else beyond).update(law.id for law in report.laws if law.refusals)
    if len(torch) != 1:
        sys.exit(f"the reports are of torch {', '.join(sorted(torch)) or '(none)'}: want those of one")
    print(f"# laws of which torch {torch.pop()} refuses no case: python -m benchmarks.supported")
    for law in catalogue().values():
        if law.id in judged - refusing and law.refusal != "never":
            print(law.id, *(["smoke"] if law.id in beyond else []))


if __name__ == "__main__":
    main(sys.argv[1:])
