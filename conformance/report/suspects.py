"""Weigh the places of findings by what the rest of a run shows.

A trace tells of one case. A run also tells which code the laws about that code find in order: a model whose result is wrong often
goes wrong first in the rule of an op, of which all laws of ops hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from shardlaw.conformance.compat.trace import chapter_about

if TYPE_CHECKING:
    from shardlaw.conformance.report.run_report import FindingLine, LawLine

MIN_CASES = 100  # of a chapter, to say that code which its findings do not name is in order


def weigh_places(findings: Sequence[FindingLine], laws: Iterable[LawLine]) -> list[FindingLine]:
    """The findings, with the places last that a chapter of their own is about, if the run tried that chapter and none of its findings
    names them. ``where`` is then the first place. Findings of a backend stay as they are."""
    judged: Counter[str] = Counter()
    for law in laws:
        judged[law.chapter] += law.cases
    tried = {chapter for chapter, cases in judged.items() if cases >= MIN_CASES}
    blamed = {(chapter_of(line), place) for line in findings for place in places_of(line)}
    return [line if line.in_back_end else _weigh(line, tried, blamed) for line in findings]


def _weigh(line: FindingLine, tried: Collection[str], blamed: Collection[tuple[str, str]]) -> FindingLine:
    def is_in_order(place: str) -> bool:
        about = chapter_about(place)
        return about in tried and about != chapter_of(line) and (about, place) not in blamed

    places = sorted(line.places, key=lambda place: is_in_order(strip_request(place)))
    where = places[0] if places[:1] != line.places[:1] else line.where
    return msgspec.structs.replace(line, where=where, places=places)


def chapter_of(line: FindingLine) -> str:
    """The chapter of a finding's law."""
    return line.law.partition(".")[0]


def places_of(line: FindingLine) -> list[str]:
    """The likely places of a finding, without what their rules were asked for."""
    return list(map(strip_request, line.places))


def strip_request(place: str) -> str:
    """A place without the placements that its rule was asked for."""
    return ",".join(place.split(",")[:2])
