"""Which cases of a law a run tries: all that the profile gives it, or, in a smoke run of everything, the chosen ones.

``profiles/smoke.txt`` is made by a command (``python -m benchmarks.chosen``) from what each case of a smoke run enters of torch's source
and what it costs. It has a line for a law: its id, the places of the cases that its enumerator gives (``0,4-7``, or ``-`` for none of
them), and the number of those that are drawn. A law that it does not name is tried whole, and so is every law of a run that selects some.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.run.request import RunRequest

SCALE = {"smoke": 1, "ci": 8, "nightly": 60}  # how many times the cases of smoke
CHOSEN = Path(__file__).parents[1] / "profiles" / "smoke.txt"


@dataclass(frozen=True)
class Share:
    """What a run tries of a law: of the first ``sweeps`` cases that its enumerator gives those at ``places`` (``None``: all), and ``draws``
    drawn ones."""

    sweeps: int
    draws: int
    places: frozenset[int] | None = None

    @property
    def count(self) -> int:
        """How many cases these are at most."""
        return self.draws + (self.sweeps if self.places is None else len(self.places))


def whole_of(law: Law, profile: str, *, alone: bool = False) -> Share:
    """All that a profile tries of a law; ``alone``: in a run that tries no law of another chapter."""
    scale = SCALE[profile]
    return Share(max(law.sweeps * scale, law.alone if alone else 0), law.draws * scale)


def share_of(law: Law, request: RunRequest, *, alone: bool = False) -> Share:
    """What a run tries of a law."""
    whole = whole_of(law, request.profile, alone=alone)
    return chosen().get(law.id, whole) if request.of_chosen else whole


@cache
def chosen() -> dict[str, Share]:
    """The shares of the laws in a smoke run of everything, by their ids."""
    lines = (line.split() for line in CHOSEN.read_text("utf-8").splitlines() if not line.startswith("#"))
    return {law: _read(places, draws) for law, places, draws in lines}


def _read(places: str, draws: str) -> Share:
    found: set[int] = set()
    for part in places.split(",") if places != "-" else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return Share(max(found, default=-1) + 1, int(draws), frozenset(found))


def written(places: set[int]) -> str:
    """The places as :func:`chosen` reads them."""
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and runs[-1][1] == place - 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "-"
