"""Chooses the cases of a smoke run: those that keep what all of them reach, at the least cost::

    python -m benchmarks.chosen measure FOLDER
    python -m benchmarks.chosen choose FOLDER [FOLDER ...] > conformance/profiles/smoke.txt

``measure`` runs every case of profile smoke, while ranks note what each enters of torch's source and what it costs
(:mod:`benchmarks.case_notes`); the report and the notes stay in FOLDER. ``choose`` looks, chapter by chapter, for few cheap cases that
together show what all show: each block of torch's source under each feature of a case; each call or law, whatever its numbers, under
each placements of its operands and its targets; each kind of deviation of each law. Greedily: the case that adds most for its cost comes
first. Every law keeps a case; one whose cases cost little together, or must all be refused, keeps them all. Drawn cases that are chosen are
listed by their texts, and a third as many are drawn anew by each run.
"""

from __future__ import annotations

import heapq
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.case_notes import NOTES, noted
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.run.chosen import written
from shardlaw.conformance.run.request import DEFAULT_WORLD, LARGER_WORLD
from shardlaw.conformance.target.config import find_target

HERE = Path(__file__).parent
TRIED_WHOLE = {"collective", "crash", "engine", "op", "plan", "random", "sharded_tensor"}  # that cost little, or of which few could go
DRAWN_ANEW = 3  # for so many of the drawn cases that were chosen one is drawn by each run
CHEAP = 0.3  # CPU-seconds of a law, as measured, below which all its cases are tried
REFUSED = "must-refuse"  # a feature: such cases run few lines of torch, and differ in what they ask
LEAST = 4  # draws of a law of which no other case is tried: some are rejected
OVERHEAD = 0.008  # CPU-seconds of a case beside what its ranks do: drawing, messages, judging
OPERAND = re.compile(r"\S+?=[0-9x()]+:(\S+?)(?::\S*)?(?= |$)")
PLACED = re.compile(r"\w+=((?:R|_?S\(|P\()\S*)")
MESH = re.compile(r"mesh=([0-9x]+)")
WORD = re.compile(r" (\w[\w.]*)=([a-z][a-z_-]*)(?= |$)")
NUMBER = re.compile(r"\d+")


@dataclass
class Tried:
    """One case of a run that was measured."""

    law: str
    text: str
    word: str
    drawn: bool
    seconds: float = 0.0
    blocks: set[int] = field(default_factory=set)

    def shows(self) -> Iterator[tuple[object, ...]]:
        """What the case shows beside the blocks that it enters."""
        kinds = (*OPERAND.findall(self.text), *PLACED.findall(self.text))
        mesh = MESH.search(self.text)
        kinds = (re.sub("[2-9]", "n", mesh[1]), *kinds) if mesh else kinds
        yield NUMBER.sub("#", self.text.partition("steps=")[2]) or self.law, kinds
        for name, value in WORD.findall(self.text.partition("steps=")[0]):
            yield self.law, name, value, kinds[1:] if mesh else kinds
        if self.word != "held":
            yield self.law, self.word


def measure(folder: Path, *options: str) -> int:
    """Run all cases of smoke; ``options`` go to ``shardlaw run``. Returns its exit code."""
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(HERE / "chosen_site"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "shardlaw", "run", "*", "--profile", "smoke", "--report", str(folder / "report"), *options]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path, NOTES: str(notes)}, check=False).returncode


def tried(folder: Path) -> list[Tried]:
    """The cases of a run that was measured, each once, with the notes of all ranks."""
    found: dict[str, Tried] = {}
    for line in (folder / "report" / "cases.txt").read_text("utf-8").splitlines():
        word, drawn, text = line.split(" ", 2)
        found.setdefault(text, Tried(text.partition(" ")[0], text, word, drawn == "drawn"))
    for note in noted(folder / "notes"):
        if (case := found.get(note.text)) is not None:
            case.seconds += note.seconds
            case.blocks.update(note.blocks.tolist())
    return list(found.values())


def cover(cases: list[Tried]) -> list[Tried]:
    """Few cheap cases of a chapter that show what all of them show."""
    number: dict[object, int] = {}
    held: list[np.ndarray] = []
    width = 1 + max((block for case in cases for block in case.blocks), default=0)
    for case in cases:
        law = find(case.law)
        features = [number.setdefault(one, len(number)) for one in ("", *sorted(features_of(Case.parse(case.text), law)))]
        pairs = np.add.outer(np.array(features, np.int64) * width, np.array(sorted(case.blocks), np.int64)).ravel()
        said = [-1 - number.setdefault(one, len(number)) for one in case.shows()]
        held.append(np.concatenate([pairs, np.array(said, np.int64)]))
    _, flat = np.unique(np.concatenate(held), return_inverse=True)
    shown = np.split(flat, np.cumsum([len(one) for one in held])[:-1])
    missing = np.ones(1 + flat.max(initial=0), bool)
    queue = [(-len(shows) / (OVERHEAD + case.seconds), at) for at, (case, shows) in enumerate(zip(cases, shown, strict=True))]
    heapq.heapify(queue)
    taken = []
    while queue:
        _, at = heapq.heappop(queue)
        worth = -float(missing[shown[at]].sum()) / (OVERHEAD + cases[at].seconds)
        if not worth:
            continue
        if queue and worth > queue[0][0]:  # others are worth more by now
            heapq.heappush(queue, (worth, at))
            continue
        missing[shown[at]] = False
        taken.append(cases[at])
    return taken


def tried_whole(cases: Iterable[Tried]) -> set[str]:
    """The laws of which no case is left out: they cost little, or all their cases must be refused."""
    by_law: defaultdict[str, list[Tried]] = defaultdict(list)
    for case in cases:
        by_law[case.law].append(case)
    return {
        law_id
        for law_id, its in by_law.items()
        if sum(OVERHEAD + case.seconds for case in its) < CHEAP
        or all(REFUSED in features_of(Case.parse(case.text), find(law_id)) for case in its)
    }


def choose(folders: Iterable[Path]) -> None:
    """Print the shares of all laws."""
    places: defaultdict[str, set[int]] = defaultdict(set)
    drawn: defaultdict[str, list[str]] = defaultdict(list)
    before, after = Counter[str](), Counter[str]()
    limits = _limits()
    whole = set(catalogue())
    for folder in folders:
        chapters: defaultdict[str, list[Tried]] = defaultdict(list)
        cases = tried(folder)
        whole &= tried_whole(cases)
        for case in cases:
            if case.law in catalogue() and case.law.partition(".")[0] not in TRIED_WHOLE:
                chapters[case.law.partition(".")[0]].append(case)
        texts: defaultdict[str, set[str]] = defaultdict(set)
        for chapter, cases in chapters.items():
            taken = cover(cases)
            before[chapter] += sum(OVERHEAD + case.seconds for case in cases)
            after[chapter] += sum(OVERHEAD + case.seconds for case in taken)
            for case in taken:
                texts[case.law].add(case.text)
                if case.drawn and case.text not in drawn[case.law]:
                    drawn[case.law].append(case.text)
        for law_id, law in catalogue().items():
            if law.sweep is not None and texts[law_id]:
                listed = enumerate(islice(law.sweep(limits), law.sweeps))
                places[law_id] |= {place for place, case in listed if case.text in texts[law_id]}
    print("# What a smoke run of everything tries of each law: the places of its enumerated cases, the number of drawn ones, and others.")
    print("# Made by python -m benchmarks.chosen; a law that is not named is tried whole.")
    for law_id, law in sorted(catalogue().items()):
        if law_id not in whole and law.chapter not in TRIED_WHOLE and law.profile == "smoke" and (law.sweeps or law.draws):
            count = len(drawn[law_id]) / DRAWN_ANEW
            if not places[law_id] and not drawn[law_id]:
                places[law_id], count = ({0}, count) if law.sweeps else (set(), LEAST)
            print(written(law_id, places[law_id], min(count, law.draws), sorted(drawn[law_id])))
    for chapter in before:
        print(f"{chapter}: {before[chapter]:.0f} CPU-seconds, chosen {after[chapter]:.0f}", file=sys.stderr)


def _limits() -> Limits:
    target = find_target("gloo", None, None, DEFAULT_WORLD)
    return Limits(DEFAULT_WORLD, target.dtypes, frozenset(target.cannot), LARGER_WORLD)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"] and len(sys.argv) > 2:
        sys.exit(measure(Path(sys.argv[2]), *sys.argv[3:]))
    if sys.argv[1:2] == ["choose"] and len(sys.argv) > 2:
        choose(map(Path, sys.argv[2:]))
    else:
        sys.exit("benchmarks.chosen: want measure FOLDER [OPTION ...], or choose FOLDER [FOLDER ...]")
