"""Where in torch to look first: from what the ranks noted of a case that deviates, and of cases near it that hold.

The first step whose result departs from the reference is looked for: an op gives on the parts what it gives on the whole, a redistribution
changes no element. What decided that step is named: the handler or the rule of the op, or the planner of the redistribution. Of functions
that a rule calls, one with lines that ran in no case that holds is more telling than the rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardlaw.conformance.compat import trace as heard
from shardlaw.conformance.law.evidence import Evidence, Piece, Step
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Verdict
from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import parse_placements
from shardlaw.reference.simulate import assemble_replicas

MAX_PLACES = 3


class _CannotTell(Exception):
    """The reference cannot say."""


class _StepDeviates(Exception):
    """A rank holds what it must not."""


def find_places(verdict: Verdict, near: Sequence[Verdict]) -> list[str]:
    """The places in torch to look at, the likeliest first, at most three; none where nothing was heard. ``verdict`` and ``near`` are of
    traced ranks; those near that do not hold tell nothing."""
    if verdict.kind == "hang":
        return [*_hang_places(verdict)][:MAX_PLACES]
    first = first_deviating_answer(verdict)
    if first is None or first.evidence is None:
        return []
    holding = [other for other in near if other.status == "held"]
    lines = LineCoverage.from_verdicts(verdict, holding)
    found = [
        each for place in _candidate_places(verdict, first, first.evidence, lines) for each in _with_finder(place, first.evidence, lines)
    ]
    return list(dict.fromkeys(filter(None, found)))[:MAX_PLACES]


def collectives_called(verdict: Verdict) -> tuple[str, ...]:
    """The collectives that the first rank which deviated has called, or in which the ranks of a hang wait, as far as Python tells."""
    stacks = [heard.in_stack(line) for answer in verdict.ranks for line in answer.stack.splitlines()]
    first = first_deviating_answer(verdict)
    visited = first.evidence.visited if first and first.evidence else ()
    return tuple(sorted({*map(heard.called_in, stacks if verdict.kind == "hang" else visited)} - {""}))


def find_storage_frame(verdict: Verdict, target: Target) -> str:
    """The innermost function of a storage of somebody's own through which the first rank's error came; nothing where torch's raised it."""
    packages = {place.partition(":")[0].partition(".")[0] for place in (target.writer, target.reader)} - {"", "torch", "shardlaw"}
    raised = next((answer.raised for answer in verdict.ranks if answer.raised is not None), None)
    if raised is None or not packages:
        return ""
    frame = re.compile(rf'[^\s"]*/((?:{"|".join(map(re.escape, sorted(packages)))})(?:/[^\s":]+)?[.]py)(?:", line |:)(\d+),? in (\S+)')
    for text in (*re.split(r"\(RANK \d+\)", raised.text)[:2][::-1], raised.stack):
        if frames := frame.findall(text):
            file, line, name = frames[-1]
            return f"{name}, {file}:{line}"
    return ""


def _with_finder(place: str, noted: Evidence, lines: LineCoverage) -> Iterator[str]:
    """A place; of one that carries out what others of its class found out, first the one of these whose lines tell most."""
    if heard.carries_out(place):
        owner = place.partition(".")[0]
        yield from lines.rarest_finder(other for other in noted.visited if other.startswith(f"{owner}."))
    yield place


def first_deviating_answer(verdict: Verdict) -> Answer | None:
    """The answer of the first rank that deviated or raised."""
    return next((answer for answer in verdict.ranks if answer.outcome in ("deviates", "raised")), None)


def add_decision(place: str, trace: Sequence[str]) -> str:
    """A place with what it asked for and claimed, where the lines of a trace say so, the last time."""
    decisions = [line.partition(": ")[2] for line in trace if line.startswith("op ")]
    return next((line for line in reversed(decisions) if line.startswith(place)), place)


def _hang_places(verdict: Verdict) -> Iterator[str]:
    """The functions in which the first rank hung, the innermost first."""
    for line in next((answer.stack for answer in verdict.ranks if answer.stack), "").splitlines():
        place = heard.in_stack(line)
        if place and not heard.carries(place) and not heard.is_generic(place):
            yield place


def _candidate_places(verdict: Verdict, first: Answer, noted: Evidence, lines: LineCoverage) -> Iterator[str]:
    """The places to look at, the likeliest first."""
    steps = {answer.rank: answer.evidence.steps for answer in verdict.ranks if answer.evidence is not None}
    step = (first_deviating_step(steps, "_backward") if "backward" in verdict.case.law else None) or first_deviating_step(steps)
    home = [place for place in noted.visited if heard.is_home(place, verdict.case.law.partition(".")[0])]
    unfit = any(map(heard.asks_whole, noted.raised[-1:])) and bool(home)  # operands that do not fit as whole tensors: who made them?
    if step is not None:
        yield from _places_of_step(step, noted, lines)
    elif first.outcome == "raised" and not unfit:
        if not noted.raised and not any(each.asked for each in noted.steps if not each.ended):  # C++ refused to ask a rule
            return
        yield from _places_of_error(noted, lines)
    candidates = home if verdict.kind == "wrong-error" else [place for place in home if place in noted.answered]
    checks = list(filter(heard.judges, candidates))
    yield from reversed([place for place in checks if noted.callers[place].isdisjoint(checks)])
    if verdict.kind == "wrong-error":
        about_meshes = verdict.case.law.startswith("mesh.")
        yield next((place for place in noted.visited if heard.does(place) and (about_meshes or not heard.is_of_meshes(place))), "")
    if not heard.is_of_steps(verdict.case.law):
        yield from (place for place in noted.visited if heard.constructs(place) and lines.runs_new_lines(place))
        yield from reversed([place for place in home if lines.is_never_in_holding(place)])
        yield from reversed(home)
    for kind in ("op", "move"):
        for each in reversed(noted.steps):
            if each.kind == kind:
                yield from _places_of_step(each, noted, lines)
    yield from reversed(home)
    yield from lines.by_rarity(noted.visited)


def _places_of_error(noted: Evidence, lines: LineCoverage) -> Iterator[str]:
    """Who is to blame for an error: the function that refused, or of an error from below the rule by which the op ran, or the last function
    that does more than to hand on."""
    last = noted.raised[-1] if noted.raised else ""
    refused = last.removeprefix(heard.REFUSED_BY)
    unfinished = [step for step in noted.steps if not step.ended]
    rule = (each for step in reversed(unfinished) for each in _places_of_step(step, noted, lines))
    frames = [frame.removeprefix(heard.REFUSED_BY) for frame in reversed(noted.raised)]
    if not any(map(heard.plans_an_op, frames)):  # a handler of its own runs outside of the planning
        yield from (step.rule for step in unfinished if step.rule in frames)
    moves = [step for step in unfinished if step.kind == "move" and len(_placement_calls(step)) > 1]
    if any(map(heard.moves, frames)):  # of several steps the last one failed: they are in a wrong order
        yield from (step.rule for step in moves)
    kin = {step.name.rpartition(".")[0]: step.rule for step in noted.steps if step.ended and step.kind == "op"}
    forth = [kin.get(step.name.rpartition(".")[0].removesuffix("_backward"), "") for step in unfinished]
    if heard.plans_an_op(refused):  # no rule: that of ops that are called alike, or of the op before, whose gradient it is
        yield from (step.alike for step in unfinished)
        yield from forth
        yield from (step.rule for step in unfinished)
    elif heard.chooses(frames[0] if frames else ""):  # there was nothing to choose from
        yield from filter(heard.offers, noted.visited)
    elif last != refused and not heard.is_generic(refused) and not heard.moves(refused):
        yield from (place for place in noted.visited if refused in noted.callers[place] and heard.judges(place))
        yield refused
    elif not refused or heard.carries(refused) or heard.moves(refused):
        yield from _places_of_transform(noted, unfinished)
        yield from (place for place, step in zip(forth, unfinished, strict=True) if heard.decomposes(step.rule))
        yield from rule
    yield from (frame for frame in frames if not heard.carries(frame) and not heard.is_generic(frame))
    yield from rule
    yield from frames


def _places_of_transform(noted: Evidence, unfinished: Sequence[Step]) -> Iterator[str]:
    """Of an op that fails on what a redistribution with a transform of its own made of its arguments: who planned the steps in this order,
    or, of one step, what the transform is done by."""
    for step in unfinished:
        for inner in (move for move in noted.steps if move.within is not None and noted.steps[move.within] is step):
            methods = _placement_calls(inner)
            for method in filter(heard.transforms, methods):
                yield from [inner.rule] if len(methods) > 1 else []
                yield from (place for place in noted.visited if heard.transforms(place) and method in _callers(noted, place))
                yield method


def _callers(noted: Evidence, place: str) -> set[str]:
    """The functions that call one, those behind what only hands on."""
    found = noted.callers.get(place, frozenset())
    return {outer for by in found for outer in (noted.callers.get(by, ()) if heard.carries(by) else (by,))} - {place}


def _places_of_step(step: Step, noted: Evidence, lines: LineCoverage) -> Iterator[str]:
    """Who decided a step, and who is told by lines that ran in it alone."""
    if step.kind == "move":
        methods = _placement_calls(step)
        merged = [call for call in step.calls if heard.MERGES_MOVES.match(call)]
        changes = _count_changed_dims(step)
        yield from merged if len(methods) < changes else [step.rule] if changes > 1 else []
        yield from methods
        yield step.rule
        yield from merged
        return
    if step.rule.partition(", ")[2] not in {place.partition(", ")[2] for place in noted.visited}:  # nobody asked the rule
        yield from (place for place in noted.visited if heard.plans_an_op(place) and step.asked)
        return
    under = [place for place in functions_below(noted, step.rule) if not is_shared_helper(place)]
    yield from (place for place in lines.by_rarity(under) if lines.is_never_in_holding(place))
    yield from (place for place in under if place in noted.answered and heard.does(place))
    yield from [] if step.ended else lines.rarest_finder(under)
    yield step.rule


def _placement_calls(step: Step) -> list[str]:
    """What a redistribution called of placements, one for each of its steps."""
    return [call for call in step.calls if "/placement_types.py" in call]


def _count_changed_dims(step: Step) -> int:
    """Along how many mesh dims a redistribution that came to its end changed placements."""
    if not (isinstance(step.given, Piece) and isinstance(step.gave, Piece)):
        return 0
    before, after = (parse_placements(piece.placements) if piece.placements else () for piece in (step.given, step.gave))
    return sum(one != other for one, other in zip(before, after, strict=False))


def functions_below(noted: Evidence, rule: str) -> list[str]:
    """The functions of rules that a rule called, itself among them, as far as they were heard."""
    spot = rule.partition(", ")[2]
    found = [place for place in noted.visited if place.partition(", ")[2] == spot]
    for place in found:
        found += [each for each, by in noted.callers.items() if place in by and each not in found and heard.RULES in each]
    return [place for place in found if not heard.is_generic(place)]


@cache
def is_shared_helper(place: str) -> bool:
    """Whether several places of its file call a function: it is a helper of theirs."""
    name, _, spot = place.partition(", ")
    call_text = name.rpartition(".")[2] + "("
    source = Path(torch.__file__).parents[1] / spot.rpartition(":")[0]
    try:
        return source.read_text("utf-8").count(call_text) > 2  # where it is defined, and one call
    except OSError:
        return False


class LineCoverage:
    """Which lines ran where: in how many of the cases that hold, of those that ran where one deviates."""

    def __init__(self, visited: Mapping[str, frozenset[int]], holding_cases: Sequence[Mapping[str, frozenset[int]]]) -> None:
        self._visited, self._holding_cases = visited, holding_cases

    @classmethod
    def from_verdicts(cls, verdict: Verdict, holding: Sequence[Verdict]) -> LineCoverage:
        deviating = [answer for answer in verdict.ranks if answer.outcome in ("deviates", "raised")]
        return cls(_merge_visited(deviating), [_merge_visited(other.ranks) for other in holding])

    def fewest_holding_cases(self, place: str) -> int:
        """In how many cases that hold the rarest line of a function ran."""
        ran = self._visited.get(place, frozenset())
        return min((sum(line in other.get(place, ()) for other in self._holding_cases) for line in ran), default=len(self._holding_cases))

    def is_never_in_holding(self, place: str) -> bool:
        """Whether it was called in no case that holds, and there is one that tells."""
        return bool(self._holding_cases) and not any(place in other for other in self._holding_cases)

    def runs_new_lines(self, place: str) -> bool:
        """Whether a function that cases which hold call too runs lines here that it runs in none of them."""
        return bool(self._holding_cases) and not self.is_never_in_holding(place) and not self.fewest_holding_cases(place)

    def rarest_finder(self, places: Iterable[str]) -> list[str]:
        """Of these functions the one that finds something out and has the rarest lines, the last such; none where none finds out."""
        finding = list(filter(heard.finds_out, places))
        return [min(finding[::-1], key=self.fewest_holding_cases)] if finding else []

    def by_rarity(self, places: Iterable[str]) -> list[str]:
        """These functions, those with the rarest lines first."""
        return sorted((place for place in places if heard.does(place)), key=self.fewest_holding_cases)


def _merge_visited(answers: Iterable[Answer]) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    for answer in answers:
        for place, lines in answer.evidence.visited.items() if answer.evidence is not None else ():
            found[place] = found.get(place, frozenset()) | lines
    return found


# Against the reference


def first_deviating_step(steps: Mapping[int, Sequence[Step]], named: str = "") -> Step | None:
    """The first step that the ranks took together whose result departs from the reference, of ops so ``named``: of an op with a
    redistribution that departs that one."""
    lowest = min(steps, default=None)
    if lowest is None:
        return None
    longest = max(steps.values(), key=len)
    for at, step in enumerate(longest):
        if named not in step.name:
            continue
        if step.kind == "op":
            inner = [k for k, other in enumerate(longest) if other.within == at]
            if step_deviates(_step_by_rank(steps, at)) or any(step_deviates(_step_by_rank(steps, k)) for k in inner):
                return next((longest[k] for k in inner if step_deviates(_step_by_rank(steps, k))), step)
        elif step.within is None and step_deviates(_step_by_rank(steps, at)):
            return step
    return None


def _step_by_rank(steps: Mapping[int, Sequence[Step]], at: int) -> dict[int, Step]:
    column = {rank: its[at] for rank, its in steps.items() if at < len(its)}
    names = {(step.kind, step.name) for step in column.values()}
    return column if len(names) == 1 else {}


def step_deviates(column: Mapping[int, Step]) -> bool:
    """Whether one step, as each rank took it, gives something else than the reference says; not where the reference cannot say."""
    if not column or not all(step.ended for step in column.values()):
        return False
    step = next(iter(column.values()))
    try:
        inputs = _assemble_values({rank: its.given for rank, its in column.items()})
    except (_CannotTell, _StepDeviates):
        return False
    try:
        with torch.no_grad():
            _compare({rank: its.gave for rank, its in column.items()}, inputs if step.kind == "move" else _run_dense(step.name, inputs))
    except _CannotTell:
        return False
    except _StepDeviates:
        return True
    return step.severed


def _run_dense(name: str, inputs: Any) -> Any:
    """What an op gives on whole tensors, and what it writes to then."""
    args, kwargs = inputs
    packet: Any = torch.ops
    for part in name.split("."):
        packet = getattr(packet, part)
    if torch.Tag.nondeterministic_seeded in packet.tags:
        raise _CannotTell
    written = heard.written(packet, args, kwargs)
    try:
        return packet(*args, **kwargs), written
    except Exception as error:
        raise _CannotTell from error


def _assemble_values(values: Mapping[int, Any]) -> Any:
    """Values that each rank has a part of, put together."""
    first = next(iter(values.values()))
    if isinstance(first, Piece):
        return next(iter(_assemble_pieces(values).values())).clone()
    if isinstance(first, (list, tuple)):
        return type(first)(_assemble_values({rank: value[at] for rank, value in values.items()}) for at in range(len(first)))
    if isinstance(first, dict):
        return {key: _assemble_values({rank: value[key] for rank, value in values.items()}) for key in first}
    return first.clone() if isinstance(first, torch.Tensor) else first


def _assemble_pieces(pieces: Mapping[int, Piece]) -> Mapping[Any, torch.Tensor]:
    first = next(iter(pieces.values()))
    try:
        if not first.placements:
            raise _CannotTell
        layout = Layout(first.shape, Mesh.parse(first.mesh), parse_placements(first.placements))
        return assemble_replicas({coord: pieces[layout.mesh.rank_at(coord)].local for coord in layout.mesh.coords()}, layout)
    except (NotationError, LayoutError, KeyError, RuntimeError) as error:
        raise _CannotTell from error
    except ValueError as error:
        raise _StepDeviates from error


def _compare(values: Mapping[int, Any], expected: Any) -> None:
    """Raises ``_Departs`` where what the ranks hold is not ``want``."""
    first = next(iter(values.values()))
    if isinstance(first, Piece) and isinstance(expected, torch.Tensor):
        inside = {rank: piece for rank, piece in values.items() if rank in Mesh.parse(first.mesh).ranks}
        if first.shape != tuple(expected.shape):
            raise _StepDeviates
        for got in _assemble_pieces(inside).values():
            _compare_tensors(got, expected)
    elif isinstance(first, (list, tuple)) and isinstance(expected, (list, tuple)):
        unknown = False
        for at, part in enumerate(expected[: len(first)]):
            try:
                _compare({rank: value[at] for rank, value in values.items()}, part)
            except _CannotTell:
                unknown = True
        if unknown:
            raise _CannotTell
    elif isinstance(first, torch.Tensor) and isinstance(expected, torch.Tensor):
        for got in values.values():
            _compare_tensors(got, expected)
    elif isinstance(expected, (bool, int, float)) and any(got != expected for got in values.values()):
        raise _StepDeviates


def _compare_tensors(got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise _StepDeviates
    if got.device != expected.device:  # such as what stayed on the meta device, where a step gives elements
        raise _CannotTell
    exact = not (expected.is_floating_point() or expected.is_complex())
    if not (torch.equal(got, expected) if exact else torch.allclose(got, expected, rtol=1e-3, atol=1e-3, equal_nan=True)):
        raise _StepDeviates
