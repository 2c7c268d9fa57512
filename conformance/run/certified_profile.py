"""Certified profiles: fixed, versioned lists of cases that come with the package.

``profiles/RELEASE/NAME.txt`` is the profile ``NAME-RELEASE``, one case a line; ``#`` begins a comment line.
``python -m benchmarks.profiles`` wrote it from cases that held. It never changes: other cases get a new release.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.errors import UsageError, one_of

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.world import Pool

PROFILES = Path(__file__).parents[1] / "profiles"
RANKS = 4  # of the largest world in any profile
# the words for a case beside ``held``, ``refused`` and the kinds of deviations
MISSING, ABSENT, UNSAID, EXPECTED = "missing", "rejected", "unsaid", "expected"


@dataclass(frozen=True)
class CertifiedProfile:
    """The cases of a profile, in order, and the sha256 of its file."""

    name: str
    release: str
    sha256: str
    cases: tuple[Case, ...]

    @cached_property
    def laws(self) -> dict[str, list[Case]]:
        """The cases by law, in the order of the file."""
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.law, []).append(case)
        return found


def profile_names() -> list[str]:
    """The names of all certified profiles, sorted."""
    return sorted(f"{file.stem}-{file.parent.name}" for file in PROFILES.glob("*/*.txt"))


def check_profile_name(profile: str) -> None:
    """Raise :class:`UsageError`, with the nearest name, if there is no such profile."""
    if profile not in profile_names():
        raise UsageError(f"--certify {profile}: no such certified profile ({one_of(profile, profile_names())})")


def read_profile(profile: str) -> CertifiedProfile:
    """Read a profile by its name, such as ``collectives-2026.1``. Raises :class:`UsageError`."""
    from shardlaw.conformance.law.case import Case

    check_profile_name(profile)
    name, _, release = profile.rpartition("-")
    data = (PROFILES / release / f"{name}.txt").read_bytes()
    lines = [line for line in data.decode().splitlines() if line and not line.startswith("#")]
    return CertifiedProfile(name, release, hashlib.sha256(data).hexdigest(), tuple(map(Case.parse, lines)))


def query_loaded(pool: Pool, target: Target) -> dict[str, Any]:
    """Ask a rank which versions and libraries it has loaded (:func:`shardlaw.conformance.rank.software.loaded_software`); else empty.
    Raises ``WorldError``."""
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.laws import find
    from shardlaw.conformance.rank import spmd

    modules = sorted({place.partition(":")[0] for place in (target.setup, target.writer, target.reader) if place})
    function = spmd.Function("shardlaw.conformance.rank.software", "", "loaded_software")
    with spmd.call_folder(Path(pool.folder), 0, function, ((modules,), {})) as room:
        pool.check(find(spmd.CALL), [Case.of(spmd.CALL, world=2, call=0)])
        found: dict[str, Any] = spmd.read_results(room, 2).get(0, {})
    return found
