"""Group the new findings of a run by cause: the fewest places in torch that account for them.

A finding has a list of likely places, the likeliest first. The place that accounts for most findings is taken as a cause, with all
findings that list it; then the place that accounts for most of the rest, and so on. The n-th place of a finding counts as one by the root
of n. A place counts for findings that do not list it first only if most of those that list it have it among their first two: other places
are code that many findings pass whatever is wrong.

What several causes have in common may be code that none of their findings lists early. If nearly all of them ran it, some list it, and few
of the similar cases that hold ran it, they are one cause. So they are if all of their findings list it, and fewer of the similar cases ran
it than their own places, or if nearly all have a feature that hardly any case of the run has; the fewer findings, the rarer it must be.
The place of a cause that is among the first of all findings of one other, whose place is not listed by its own, accounts for both: that
place calls it.

A cause with a large part of all findings also accounts for a smaller one whose findings have all run the code at its place, and for
findings whose place is not known and that are of a kind which it has. Findings without a place have one cause if their errors are alike,
and join a cause all of whose findings show that error. Hangs, whose place is where ranks wait, and findings at a place that every op goes
through are of one cause only if they deviate in the same way.

In a backend that is not torch's the place is the collective.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shardlaw.conformance.compat.trace import chapter_about, identifies_cause, is_about_meshes, only_forwards
from shardlaw.conformance.law.verdict import collectives_in
from shardlaw.conformance.report.suspects import chapter_of, places_of, strip_request

if TYPE_CHECKING:
    from shardlaw.conformance.report.run_report import FindingLine

TOP, MIN_SHARE = 2, 0.6  # of those that list a place so many must have it among their first ones
LARGE, LARGE_SHARE = 5, 1 / 8  # findings, and of all
FIRST = 3  # places of a finding among which the place of another cause must be
NEARLY_ALL, SOME = 0.9, 0.1  # of the findings
FEW, MOST = 0.2, 0.7  # of the similar cases that hold: to have run code that findings ran, and code that all findings list
RARE, RAREST = 0.05, 0.02  # of the cases of a run: to have a feature that a large part of the findings has, and one that any has


class _Common(NamedTuple):
    """Something that several causes have in common, which may be the cause; the greatest one is the likeliest."""

    findings: int  # of the causes
    ran: float  # minus the share of similar holding cases that ran the place, or of all cases that have the feature
    votes: float  # of the findings for the place
    place: str
    joined: tuple[str, ...]  # the places of the causes


def group_by_cause(new: Sequence[FindingLine], cases: int, reached: Mapping[str, int]) -> list[list[FindingLine]]:
    """Group ``new`` by cause, in the order in which the causes first occur. A group begins with the findings at its place, smallest case
    first. ``reached`` counts, by feature, how many of the run's ``cases`` had it."""
    position = {line.id: number for number, line in enumerate(new)}
    collectives = _group_by_collective([line for line in new if line.in_back_end])
    unexplained: list[FindingLine] = []
    for line in (line for line in new if not line.in_back_end):
        next((group for group in collectives if _is_explained_by(line, group)), unexplained).append(line)
    for group in collectives:  # the plainest case of the collective's own laws comes first
        group.sort(key=lambda line: (not line.in_back_end, not collectives_in(line.features), len(line.features), _size_key(line)))
    needed = set().union(*map(_needed_features, unexplained))
    rare = {name: reached[name] / cases for name in needed if 0 < reached.get(name, 0) <= RARE * cases}
    found = [*collectives, *_group_by_place(unexplained, rare)]
    return sorted(found, key=lambda group: min(position[line.id] for line in group))


def _group_by_collective(lines: Sequence[FindingLine]) -> list[list[FindingLine]]:
    """Group findings in a backend by cause."""
    found: list[list[FindingLine]] = []
    for alike in _group_by(lines, lambda line: line.cause):
        group = next((group for group in found if _is_explained_by(alike[0], group)), None)
        found.append(alike) if group is None else group.extend(alike)
    return found


def _group_by_place(lines: Sequence[FindingLine], rare: Mapping[str, float]) -> list[list[FindingLine]]:
    """Group findings in torch by cause. ``rare``: features that few cases have, with the share of the cases."""
    causes = _cover([line for line in lines if _place_of(line)])
    rarest = {name: share for name, share in rare.items() if share <= RAREST}
    while common := (
        max([*_common_code(causes, len(lines)), *_common_features(causes, len(lines), rare)], default=None)
        or max([*_common_suspects(causes), *_called_by_others(causes)], default=None)
        or max(_common_features(causes, None, rarest), default=None)
    ):
        *_, place, joined = common
        together = [line for other in joined for line in causes.pop(other)]
        causes.setdefault(place, []).extend(together)
    for place in sorted(causes, key=lambda place: len(causes[place])):  # small ones first: what they join may join another
        if (larger := _find_passed(place, causes, len(lines))) is not None:
            causes[larger] += causes.pop(place)
    for alike in _group_by([line for line in lines if not _place_of(line)], lambda line: _error_of(line) or line.cause or line.id):
        _add_unplaced(alike, causes, len(lines))
    return [_sort_group(place, group) for place, group in causes.items()]


def _cover(lines: Sequence[FindingLine]) -> dict[str, list[FindingLine]]:
    """The fewest places that account for findings, each with those it accounts for."""
    rest, causes = list(lines), {}
    while rest:
        suspects = {line.id: _suspects(line) for line in rest}
        listed = Counter(itertools.chain.from_iterable(suspects.values()))
        among_first = Counter(place for its in suspects.values() for place in its[:TOP])
        telling = {place for place, count in listed.items() if among_first[place] >= MIN_SHARE * count}
        votes: defaultdict[str, float] = defaultdict(float)
        for its in suspects.values():
            for rank, place in enumerate(its, 1):
                votes[place] += _vote(rank) if rank == 1 or place in telling else 0
        cause = max(votes, key=lambda place: (votes[place], among_first[place]))
        causes[cause] = [line for line in rest if cause in suspects[line.id][: None if cause in telling else 1]]
        rest = [line for line in rest if line not in causes[cause]]
    return causes


def _suspects(line: FindingLine) -> list[str]:
    """The places that may account for a finding, the likeliest first; for a hang, whose place is where ranks wait, and for a place that
    every op goes through, one key of place and kind."""
    place = _place_of(line)
    if line.kind == "hang" or not identifies_cause(place):
        return [line.cause or place or line.id]
    others = (other for other in places_of(line) if identifies_cause(other) and not only_forwards(other))
    return list(dict.fromkeys([place, *others]))


def _common_code(causes: Mapping[str, Sequence[FindingLine]], total: int) -> Iterator[_Common]:
    """Yield the places that account for several causes together, which are a large part of ``total``."""
    for place in filter(_may_be_common, {suspect for group in causes.values() for line in group for suspect in _suspects(line)}):
        joined = [cause for cause, group in causes.items() if sum(place in line.ran for line in group) >= NEARLY_ALL * len(group)]
        lines = [line for cause in joined for line in causes[cause]]
        if len(joined) < 2 or not _is_large(lines, total) or sum(place in places_of(line) for line in lines) < SOME * len(lines):
            continue
        if (share := _share_that_ran(place, lines)) <= FEW:
            yield _Common(len(lines), -share, _votes_for(place, lines), place, tuple(joined))


def _may_be_common(place: str) -> bool:
    """Whether a place may account for several causes."""
    return identifies_cause(place) and not only_forwards(place) and not is_about_meshes(place)


def _common_features(causes: Mapping[str, Sequence[FindingLine]], total: int | None, rare: Mapping[str, float]) -> Iterator[_Common]:
    """Yield the rare features that nearly all findings of several causes have, with the place of the largest cause. Where ``total`` is
    given, the causes are a large part of it together."""
    for name, share in rare.items():
        joined = tuple(cause for cause, group in causes.items() if sum(name in line.features for line in group) >= NEARLY_ALL * len(group))
        lines = [line for cause in joined for line in causes[cause]]
        if len(joined) >= 2 and (total is None or _is_large(lines, total)):
            yield _Common(len(lines), -share, 0, max(joined, key=lambda cause: len(causes[cause])), joined)


def _common_suspects(causes: Mapping[str, Sequence[FindingLine]]) -> Iterator[_Common]:
    """Yield the places that all findings of several causes list, and that some similar holding cases did not run. Of the cases similar to
    those of a cause no more may have run it than ran the place of that cause."""
    several = {place: by for place, by in _listed_by(causes).items() if len(by) >= 2 and _may_be_common(place)}
    for place, by in several.items():
        joined = [cause for cause in by if _share_that_ran(place, causes[cause]) <= _share_that_ran(cause, causes[cause])]
        lines = [line for cause in joined for line in causes[cause]]
        if len(joined) >= 2 and (share := _share_that_ran(place, lines)) <= MOST:
            yield _Common(len(lines), -share, _votes_for(place, lines), place, tuple(joined))


def _called_by_others(causes: Mapping[str, Sequence[FindingLine]]) -> Iterator[_Common]:
    """Yield the places of causes that are among the first of all findings of one other, whose place their own findings do not list. What
    several list is code that many findings pass."""
    for place, by in _listed_by(causes, FIRST).items():
        if group := causes.get(place):
            listed = {suspect for line in group for suspect in _suspects(line)}
            others = [cause for cause in by if cause not in listed]
            if len(others) == 1:
                yield _Common(len(group) + len(causes[others[0]]), 0.0, 0, place, (place, others[0]))


def _listed_by(causes: Mapping[str, Sequence[FindingLine]], first: int | None = None) -> dict[str, list[str]]:
    """By place, the causes all of whose findings list it, or have it among their ``first`` places."""
    found: dict[str, list[str]] = {}
    for cause, group in causes.items():
        for place in set.intersection(*(set(_suspects(line)[:first]) for line in group)):
            found.setdefault(place, []).append(cause)
    return found


def _votes_for(place: str, lines: Iterable[FindingLine]) -> float:
    """The votes of findings for a place that they list."""
    lists = (_suspects(line) for line in lines)
    return sum(_vote(its.index(place) + 1) for its in lists if place in its)


def _vote(rank: int) -> float:
    """What the n-th place of a finding counts."""
    return 1 / math.sqrt(rank)


def _share_that_ran(place: str, lines: Iterable[FindingLine]) -> float:
    """Of the holding cases that are similar to those of the findings, the share that ran the code at a place."""
    similar = sum(line.similar for line in lines)
    return sum(line.ran.get(place, 0) for line in lines) / similar if similar else 1.0


def _is_large(lines: Sequence[FindingLine], total: int) -> bool:
    """Whether findings are a large part of ``total``."""
    return len(lines) >= max(LARGE, LARGE_SHARE * total)


def _find_passed(place: str, causes: Mapping[str, Sequence[FindingLine]], total: int) -> str | None:
    """The place of the largest cause that is larger than the one at ``place``, and whose place all findings of that one have run."""
    few = causes[place]
    passed = set.intersection(*({*line.ran, *places_of(line)} for line in few))
    larger = (other for other in _large_causes(causes, total) if len(causes[other]) > len(few))
    return next((other for other in larger if other in passed), None)


def _add_unplaced(alike: list[FindingLine], causes: dict[str, list[FindingLine]], total: int) -> None:
    """Add findings without a place, which show one error or have one key, to the causes."""
    error = _error_of(alike[0])
    same = [place for place, group in causes.items() if error and {_error_of(line) for line in group} == {error}]
    kinds = {_broad_kind(line) for line in alike}
    large = [place for place in _large_causes(causes, total) if kinds <= {_broad_kind(line) for line in causes[place]}]
    joins = (same or large or [alike[0].id])[0]
    for place in same[1:]:
        causes[joins] += causes.pop(place)
    causes.setdefault(joins, []).extend(alike)


def _large_causes(causes: Mapping[str, Sequence[FindingLine]], total: int) -> list[str]:
    """The places of the causes of a large part of ``total`` findings, the largest first."""
    large = (place for place, group in causes.items() if _is_large(group, total))
    return sorted(large, key=lambda place: len(causes[place]), reverse=True)


def _sort_group(place: str, group: Iterable[FindingLine]) -> list[FindingLine]:
    """Sort the findings of a cause: those at its place first, of these the ones of the chapter that is about it, then by the size of their
    cases. Where none names the place first, the first finding takes it over."""
    about = chapter_about(place)
    first, *others = sorted(group, key=lambda line: (_place_of(line) != place, chapter_of(line) != about, _size_key(line)))
    if _place_of(first) != place and any(place in places_of(line) for line in group):
        first = msgspec.structs.replace(first, where=place)
    return [first, *others]


def _group_by(lines: Iterable[FindingLine], key: Callable[[FindingLine], str]) -> list[list[FindingLine]]:
    """Group findings by a key; in each group the smallest case is first."""
    groups: dict[str, list[FindingLine]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return [sorted(its, key=_size_key) for its in groups.values()]


def _size_key(line: FindingLine) -> tuple[bool, int, str]:
    return line.note.startswith(("not minimal", "not shrunk")), len(line.text), line.text


def _error_of(line: FindingLine) -> str:
    """The pattern of the error that a finding shows; empty where it shows none."""
    return line.cause.split(" | ", 2)[2] if line.kind == "raised" and line.cause.count(" | ") >= 2 else ""


def _broad_kind(line: FindingLine) -> str:
    """The kind of a finding; a crash, and an error on some ranks, count as an error."""
    return "raised" if line.kind in ("crash", "divergence") else line.kind


def _is_explained_by(line: FindingLine, others: Iterable[FindingLine]) -> bool:
    """Whether one of ``others`` shows that the backend gives a wrong value in a collective which this finding calls. Of the laws of
    collectives themselves an error is explained only if it has the features of that finding."""
    for other in (line for line in others if line.in_back_end and line.kind == "wrong-value"):
        wrong, needed, has = set(collectives_in(other.features)), _needed_features(other), _needed_features(line)
        alike = not collectives_in(line.features) or line.kind == "wrong-value" or (line.kind in ("raised", "divergence") and needed <= has)
        if wrong and alike and wrong <= {*collectives_in(line.features), *line.calls}:
            return True
    return False


def _needed_features(line: FindingLine) -> set[str]:
    return {name for name in line.features if not name.startswith(("world:", "op:"))}


def _place_of(line: FindingLine) -> str:
    return strip_request(line.where)
