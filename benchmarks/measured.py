"""The cases of a smoke run as they were measured, for :mod:`benchmarks.chosen`: what each entered of torch, showed, and cost."""

from __future__ import annotations

import heapq
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from operator import attrgetter
from pathlib import Path
from statistics import median

from benchmarks.case_notes import NOTES, Note, noted
from benchmarks.corners import planned
from benchmarks.smoke import LOOP
from shardlaw.conformance.laws import catalogue

HERE = Path(__file__).parent
KEPT_FOR = 0.5  # of its cost is the price of a case of the list at hand: it was tried on every release
UNIT = 3.5  # CPU-seconds of the loop of benchmarks.smoke on the machine whose CPU-seconds all costs here are
LOST = frozenset({"crash", "divergence", "hang"})  # of which the others must wait, and whose world is made anew
WAIT = 1.0  # seconds
OVERHEAD = 0.003  # CPU-seconds of a case beside what its ranks do: drawing, messages, judging
PLACED = re.compile(r"\w+=(?:[0-9x()]+:)?((?:R|_?S\(|P\()\S*)")
MESH = re.compile(r" mesh=([0-9x]+)")
PLACEMENT = re.compile(r"R|_?S\([^)]*\)|P\([^)]*\)")
WORD = re.compile(r" (\w[\w.]*)=([a-z][a-z_-]*)(?= |$)")
NAME = re.compile(r" (\w[\w.]*)=")
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
    is_listed: bool = False  # in the list at hand

    @property
    def chapter(self) -> str:
        return self.law.partition(".")[0]

    @property
    def name(self) -> str:
        """Of its law, whatever the variant."""
        return self.law.partition("[")[0]

    @property
    def cost(self) -> float:
        """CPU-seconds of all that take part, and seconds of waiting."""
        return OVERHEAD + self.seconds + WAIT * (self.word in LOST)

    @property
    def price(self) -> float:
        """What the choice weighs against what the case shows."""
        return self.cost * (KEPT_FOR if self.is_listed else 1)

    @property
    def call(self) -> str:
        """The call of ops that it makes, whatever the numbers in it; else its law."""
        return NUMBER.sub("#", self.text.partition("steps=")[2]) or self.law

    def shows(self) -> Iterator[tuple[object, ...]]:
        """What the case shows beside the blocks that it enters."""
        values = [PLACEMENT.findall(value) for value in PLACED.findall(self.text)]
        mesh = MESH.search(self.text)
        alone = [extent == "1" for extent in mesh[1].split("x")] if mesh is not None else []  # along such a dim nothing moves
        dims = list(enumerate(zip_longest(alone, *values))) or [()]
        fields = self.text.partition("steps=")[0]
        words, given = WORD.findall(fields), tuple(NAME.findall(fields))
        yield from ((self.law, word, given) for word in words)  # beside which other fields it stands
        for dim in dims:  # where it stands, and what it does to each value
            yield self.call, dim
            for word in words:
                yield self.law, word, dim
        if self.word != "held":
            yield self.law, self.word


def measure(folder: Path, *options: str) -> int:
    """Run all cases of smoke; ``options`` go to ``shardlaw run``. Returns its exit code."""
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    exec(LOOP, {})
    (folder / "unit").write_text(f"{time.process_time() - began:.2f}\n")
    path = os.pathsep.join([str(HERE / "chosen_site"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "shardlaw", "run", "*", "--profile", "smoke", "--report", str(folder / "report"), *options]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path, NOTES: str(notes)}, check=False).returncode


def tried(folders: Iterable[Path]) -> list[Tried]:
    """The cases of runs that were measured, each once, with the notes of all ranks."""
    found: dict[str, Tried] = {}
    listed = {case.text for case in planned(())}
    for folder in folders:
        new: dict[str, Tried] = {}
        speed = UNIT / float((folder / "unit").read_text())
        for line in (folder / "report" / "cases.txt").read_text("utf-8").splitlines():
            word, drawn, text = line.split(" ", 2)
            law = text.partition(" ")[0]
            if text not in found and law in catalogue():
                new.setdefault(text, Tried(law, text, word, drawn == "drawn", is_listed=text in listed))
        for note in levelled(noted(folder / "notes")):
            if (case := new.get(note.text)) is not None:
                case.seconds += note.seconds * speed
                case.blocks.update(note.blocks.tolist())
        found |= new
    return list(found.values())


def levelled(notes: Iterable[Note]) -> Iterator[Note]:
    """The notes, of which those of one process and law share what the first of them took beyond the median: what a rank imports, compiles
    or plans with a law's first case helps the later ones, and any case may be the first."""
    for _, of_process in groupby(notes, attrgetter("process")):
        laws: defaultdict[str, list[Note]] = defaultdict(list)
        for note in of_process:
            laws[note.law].append(note)
        for first, *later in laws.values():
            usual = median([note.seconds for note in later] or [first.seconds])
            beyond = max(0.0, first.seconds - usual)
            for note, seconds in ((first, first.seconds - beyond), *((note, note.seconds) for note in later)):
                yield replace(note, seconds=seconds + beyond / (1 + len(later)))


def best_first(count: int, worth: Callable[[int], float]) -> Iterator[tuple[int, float]]:
    """Yield the numbers below ``count``, each with what it is worth, the one first that is worth most by then. What is taken may only lower
    the worth of the others; whoever asks for the next has noted what the last one shows."""
    queue = [(-worth(at), at) for at in range(count)]
    heapq.heapify(queue)
    while queue:
        _, at = heapq.heappop(queue)
        now = worth(at)
        if queue and -now > queue[0][0]:  # others are worth more by now
            heapq.heappush(queue, (-now, at))
        else:
            yield at, now
