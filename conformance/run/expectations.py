"""Expectations: known findings, each with a reason, so that a run reports what is new.

They are read from layers of files (:mod:`shardlaw.conformance.run.expectation_file`): the shipped ones, those of other packages with laws,
the target's, the user's. If several entries match, the one of the last layer counts.

For every entry a run counts its hits, and the cases of each law that it covers whatever their verdict. An entry is *too wide* if more than
20 % of a law's cases are covered and hold: it would hide new faults. The run warns of it, and ends with 1 under ``--strict``, unless the
entry says ``wide = true``. This is not decided for the cases of ``smoke.txt``, which are no fair sample, nor for entries with ``at``, since
only deviations are traced.

A run tries the case of every entry (in a smoke run of all laws: of one entry for each cause) before it draws any. An entry is *stale* if
its case holds and no other case matched it. Of the drawn cases that entries cover, three in four are skipped
(:mod:`shardlaw.conformance.run.search`) and not counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.selection import glob
from shardlaw.conformance.run.entry import MIN_CASES, REFUSED, Entry
from shardlaw.conformance.run.expectation_file import Refuse, read_entries

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
    """An entry that is refused because a large ``share`` of a law's cases match it and hold."""

    entry: Entry
    law: str
    share: float

    def __str__(self) -> str:
        return (
            f"{self.entry.where}: matches cases of {self.law} that hold, {self.share:.0%} of all, more than {MAX_HOLDING_SHARE:.0%}: "
            "refused, name more features or say wide = true"
        )


class Expectations:
    """The entries that apply to this torch and target, with the counts of a run. ``judged`` counts the cases so far by law. The laws in
    ``chosen`` try the cases of ``smoke.txt`` only, from which :meth:`too_wide` concludes nothing."""

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
        """The cases of a law that entries name, except hangs and crashes, each of which costs a world. With ``one_each`` only the case of
        the first entry of each cause."""
        cases = [case for case in self._cases.get(law_id, ()) if COSTLY_KINDS.isdisjoint(entry.kind for entry in self._of_case[case])]
        return [case for case in cases if not one_each or any(self._is_first_of_cause(entry) for entry in self._of_case[case])]

    def _is_first_of_cause(self, entry: Entry) -> bool:
        return entry.cause is None or self._first.get(entry.cause.id) is entry

    def match(
        self, case: Case, kind: str, features: AbstractSet[str], error: str, at: AbstractSet[str] = frozenset(), *, count: bool = True
    ) -> Entry | None:
        """The entry that accounts for a deviation, or ``None``. ``at``: the places that a trace gave. With ``count`` it is a hit."""
        found = [entry for entry in self._of_law.get(case.law, ()) if entry.matches(case, kind, features, error, at)]
        if count and found:
            found[0].hits += 1
            for entry in found:
                entry.deviated[case.law] += 1
        return found[0] if found else None

    def match_verdict(self, law: Law, verdict: Verdict, at: AbstractSet[str] = frozenset()) -> Entry | None:
        """As :meth:`match`, for a deviating or refused verdict; not counted as a hit."""
        case, features = _case_and_features(law, verdict)
        return self.match(case, verdict.word, features, verdict.error, at, count=False)

    def needs_trace(self, law: Law, verdict: Verdict) -> bool:
        """Whether an entry with ``at`` might account for a deviation, which only a trace can tell."""
        case, features = _case_and_features(law, verdict)
        return any(entry.at and entry.may_match(case, verdict.word, features, verdict.error) for entry in self._of_law.get(law.id, ()))

    def skip_entry(self, case: Case, features: AbstractSet[str]) -> Entry | None:
        """The entry that expects a case to hang or crash and was hit often enough. The case is then counted as a deviation of the entry."""
        for entry in self.costly_entries(case, features):
            if entry.hits >= HITS_BEFORE_SKIPPED:
                self.count_case(case, features)
                entry.deviated[case.law] += 1
                return entry
        return None

    def costly_entries(self, case: Case, features: AbstractSet[str]) -> Iterator[Entry]:
        """Yield the entries that expect a case to hang or crash."""
        for entry in self._of_law.get(case.law, ()):
            if entry.kind in COSTLY_KINDS and not entry.at and entry.covers(case, features):
                yield entry

    def covers(self, case: Case, features: AbstractSet[str]) -> bool:
        """Whether an entry with features or conditions, and without ``at``, covers a case, whatever its verdict."""
        candidates = (entry for entry in self._of_law.get(case.law, ()) if (entry.features or entry.conditions) and not entry.at)
        return any(entry.covers(case, features) for entry in candidates)

    def note_own_case(self, verdict: Verdict) -> None:
        """If the verdict is of an entry's own case, note whether it holds now, or is refused no longer."""
        for entry in self._of_case.get(verdict.case, ()):
            entry.mended = verdict.status != REFUSED if entry.kind == REFUSED else verdict.status == "held"

    def count_case(self, case: Case, features: AbstractSet[str]) -> None:
        """Count a judged case for its law and for each entry that covers it."""
        self._judged[case.law] += 1
        for entry in self._of_law.get(case.law, ()):
            if not entry.at and entry.covers(case, features):
                entry.matched[case.law] += 1

    def masked_share(self, entry: Entry) -> float:
        """The largest share, from 0 to 1, of a law's cases that an entry covers."""
        return max((count / self._judged[law_id] for law_id, count in entry.matched.items()), default=0.0)

    def too_wide(self) -> list[TooWideEntry]:
        """The entries that cover too many cases which hold, each with the law where the share is largest. Needs 20 cases of a law."""
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
        """Whether an entry about this law only is stale. One law alone cannot tell that of an entry about several."""
        return any(entry.is_stale_in(law_id) for entry in self._of_law.get(law_id, ()) if len(entry.laws) == 1)


def _case_and_features(law: Law, verdict: Verdict) -> tuple[Case, AbstractSet[str]]:
    """The case of a verdict under this law's id, and the features of case and verdict."""
    from shardlaw.conformance.law.features.features import features_of

    return replace(verdict.case, law=law.id), features_of(verdict.case, law) | set(verdict.features)


def shipped_files() -> list[Path]:
    """The expectation files of this package."""
    return sorted(SHIPPED.glob("*.toml"))


def expectation_files(target: Target, extra: Sequence[Path] = ()) -> list[Path]:
    """All expectation files of a run, first layer first: shipped, of other packages with laws, the target's, the user's (``extra``)."""
    from shardlaw.conformance.laws import expectations as foreign_files

    return [*shipped_files(), *foreign_files(), *given_files(target, extra)]


def given_files(target: Target, extra: Sequence[Path] = ()) -> list[Path]:
    """The target's files and the user's (``extra``)."""
    return [*map(Path, target.expect), *extra]


def load(files: Sequence[Path], laws: Sequence[Law], torch_version: str, target: str = "gloo", given: Sequence[Path] = ()) -> Expectations:
    """Read the entries of ``files`` that apply to this torch and target. Of the files in ``given`` also the cases and the targets are
    checked, which takes long for all the others. Raises :class:`UsageError`, with file and line, for an invalid entry."""
    known = {law.id: law for law in laws}
    aliases = {alias: law.id for law in laws for alias in law.aliases}

    from shardlaw.conformance.run.case_check import check_case
    from shardlaw.conformance.target.config import read_config, target_origins

    names = target_origins(read_config()) if given else ()

    def check(entry: Entry, refuse: Refuse) -> None:
        if entry.target and not any(glob(entry.target).fullmatch(name) for name in names):
            raise refuse("target", f"target = {entry.target!r}: matches no target ({one_of(entry.target, names)})")
        if entry.case and entry.applies_to(torch_version, target):
            case = Case.parse(entry.case)
            try:
                check_case(known[case.law], case)
            except UsageError as error:
                raise refuse("case", str(error)) from None

    entries = [entry for file in files for entry in read_entries(file, [*known], aliases, check=check if file in given else None)]
    return Expectations(entry for entry in entries if entry.applies_to(torch_version, target))


def load_for_certificate(laws: Sequence[Law], torch_version: str, target: str) -> tuple[Expectations, Expectations]:
    """The shipped expectations that a certified run accepts, and those about single backends, which it does not accept."""
    entries = load(shipped_files(), laws, torch_version, target).entries
    return Expectations(entry for entry in entries if not entry.target), Expectations(entry for entry in entries if entry.target)
