"""Find the fewest features and field values that separate the cases that deviate from those that hold.

The data are the judged cases of a run, in ``cases.txt``. They tell which features of a finding matter: those without which cases hold.
``shardlaw expect update`` writes only these into an entry, so that it also matches the next case of the same fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

# features that only ranks report: they do not follow from the text of a case
RANK_FEATURES = ("op:", "derived")
# features that say little about a cause: used only if nothing else separates
LAST_FEATURES = ("world:",)
MAX_NAMES = 3
MAX_HOLDING_PART = 6  # at most 1 / 6 of a law's cases may match and hold: less than an expectation allows
NAME_COST, WORD_COST, LAST_COST = 0.05, 0.02, 0.1  # by how much one more name, a NAME=WORD, a feature of LAST_FEATURES must raise the score


@dataclass(frozen=True)
class JudgedCase:
    """A case that a run judged: its verdict (``held``, ``refused`` or the kind of deviation), its features, and its fields that have one
    word (``NAME=WORD``)."""

    verdict: str
    features: frozenset[str]


class CaseTable:
    """The cases of one law, as bit sets: by feature, and by verdict."""

    def __init__(self, cases: Sequence[JudgedCase]) -> None:
        self.total = len(cases)
        self._with_feature, self._with_verdict = defaultdict[str, int](int), defaultdict[str, int](int)
        for at, case in enumerate(cases):
            self._with_verdict[case.verdict] |= 1 << at
            for name in case.features:
                self._with_feature[name] |= 1 << at

    def count_cases(self, names: Iterable[str], kind: str) -> tuple[int, int, int]:
        """How many cases with all ``names`` deviate with this kind, how many with all ``names`` do not, and how many of all cases do."""
        reached, wrong = (1 << self.total) - 1, self._with_verdict.get(kind, 0)
        for name in names:
            reached &= self._with_feature.get(name, 0)
        return (reached & wrong).bit_count(), (reached & ~wrong).bit_count(), wrong.bit_count()

    def allows(self, names: Iterable[str], kind: str) -> bool:
        """Whether few cases with all ``names`` do not deviate with this kind."""
        return self.count_cases(names, kind)[1] <= self.total // MAX_HOLDING_PART


def read_tables(path: Path) -> dict[str, CaseTable]:
    """Read a ``cases.txt`` into a table for each law; empty if the file cannot be read or parsed."""
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.condition import case_facts
    from shardlaw.conformance.law.features.features import features_of
    from shardlaw.conformance.laws import catalogue
    from shardlaw.reference.notation import NotationError

    laws, found = catalogue(), defaultdict[str, list[JudgedCase]](list)
    try:
        for line in path.read_text("utf-8").splitlines():
            verdict, _, text = (*line.split(" ", 2), "", "")[:3]
            law = laws.get(text.partition(" ")[0])
            if law is not None:
                found[law.id].append(JudgedCase(verdict, features_of(case := Case.parse(text), law) | case_facts(case)))
    except (OSError, UnicodeDecodeError, NotationError):
        return {}
    return {law_id: CaseTable(cases) for law_id, cases in found.items()}


def separating_features(features: Sequence[str], kind: str, table: CaseTable) -> list[tuple[str, ...]]:
    """The combinations of at most three names that best separate the cases with this kind from the others, best first.

    The score is the F1 score (most cases with the names deviate, most deviating cases have the names) minus a cost for each name, which
    prevents overfitting to the cases of one run. Empty if nothing separates, or there are too few cases.
    """
    names = [name for name in features if not name.startswith(RANK_FEATURES)]
    scored = []
    for chosen in (chosen for size in range(MAX_NAMES + 1) for chosen in combinations(names, size)):
        wrong, others, every = table.count_cases(chosen, kind)
        if 0 < wrong < table.total and others <= min(wrong, table.total // MAX_HOLDING_PART):
            cost = NAME_COST * len(chosen) + sum(WORD_COST * ("=" in name) + LAST_COST * name.startswith(LAST_FEATURES) for name in chosen)
            scored.append((2 * wrong / (wrong + others + every) - cost, chosen))
    best = max((score for score, _ in scored), default=0.0)
    return [chosen for score, chosen in sorted(scored, key=lambda item: -item[0]) if score >= best - 2 * NAME_COST]


def law_patterns(law: str) -> list[str]:
    """The law patterns for the entry of a finding, narrowest first: the law, all its variants, the chapter, everything."""
    name, chapter = law.partition("[")[0], law.partition(".")[0]
    return [law, *([name] if name != law else []), f"{chapter}.*", "*"]


def is_allowed(pattern: str, names: Sequence[str], kind: str, tables: Mapping[str, CaseTable]) -> bool:
    """Whether the names are allowed (:meth:`CaseTable.allows`) in each law that a pattern selects."""
    from shardlaw.conformance.law.selection import matches

    return all(table.allows(names, kind) for law, table in tables.items() if matches(pattern, law))
