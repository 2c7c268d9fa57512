"""How many cases reach each corner of the input space: ``python -m benchmarks.corners [REPORT] [LAW ...]``.

Counts the cases that a run judged (``cases.txt`` in the folder of its report), or, without a folder, those that a smoke run of
everything would try under seed 0, without trying any; of the laws that are named, or of all. Prints a table of corners with their cases,
marks those with fewer than they need, and exits 1 where there are such. Of a report, laws that it does not have count nothing.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.selection import select
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.request import LARGER_WORLD, RunRequest
from shardlaw.conformance.run.search import Plan
from shardlaw.conformance.run.shares import law_share
from shardlaw.reference.placement import Partial

LEAST, THIN = 10, 8
PROGRAMS = {"programs": "op.program", "histories": "op.history", "out=": "op.out", "alias": "op.alias", "backward": "op.*backward"}
LAYOUTS = {
    "strided shard": "strided",
    "permuted ranks": "permuted",
    "zero-size operand": "size-0",
    "true 3-D mesh": "solid",
    "pending, no sum": "unsummed",
    "pending, no sum, first operand": "first-unsummed",
    "sub-mesh": "submesh",
}
LARGER = ("redistribute", "op", "gradient", "module", "roundtrip")
OP_DTYPES = ("float16", "bfloat16", "int8", "int16", "complex64", "complex128")
MEMORIES = ("transposed", "sliced", "expanded", "offset", "channels-last")


@dataclass(frozen=True)
class Corner:
    """Cases of ``laws`` (globs over names without their variants) that have all of ``words``: features, ``word/word`` for any of several,
    ``!word`` for one that they must not have, and ``field:NAME`` or ``field:NAME=REGEX`` for what a field says."""

    group: str
    name: str
    laws: str
    words: str = ""
    least: int = LEAST

    def holds(self, case: Case, reached: frozenset[str]) -> bool:
        return any(fnmatchcase(case.law.partition("[")[0], glob) for glob in self.laws.split()) and all(
            self._has(case, reached, word) for word in self.words.split()
        )

    def _has(self, case: Case, reached: frozenset[str], word: str) -> bool:
        if word.startswith("!"):
            return not self._has(case, reached, word[1:])
        if word.startswith("field:"):
            name, _, pattern = word.removeprefix("field:").partition("=")
            return name in case and re.search(pattern, case.get(name)) is not None
        return not reached.isdisjoint(word.split("/"))


def corners() -> Iterator[Corner]:
    """The lines that were asked for."""
    for chapter in ("collective", "layout", "redistribute", "gradient", "op", "module", "roundtrip"):
        yield Corner("values at the edges", chapter, f"{chapter}.*", "edge")
    yield Corner("values at the edges", "NaN under a maximum or minimum", "*", "nan-extreme")
    yield Corner("saves", "two in flight, in two folders", "roundtrip.at-once")
    yield Corner("saves", "two jobs in one folder", "crash.*", "second-job")
    yield Corner("by rank", "values and keys that differ by rank", "roundtrip.by-rank")
    for chapter in LARGER:
        yield Corner("more than 4 ranks", chapter, f"{chapter}.*", "world:5/world:6/world:7/world:8")
    for chapter in LARGER:
        yield Corner("true 3-D meshes", chapter, f"{chapter}.*", "solid")
    for programs, laws in PROGRAMS.items():
        for layout, words in LAYOUTS.items():
            yield Corner(programs, layout, laws, words)
    for way, laws in (("forward", "op.forward"), ("backward", "op.*backward")):
        for dtype in OP_DTYPES:
            if way == "forward" or not dtype.startswith("int"):  # which have no gradient
                yield Corner(f"dtypes of ops, {way}", dtype, laws, f"dtype:{dtype}")
        for memory in MEMORIES:
            yield Corner(f"memory of ops, {way}", memory, laws, f"memory:{memory}")
    yield Corner("dtypes of ops, forward", "float8", "op.*", "rare-dtype")
    for dtype in ("float16", "int8", "int16", "complex64", "complex128"):
        yield Corner("dtypes of checkpoints", dtype, "roundtrip.*", f"dtype:{dtype}")
    yield Corner("dtypes of checkpoints", "float8", "roundtrip.*", "field:as=float8")
    yield Corner("parallelism", "FSDP2 and tensor parallelism, saved and loaded", "optimizer.state", "way:both")
    yield Corner("parallelism", "expert parallelism", "module.experts")
    yield Corner("parallelism", "to_empty and reset_parameters", "module.materialized")
    for kind, pattern in {"int": r"[{,]\d+:", "bool": "(True|False):", "None": "None:", "tuple": r"\):", "float": r"\d\.\d*:"}.items():
        yield Corner("keys of a state", kind, "roundtrip.*", f"field:state={pattern}")
    for law in ("module.loss-odd", "module.clipped-mixed", "module.compiled-model", "module.forward[transformer]"):
        yield Corner("thin laws", law, law.partition("[")[0], "" if "[" not in law else f"variant:{law.partition('[')[2][:-1]}", THIN)


def words_of(case: Case, law: Law | None) -> frozenset[str]:
    """The features of a case, with what several of them say together."""
    found = set(features_of(case, law))
    if any(mesh.ndim > 2 and 1 not in mesh.shape for mesh in case.meshes):
        found.add("solid")
    if "steps" in case:
        pending = [[p.op for p in case.tensor(name).placements or () if isinstance(p, Partial)] for name in _operands(case)]
        found |= {"unsummed"} if any({*ops} - {"sum"} for ops in pending) else set()
        found |= {"first-unsummed"} if {*(pending or [[]])[0]} - {"sum"} else set()
    if "[" in case.law:
        found.add(f"variant:{case.law.partition('[')[2][:-1]}")
    return frozenset(found)


def _operands(case: Case) -> list[str]:
    """The names of the tensors of a program, in their order."""
    return [name for name, _ in case.fields if len(name) == 1]


def judged(folder: Path, globs: Iterable[str]) -> Iterator[Case]:
    """The cases of a report's ``cases.txt``, without those that were given up."""
    laws = {law.id for law in named(globs)}
    for line in (folder / "cases.txt").read_text("utf-8").splitlines():
        verdict, _, text = line.split(" ", 2)
        if verdict != "rejected" and text.partition(" ")[0] in laws:
            yield Case.parse(text)


def planned(globs: Iterable[str]) -> Iterator[Case]:
    """The cases of a smoke run of everything."""
    request, limits = RunRequest(), Limits(larger=LARGER_WORLD)
    for law in named(globs):
        if law.profile == "smoke":
            found: list[Case] = []
            Plan.for_law(law, limits, 0, "smoke", share=law_share(law, request)).feed(lambda case, drawn, found=found: found.append(case))  # type: ignore[misc]
            yield from found


def named(globs: Iterable[str]) -> list[Law]:
    """The laws that are named, or all. Raises :class:`UsageError`."""
    return select(list(catalogue().values()), tuple(globs), ())


def count(cases: Iterable[Case]) -> Counter[Corner]:
    """How many of the cases reach each corner."""
    laws, lines, found = catalogue(), list(corners()), Counter[Corner]()
    of_law = cache(partial(_of_law, lines))
    for case in cases:
        reached = words_of(case, laws.get(case.law))
        found.update(corner for corner in of_law(case.law.partition("[")[0]) if corner.holds(case, reached))
    return found


def _of_law(lines: list[Corner], name: str) -> list[Corner]:
    return [corner for corner in lines if any(fnmatchcase(name, glob) for glob in corner.laws.split())]


def main(args: list[str], out: Callable[[str], object] = print) -> int:
    """Print the table; 1 where a corner has too few cases, 2 where there is no such report or law."""
    warnings.simplefilter("ignore")
    folder = Path(args[0]) if args and ("/" in args[0] or Path(args[0]).is_dir()) else None
    globs = tuple(args[1:] if folder else args)
    try:
        found = count(judged(folder, globs) if folder else planned(globs))
    except (UsageError, OSError) as error:
        out(f"benchmarks.corners: {error}: want the folder of a report, and names of laws")
        return 2
    below = 0
    for corner in corners():
        few = found[corner] < corner.least
        below += few
        out(f"{corner.group:24} {corner.name:52} {found[corner]:6}{f'  below {corner.least}' if few else ''}")
    out(f"{below} of {sum(1 for _ in corners())} corners have too few cases")
    return int(below > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
