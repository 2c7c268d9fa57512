"""Group the new findings of a run by cause: the fewest places in torch that account for them.

Findings at one place have one cause, whatever their kind: an index that is off by one gives a wrong value or an error, depending on the
case. Findings at two places have one cause if

- one place is among the likely places of nearly all findings at the other: code that calls a faulty function deviates too. Every
  redistribution goes through its planner, so within a chapter such findings must also have the features that all findings at the planner
  share. What findings at more places pass than there are findings at it is common code, and counts only if the places are few;
- a third place, which is no step of redistributions and no common code, is among the likely places of nearly all of both;
- both are methods of one class, and the smallest case of one has all features of the smallest case of the other;
- the findings at one are gradients of ops whose forward deviates at the other;
- they are in different chapters, and all have one feature that hardly any case of the run has;
- nearly all have one feature that many findings in several chapters have, and eight times as many of the findings as of the cases;
- the findings at one show that meshes are wrong, and those at the other, of other chapters, have all features of their
  meshes that these share.

A hang, or a finding at a place that every op goes through, joins another group only if the place is the same and the features of one
include those of the other. One or two findings join a group of many of their kind in their chapter, of which several pass their place too:
nothing sets them apart. Findings without a place (no trace tells) have one cause if their errors are alike, and so do groups of which
all show that error. They join the largest group that has their kind and whose first case, or whose cases in common, have no features that
they lack; or that has most findings, in three chapters, one of which shows the fault without features. In a backend that is not torch's
the place is the collective.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shardlaw.conformance.compat.trace import chapter_about, identifies_cause, is_redistribution_step, only_forwards
from shardlaw.conformance.law.verdict import collectives_in
from shardlaw.conformance.report.suspects import chapter_of, places_of, strip_request

if TYPE_CHECKING:
    from shardlaw.conformance.report.run_report import FindingLine

MIN_SHARE = 0.75
RARE_SHARE = 0.02  # of the cases of a run
MANY_CHAPTERS = 3
MANY_FINDINGS, TIMES_AS_FREQUENT = 5, 8.0
STRAGGLERS, SEVERAL = 2, 3  # findings
MAX_PASSING = 4  # places: what findings at more of them pass is common code


class _Run(NamedTuple):
    """What is rare or common among the findings and cases of a run: features that hardly any case has, features that tell findings from
    cases, and places that findings at many places pass."""

    rare: AbstractSet[str]
    marks: AbstractSet[str]
    common: AbstractSet[str]


def group_by_cause(new: Sequence[FindingLine], cases: int, reached: Mapping[str, int]) -> list[list[FindingLine]]:
    """Group ``new`` by cause, in the order in which the causes first occur. A group begins with the findings at its most frequent place,
    smallest case first. ``reached`` counts, by feature, how many of the run's ``cases`` had it."""
    position = {line.id: number for number, line in enumerate(new)}
    collectives = _group_by_collective([line for line in new if line.in_back_end])
    unexplained: list[FindingLine] = []
    for line in (line for line in new if not line.in_back_end):
        next((group for group in collectives if _is_explained_by(line, group)), unexplained).append(line)
    rare = {name for name, count in reached.items() if 0 < count <= cases * RARE_SHARE}
    run = _Run(rare, _find_marks(unexplained, cases, reached), _find_common_places(unexplained))
    found = [*collectives, *_group_by_place(unexplained, run)]
    for group in found:
        _put_frequent_place_first(group, run)
    return sorted(found, key=lambda group: min(position[line.id] for line in group))


def _group_by_collective(lines: Sequence[FindingLine]) -> list[list[FindingLine]]:
    """Group findings in a backend by cause."""
    found: list[list[FindingLine]] = []
    for alike in _group_by(lines, lambda line: line.cause):
        group = next((group for group in found if _is_explained_by(alike[0], group)), None)
        found.append(alike) if group is None else group.extend(alike)
    return found


def _group_by_place(lines: Sequence[FindingLine], run: _Run) -> list[list[FindingLine]]:
    """Group findings in torch by cause."""
    groups: list[tuple[list[FindingLine], list[FindingLine]]] = []  # the lines at the group's own place, and all its lines
    placed = _group_by([line for line in lines if _place_of(line)], _group_key)
    for alike in sorted(placed, key=lambda alike: (chapter_of(alike[0]) == "mesh", len(alike)), reverse=True):
        fitting = (
            group
            for own, group in groups
            if _is_same_fault(own, alike, run) or _share_telling_feature(own, alike, run) or _stands_on_mesh(alike, group)
        )
        group = next(fitting, None)
        groups.append((alike, [*alike])) if group is None else group.extend(alike)
    found = _add_unplaced([line for line in lines if not _place_of(line)], [group for _, group in groups])
    return _join_stragglers(found)


def _add_unplaced(lines: Sequence[FindingLine], groups: list[list[FindingLine]]) -> list[list[FindingLine]]:
    """The groups, with ``lines``, of which no place is known, as groups of their own or in groups that account for them."""
    for alike in _group_by(lines, lambda line: _error_of(line) or line.cause or line.id):
        error = _error_of(alike[0])
        same = [group for group in groups if error and {_error_of(line) for line in group} == {error}]
        groups = [group for group in groups if group not in same]
        merged = [*itertools.chain.from_iterable(same), *alike]
        most = sum(map(len, groups)) / 2
        group = next((group for group in sorted(groups, key=len, reverse=True) if _could_be_of(merged, group, len(group) >= most)), None)
        groups.append(merged) if group is None else group.extend(merged)
    return groups


def _join_stragglers(groups: Sequence[list[FindingLine]]) -> list[list[FindingLine]]:
    """The groups; those of one or two findings that nothing sets apart from the findings of a large group have joined it."""
    large = sorted((group for group in groups if len(group) >= MANY_FINDINGS), key=len, reverse=True)
    found = []
    for group in groups:
        joined = next((other for other in large if len(group) <= STRAGGLERS and _is_unremarkable(group, other)), None)
        found.append(group) if joined is None else joined.extend(group)
    return found


def _is_unremarkable(few: Iterable[FindingLine], many: Iterable[FindingLine]) -> bool:
    """Whether ``many`` has findings in the chapters and of the kinds of ``few``, of which several pass the places of ``few`` too. Where no
    place is known there must be more of them."""
    for line in few:
        place, looked_for = _place_of(line), (chapter_of(line), _broad_kind(line))
        alike = [places_of(other) for other in many if (chapter_of(other), _broad_kind(other)) == looked_for]
        if len(alike) < MANY_FINDINGS or (place and sum(place in places for places in alike) < SEVERAL):
            return False
    return True


def _put_frequent_place_first(group: list[FindingLine], run: _Run) -> None:
    """Sort a group in place: the findings at its most frequent place first, of these the ones of the chapter that is about it, then by the
    size of their cases. In a backend the plainest case of the collective's own laws comes first. A place that is likely for more of them
    than any first place is takes its part."""
    named = Counter(place for line in group for place in {_place_of(line), *places_of(line)})
    shown = _place_of(max(group, key=lambda line: (line.in_back_end, bool(_place_of(line)), named[_place_of(line)])))
    about = chapter_about(shown)

    def plainness(line: FindingLine) -> tuple[bool, int]:
        return (not collectives_in(line.features), len(line.features)) if line.in_back_end else (chapter_of(line) != about, 0)

    group.sort(key=lambda line: (_place_of(line) != shown, *plainness(line), _size_key(line)))
    common = next(iter(_passed_by_most(group, run)), "")
    if not group[0].in_back_end and named[common] > named[shown]:
        group[0] = msgspec.structs.replace(group[0], where=common)


def _group_by(lines: Iterable[FindingLine], key: Callable[[FindingLine], str]) -> list[list[FindingLine]]:
    """Group findings by a key; in each group the smallest case is first."""
    groups: dict[str, list[FindingLine]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return [sorted(its, key=_size_key) for its in groups.values()]


def _group_key(line: FindingLine) -> str:
    """The key of the initial groups: the place; for a hang, whose place is where ranks wait, and for a place that every op goes through,
    place and kind."""
    place = _place_of(line)
    return place if identifies_cause(place) and line.kind != "hang" else line.cause or place or line.id


def _size_key(line: FindingLine) -> tuple[bool, int, str]:
    return line.note.startswith(("not minimal", "not shrunk")), len(line.text), line.text


def _is_same_fault(some: Sequence[FindingLine], others: Sequence[FindingLine], run: _Run) -> bool:
    """Whether the findings at two places have one cause."""
    first, second = some[0], others[0]
    if second.kind == "hang" or first.kind == "hang" or not (identifies_cause(_place_of(first)) and identifies_cause(_place_of(second))):
        return _place_of(first) == _place_of(second) and _is_nested(_needed_features(first), _needed_features(second))
    if _owner_class(first) == _owner_class(second) != "" and _is_nested(_needed_features(first), _needed_features(second)):
        return True
    if _are_gradients(some, others) or not set(_passed_by_most(some, run)).isdisjoint(_passed_by_most(others, run)):
        return True
    return _pass_through(others, some, run) or _pass_through(some, others, run)


def _could_be_of(unplaced: Sequence[FindingLine], group: Sequence[FindingLine], has_most: bool) -> bool:
    """Whether findings whose place is not known have kinds that the group has, and the features of its first finding, or those that all
    its findings share. A fault that needs no features, shows in several chapters and has most findings accounts for all of them."""
    if has_most and len({chapter_of(line) for line in group}) >= MANY_CHAPTERS and not all(map(_needed_features, group)):
        return True
    kinds, has = {_broad_kind(line) for line in unplaced}, set.intersection(*map(_needed_features, unplaced))
    needed = (_needed_features(group[0]), set.intersection(*map(_needed_features, group)))
    return kinds <= {_broad_kind(line) for line in group} and any(features and features <= has for features in needed)


def _stands_on_mesh(lines: Sequence[FindingLine], group: Sequence[FindingLine]) -> bool:
    """Whether a group shows that meshes themselves are wrong, and ``lines``, of other chapters, run on such meshes."""
    meshes = [line for line in group if chapter_of(line) == "mesh"]
    if not meshes or meshes[0] is not group[0] or "mesh" in map(chapter_of, lines):
        return False
    shared = {name for name in set.intersection(*map(_needed_features, meshes)) if "mesh" in name}
    return bool(shared) and all(shared <= _needed_features(line) for line in lines)


def _are_gradients(some: Sequence[FindingLine], others: Sequence[FindingLine]) -> bool:
    """Whether ``others`` are gradients of ops whose forward is in ``some``, in any variant of the op."""
    forward = {_op_name(line.law, "op.forward") for line in some}
    return all(_op_name(line.law, "op.backward") in forward - {""} for line in others)


def _op_name(law: str, which: str) -> str:
    """The op of a law ``which[op]``, without its variant (``min`` of ``min.reduction_no_dim``); empty for another law."""
    name, _, variant = law.partition("[")
    op = re.match(r"((?:nn\.functional|linalg|special|fft)\.)?\w+", variant)
    return op[0] if op and name == which else ""


def _owner_class(line: FindingLine) -> str:
    """The class of the method to look at, with its file; empty for a function."""
    name, _, file = _place_of(line).partition(", ")
    owner = name.rpartition(".")[0]
    return f"{owner}, {file.partition(':')[0]}" if owner else ""


def _is_nested(one: set[str], other: set[str]) -> bool:
    return one <= other or other <= one


def _share_telling_feature(some: Sequence[FindingLine], others: Sequence[FindingLine], run: _Run) -> bool:
    """Whether nearly all of both share a feature that tells findings from cases, or all a rare one if the two have no chapter in common."""
    chapters, further = ({chapter_of(line) for line in lines} for lines in (some, others))
    shared = set.intersection(*map(_needed_features, [*some, *others]))
    if chapters.isdisjoint(further) and shared & run.rare:
        return True
    return any(all(_share_of(name, lines) >= MIN_SHARE for lines in (some, others)) for name in run.marks)


def _share_of(name: str, lines: Sequence[FindingLine]) -> float:
    """The share of findings that have a feature."""
    return sum(name in line.features for line in lines) / len(lines)


def _find_marks(lines: Sequence[FindingLine], cases: int, reached: Mapping[str, int]) -> set[str]:
    """The features that many findings in several chapters have, and far more of the findings than of the cases."""
    found = set()
    for name, count in Counter(name for line in lines for name in _needed_features(line)).items():
        chapters = {chapter_of(line) for line in lines if name in line.features}
        expected = len(lines) * reached.get(name, 0) / max(cases, 1)
        if count >= max(MANY_FINDINGS, expected * TIMES_AS_FREQUENT) and expected and len(chapters) >= MANY_CHAPTERS:
            found.add(name)
    return found


def _pass_through(lines: Sequence[FindingLine], others: Sequence[FindingLine], run: _Run) -> bool:
    """Whether the place of ``others`` is no common code and among the likely places of nearly all ``lines``."""
    place, shared = _place_of(others[0]), set.intersection(*map(_needed_features, others))
    chapters = {chapter_of(line) for line in others} if is_redistribution_step(place) else set()
    relevant = (line for line in lines if shared <= _needed_features(line) or chapter_of(line) not in chapters)
    return place not in run.common and sum(place in places_of(line) for line in relevant) >= MIN_SHARE * len(lines)


def _passed_by_most(lines: Sequence[FindingLine], run: _Run) -> list[str]:
    """The places, other than common code and steps of redistributions, that are among the likely ones of nearly all ``lines``, the most
    frequent first."""

    def is_telling(place: str) -> bool:
        return identifies_cause(place) and place not in run.common and not is_redistribution_step(place) and not only_forwards(place)

    named = Counter(place for line in lines for place in places_of(line) if is_telling(place))
    return [place for place, count in named.most_common() if count >= MIN_SHARE * len(lines)]


def _find_common_places(lines: Sequence[FindingLine]) -> set[str]:
    """The places that findings at many places pass, and at more places than there are findings at them."""
    passing: dict[str, set[str]] = {}
    for line in lines:
        for place in places_of(line):
            passing.setdefault(place, set()).add(_place_of(line))
    own = Counter(map(_place_of, lines))
    return {place for place, firsts in passing.items() if len(firsts) > max(MAX_PASSING, own[place])}


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
