"""Makes the list of a certified profile of the cases that runs have judged::

    python -m benchmarks.profiles NAME RELEASE COUNT 'LAW ...' REPORT ... > conformance/profiles/RELEASE/NAME.txt

Of each law of tier core that is selected the control, and up to COUNT further cases, evenly from all that the reports list in their
``cases.txt``: those that held in every report that has them. A list that is released is never made again: it is what targets were
certified by. ``collectives-2026.1`` is of smoke runs on gloo and on ``examples/pypost``, the others of one on gloo, all with torch 2.13.0.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.selection import select
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.certified_profile import RANKS


def main(name: str, release: str, count: str, patterns: str, *reports: str) -> None:
    held: dict[str, dict[str, None]] = {}
    others_say: set[str] = set()
    for report in reports:
        for line in (Path(report) / "cases.txt").read_text("utf-8").splitlines():
            word, _, text = line.split(" ", 2)
            if word == "held":
                held.setdefault(text.split(" ", 1)[0], {})[text] = None
            else:
                others_say.add(text)
    print(f"# {name}-{release}: {patterns}, up to {count} cases a law beside its control, of tier core; one case a line")
    for law in select(list(catalogue().values()), patterns.split()):
        if law.tier != "core":
            continue
        cases = [text for text in held.get(law.id, ()) if text not in others_say and fits(Case.parse(text))]
        others = [text for text in cases if text != law.control]
        step = max(1.0, len(others) / int(count))
        chosen = [others[int(at * step)] for at in range(min(int(count), len(others)))]
        print(*([law.control] if law.control in cases else []), *chosen, sep="\n", end="\n" if cases else "")


def fits(case: Case) -> bool:
    """Whether every torch understands a case: samples are numbered by the torch that has them."""
    return case.world <= RANKS and "sample" not in case


if __name__ == "__main__":
    main(*sys.argv[1:])
