"""Chooses the cases of a smoke run: those that keep what all of them reach, at the least cost::

    python -m benchmarks.chosen measure FOLDER
    python -m benchmarks.chosen choose FOLDER [FOLDER ...] > conformance/profiles/smoke.txt

``measure`` runs every case of profile smoke, while ranks note what each enters of torch's source and what it costs
(:mod:`benchmarks.case_notes`); the report and the notes stay in FOLDER. ``choose`` looks, chapter by chapter, for few cheap cases that
together show what all show: each block of torch's source, and each block under each feature of a case; each call or law, whatever its
numbers, under what a mesh dim does to its operands and its targets; each kind of deviation of each law. Greedily: the case that adds most
for its cost comes first, until none adds :data:`LEAST_WORTH` a CPU-second. Every law keeps a case; one whose cases cost little together, or
must all be refused, keeps them all; a corner of the input space (:mod:`benchmarks.corners`) keeps as many as it needs, the cheapest ones; a
law that draws keeps its table, the few cases that were written down because draws would rarely meet them; each operand of each law of
gradients is sharded in one case, each dim of an op's first operand cut, evenly and unevenly, and in each call of the op, each operand
pending, as a sum, a maximum and a minimum; in chapters whose cases differ in words (:data:`TOLD_APART`) each word of a law keeps its
cheapest case, unless that is dear. Where the rule of a gradient is an op's own, and cases cost little, calls that smoke leaves to ``ci``
are taken too (:func:`later_calls`). What no other case enters is worth more (:data:`BLOCK_WORTH`), and a case that the list at hand has
costs half. Drawn cases that are chosen are listed by their texts, and a third as many are drawn anew by each run.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.corners import MEMORIES, corners, words_of
from benchmarks.measured import LOST, WORD, Tried, best_first, measure, tried
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.laws.op.results import specs
from shardlaw.conformance.run.request import DEFAULT_WORLD, LARGER_WORLD
from shardlaw.conformance.run.shares import SCALE, format_share
from shardlaw.conformance.target.config import find_target
from shardlaw.reference.placement import Partial, Shard
from shardlaw.strategies.op_corners import corner_samples
from shardlaw.strategies.op_gradient_corners import corner_gradients
from shardlaw.strategies.op_programs import family_histories

TRIED_WHOLE = {"crash", "engine", "op.local", "plan", "random", "sharded_tensor"}  # chapters and laws that cost little
TOLD_APART = {"collective", "layout", "mesh", "optimizer", "roundtrip"}  # where a word, such as the call that fails, is what a case asks
SAID_WORTH = 16.0  # of a call under placements, where that of a block of torch under a feature is 1
BLOCK_WORTH = 500.0  # of a block, whatever the feature: what no other case runs, no other case can judge
LEAST_WORTH = 2200.0  # a CPU-second
DRAWN_ANEW = 3  # for so many of the drawn cases that were chosen one is drawn by each run
DEAR = 0.15  # CPU-seconds of a case, above which no word needs it; of a law's case in the mean, above which it gets none from ``ci``
CHEAP = 0.3  # CPU-seconds of a law with its variants, below which all its cases are tried
REFUSED = "must-refuse"  # a feature: such cases run few lines of torch, and differ in what they ask
LEAST = 4  # draws of a law of which no other case is tried: some are rejected
TABLE = 12  # enumerated cases of a law that draws as well, and no more than these: written down by hand
SOUND = frozenset({"held", "refused"})
SHARDED = re.compile(r"(\b\w+)=[0-9x()]+:\S*S\(")
AMOUNTS = ("dtype:", "world:", "size-")
KEPT = frozenset({"sum", "max", "min"})  # reductions that some ops keep pending; those that keep averages keep sums too
MEMORY = re.compile(rf":({'|'.join(MEMORIES)})\b")


def cover(cases: list[Tried]) -> list[Tried]:
    """The cases of a chapter that show most of what all of them show for what they cost, best first."""
    number: dict[object, int] = {}
    held: list[np.ndarray] = []
    width = 1 + max((block for case in cases for block in case.blocks), default=0)
    for case in cases:
        features = [number.setdefault(one, len(number)) for one in ("", *sorted(features_of(Case.parse(case.text), find(case.law))))]
        pairs = np.add.outer(np.array(features, np.int64) * width, np.array(sorted(case.blocks), np.int64)).ravel()
        said = [-1 - number.setdefault(one, len(number)) for one in case.shows()]
        held.append(np.concatenate([pairs, np.array(said, np.int64)]))
    values, flat = np.unique(np.concatenate(held), return_inverse=True)
    shown = np.split(flat, np.cumsum([len(one) for one in held])[:-1])
    missing = np.where(values < 0, SAID_WORTH, np.where(values < width, BLOCK_WORTH, 1.0))

    taken = []
    for at, worth in best_first(len(cases), lambda at: missing[shown[at]].sum() / cases[at].price):
        if worth < LEAST_WORTH:
            break
        missing[shown[at]] = 0
        taken.append(cases[at])
    return taken


def tried_whole(cases: Iterable[Tried]) -> set[str]:
    """The names, whatever their variants, of laws of which no case is left out: they cost little, or all their cases must be refused."""
    by_name: defaultdict[str, list[Tried]] = defaultdict(list)
    for case in cases:
        by_name[case.name].append(case)
    return {
        name
        for name, its in by_name.items()
        if TRIED_WHOLE & {name, name.partition(".")[0]}
        or any(find(case.law).checks for case in its)  # each of which asks much of the same lines
        or sum(case.cost for case in its) < CHEAP
        or all(REFUSED in features_of(Case.parse(case.text), find(case.law)) for case in its)
    }


def at_corners(cases: list[Tried], taken: set[str]) -> Iterator[Tried]:
    """The cheapest of the cases that are not taken which corners of the input space need. What deviates does not count: of a known cause
    a run tries one case."""
    words = {case.text: words_of(Case.parse(case.text), find(case.law)) for case in cases}
    for corner in corners():
        reach = [case for case in cases if case.word in SOUND and corner.holds(Case.parse(case.text), words[case.text])]
        missing = corner.least - sum(case.text in taken for case in reach)
        for case in sorted((case for case in reach if case.text not in taken), key=lambda case: case.price)[: max(missing, 0)]:
            taken.add(case.text)
            yield case


def tables(cases: Iterable[Tried], limits: Limits) -> Iterator[Tried]:
    """The cases of tables of laws that draw: what programs begin with, and all that enumerators of few cases have. Those that cost a
    world stay away."""
    by_hand = {
        "op.program": len(corner_samples()),
        "op.program-backward": len(corner_gradients()),
        "op.history": len(family_histories()),  # what a cache confuses runs no other lines
    }
    written_down: set[str] = set()
    for law_id, law in catalogue().items():
        if law.draws and law.sweep is not None and (law.sweeps <= TABLE or law_id in by_hand):
            swept = [case.text for case in islice(law.sweep(limits), law.sweeps + 1)]
            written_down.update(swept[: by_hand.get(law_id, law.sweeps if len(swept) <= law.sweeps else 0)])
    yield from (case for case in cases if case.text in written_down and case.word not in LOST)


def sharded_operands(cases: Iterable[Tried], taken: set[str]) -> Iterator[Tried]:
    """The cheapest cases in which operands of laws of gradients are sharded that no case which is taken shards."""
    cheap = sorted((case for case in cases if case.name == "op.backward"), key=lambda case: (case.text not in taken, case.price))
    seen: set[tuple[str, str]] = set()
    for case in cheap:
        new = {(case.law, operand) for operand in SHARDED.findall(case.text)} - seen
        seen |= new
        if new and case.text not in taken:
            yield case


def cut_dims(cases: Iterable[Tried], taken: set[str]) -> Iterator[Tried]:
    """The cheapest cases of ops that cut a dim of the first operand, evenly or into parts of unlike sizes, none of them empty, where no
    case of the law that is taken does, nor one of the same call: sizes that are handed to a kernel, and dims that a rule takes one for the
    other, run the same lines, right or wrong."""
    some = (case for case in cases if case.name == "op.forward" and case.word in SOUND)
    seen: set[tuple[object, ...]] = set()
    for case in sorted(some, key=lambda case: (case.text not in taken, case.price)):
        parsed = Case.parse(case.text)
        new = {(case.law, *cut) for cut in (*_cut(parsed), *_cut_in_call(parsed))} - seen
        if new and (case.text in taken or " mesh=2 " in case.text):
            seen |= new
            if case.text not in taken:
                yield case


def _cut(case: Case) -> Iterator[tuple[int, int, bool]]:
    """The number of dims of the first operand, with each that its shards divide, and whether they differ in size. Unlike parts stand for
    like ones too."""
    first, mesh = next(iter(specs(case).values()), None), case.mesh()
    for dim, extent in enumerate(first.shape if first is not None else ()):
        cuts = [size for size, at in zip(mesh.shape, first.placements or (), strict=False) if isinstance(at, Shard) and at.dim == dim]
        if 1 < prod(cuts) <= extent:
            yield from ((len(first.shape), dim, uneven) for uneven in (False, True)[: 1 + (extent % prod(cuts) != 0)])


def _cut_in_call(case: Case) -> set[tuple[str, int]]:
    """The calls of a case, with each dim of the first operand that its shards divide."""
    return {(case.get("steps"), dim) for _, dim, _ in _cut(case)}


def pending_operands(cases: Iterable[Tried], taken: set[str]) -> Iterator[Tried]:
    """The cheapest cases of ops in which an operand, or several alike, are pending as a sum, a maximum or a minimum, where no case of the
    law that is taken has them so: an op whose rule keeps a reduction pending wrongly runs the same lines as one that does so rightly."""
    some = (case for case in cases if case.name == "op.forward" and case.word in SOUND)
    seen: set[tuple[str, str, tuple[str, ...]]] = set()
    for case in sorted(some, key=lambda case: (case.text not in taken, case.price)):
        pending: defaultdict[str, list[str]] = defaultdict(list)
        for name, spec in specs(Case.parse(case.text)).items():
            for op in {at.op for at in spec.placements or () if isinstance(at, Partial)} & KEPT:
                pending[op].append(name)
        new = {(case.law, op, alike) for op, names in pending.items() for alike in {tuple(names), *((name,) for name in names)}} - seen
        seen |= new
        if new and case.text not in taken:
            yield case


def with_rules(folders: Iterable[Path]) -> set[str]:
    """The laws of gradients that runs computed by an op which has a rule of its own, such as ``_softmax_backward_data``."""
    reports = (msgspec.json.decode((folder / "report" / "report.json").read_bytes()) for folder in folders)
    laws = (law for report in reports for law in report["laws"] if law["id"].startswith("op.backward["))
    return {law["id"] for law in laws if any(name.startswith("op:") and "backward" in name for name in law["features"])}


def dear_laws(cases: Iterable[Tried]) -> set[str]:
    """The laws whose cases cost more than :data:`DEAR` in the mean."""
    costs: defaultdict[str, list[float]] = defaultdict(list)
    for case in cases:
        costs[case.law].append(case.cost)
    return {law for law, its in costs.items() if sum(its) > DEAR * len(its)}


def later_calls(law: Law, places: Collection[int], limits: Limits) -> set[int]:
    """Further places of a law's enumerated cases, of the first that profile ``ci`` tries: each call is made with each dim of the first
    operand cut in two, for the rule of a gradient may take one dim for another."""
    assert law.sweep is not None
    cases = list(islice(law.sweep(limits), law.sweeps * SCALE["ci"]))
    seen: set[tuple[str, int]] = set()
    found = set()
    for place, case in sorted(enumerate(cases), key=lambda one: one[0] not in places):
        new = _cut_in_call(case) - seen
        if new and (place in places or case.get("mesh") == "2"):
            seen |= new
            found.add(place)
    return found - set(places)


def words_asked(case: Tried) -> set[object]:
    """The words of a case's fields, the memory of its tensors, how many dims its meshes have that are longer than 1, and its features
    but those that say how large it is."""
    parsed = Case.parse(case.text)
    found = {one for one in features_of(parsed, find(case.law)) if not one.startswith(AMOUNTS)}
    longer = {sum(extent > 1 for extent in mesh.shape) for mesh in parsed.meshes}
    return {*WORD.findall(case.text), *MEMORY.findall(case.text), *longer, *found}


def of_words(cases: list[Tried], taken: set[str]) -> Iterator[Tried]:
    """The cheapest of the cases that are not taken, nor lost to a known cause, which have a word that none of their law's has that is
    taken."""
    asked: defaultdict[str, set[object]] = defaultdict(set)
    for case in cases:
        if case.text in taken:
            asked[case.law] |= words_asked(case)
    for case in sorted(cases, key=lambda case: case.price):
        asks = case.chapter in TOLD_APART and case.word not in LOST and case.cost < DEAR
        if asks and not (words := words_asked(case)) <= asked[case.law]:
            asked[case.law] |= words
            taken.add(case.text)
            yield case


def choose(folders: Sequence[Path]) -> None:
    """Print the shares of all laws."""
    cases = tried(folders)
    whole = tried_whole(cases)
    chapters: defaultdict[str, list[Tried]] = defaultdict(list)
    for case in cases:
        if case.name not in whole:
            chapters[case.chapter].append(case)
    taken = {case.text: case for its in chapters.values() for case in cover(its)}
    limits, listed = smoke_limits(), [case for its in chapters.values() for case in its]
    taken |= {case.text: case for case in tables(listed, limits)}
    taken |= {case.text: case for case in sharded_operands(listed, set(taken))}
    taken |= {case.text: case for case in cut_dims(listed, set(taken))}
    taken |= {case.text: case for case in pending_operands(listed, set(taken))}
    reached = {*taken, *(case.text for case in cases if case.name in whole)}
    sure = [case for case in cases if not (case.drawn and case.name in whole)]  # other seeds draw others
    taken |= {case.text: case for case in at_corners(sure, reached)}
    taken |= {case.text: case for case in of_words(cases, reached | set(taken))}
    by_rule = with_rules(folders) - dear_laws(cases)
    print("# What a smoke run of everything tries of each law: the places of its enumerated cases, the number of drawn ones, and others.")
    print("# Made by python -m benchmarks.chosen; a law that is not named is tried whole.")
    for law_id, law in sorted(catalogue().items()):
        if law_id.partition("[")[0] in whole or law.profile != "smoke" or not (law.sweeps or law.draws):
            continue
        swept = [case.text for case in islice(law.sweep(limits), law.sweeps)] if law.sweep is not None else []
        places = {place for place, text in enumerate(swept) if text in taken}
        places |= later_calls(law, places, limits) if law_id in by_rule else set()
        own = [case for case in taken.values() if case.law == law_id]
        drawn = sorted(case.text for case in own if case.drawn or (case.is_listed and case.text not in swept))
        count = len(drawn) / DRAWN_ANEW
        if not places and not drawn:
            places, count = ({0}, count) if law.sweeps else (set(), LEAST)
        print(format_share(law_id, places, min(count, law.draws), drawn))
    for chapter, its in chapters.items():
        chosen = [case for case in its if case.text in taken]
        spent, kept = (sum(case.cost for case in some) for some in (its, chosen))
        print(f"{chapter}: {len(its)} cases, {spent:.0f} CPU-seconds; chosen {len(chosen)}, {kept:.0f}", file=sys.stderr)


def smoke_limits() -> Limits:
    """Those of a smoke run on the CPU."""
    target = find_target("gloo", None, None, DEFAULT_WORLD)
    return Limits(DEFAULT_WORLD, target.dtypes, frozenset(target.cannot), LARGER_WORLD)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"] and len(sys.argv) > 2:
        sys.exit(measure(Path(sys.argv[2]), *sys.argv[3:]))
    if sys.argv[1:2] == ["choose"] and len(sys.argv) > 2:
        choose([*map(Path, sys.argv[2:])])
    else:
        sys.exit("benchmarks.chosen: want measure FOLDER [OPTION ...], or choose FOLDER [FOLDER ...]")
