"""The fewest features and fields that part what deviates from what holds: the cases of a run are the data.

A run writes every case that it judged into ``cases.txt``. Of a finding they tell which of its features matter: those without which cases
hold. ``shardlaw expect update`` names these and no others, so that an entry accounts for the next example of the same fault too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

# what ranks alone can tell: the text of a case does not have it
RANK_FEATURES = ("op:", "derived")
# what tells little of a cause: named only where nothing else parts
LAST_FEATURES = ("world:",)
MAX_NAMES = 3
MAX_HOLDING_PART = 6  # less than an entry may match that holds
NAME_COST, WORD_COST, LAST_COST = 0.05, 0.02, 0.1  # what one more name, one that is a word of a field, one that tells little must gain


@dataclass(frozen=True)
class JudgedCase:
    """A case that a run judged: ``held``, ``refused`` or the kind of its deviation, and what its text tells: its features, and what its
    fields say in one word (``NAME=WORD``)."""

    verdict: str
    features: frozenset[str]


class CaseTable:
    """The cases of one law, as sets of bits: which have a feature, and which deviate how."""

    def __init__(self, cases: Sequence[JudgedCase]) -> None:
        self.total = len(cases)
        self._with_feature, self._with_verdict = defaultdict[str, int](int), defaultdict[str, int](int)
        for at, case in enumerate(cases):
            self._with_verdict[case.verdict] |= 1 << at
            for name in case.features:
                self._with_feature[name] |= 1 << at

    def count_cases(self, names: Iterable[str], kind: str) -> tuple[int, int, int]:
        """Of the cases with all these features and words how many deviate so and how many do not, and how many of all deviate so."""
        reached, wrong = (1 << self.total) - 1, self._with_verdict.get(kind, 0)
        for name in names:
            reached &= self._with_feature.get(name, 0)
        return (reached & wrong).bit_count(), (reached & ~wrong).bit_count(), wrong.bit_count()

    def allows(self, names: Iterable[str], kind: str) -> bool:
        """Whether few of the cases with all these features and words do not deviate so."""
        return self.count_cases(names, kind)[1] <= self.total // MAX_HOLDING_PART


def read_tables(path: Path) -> dict[str, CaseTable]:
    """By law, the cases that a file of cases lists; nothing where it cannot be read, or is of other laws than these."""
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.condition import facts
    from shardlaw.conformance.law.features.features import features_of
    from shardlaw.conformance.laws import catalogue
    from shardlaw.reference.notation import NotationError

    laws, found = catalogue(), defaultdict[str, list[JudgedCase]](list)
    try:
        for line in path.read_text("utf-8").splitlines():
            verdict, _, text = (*line.split(" ", 2), "", "")[:3]
            law = laws.get(text.partition(" ")[0])
            if law is not None:
                found[law.id].append(JudgedCase(verdict, features_of(case := Case.parse(text), law) | facts(case)))
    except (OSError, UnicodeDecodeError, NotationError):
        return {}
    return {law_id: CaseTable(cases) for law_id, cases in found.items()}


def separating_features(features: Sequence[str], kind: str, table: CaseTable) -> list[tuple[str, ...]]:
    """The choices of at most three of these features and words that part best what deviates so from what does not, the best first: most of
    the cases with them deviate, and most of those that deviate have them. One more name has to gain something, for what fits the cases of
    one run to the last does not fit those of the next. None where nothing parts, or no cases tell."""
    names = [name for name in features if not name.startswith(RANK_FEATURES)]
    scored = []
    for chosen in (chosen for size in range(MAX_NAMES + 1) for chosen in combinations(names, size)):
        wrong, others, every = table.count_cases(chosen, kind)
        if 0 < wrong < table.total and others <= min(wrong, table.total // MAX_HOLDING_PART):
            cost = NAME_COST * len(chosen) + sum(WORD_COST * ("=" in name) + LAST_COST * name.startswith(LAST_FEATURES) for name in chosen)
            scored.append((2 * wrong / (wrong + others + every) - cost, chosen))
    best = max((score for score, _ in scored), default=0.0)
    return [chosen for score, chosen in sorted(scored, key=lambda one: -one[0]) if score >= best - 2 * NAME_COST]


def law_patterns(law: str) -> list[str]:
    """The patterns that an entry of a finding may have, the narrowest first: its law, all variants of this, the chapter, everything."""
    name, chapter = law.partition("[")[0], law.partition(".")[0]
    return [law, *([name] if name != law else []), f"{chapter}.*", "*"]


def is_allowed(pattern: str, names: Sequence[str], kind: str, tables: Mapping[str, CaseTable]) -> bool:
    """Whether in each of the laws that a pattern selects few cases with these features and words do not deviate so."""
    from shardlaw.conformance.law.selection import matches

    return all(table.allows(names, kind) for law, table in tables.items() if matches(pattern, law))
