"""Order the functions of torch that a deviating case called by how likely the fault is in them.

Three things are weighed: how early the steps of the case lead to a function (:mod:`shardlaw.conformance.run.place`), how few of the cases
that hold ran its rarest line, and how many words its source shares with what the case is about. The weights were fitted on 118 planted
faults and 82 known causes; within half and twice of each the result hardly changes. ``docs/sensitivity.md`` has the figures.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from shardlaw.conformance.compat import trace as torch_trace
from shardlaw.conformance.law.evidence import merge
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.verdict import Answer, Verdict

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law

DEVIATING = ("deviates", "raised", "crashed")  # outcomes
SHARED_WORDS = 1.5  # of the function that shares most
LINES_RUN = 0.3  # a long function has more places for a fault
NAME, FILE = 3, 1  # how often a word of a function's or a file's name counts
SHORT = 5  # added to the norm of a function's words, so that one of a few words is not like everything
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ENDING = re.compile("(?<=...)(ing|ed|es|s|e)$")


class LineCoverage:
    """Which lines the deviating case ran, and in how many holding cases each of them ran too."""

    def __init__(self, visited: Mapping[str, frozenset[int]], holding_cases: Sequence[Mapping[str, frozenset[int]]]) -> None:
        self._visited, self._holding_cases = visited, holding_cases

    @classmethod
    def from_verdicts(cls, verdict: Verdict, near: Sequence[Verdict]) -> LineCoverage:
        deviating = [answer for answer in verdict.ranks if answer.outcome in DEVIATING]
        return cls(_merge_visited(deviating), [_merge_visited(other.ranks) for other in near if other.status == "held"])

    @property
    def holding_count(self) -> int:
        return len(self._holding_cases)

    @property
    def is_comparable(self) -> bool:
        """Whether it is known what the deviating case ran, and some holding case."""
        return bool(self._visited) and bool(self._holding_cases)

    def holding_cases_by_place(self) -> dict[str, int]:
        """The functions that the deviating case ran, each with the number of holding cases that ran it too."""
        return {place: sum(place in other for other in self._holding_cases) for place in self._visited}

    def fewest_holding_cases(self, place: str) -> int:
        """In how many holding cases the rarest line of a function ran."""
        ran = self._visited.get(place, frozenset())
        return min((sum(line in other.get(place, ()) for other in self._holding_cases) for line in ran), default=len(self._holding_cases))

    def is_never_in_holding(self, place: str) -> bool:
        """Whether there are holding cases and none called the function."""
        return bool(self._holding_cases) and not any(place in other for other in self._holding_cases)

    def runs_new_lines(self, place: str) -> bool:
        """Whether holding cases call the function, and it ran lines that it ran in none of them."""
        return bool(self._holding_cases) and not self.is_never_in_holding(place) and not self.fewest_holding_cases(place)

    def rarest_finder(self, places: Iterable[str]) -> list[str]:
        """The last of these functions that computes a decision and has the rarest lines, as a list; empty if none does."""
        finding = list(filter(torch_trace.analyzes, places))
        return [min(finding[::-1], key=self.fewest_holding_cases)] if finding else []

    def by_rarity(self, places: Iterable[str]) -> list[str]:
        """These functions, rarest lines first, without those that only pass arguments on."""
        return sorted((place for place in places if torch_trace.is_candidate(place)), key=self.fewest_holding_cases)

    def by_suspicion(self, places: Sequence[str], about: str, steps: float = 1.0) -> list[str]:
        """These functions and tables, given in the order in which the case's steps lead to them, the likeliest to be at fault first.
        ``about`` says in words what the case asks and what it got; ``steps`` is the weight of the order given."""
        shared = shared_words(places, about)

        def innocence(at: int) -> float:
            place = places[at]
            ran = len(self._visited.get(place, ()))
            evidence = steps * math.log(1 + at) + (math.log(1 + self.fewest_holding_cases(place)) if ran else 0)  # no line of a table runs
            return evidence - SHARED_WORDS * shared[place] - LINES_RUN * math.log(max(1, ran))

        return [places[at] for at in sorted(range(len(places)), key=innocence)]


def describe(law: Law, verdict: Verdict) -> str:
    """What a case asks and what it got, in words."""
    features = features_of(verdict.case, law) | set(verdict.features)
    return f"{law.id} {law.clause} {verdict.case.text} {' '.join(sorted(features))} {verdict.message}"


def shared_words(places: Collection[str], about: str) -> dict[str, float]:
    """How much the source of each function has in common with a text, relative to the one that has most: the cosine of their words, rare
    words counting more."""
    asked = set(words_of(about))
    words = {place: _words_of_function(place) for place in places}
    functions_with = Counter(word for its in words.values() for word in its)
    weight = {word: math.log(1 + len(words) / count) for word, count in functions_with.items()}
    found = {}
    for place, its in words.items():
        norm = math.hypot(*(count * weight[word] for word, count in its.items())) + SHORT
        found[place] = sum(count * weight[word] ** 2 for word, count in its.items() if word in asked) / norm
    most = max(found.values(), default=0.0) or 1.0
    return {place: share / most for place, share in found.items()}


def words_of(text: str) -> list[str]:
    """The words of a text, those within names too, in lower case and without endings: ``ShardedTensors`` has ``shard`` and ``tensor``."""
    return [_ENDING.sub("", word.lower()) for word in _WORD.findall(text) if len(word) > 1]


@cache
def _words_of_function(place: str) -> Mapping[str, float]:
    """How much each word counts in a function: by the logarithm of how often its source has it, more in its name."""
    name, _, spot = place.partition(", ")
    counts = {word: math.log(1 + count) for word, count in Counter(words_of(torch_trace.source_of(place))).items()}
    for text, more in ((name, NAME), (spot.rpartition("/")[2].partition(".py")[0], FILE)):
        for word in words_of(text):
            counts[word] = counts.get(word, 0) + more
    return counts


def _merge_visited(answers: Iterable[Answer]) -> dict[str, frozenset[int]]:
    return merge(answer.evidence.visited for answer in answers if answer.evidence is not None)
