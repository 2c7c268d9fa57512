"""The fewest features and fields that part what deviates from what holds: the cases of a run are the data.

A run writes every case that it judged into ``cases.txt``. Of a finding they tell which of its features matter: those without which cases
hold. ``shardlaw expect update`` names these and no others, so that an entry accounts for the next example of the same fault too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

# what ranks alone can tell: the text of a case does not have it
SEEN_BY_RANKS = ("op:", "derived")
# what tells little of a cause: named only where nothing else parts
LAST_FEATURES = ("world:",)
MOST = 3
SELDOM = 6  # less than an entry may match that holds


@dataclass(frozen=True)
class Tried:
    """A case that a run judged: ``held``, ``refused`` or the kind of its deviation, and what its text tells: its features, and what its
    fields say in one word (``NAME=WORD``)."""

    verdict: str
    features: frozenset[str]


def tried(path: Path) -> dict[str, list[Tried]]:
    """By law, the cases that a file of cases lists; nothing where it cannot be read, or is of other laws than these."""
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.condition import facts
    from shardlaw.conformance.law.features.features import features_of
    from shardlaw.conformance.laws import catalogue
    from shardlaw.reference.notation import NotationError

    laws, found = catalogue(), defaultdict[str, list[Tried]](list)
    try:
        for line in path.read_text("utf-8").splitlines():
            verdict, _, text = (*line.split(" ", 2), "", "")[:3]
            law = laws.get(text.partition(" ")[0])
            if law is not None:
                found[law.id].append(Tried(verdict, features_of(case := Case.parse(text), law) | facts(case)))
    except (OSError, UnicodeDecodeError, NotationError):
        return {}
    return found


def parting(features: Sequence[str], kind: str, cases: Sequence[Tried]) -> list[str] | None:
    """The fewest of these features and words that no case has which does not deviate so, those that most deviating cases have, features
    before words. What fewer than half of the deviating cases have tells of one of them, not of the cause: then those that at most one in
    ``SELDOM`` of all cases has which does not deviate so. ``None`` where no three of them part, or no cases tell."""
    names = [name for name in features if not name.startswith(SEEN_BY_RANKS)]
    deviating = [case.features for case in cases if case.verdict == kind]
    others = [case.features for case in cases if case.verdict != kind]
    if not deviating or not others:
        return None
    telling = [name for name in names if not name.startswith(LAST_FEATURES)]
    first = None
    for allowed, some, size in product((0, len(cases) // SELDOM), (telling, names), range(1, MOST + 1)):
        for part in ([name for name in some if "=" not in name], some):
            fitting = [chosen for chosen in combinations(part, size) if sum(map(set(chosen).issubset, others)) <= allowed]
            if fitting:
                best = max(fitting, key=lambda chosen: sum(map(set(chosen).issubset, deviating)))
                if 2 * sum(map(set(best).issubset, deviating)) >= len(deviating):
                    return list(best)
                first = first or list(best)
    return first


def common_pattern(laws: Sequence[str], features: Sequence[str], kind: str, cases: Mapping[str, Sequence[Tried]]) -> str | None:
    """The narrowest pattern that selects all these laws of one chapter, if no case of the other laws that it selects has the features and
    does not deviate so; ``None`` where there is none."""
    from shardlaw.conformance.law.selection import select_ids

    names, chapters = {law.partition("[")[0] for law in laws}, {law.partition(".")[0] for law in laws}
    patterns = [*names] if len(names) == 1 else []
    for pattern in [*patterns, *(f"{chapter}.*" for chapter in chapters if len(chapters) == 1)]:
        selected = select_ids([*cases], [pattern])
        if set(laws) <= set(selected) and not any(
            case.verdict != kind and case.features.issuperset(features) for law in selected for case in cases[law]
        ):
            return pattern
    return None
