"""What a run expects: causes in torch, and entries that each match findings, with what a run counts of them."""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.condition import Condition
from shardlaw.conformance.law.selection import glob
from shardlaw.conformance.law.verdict import KINDS, struck

if TYPE_CHECKING:
    from packaging.version import Version

ANY_KIND = "*"  # of entries that say where: however it departs there
REFUSED = "refused"  # a kind of entries alone: what every rank refuses, and did not on earlier releases
SIGNED_KINDS = frozenset({"raised", "wrong-error", "crash", REFUSED})
LOUD_KINDS = frozenset({"raised", "crash", "hang", "divergence", REFUSED})
ENTRY_KINDS = (*KINDS, REFUSED)
MIN_CASES = 20
EMPTY_REASON = "..."


@dataclass(frozen=True)
class Cause:
    """One fault of torch. ``where`` is the function to mend and its file, ``seen`` the releases on which a case of it deviates, ``tried``
    those that any cause of its file lists: both without the last part of a version, in order."""

    id: str
    title: str
    where: str = ""
    issue: str = ""
    seen: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()

    def applies_to(self, version: Version) -> bool:
        """Whether it is to be expected of a release."""
        near = self._nearest_releases(version)
        return not self.seen or bool(near & set(self.seen))

    def is_untried_on(self, version: Version) -> bool:
        """Whether nobody has tried this release."""
        return bool(self.seen) and _format_release(version) not in self.tried

    def _nearest_releases(self, version: Version) -> set[str]:
        from packaging.version import Version

        if _format_release(version) in self.tried:
            return {_format_release(version)}
        at = bisect([Version(one) for one in self.tried], Version(_format_release(version)))
        return set(self.tried[max(0, at - 1) : at + 1])


@dataclass(eq=False)
class Entry:
    """One known finding, where it is written, and what a run saw of it.

    ``laws`` are the ids that ``law`` selects. ``hits`` counts the deviations that it accounts for, ``cases`` by law the cases that it would
    match whatever their verdict, ``happened`` by law the deviations that matched, also those that a later layer's entry accounts for.
    ``mended``: its own case was judged, and does not deviate.
    """

    law: str
    kind: str
    reason: str
    features: frozenset[str] = frozenset()
    conditions: tuple[Condition, ...] = ()
    at: str = ""
    signature: str = ""
    torch: str = ""
    target: str = ""
    finding: str = ""
    case: str = ""
    issue: str = ""
    wide: bool = False
    rare: bool = False
    cause: Cause | None = None
    file: Path = Path()
    line: int = 0
    laws: tuple[str, ...] = ()
    hits: int = 0
    mended: bool = False
    deviated: Counter[str] = field(default_factory=Counter)
    matched: Counter[str] = field(default_factory=Counter)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def has_reason(self) -> bool:
        """Whether its reason says anything."""
        return re.search(r"\w", self.reason) is not None

    @property
    def is_loud(self) -> bool:
        """Whether a user who meets it is told that something is wrong."""
        return self.kind in LOUD_KINDS or (self.kind == "wrong-error" and "accepted" not in self.signature)

    @property
    def is_stale(self) -> bool:
        """Whether it is there no longer: its case does not show it, or, of one without a case, it did not happen though its features were
        reached often enough to tell."""
        return not self.deviated and (self.mended or self._never_matched(self.matched.total()))

    def is_stale_in(self, law_id: str) -> bool:
        """Whether the cases of one law show that it happens there no longer."""
        return not self.deviated[law_id] and (self.mended or self._never_matched(self.matched[law_id]))

    def _never_matched(self, reached: int) -> bool:
        return not (self.case or self.rare) and reached >= MIN_CASES

    @cached_property
    def _error_pattern(self) -> re.Pattern[str]:
        return re.compile(glob(error_part(self.signature)).pattern)

    @property
    def requirements(self) -> list[str]:
        """What a case must have, each in words: its features, what its fields hold, and where a trace must show it."""
        return [*sorted(self.features), *map(str, self.conditions), *([f"at {self.at}"] if self.at else [])]

    def covers(self, case: Case, features: AbstractSet[str]) -> bool:
        """Whether a case of one of its laws, which has these features, is one that it is about, as far as the case alone tells."""
        return self.features <= features and all(condition.holds(case) for condition in self.conditions)

    def matches(self, case: Case, kind: str, features: AbstractSet[str], error: str, at: AbstractSet[str] = frozenset()) -> bool:
        """Whether it accounts for a deviation of one of its laws, of which a trace says that it is ``at`` these places."""
        return (not self.at or self.at in at) and self.may_match(case, kind, features, error)

    def may_match(self, case: Case, kind: str, features: AbstractSet[str], error: str) -> bool:
        """Whether it accounts for a deviation of one of its laws, as far as can be said without a trace."""
        return self.kind in (kind, ANY_KIND) and self._matches_error(struck(error)) and self.covers(case, features)

    def _matches_error(self, error: str) -> bool:
        if not self.signature or self._error_pattern.search(error) is not None:
            return True
        # a kernel on a GPU tells an index that is out of range in no other words
        return "device-side assert triggered" in error and re.search("out of (range|bounds)|index_select", self.signature) is not None

    def applies_to(self, torch_version: str, target: str) -> bool:
        """Whether it is about this torch and this target."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        version = Version(Version(torch_version).base_version)
        if self.target and not glob(self.target).fullmatch(target):
            return False
        if self.torch or self.cause is None:
            return version in SpecifierSet(self.torch, prereleases=True)
        return self.cause.applies_to(version)

    def is_untried_on(self, torch_version: str) -> bool:
        """Whether it is expected of a release on which nobody has tried it."""
        from packaging.version import Version

        return self.cause is not None and not self.torch and self.cause.is_untried_on(Version(Version(torch_version).base_version))


def _format_release(version: Version) -> str:
    return f"{version.major}.{version.minor}"


def error_part(signature: str) -> str:
    """The error that a signature names."""
    # a whole signature ("law | kind | check | error"), as a finding has it, means its error
    return signature.split(" | ", 3)[3] if signature.count(" | ") >= 3 else signature
