"""How many, and which, cases of a law a run tries: all that the profile allows, or, in a smoke run of all laws, those in ``smoke.txt``.

``python -m benchmarks.chosen`` writes ``profiles/smoke.txt`` from the lines of torch that each case of a smoke run executes and from its
cost. The file has a line for each law: its id, the indices of enumerated cases (``0,4-7``, or ``-`` for none), which may be among those
that profile ``ci`` adds, and the number of cases to draw. Indented below stand cases that were drawn when the file was written. A law
without a line gets all cases of its profile, and so does every law in a run that selects laws.

``python -m benchmarks.first`` writes ``profiles/first.txt`` from the same: which of these a run with ``-x`` tries first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import DTYPES

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law, Limits
    from shardlaw.conformance.run.request import RunRequest

SCALE = {"smoke": 1, "ci": 8, "nightly": 60}  # how many times the cases of smoke
SMOKE_FILE = Path(__file__).parents[1] / "profiles" / "smoke.txt"
FIRST_FILE = SMOKE_FILE.with_name("first.txt")


@dataclass(frozen=True)
class Share:
    """The cases that a run tries of a law: of the first ``sweeps`` enumerated cases those at ``indices`` (``None``: all), the ``cases`` of
    these texts, whose places follow on those of the sweeps, and ``draws`` drawn cases. The seed decides whether a fraction of a draw
    becomes one."""

    sweeps: int
    draws: float
    indices: frozenset[int] | None = None
    cases: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The largest number of cases that this share may have."""
        return ceil(self.draws) + len(self.cases) + (self.sweeps if self.indices is None else len(self.indices))

    @property
    def places(self) -> frozenset[int]:
        """The places of all listed cases."""
        swept = range(self.sweeps) if self.indices is None else self.indices
        return frozenset([*swept, *range(self.sweeps, self.sweeps + len(self.cases))])

    def cases_within(self, limits: Limits, places: Collection[int] | None = None) -> Iterator[Case]:
        """Yield those of :attr:`cases` at ``places`` (``None``: all), without those whose dtype the target lacks."""
        absent = [name for name in DTYPES if name not in limits.dtypes]
        for place, text in enumerate(self.cases, self.sweeps):
            if (places is None or place in places) and not any(re.search(rf"\b{name}\b", text) for name in absent):
                yield Case.parse(text)


def full_share(law: Law, profile: str, *, is_one_chapter: bool = False) -> Share:
    """All cases that a profile allows a law; ``is_one_chapter``: the run tries laws of one chapter only."""
    scale = SCALE[profile]
    return Share(max(law.sweeps * scale, law.alone if is_one_chapter else 0), law.draws * scale)


def law_share(law: Law, request: RunRequest, *, is_one_chapter: bool = False) -> Share:
    """The share of a law in a run."""
    full = full_share(law, request.profile, is_one_chapter=is_one_chapter)
    return smoke_shares().get(law.id, full) if request.uses_smoke_shares else full


@cache
def smoke_shares() -> dict[str, Share]:
    """The shares that ``smoke.txt`` gives to a smoke run of all laws, by law id."""
    blocks = re.split(r"\n(?! |$)", SMOKE_FILE.read_text("utf-8"))
    return dict(map(parse_share, (block for block in blocks if not block.startswith("#"))))


def parse_share(block: str) -> tuple[str, Share]:
    """Parse a law's id and share from what :func:`format_share` returns."""
    first, *cases = block.splitlines()
    law, ranges, draws = first.split()
    indices = _parse_ranges(ranges)
    return law, Share(max(indices, default=-1) + 1, float(draws), indices, tuple(f"{law} {case.strip()}" for case in cases))


def format_share(law: str, indices: Collection[int], draws: float, cases: Sequence[str] = ()) -> str:
    """The lines of a law in ``smoke.txt``; ``cases`` are texts."""
    return "\n ".join([f"{law} {_format_ranges(indices)} {draws:.3g}", *(text.partition(" ")[2] for text in cases)])


@cache
def first_waves() -> dict[str, list[frozenset[int]]]:
    """What ``first.txt`` says a smoke run of all laws with ``-x`` tries first: by law id, the places of listed cases, wave by wave."""
    return dict(parse_waves(line) for line in FIRST_FILE.read_text("utf-8").splitlines() if not line.startswith("#"))


def parse_waves(line: str) -> tuple[str, list[frozenset[int]]]:
    """Parse a law's id and waves from what :func:`format_waves` returns."""
    law, *waves = line.split()
    return law, [*map(_parse_ranges, waves)]


def format_waves(law: str, waves: Iterable[Collection[int]]) -> str:
    """The line of a law in ``first.txt``."""
    return " ".join([law, *map(_format_ranges, waves)])


def _parse_ranges(text: str) -> frozenset[int]:
    """The indices of ``0,4-7``; none of ``-``."""
    indices: set[int] = set()
    for part in text.split(",") if text != "-" else ():
        start, _, last = part.partition("-")
        indices.update(range(int(start), int(last or start) + 1))
    return frozenset(indices)


def _format_ranges(indices: Collection[int]) -> str:
    runs: list[list[int]] = []
    for place in sorted(indices):
        if runs and runs[-1][1] == place - 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "-"
