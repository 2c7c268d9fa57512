"""Which cases of a law a run tries: all that the profile gives it, or, in a smoke run of everything, the chosen ones.

``profiles/smoke.txt`` is made by a command (``python -m benchmarks.chosen``) from what each case of a smoke run enters of torch's source
and what it costs. It has a line for a law: its id, the places of the cases that its enumerator gives (``0,4-7``, or ``-`` for none of
them), and the number of those that are drawn; and indented below it cases that were drawn when it was made. A law that it does not name is
tried whole, and so is every law of a run that selects some.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Limits

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.run.request import RunRequest

SCALE = {"smoke": 1, "ci": 8, "nightly": 60}  # how many times the cases of smoke
SMOKE_FILE = Path(__file__).parents[1] / "profiles" / "smoke.txt"


@dataclass(frozen=True)
class Share:
    """What a run tries of a law: of the first ``sweeps`` cases that its enumerator gives those at ``places`` (``None``: all), the ``cases``
    of these texts, and ``draws`` drawn ones; of a fraction of one the seed decides."""

    sweeps: int
    draws: float
    indices: frozenset[int] | None = None
    cases: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many cases these are at most."""
        return ceil(self.draws) + len(self.cases) + (self.sweeps if self.indices is None else len(self.indices))

    def cases_within(self, limits: Limits) -> Iterator[Case]:
        """The :attr:`cases` but for those with a dtype that the target does not have."""
        absent = [name for name in Limits().dtypes if name not in limits.dtypes]
        for text in self.cases:
            if not any(re.search(rf"\b{name}\b", text) for name in absent):
                yield Case.parse(text)


def full_share(law: Law, profile: str, *, alone: bool = False) -> Share:
    """All that a profile tries of a law; ``alone``: in a run that tries no law of another chapter."""
    scale = SCALE[profile]
    return Share(max(law.sweeps * scale, law.alone if alone else 0), law.draws * scale)


def law_share(law: Law, request: RunRequest, *, alone: bool = False) -> Share:
    """What a run tries of a law."""
    whole = full_share(law, request.profile, alone=alone)
    return smoke_shares().get(law.id, whole) if request.uses_smoke_shares else whole


@cache
def smoke_shares() -> dict[str, Share]:
    """The shares of the laws in a smoke run of everything, by their ids."""
    blocks = re.split(r"\n(?! |$)", SMOKE_FILE.read_text("utf-8"))
    return dict(map(parse_share, (block for block in blocks if not block.startswith("#"))))


def parse_share(block: str) -> tuple[str, Share]:
    """A law's id and its share, as :func:`written`."""
    first, *cases = block.splitlines()
    law, places, draws = first.split()
    found: set[int] = set()
    for part in places.split(",") if places != "-" else ():
        start, _, last = part.partition("-")
        found.update(range(int(start), int(last or start) + 1))
    return law, Share(max(found, default=-1) + 1, float(draws), frozenset(found), tuple(f"{law} {case.strip()}" for case in cases))


def format_share(law: str, places: Collection[int], draws: float, cases: Sequence[str] = ()) -> str:
    """The share of a law as :func:`chosen` reads it; ``cases`` are texts."""
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and runs[-1][1] == place - 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    told = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "-"
    return "\n ".join([f"{law} {told} {draws:.3g}", *(text.partition(" ")[2] for text in cases)])
