"""The cases of a smoke run as they were measured, for :mod:`benchmarks.chosen`: what each entered of torch, showed, and cost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path

from benchmarks.case_notes import NOTES, noted
from benchmarks.smoke import LOOP
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.request import DEFAULT_WORLD, LARGER_WORLD
from shardlaw.conformance.run.shares import smoke_shares
from shardlaw.conformance.target.config import find_target

HERE = Path(__file__).parent
LISTED = 0.5  # for so much of its cost a case stays that the list at hand has: it was tried on every release
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
        """CPU-seconds of all that take part, and seconds of waiting; half of it for a case of the list at hand."""
        return (OVERHEAD + self.seconds + WAIT * (self.word in LOST)) * (LISTED if self.is_listed else 1)

    def shows(self) -> Iterator[tuple[object, ...]]:
        """What the case shows beside the blocks that it enters."""
        values = [PLACEMENT.findall(value) for value in PLACED.findall(self.text)]
        mesh = MESH.search(self.text)
        alone = [extent == "1" for extent in mesh[1].split("x")] if mesh is not None else []  # along such a dim nothing moves
        dims = list(enumerate(zip_longest(alone, *values))) or [()]
        fields, _, steps = self.text.partition("steps=")
        words, given = WORD.findall(fields), tuple(NAME.findall(fields))
        yield from ((self.law, word, given) for word in words)  # beside which other fields it stands
        for dim in dims:  # where it stands, and what it does to each value
            yield NUMBER.sub("#", steps) or self.law, dim
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
    listed = listed_texts()
    for folder in folders:
        new: dict[str, Tried] = {}
        speed = UNIT / float((folder / "unit").read_text())
        for line in (folder / "report" / "cases.txt").read_text("utf-8").splitlines():
            word, drawn, text = line.split(" ", 2)
            law = text.partition(" ")[0]
            if text not in found and law in catalogue():
                new.setdefault(text, Tried(law, text, word, drawn == "drawn", is_listed=text in listed))
        for note in noted(folder / "notes"):
            if (case := new.get(note.text)) is not None:
                case.seconds += note.seconds * speed
                case.blocks.update(note.blocks.tolist())
        found |= new
    return list(found.values())


@cache
def listed_texts() -> frozenset[str]:
    """The cases that the list at hand names."""
    limits, found = smoke_limits(), set[str]()
    for law_id, share in smoke_shares().items():
        law = catalogue().get(law_id)
        if law is not None and law.sweep is not None and share.indices is not None:
            found.update(case.text for place, case in enumerate(islice(law.sweep(limits), share.sweeps)) if place in share.indices)
        found.update(share.cases)
    return frozenset(found)


def smoke_limits() -> Limits:
    """Of a smoke run on gloo."""
    target = find_target("gloo", None, None, DEFAULT_WORLD)
    return Limits(DEFAULT_WORLD, target.dtypes, frozenset(target.cannot), LARGER_WORLD)
