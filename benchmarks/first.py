"""Orders the cases of a smoke run by what they show for their cost, for runs with ``-x``::

    python -m benchmarks.first FOLDER [FOLDER ...] > conformance/profiles/first.txt

FOLDER is what ``python -m benchmarks.chosen measure FOLDER`` left. A fault in a block of torch's source is taken to show in each case that
enters the block with one of :data:`CHANCES`, all equally likely. The case comes first that is expected to find most of the faults which the
cases before it may have missed, for its cost; a call or law under what mesh dims do to its operands counts as much as
:data:`SAID_WORTH` blocks, once, and the call itself as much as :data:`CALL_WORTH`. Blocks of files :data:`BESIDE` placements and
checkpoints count as much as :data:`BESIDE_WORTH`. The file has all listed cases, in waves; those that were not measured come with wave
:data:`UNMEASURED`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks import reach
from benchmarks.chosen import smoke_limits
from benchmarks.measured import Tried, best_first, tried
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.run.shares import format_waves, law_share

CHANCES = (0.01, 0.03, 0.1, 0.3, 1.0)
SAID_WORTH, CALL_WORTH = 1.0, 3.0
BESIDE, BESIDE_WORTH = ("/fsdp/", "/pipelining/", "/_composable/", "/optim/"), 0.25
FIRST_WAVES, WAVE = (250, 500), 1000  # cases
UNMEASURED = 4


def by_worth(cases: Sequence[Tried]) -> Iterator[Tried]:
    """Yield the cases, the one first that is expected to find most for its cost of what those before it left."""
    number: dict[object, int] = {}
    calls = [number.setdefault(case.call, len(number)) for case in cases]
    count = len(number)
    said = [
        np.array([call, *(number.setdefault(one, len(number)) for one in case.shows())], np.int64)
        for call, case in zip(calls, cases, strict=True)
    ]
    blocks = [np.array(sorted(case.blocks), np.int64) for case in cases]
    unfound = np.tile(block_worths(), (len(CHANCES), 1))
    unsaid = np.where(np.arange(len(number)) < count, CALL_WORTH, SAID_WORTH)
    chances = np.array(CHANCES)[:, None]

    def worth(at: int) -> float:
        return float((unfound[:, blocks[at]] * chances).sum() + unsaid[said[at]].sum()) / cases[at].cost

    for at, _ in best_first(len(cases), worth):
        unfound[:, blocks[at]] *= 1 - chances
        unsaid[said[at]] = 0
        yield cases[at]


def block_worths() -> np.ndarray:
    """What a fault in each block counts."""
    first = reach.numbered()
    worths = np.ones(first[""])
    for (file, begin), end in zip(first.items(), [*first.values()][1:], strict=False):
        if any(part in file for part in BESIDE):
            worths[begin:end] = BESIDE_WORTH
    return worths


def main(folders: Sequence[Path]) -> None:
    """Print the waves of all laws."""
    limits, request = smoke_limits(), RunRequest()
    places: dict[str, tuple[str, int]] = {}
    for law_id, law in catalogue().items():
        if law.profile != "smoke":
            continue
        share = law_share(law, request)
        listed = share.places
        swept = islice(law.sweep(limits), share.sweeps) if law.sweep is not None else ()
        places |= {case.text: (law_id, at) for at, case in enumerate(swept) if at in listed}
        places |= {text: (law_id, at) for at, text in enumerate(share.cases, share.sweeps)}
    measured = [case for case in tried(folders) if case.text in places]
    ordered = by_worth(measured)
    waves: list[list[tuple[str, int]]] = []
    while wave := [places[case.text] for case in islice(ordered, ([*FIRST_WAVES, WAVE])[min(len(waves), len(FIRST_WAVES))])]:
        waves.append(wave)
    waves[UNMEASURED] += [places[text] for text in places.keys() - {case.text for case in measured}]
    print("# In which order a smoke run of everything with -x tries the listed cases of all laws: their places in smoke.txt, wave by wave.")
    print("# Made by python -m benchmarks.first.")
    for law_id in sorted({law for wave in waves for law, _ in wave}):
        print(format_waves(law_id, [[at for law, at in wave if law == law_id] for wave in waves]))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("benchmarks.first: no folder: python -m benchmarks.first FOLDER [FOLDER ...]")
    main([*map(Path, sys.argv[1:])])
