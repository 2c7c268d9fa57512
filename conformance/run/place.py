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
from shardlaw.conformance.law.evidence import Evidence, Step, TracedTensor
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Verdict
from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import parse_placements
from shardlaw.reference.simulate import assemble_replicas

NAMED = 3


class _Unknown(Exception):
    """The reference cannot say."""


class _Departs(Exception):
    """A rank holds what it must not."""


def places_of(verdict: Verdict, near: Sequence[Verdict]) -> list[str]:
    """The places in torch to look at, the likeliest first, at most three; none where nothing was heard. ``verdict`` and ``near`` are of
    traced ranks; those near that do not hold tell nothing."""
    if verdict.kind == "hang":
        return [*_waiting(verdict)][:NAMED]
    first = departing(verdict)
    if first is None or first.evidence is None:
        return []
    held = [other for other in near if other.status == "held"]
    lines = Lines.of(verdict, held)
    found = [each for place in _likely(verdict, first, first.evidence, lines) for each in _who_found_out(place, first.evidence, lines)]
    return list(dict.fromkeys(filter(None, found)))[:NAMED]


def calls_in(verdict: Verdict) -> tuple[str, ...]:
    """The collectives that the first rank which deviated has called, or in which the ranks of a hang wait, as far as Python tells."""
    stacks = [heard.place_in_stack(line) for answer in verdict.ranks for line in answer.stack.splitlines()]
    first = departing(verdict)
    visited = first.evidence.visited if first and first.evidence else ()
    return tuple(sorted({*map(heard.collective_called_by, stacks if verdict.kind == "hang" else visited)} - {""}))


def in_storage(verdict: Verdict, target: Target) -> str:
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


def _who_found_out(place: str, noted: Evidence, lines: Lines) -> Iterator[str]:
    """A place; of one that carries out what others of its class found out, first the one of these whose lines tell most."""
    if heard.applies_analysis(place):
        owner = place.partition(".")[0]
        yield from lines.finder(other for other in noted.visited if other.startswith(f"{owner}."))
    yield place


def departing(verdict: Verdict) -> Answer | None:
    """The answer of the first rank that deviated or raised."""
    return next((answer for answer in verdict.ranks if answer.outcome in ("deviates", "raised")), None)


def decided(place: str, trace: Sequence[str]) -> str:
    """A place with what it asked for and claimed, where the lines of a trace say so, the last time."""
    told = [line.partition(": ")[2] for line in trace if line.startswith("op ")]
    return next((line for line in reversed(told) if line.startswith(place)), place)


def _waiting(verdict: Verdict) -> Iterator[str]:
    """The functions in which the first rank hung, the innermost first."""
    for line in next((answer.stack for answer in verdict.ranks if answer.stack), "").splitlines():
        place = heard.place_in_stack(line)
        if place and not heard.only_forwards(place) and not heard.is_generic(place):
            yield place


def _likely(verdict: Verdict, first: Answer, noted: Evidence, lines: Lines) -> Iterator[str]:
    """The places to look at, the likeliest first."""
    steps = {answer.rank: answer.evidence.steps for answer in verdict.ranks if answer.evidence is not None}
    step = (first_departing(steps, "_backward") if "backward" in verdict.case.law else None) or first_departing(steps)
    home = [place for place in noted.visited if heard.is_home(place, verdict.case.law.partition(".")[0])]
    unfit = any(map(heard.finds_metadata, noted.raised[-1:])) and bool(home)  # operands that do not fit as whole tensors: who made them?
    if step is not None:
        yield from _of_step(step, noted, lines)
    elif first.outcome == "raised" and not unfit:
        if not noted.raised and not any(each.rule_asked for each in noted.steps if not each.completed):  # C++ refused to ask a rule
            return
        yield from _of_error(noted, lines)
    asked = home if verdict.kind == "wrong-error" else [place for place in home if place in noted.answered]
    judging = list(filter(heard.is_check, asked))
    yield from reversed([place for place in judging if noted.callers[place].isdisjoint(judging)])
    if verdict.kind == "wrong-error":
        about_meshes = verdict.case.law.startswith("mesh.")
        candidates = filter(heard.is_candidate, noted.visited)
        yield next((place for place in candidates if about_meshes or not heard.is_about_meshes(place)), "")
    if not heard.is_about_ops(verdict.case.law):
        yield from (place for place in noted.visited if heard.constructs_sharded_tensor(place) and lines.another_way(place))
        yield from reversed([place for place in home if lines.alone(place)])
        yield from reversed(home)
    for kind in ("op", "move"):
        for each in reversed(noted.steps):
            if each.kind == kind:
                yield from _of_step(each, noted, lines)
    yield from reversed(home)
    yield from lines.telling(noted.visited)


def _of_error(noted: Evidence, lines: Lines) -> Iterator[str]:
    """Who is to blame for an error: the function that refused, or of an error from below the rule by which the op ran, or the last function
    that does more than to hand on."""
    last = noted.raised[-1] if noted.raised else ""
    refused = last.removeprefix(heard.REFUSED_BY)
    unfinished = [step for step in noted.steps if not step.completed]
    rule = (each for step in reversed(unfinished) for each in _of_step(step, noted, lines))
    frames = [frame.removeprefix(heard.REFUSED_BY) for frame in reversed(noted.raised)]
    if not any(map(heard.plans_op, frames)):  # a handler of its own runs outside of the planning
        yield from (step.rule for step in unfinished if step.rule in frames)
    moves = [step for step in unfinished if step.kind == "move" and len(_methods(step)) > 1]
    if any(map(heard.is_redistribution, frames)):  # of several steps the last one failed: they are in a wrong order
        yield from (step.rule for step in moves)
    kin = {step.name.rpartition(".")[0]: step.rule for step in noted.steps if step.completed and step.kind == "op"}
    forth = [kin.get(step.name.rpartition(".")[0].removesuffix("_backward"), "") for step in unfinished]
    if heard.plans_op(refused):  # no rule: that of ops that are called alike, or of the op before, whose gradient it is
        yield from (step.similar_rule for step in unfinished)
        yield from forth
        yield from (step.rule for step in unfinished)
    elif heard.selects(frames[0] if frames else ""):  # there was nothing to choose from
        yield from filter(heard.expands_strategies, noted.visited)
    elif last != refused and not heard.is_generic(refused) and not heard.is_redistribution(refused):
        yield from (place for place in noted.visited if refused in noted.callers[place] and heard.is_check(place))
        yield refused
    elif not refused or heard.only_forwards(refused) or heard.is_redistribution(refused):
        yield from _of_transformed(noted, unfinished)
        yield from (place for place, step in zip(forth, unfinished, strict=True) if heard.plans_decomposition(step.rule))
        yield from rule
    yield from (frame for frame in frames if not heard.only_forwards(frame) and not heard.is_generic(frame))
    yield from rule
    yield from frames


def _of_transformed(noted: Evidence, unfinished: Sequence[Step]) -> Iterator[str]:
    """Of an op that fails on what a redistribution with a transform of its own made of its arguments: who planned the steps in this order,
    or, of one step, what the transform is done by."""
    for step in unfinished:
        for inner in (move for move in noted.steps if move.within is not None and noted.steps[move.within] is step):
            methods = _methods(inner)
            for method in filter(heard.is_derived_partial, methods):
                yield from [inner.rule] if len(methods) > 1 else []
                yield from (place for place in noted.visited if heard.is_derived_partial(place) and method in _called_by(noted, place))
                yield method


def _called_by(noted: Evidence, place: str) -> set[str]:
    """The functions that call one, those behind what only hands on."""
    found = noted.callers.get(place, frozenset())
    return {outer for by in found for outer in (noted.callers.get(by, ()) if heard.only_forwards(by) else (by,))} - {place}


def _of_step(step: Step, noted: Evidence, lines: Lines) -> Iterator[str]:
    """Who decided a step, and who is told by lines that ran in it alone."""
    if step.kind == "move":
        methods = _methods(step)
        merged = [call for call in step.calls if heard.MERGES_MOVES.match(call)]
        changes = _changes(step)
        yield from merged if len(methods) < changes else [step.rule] if changes > 1 else []
        yield from methods
        yield step.rule
        yield from merged
        return
    if step.rule.partition(", ")[2] not in {place.partition(", ")[2] for place in noted.visited}:  # nobody asked the rule
        yield from (place for place in noted.visited if heard.plans_op(place) and step.rule_asked)
        return
    under = [place for place in noted_below(noted, step.rule) if not shared(place)]
    yield from (place for place in lines.telling(under) if lines.alone(place))
    yield from (place for place in under if place in noted.answered and heard.is_candidate(place))
    yield from [] if step.completed else lines.finder(under)
    yield step.rule


def _methods(step: Step) -> list[str]:
    """What a redistribution called of placements, one for each of its steps."""
    return [call for call in step.calls if "/placement_types.py" in call]


def _changes(step: Step) -> int:
    """Along how many mesh dims a redistribution that came to its end changed placements."""
    if not (isinstance(step.arguments, TracedTensor) and isinstance(step.results, TracedTensor)):
        return 0
    before, after = (parse_placements(piece.placements) if piece.placements else () for piece in (step.arguments, step.results))
    return sum(one != other for one, other in zip(before, after, strict=False))


def noted_below(noted: Evidence, rule: str) -> list[str]:
    """The functions of rules that a rule called, itself among them, as far as they were heard."""
    spot = rule.partition(", ")[2]
    found = [place for place in noted.visited if place.partition(", ")[2] == spot]
    for place in found:
        found += [each for each, by in noted.callers.items() if place in by and each not in found and heard.RULES in each]
    return [place for place in found if not heard.is_generic(place)]


@cache
def shared(place: str) -> bool:
    """Whether several places of its file call a function: it is a helper of theirs."""
    name, _, spot = place.partition(", ")
    called = name.rpartition(".")[2] + "("
    source = Path(torch.__file__).parents[1] / spot.rpartition(":")[0]
    try:
        return source.read_text("utf-8").count(called) > 2  # where it is defined, and one call
    except OSError:
        return False


class Lines:
    """Which lines ran where: in how many of the cases that hold, of those that ran where one deviates."""

    def __init__(self, visited: Mapping[str, frozenset[int]], held: Sequence[Mapping[str, frozenset[int]]]) -> None:
        self._visited, self._held = visited, held

    @classmethod
    def of(cls, verdict: Verdict, held: Sequence[Verdict]) -> Lines:
        deviating = [answer for answer in verdict.ranks if answer.outcome in ("deviates", "raised")]
        return cls(_all(deviating), [_all(other.ranks) for other in held])

    def fewest(self, place: str) -> int:
        """In how many cases that hold the rarest line of a function ran."""
        ran = self._visited.get(place, frozenset())
        return min((sum(line in other.get(place, ()) for other in self._held) for line in ran), default=len(self._held))

    def alone(self, place: str) -> bool:
        """Whether it was called in no case that holds, and there is one that tells."""
        return bool(self._held) and not any(place in other for other in self._held)

    def another_way(self, place: str) -> bool:
        """Whether a function that cases which hold call too runs lines here that it runs in none of them."""
        return bool(self._held) and not self.alone(place) and not self.fewest(place)

    def finder(self, places: Iterable[str]) -> list[str]:
        """Of these functions the one that finds something out and has the rarest lines, the last such; none where none finds out."""
        finding = list(filter(heard.analyzes, places))
        return [min(finding[::-1], key=self.fewest)] if finding else []

    def telling(self, places: Iterable[str]) -> list[str]:
        """These functions, those with the rarest lines first."""
        return sorted((place for place in places if heard.is_candidate(place)), key=self.fewest)


def _all(answers: Iterable[Answer]) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    for answer in answers:
        for place, lines in answer.evidence.visited.items() if answer.evidence is not None else ():
            found[place] = found.get(place, frozenset()) | lines
    return found


# Against the reference


def first_departing(steps: Mapping[int, Sequence[Step]], named: str = "") -> Step | None:
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
            if departs(_column(steps, at)) or any(departs(_column(steps, k)) for k in inner):
                return next((longest[k] for k in inner if departs(_column(steps, k))), step)
        elif step.within is None and departs(_column(steps, at)):
            return step
    return None


def _column(steps: Mapping[int, Sequence[Step]], at: int) -> dict[int, Step]:
    column = {rank: its[at] for rank, its in steps.items() if at < len(its)}
    names = {(step.kind, step.name) for step in column.values()}
    return column if len(names) == 1 else {}


def departs(column: Mapping[int, Step]) -> bool:
    """Whether one step, as each rank took it, gives something else than the reference says; not where the reference cannot say."""
    if not column or not all(step.completed for step in column.values()):
        return False
    step = next(iter(column.values()))
    try:
        given = _whole({rank: its.arguments for rank, its in column.items()})
    except (_Unknown, _Departs):
        return False
    try:
        with torch.no_grad():
            _check({rank: its.results for rank, its in column.items()}, given if step.kind == "move" else _dense(step.name, given))
    except _Unknown:
        return False
    except _Departs:
        return True
    return step.severed


def _dense(name: str, given: Any) -> Any:
    """What an op gives on whole tensors, and what it writes to then."""
    args, kwargs = given
    packet: Any = torch.ops
    for part in name.split("."):
        packet = getattr(packet, part)
    if torch.Tag.nondeterministic_seeded in packet.tags:
        raise _Unknown
    written = heard.written_arguments(packet, args, kwargs)
    try:
        return packet(*args, **kwargs), written
    except Exception as error:
        raise _Unknown from error


def _whole(values: Mapping[int, Any]) -> Any:
    """Values that each rank has a part of, put together."""
    first = next(iter(values.values()))
    if isinstance(first, TracedTensor):
        return next(iter(_assembled(values).values())).clone()
    if isinstance(first, (list, tuple)):
        return type(first)(_whole({rank: value[at] for rank, value in values.items()}) for at in range(len(first)))
    if isinstance(first, dict):
        return {key: _whole({rank: value[key] for rank, value in values.items()}) for key in first}
    return first.clone() if isinstance(first, torch.Tensor) else first


def _assembled(pieces: Mapping[int, TracedTensor]) -> Mapping[Any, torch.Tensor]:
    first = next(iter(pieces.values()))
    try:
        if not first.placements:
            raise _Unknown
        layout = Layout(first.shape, Mesh.parse(first.mesh), parse_placements(first.placements))
        return assemble_replicas({coord: pieces[layout.mesh.rank_at(coord)].local for coord in layout.mesh.coords()}, layout)
    except (NotationError, LayoutError, KeyError, RuntimeError) as error:
        raise _Unknown from error
    except ValueError as error:
        raise _Departs from error


def _check(values: Mapping[int, Any], want: Any) -> None:
    """Raises ``_Departs`` where what the ranks hold is not ``want``."""
    first = next(iter(values.values()))
    if isinstance(first, TracedTensor) and isinstance(want, torch.Tensor):
        inside = {rank: piece for rank, piece in values.items() if rank in Mesh.parse(first.mesh).ranks}
        if first.shape != tuple(want.shape):
            raise _Departs
        for got in _assembled(inside).values():
            _alike(got, want)
    elif isinstance(first, (list, tuple)) and isinstance(want, (list, tuple)):
        unknown = False
        for at, part in enumerate(want[: len(first)]):
            try:
                _check({rank: value[at] for rank, value in values.items()}, part)
            except _Unknown:
                unknown = True
        if unknown:
            raise _Unknown
    elif isinstance(first, torch.Tensor) and isinstance(want, torch.Tensor):
        for got in values.values():
            _alike(got, want)
    elif isinstance(want, (bool, int, float)) and any(got != want for got in values.values()):
        raise _Departs


def _alike(got: torch.Tensor, want: torch.Tensor) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise _Departs
    if got.device != want.device:  # such as what stayed on the meta device, where a step gives elements
        raise _Unknown
    exact = not (want.is_floating_point() or want.is_complex())
    if not (torch.equal(got, want) if exact else torch.allclose(got, want, rtol=1e-3, atol=1e-3, equal_nan=True)):
        raise _Departs
