"""How often the place that a trace names is the one that docs/findings.md gives: ``python -m benchmarks.places [--misses]``.

A row of its table that names functions or classes of torch counts; its case is traced in a fresh world, as that of a confirmed finding
is. A hit names one of the row's functions, or a method of one of its classes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.rank.trace import place_of
from shardlaw.conformance.world import Pool

FINDINGS = Path(__file__).parents[1] / "docs" / "findings.md"
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")


def rows() -> Iterator[tuple[str, set[str], str]]:
    """What each row says, the names of torch's own in it, and its case."""
    for line in FINDINGS.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) < 2 or not (case := re.fullmatch(r"`([a-z_]+\.[^`]+)`", cells[-1])):
            continue
        names = {name for name in NAME.findall(cells[0]) if "_" in name.strip("_") or name[:1].isupper() or "." in name}
        if names:
            yield cells[0], names, case[1].replace("\\|", "|")


def main(misses: bool) -> None:
    hits = traced = 0
    with Pool(Target()) as pool:
        for said, names, text in rows():
            case = Case.parse(text)
            law = find(case.law)
            verdict, ordinary = (pool.fresh(law, one, traced=True) for one in (case, Case.parse(law.control)))
            place = place_of(verdict, ordinary)
            function = place.split(",")[0]
            words = {word for name in names for word in (name, name.rpartition(".")[2])}
            hit = any(word in words for word in function.split("."))
            traced += 1
            hits += hit
            if misses and not hit:
                print(f"{verdict.kind or verdict.status}  {place or 'no place'}\n    {said}\n    {text}", flush=True)
    print(f"{hits} of {traced} places are those that docs/findings.md gives")


if __name__ == "__main__":
    main("--misses" in sys.argv[1:])
