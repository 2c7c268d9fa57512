"""The new findings of a run by cause: the fewest places in torch that account for them.

What departs at one place is one cause, however it departs: a shift by one is a wrong value or an error, as the case goes. So is what
departs at two places

- of which one is among those to look at of nearly all that depart at the other: what stands on a function that is wrong departs as well.
  Every redistribution goes through its planner, so within a chapter these have to share the features that all at the planner have;
- that are methods of one class, where the smallest case of one has all features of the other's;
- of which one is met by gradients of ops that depart at the other;
- in unlike chapters, where all of it has a feature that hardly any case has.

A hang, and what departs at a place that every op goes through, is of another's cause only at one place and under features of which one
has all of the other's. What has no place, since no trace tells, is of the largest cause that departs so and whose smallest case has no
other features.
In a back end that is not torch's the place is the collective.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shardlaw.conformance.compat.trace import collective_of, redistributes, tells

if TYPE_CHECKING:
    from shardlaw.conformance.report.run_report import FindingLine

MIN_SHARE = 0.75
RARE_SHARE = 0.02  # of the cases of a run


def group_by_cause(new: Sequence[FindingLine], cases: int, reached: Mapping[str, int]) -> list[list[FindingLine]]:
    """The findings by cause, those that came first first; of each cause those at the place that is named most first, the smallest case
    before the others. ``reached``: how many of the run's ``cases`` had a feature."""
    position = {line.id: number for number, line in enumerate(new)}
    found: list[list[FindingLine]] = []
    for lines in _group_by((line for line in new if line.in_back_end), lambda line: line.cause):
        home = next((others for others in found if _is_explained_by(lines[0], others)), None)
        found.append(lines) if home is None else home.extend(lines)
    collectives = [*found]
    alone: list[FindingLine] = []
    for line in (line for line in new if not line.in_back_end):
        next((others for others in collectives if _is_explained_by(line, others)), alone).append(line)
    begun: list[tuple[list[FindingLine], list[FindingLine]]] = []
    for lines in sorted(_group_by(alone, _group_key), key=len, reverse=True):
        alike = (
            whole
            for first, whole in begun
            if _is_same_fault(first, lines) or _share_rare_feature(first, lines, cases * RARE_SHARE, reached)
        )
        home = next(alike, None)
        begun.append((lines, [*lines])) if home is None else home.extend(lines)
    found += [whole for _, whole in begun]
    for lines in found:
        named = Counter(place for line in lines for place in {_place_of(line), *map(_strip_request, line.places)})
        shown = _place_of(max(lines, key=lambda line: (line.in_back_end, named[_place_of(line)])))
        lines.sort(key=lambda line: (_place_of(line) != shown, _size_key(line)))
    return sorted(found, key=lambda lines: min(position[line.id] for line in lines))


def _group_by(lines: Iterable[FindingLine], key: Callable[[FindingLine], str]) -> list[list[FindingLine]]:
    """Findings of one key together, the smallest case first."""
    groups: dict[str, list[FindingLine]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return [sorted(its, key=_size_key) for its in groups.values()]


def _group_key(line: FindingLine) -> str:
    """What findings have in common that are one cause to begin with: the place, but for hangs, whose place is where ranks wait, and for
    places that every op goes through. There it matters how they depart."""
    place = _place_of(line)
    return place if tells(place) and line.kind != "hang" else line.cause or place or line.id


def _size_key(line: FindingLine) -> tuple[bool, int, str]:
    return line.note.startswith("not minimal"), len(line.text), line.text


def _is_same_fault(some: Sequence[FindingLine], others: Sequence[FindingLine]) -> bool:
    """Whether what departs at two places is one fault."""
    first, second = some[0], others[0]
    if not _place_of(second):
        as_others_do = {line.kind for line in others} <= {line.kind for line in some}
        return (
            as_others_do
            and bool(_place_of(first) and _needed_features(first))
            and all(_needed_features(first) <= _needed_features(line) for line in others)
        )
    if second.kind == "hang" or first.kind == "hang" or not (tells(_place_of(first)) and tells(_place_of(second))):
        return _place_of(first) == _place_of(second) and _is_nested(_needed_features(first), _needed_features(second))
    if _owner_class(first) == _owner_class(second) != "" and _is_nested(_needed_features(first), _needed_features(second)):
        return True
    return _pass_through(others, some) or _pass_through(some, others) or _are_gradients(some, others)


def _are_gradients(some: Sequence[FindingLine], others: Sequence[FindingLine]) -> bool:
    """Whether the others are gradients through ops that depart forward, in whatever variant."""
    forward = {_op_name(line.law, "op.forward") for line in some}
    return all(_op_name(line.law, "op.backward") in forward - {""} for line in others)


def _op_name(law: str, which: str) -> str:
    """The op of a law of ops, without a variant of its own (``min.reduction_no_dim``); nothing of another law."""
    name, _, variant = law.partition("[")
    op = re.match(r"((?:nn\.functional|linalg|special|fft)\.)?\w+", variant)
    return op[0] if op and name == which else ""


def _owner_class(line: FindingLine) -> str:
    """The class whose method is the place to look at, with its file; nothing for a function."""
    name, _, file = _place_of(line).partition(", ")
    owner = name.rpartition(".")[0]
    return f"{owner}, {file.partition(':')[0]}" if owner else ""


def _is_nested(one: set[str], other: set[str]) -> bool:
    return one <= other or other <= one


def _share_rare_feature(some: Sequence[FindingLine], others: Sequence[FindingLine], most: float, reached: Mapping[str, int]) -> bool:
    """Whether all these findings have a feature that at most so many cases have, those of the two in chapters of their own."""
    chapters, further = ({line.law.partition(".")[0] for line in lines} for lines in (some, others))
    shared = set.intersection(*map(_needed_features, [*some, *others]))
    return chapters.isdisjoint(further) and any(0 < reached.get(name, 0) <= most for name in shared)


def _pass_through(lines: Sequence[FindingLine], others: Sequence[FindingLine]) -> bool:
    """Whether the place of the others is among those to look at of nearly all of these findings, and tells of them."""
    place, shared = _place_of(others[0]), set.intersection(*map(_needed_features, others))
    chapters = {line.law.partition(".")[0] for line in others} if redistributes(place) else set()
    relevant = (line for line in lines if shared <= _needed_features(line) or line.law.partition(".")[0] not in chapters)
    return bool(place) and sum(place in map(_strip_request, line.places) for line in relevant) >= MIN_SHARE * len(lines)


def _is_explained_by(line: FindingLine, others: Iterable[FindingLine]) -> bool:
    """Whether a finding is of a collective that a back end does wrong, as one of the others shows: of several that a case calls each may be
    to blame. An error, if it has the features of the other, those of the world apart."""
    for other in (line for line in others if line.in_back_end):
        collectives, needed, has = _collectives_of(other), _needed_features(other), _needed_features(line)
        alike = not line.in_back_end or line.kind == "wrong-value" or (line.kind in ("raised", "divergence") and needed <= has)
        if other.kind == "wrong-value" and collectives and collectives <= _collectives_of(line) and alike:
            return True
    return False


def _needed_features(line: FindingLine) -> set[str]:
    return {name for name in line.features if not name.startswith(("world:", "op:"))}


def _collectives_of(line: FindingLine) -> set[str]:
    """The collectives that a finding in a back end names, or by which torch does what is to be looked at first."""
    if line.in_back_end:
        return {name.partition(":")[2] for name in line.features if name.startswith("collective:")}
    return set(filter(None, map(collective_of, line.places[:2])))


def _place_of(line: FindingLine) -> str:
    return _strip_request(line.where)


def _strip_request(place: str) -> str:
    """A place without what a rule was asked there."""
    return ",".join(place.split(",")[:2])
