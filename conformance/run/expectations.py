"""Expectations: known findings, each written down with a reason, so that a run says what is new.

They come in layers, each a list of files (:mod:`shardlaw.conformance.run.expectation_file`): those shipped (one file a chapter), the
target's own, the user's. Where several entries match, the last layer's counts.

Of every entry a run counts its hits, and how many of a law's cases it would match whatever they do. An entry that would match cases which
hold, and these are more than 20 % of a law's, hides too much: a run warns of it, and ends with 1 under ``--strict``, unless it says
``wide = true``; chosen cases of a law cannot tell, nor can entries that say at which place: only what deviates is traced. A run tries the
case of every entry (of chosen cases that of one entry of each cause), before anything that it draws: an entry whose case holds, and that
happened in no other, is stale. Of what it draws it passes over three in four of those cases that entries cover
(:mod:`shardlaw.conformance.run.search`), and counts none of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.run.entry import MIN_CASES, REFUSED, Entry
from shardlaw.conformance.run.expectation_file import read_entries

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Verdict

SHIPPED = Path(__file__).parents[1] / "expectations"
MAX_HOLDING_SHARE = 0.2
COSTLY_KINDS = frozenset({"hang", "crash"})
HITS_BEFORE_SKIPPED = 3


@dataclass(frozen=True)
class TooWideEntry:
    """An entry that matches so many of a law's cases which hold that it is refused."""

    entry: Entry
    law: str
    share: float

    def __str__(self) -> str:
        return (
            f"{self.entry.where}: matches cases of {self.law} that hold, {self.share:.0%} of all, more than {MAX_HOLDING_SHARE:.0%}: "
            "refused, name more features or say wide = true"
        )


class Expectations:
    """The entries that hold for this torch and this target, and what a run counts of them. ``judged`` counts by law the cases so far; of
    ``chosen`` laws these are chosen ones, which say nothing of how much an entry would match."""

    def __init__(self, entries: Iterable[Entry] = (), judged: Mapping[str, int] | None = None, chosen: Iterable[str] = ()) -> None:
        self.entries = tuple(entries)
        self.chosen = frozenset(chosen)
        self._of_law: dict[str, list[Entry]] = {}
        self._of_case: dict[Case, list[Entry]] = {}
        self._cases: dict[str, list[Case]] = {}
        self._judged: Counter[str] = Counter(judged)
        tried = [entry for entry in self.entries if entry.case and entry.cause and entry.kind not in COSTLY_KINDS]
        self._first = {entry.cause.id: entry for entry in reversed(tried) if entry.cause}
        for entry in reversed(self.entries):
            for law_id in entry.laws:
                self._of_law.setdefault(law_id, []).append(entry)
            if entry.case:
                case = Case.parse(entry.case)
                if case not in self._of_case:
                    self._cases.setdefault(case.law, []).append(case)
                self._of_case.setdefault(case, []).append(entry)

    def known_cases(self, law_id: str, *, one_each: bool = False) -> list[Case]:
        """The cases of a law that entries name, but for those that may hang or crash: trying them costs a world. With ``one_each`` those
        alone that stand first for their cause."""
        cases = [case for case in self._cases.get(law_id, ()) if COSTLY_KINDS.isdisjoint(entry.kind for entry in self._of_case[case])]
        return [case for case in cases if not one_each or any(self._is_first_of_cause(entry) for entry in self._of_case[case])]

    def _is_first_of_cause(self, entry: Entry) -> bool:
        return entry.cause is None or self._first.get(entry.cause.id) is entry

    def match(
        self, case: Case, kind: str, features: AbstractSet[str], error: str, at: AbstractSet[str] = frozenset(), *, count: bool = True
    ) -> Entry | None:
        """The entry that accounts for a deviation, ``at`` these places if it was traced, or ``None``. With ``count`` it is a hit."""
        found = [entry for entry in self._of_law.get(case.law, ()) if entry.matches(case, kind, features, error, at)]
        if count and found:
            found[0].hits += 1
            for entry in found:
                entry.deviated[case.law] += 1
        return found[0] if found else None

    def match_verdict(self, law: Law, verdict: Verdict, at: AbstractSet[str] = frozenset()) -> Entry | None:
        """The entry that accounts for a deviating or refused verdict, ``at`` these places if it was traced; not counted as a hit."""
        case, features = _case_and_features(law, verdict)
        return self.match(case, verdict.word, features, verdict.error, at, count=False)

    def needs_trace(self, law: Law, verdict: Verdict) -> bool:
        """Whether a trace of a deviation may show that an entry accounts for it."""
        case, features = _case_and_features(law, verdict)
        return any(entry.at and entry.may_match(case, verdict.word, features, verdict.error) for entry in self._of_law.get(law.id, ()))

    def skip_entry(self, case: Case, features: AbstractSet[str]) -> Entry | None:
        """The expected hang or crash, met often enough, that a case would be; the case is then counted as one that it happened in."""
        for entry in self._of_law.get(case.law, ()):
            if entry.kind in COSTLY_KINDS and not entry.at and entry.hits >= HITS_BEFORE_SKIPPED and entry.covers(case, features):
                self.count_case(case, features)
                entry.deviated[case.law] += 1
                return entry
        return None

    def covers(self, case: Case, features: AbstractSet[str]) -> bool:
        """Whether an entry that names features or fields, and no place, matches a case, whatever comes of it."""
        telling = (entry for entry in self._of_law.get(case.law, ()) if (entry.features or entry.conditions) and not entry.at)
        return any(entry.covers(case, features) for entry in telling)

    def note_own_case(self, verdict: Verdict) -> None:
        """Note what became of the entries whose own case was judged."""
        for entry in self._of_case.get(verdict.case, ()):
            entry.mended = verdict.status != (REFUSED if entry.kind == REFUSED else "deviates")

    def count_case(self, case: Case, features: AbstractSet[str]) -> None:
        """Count one case towards the share of its law's that entries would match."""
        self._judged[case.law] += 1
        for entry in self._of_law.get(case.law, ()):
            if not entry.at and entry.covers(case, features):
                entry.matched[case.law] += 1

    def masked_share(self, entry: Entry) -> float:
        """The largest share, from 0 to 1, of the cases of one of its laws that an entry would match."""
        return max((count / self._judged[law_id] for law_id, count in entry.matched.items()), default=0.0)

    def too_wide(self) -> list[TooWideEntry]:
        """The entries to refuse, each with the law of which it matches most that holds. Laws with fewer than 20 cases say nothing."""
        found = []
        for entry in self.entries:
            shares = {
                law_id: (count - entry.deviated[law_id]) / self._judged[law_id]
                for law_id, count in entry.matched.items()
                if self._judged[law_id] >= MIN_CASES and law_id not in self.chosen
            }
            law_id = max(shares, key=shares.__getitem__, default="")
            if law_id and not entry.wide and shares[law_id] > MAX_HOLDING_SHARE:
                found.append(TooWideEntry(entry, law_id, shares[law_id]))
        return found

    def has_stale(self, law_id: str) -> bool:
        """Whether an entry that is about this law alone is stale, by the law's own cases. An entry about several laws is stale where it
        happens in none of them, and no one of them can tell."""
        return any(entry.is_stale_in(law_id) for entry in self._of_law.get(law_id, ()) if len(entry.laws) == 1)


def _case_and_features(law: Law, verdict: Verdict) -> tuple[Case, AbstractSet[str]]:
    """The case of a verdict, as one of this law, and the features of both."""
    from shardlaw.conformance.law.features.features import features_of

    return replace(verdict.case, law=law.id), features_of(verdict.case, law) | set(verdict.features)


def shipped_files() -> list[Path]:
    """The files that come with this package."""
    return sorted(SHIPPED.glob("*.toml"))


def expectation_files(target: Target, extra: Sequence[Path] = ()) -> list[Path]:
    """All files of a run, the first layer first: shipped, those that come with the laws of others, the target's, the user's."""
    from shardlaw.conformance.laws import expectations as theirs

    return [*shipped_files(), *theirs(), *map(Path, target.expect), *extra]


def load(files: Sequence[Path], laws: Sequence[Law], torch_version: str, target: str = "gloo") -> Expectations:
    """The entries of ``files`` that hold for this torch and target.

    Raises :class:`UsageError`, with file and line, for an entry that means nothing.
    """
    ids = [law.id for law in laws]
    aliases = {alias: law.id for law in laws for alias in law.aliases}
    entries = [entry for file in files for entry in read_entries(file, ids, aliases)]
    return Expectations(entry for entry in entries if entry.applies_to(torch_version, target))
