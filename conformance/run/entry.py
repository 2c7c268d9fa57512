"""Known causes in torch and the entries that match their findings, with what a run counts for each entry."""

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
from shardlaw.conformance.law.verdict import KINDS, error_pattern

if TYPE_CHECKING:
    from packaging.version import Version

ANY_KIND = "*"  # only for entries with ``at``
REFUSED = "refused"  # a kind of entries only: every rank refuses what earlier releases did not
SIGNED_KINDS = frozenset({"raised", "wrong-error", "crash", REFUSED})
LOUD_KINDS = frozenset({"raised", "crash", "hang", "divergence", REFUSED})
ENTRY_KINDS = (*KINDS, REFUSED)
MIN_CASES = 20  # of a law, before their share says anything
EMPTY_REASON = "..."

# what CPU kernels say of an index out of range, where GPU kernels have one assertion for all; not what is said of lists, dims and storages
KERNEL_INDEX_ERROR = re.compile(
    "(?<!tuple )(?<!list )(?<!assignment )index out of range|is out of bounds(?! for storage)|^out of bounds$|index_select"
)


@dataclass(frozen=True)
class Cause:
    """One fault of torch. ``where`` is the function to fix and its file, ``seen`` the releases on which a case of it deviates, ``tried``
    all releases that a cause of the same file lists; those in ``seen`` if no entry is about gloo, as GPUs are not at hand for every
    release. Releases are ``MAJOR.MINOR``, in ascending order."""

    id: str
    title: str
    where: str = ""
    issue: str = ""
    seen: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()

    def applies_to(self, version: Version) -> bool:
        """Whether the cause is expected on a release: the nearest tried releases have it."""
        near = self._nearest_releases(version)
        return not self.seen or bool(near & set(self.seen))

    def is_untried_on(self, version: Version) -> bool:
        """Whether its cases were never tried on a release."""
        return bool(self.seen) and _format_release(version) not in self.tried

    def _nearest_releases(self, version: Version) -> set[str]:
        from packaging.version import Version

        if _format_release(version) in self.tried:
            return {_format_release(version)}
        at = bisect([Version(release) for release in self.tried], Version(_format_release(version)))
        return set(self.tried[max(0, at - 1) : at + 1])


@dataclass(eq=False)
class Entry:
    """One known finding, its position in a file (``file``, ``line``), and what a run counted for it.

    ``laws`` are the ids that the pattern ``law`` selects. ``hits`` counts the deviations that this entry accounts for, ``matched`` by law
    the cases that it covers whatever their verdict, ``deviated`` by law the deviations that match, also those for which a later layer's
    entry accounts. ``mended``: its own case was judged and holds.
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
        """Whether somebody filled in the reason."""
        return re.search(r"\w", self.reason) is not None

    @property
    def is_loud(self) -> bool:
        """Whether a user notices the fault: it raises, hangs or crashes, or gives a wrong error."""
        return self.kind in LOUD_KINDS or (self.kind == "wrong-error" and "accepted" not in self.signature)

    @property
    def is_stale(self) -> bool:
        """Whether the finding no longer occurs: its own case holds, or it has no case and nothing matched although enough cases had its
        features. Nobody can tell of one that is rare."""
        return not self.deviated and self._is_gone(self.matched.total())

    def is_stale_in(self, law_id: str) -> bool:
        """As :attr:`is_stale`, by the cases of one law."""
        return not self.deviated[law_id] and self._is_gone(self.matched[law_id])

    def _is_gone(self, reached: int) -> bool:
        return not self.rare and (self.mended or (not self.case and reached >= MIN_CASES))

    @cached_property
    def _error_pattern(self) -> re.Pattern[str]:
        return re.compile(glob(error_part(self.signature)).pattern)

    @property
    def requirements(self) -> list[str]:
        """What a case must have, as texts: features, conditions on fields, and the place that a trace must show."""
        return [*sorted(self.features), *map(str, self.conditions), *([f"at {self.at}"] if self.at else [])]

    def covers(self, case: Case, features: AbstractSet[str]) -> bool:
        """Whether the entry is about a case of one of its laws, judged by the case and its features alone."""
        return self.features <= features and all(condition.matches(case) for condition in self.conditions)

    def matches(self, case: Case, kind: str, features: AbstractSet[str], error: str, at: AbstractSet[str] = frozenset()) -> bool:
        """Whether the entry accounts for a deviation of one of its laws; ``at`` are the places that a trace gave."""
        return (not self.at or self.at in at) and self.may_match(case, kind, features, error)

    def may_match(self, case: Case, kind: str, features: AbstractSet[str], error: str) -> bool:
        """As :meth:`matches`, without asking for a place."""
        return self.kind in (kind, ANY_KIND) and self._matches_error(error_pattern(error)) and self.covers(case, features)

    def _matches_error(self, error: str) -> bool:
        if not self.signature or self._error_pattern.search(error) is not None:
            return True
        return "device-side assert triggered" in error and KERNEL_INDEX_ERROR.search(self.signature) is not None

    def applies_to(self, torch_version: str, target: str) -> bool:
        """Whether the entry is about this release of torch and this target."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        version = Version(Version(torch_version).base_version)
        if self.target and not glob(self.target).fullmatch(target):
            return False
        if self.torch or self.cause is None:
            return version in SpecifierSet(self.torch, prereleases=True)
        return self.cause.applies_to(version)

    def is_untried_on(self, torch_version: str) -> bool:
        """Whether the entry is expected on a release on which its cause was never tried."""
        from packaging.version import Version

        return self.cause is not None and not self.torch and self.cause.is_untried_on(Version(Version(torch_version).base_version))


def _format_release(version: Version) -> str:
    return f"{version.major}.{version.minor}"


def error_part(signature: str) -> str:
    """The error text of a signature, which is that text alone or a finding's ``law | kind | check | error``."""
    return signature.split(" | ", 3)[3] if signature.count(" | ") >= 3 else signature
