"""Find where in torch to look first, from the traces of a case that deviates and of similar cases that hold.

The search starts from the first step whose result deviates from the reference: an op must give on shards what it gives on the global
tensors, a redistribution must change no element. The place is what decided that step: the op's handler or sharding rule, or the planner of
the redistribution. A function called by the rule comes before the rule if it ran lines that no holding case ran, and right after it if the
rule returned its result, or if few rules share it.

If no step deviates, but the operands of one contradict their placements, what ran before that step comes first; where only the metadata
of an op's result are wrong, what finds them. Else it is the files that the law's chapter is about: comparisons, functions that ran lines
that no holding case ran (before them, what they called there), and the others, those first that ran the rarest lines. What should have
been refused is put down to what can refuse.

This order is weighed against what else is known of each function (:mod:`shardlaw.conformance.run.suspicion`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch

from shardlaw.conformance.compat import trace as torch_trace
from shardlaw.conformance.law.evidence import Evidence, Step, TracedTensor, traced_tensors
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Verdict
from shardlaw.conformance.run.deviating_step import first_contradicting_step, first_deviating_step
from shardlaw.conformance.run.suspicion import DEVIATING, LineCoverage
from shardlaw.reference.placement import parse_placements

FEW_CALLS = 6  # of a helper in the rules of its file, all of which may be at fault
STEPS_OF_OPS = 2.0  # the weight of what the steps of ops and redistributions tell, as the reference judges each; elsewhere 1
MAX_PLACES = 8  # of a finding; those that the rest of the run finds in order count last


def find_places(verdict: Verdict, near: Sequence[Verdict], controls: Sequence[Verdict] = (), about: str = "") -> list[str]:
    """The places in torch to look at, at most eight, the likeliest first; of a hang, and of a crash that left no trace, those on the stack
    of the first rank that hung or crashed. All verdicts come from traced runs; of ``near``, similar cases, and ``controls``, cases of other
    laws, only those that hold are used. ``about`` says in words what the case asks and what it got."""
    places = places_by_steps(verdict, near)
    lines = LineCoverage.from_verdicts(verdict, [*near, *controls])
    weight = STEPS_OF_OPS if torch_trace.is_about_ops(verdict.case.law) else 1.0
    return (lines.by_suspicion(places, about, weight) if lines.is_comparable else places)[:MAX_PLACES]


def places_by_steps(verdict: Verdict, near: Sequence[Verdict]) -> list[str]:
    """The places of :func:`find_places`, in the order in which the steps of the case lead to them."""
    first = first_deviating_answer(verdict)
    if verdict.kind == "hang" or (verdict.kind == "crash" and first is not None and first.evidence is None):
        return [*_places_on_stack(first or next((answer for answer in verdict.ranks if answer.stack), None))]
    if first is None or first.evidence is None:
        return []
    lines = LineCoverage.from_verdicts(verdict, near)
    candidates = _candidate_places(verdict, first, first.evidence, lines)
    found = [each for place in candidates for each in _with_finder(place, first.evidence, lines)]
    return list(dict.fromkeys(filter(None, found)))


def collectives_called(verdict: Verdict) -> tuple[str, ...]:
    """The collectives that the first deviating rank called, or in which the ranks of a hang wait, as far as Python frames show."""
    stacks = [torch_trace.place_in_stack(line) for answer in verdict.ranks for line in answer.stack.splitlines()]
    first = first_deviating_answer(verdict)
    visited = first.evidence.visited if first and first.evidence else ()
    return tuple(sorted({*map(torch_trace.collective_called_by, stacks if verdict.kind == "hang" else visited)} - {""}))


def find_storage_frame(verdict: Verdict, target: Target) -> str:
    """The innermost frame, in the packages of the target's own storage, of the first rank's error; empty if there is none."""
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


def _with_finder(place: str, evidence: Evidence, lines: LineCoverage) -> Iterator[str]:
    """Yield a place; before one that only executes a decision of its class, the function of the class that likely made it."""
    if torch_trace.applies_analysis(place):
        owner = place.partition(".")[0]
        yield from lines.rarest_finder(other for other in evidence.visited if other.startswith(f"{owner}."))
    yield place


def first_deviating_answer(verdict: Verdict) -> Answer | None:
    """The answer of the first rank that deviated, raised or crashed, if any."""
    return next((answer for answer in verdict.ranks if answer.outcome in DEVIATING), None)


def add_decision(place: str, trace: Sequence[str]) -> str:
    """A place with the placements that it asked for and returned, or the last rule of its file did, from the last line of a trace that has
    them."""
    decisions = [line.partition(": ")[2].split(",", 2) for line in trace if line.startswith("op ")]
    own = [decision for decision in decisions if decision[:2] == place.split(",")[:2]]
    file = place.partition(", ")[2].rpartition(":")[0]
    beside = [decision for decision in decisions if file and decision[1:] and decision[1].strip().rpartition(":")[0] == file]
    return ",".join([place, *(own or beside)[-1][2:]]) if own or beside else place


def _places_on_stack(answer: Answer | None) -> Iterator[str]:
    """Yield the functions in which a rank hung or crashed, innermost first."""
    for line in answer.stack.splitlines() if answer is not None else ():
        place = torch_trace.place_in_stack(line)
        if place and not torch_trace.only_forwards(place) and not torch_trace.is_generic(place):
            yield place


def _candidate_places(verdict: Verdict, first: Answer, evidence: Evidence, lines: LineCoverage) -> Iterator[str]:
    """Yield the places to look at, the likeliest first."""
    law = verdict.case.law
    steps = {answer.rank: answer.evidence.steps for answer in verdict.ranks if answer.evidence is not None}
    step = (first_deviating_step(steps, "_backward") if "backward" in law else None) or first_deviating_step(steps)
    home = [place for place in evidence.visited if torch_trace.is_home(place, law.partition(".")[0])]
    # operands that do not fit as global tensors: look at what made them
    unfit = bool(home) and any(map(torch_trace.finds_metadata, evidence.raised[-1:]))
    if step is not None:
        yield from _places_of_step(step, evidence, lines)
    elif first.outcome == "raised" and not unfit:
        gave = torch_trace.backward_in_error(first.raised.text if first.raised is not None else "")
        yield from (place for place in evidence.visited if place.partition(", ")[0] == gave)
        if evidence.raised or any(each.rule_asked and not each.completed for each in evidence.steps):
            yield from _places_of_error(evidence, lines)
        elif torch_trace.is_about_ops(law):
            return  # C++ raised before any rule was asked
    elif (contradicting := first_contradicting_step(steps)) is not None:  # what called no op made the operand
        made = [place for place in contradicting.since if not torch_trace.is_generic(place)]
        yield from lines.by_rarity(filter(torch_trace.is_backward, made))  # ran after what ran forward
        yield from lines.by_rarity(made)
    elif verdict.kind == "wrong-metadata" and torch_trace.is_about_ops(law) and not _repeats_op(evidence):
        yield from filter(torch_trace.finds_metadata, evidence.visited)  # values and shapes are right: no rule gives strides
    yield from _places_at_home(verdict, home, evidence, lines)
    yield from _places_anywhere(law, home, evidence, lines)


def _places_at_home(verdict: Verdict, home: Sequence[str], evidence: Evidence, lines: LineCoverage) -> Iterator[str]:
    """Yield the places in the files of the law's chapter, ``home``, the likeliest first."""
    law, about_ops = verdict.case.law, torch_trace.is_about_ops(verdict.case.law)
    # a comparison that a case goes by decides what it does; a check can only refuse
    yield from _failed_checks(filter(torch_trace.is_comparison, home), evidence)
    if not about_ops:
        for place in reversed([place for place in home if lines.runs_new_lines(place)]):
            yield from _called_anew(place, evidence, lines) if verdict.kind != "wrong-error" else []  # of what went on instead of refusing
            yield place
    if verdict.kind == "wrong-error":
        yield from _failed_checks(home, evidence)
        if not about_ops:
            yield from _might_refuse(evidence, law.partition(".")[0])
        relevant = (place for place in evidence.visited if law.startswith("mesh.") or not torch_trace.is_about_meshes(place))
        yield next((place for place in relevant if torch_trace.is_candidate(place) and not torch_trace.is_generic(place)), "")
    if about_ops:
        return
    yield from (place for place in evidence.visited if torch_trace.constructs_sharded_tensor(place) and lines.runs_new_lines(place))
    likely = list(reversed(home))
    if not law.startswith("module."):  # what a style called last gave the result; elsewhere most faults are where most is done
        likely.sort(key=lambda place: (lines.fewest_holding_cases(place), -len(evidence.visited[place])))
    yield from (place for place in likely if lines.is_never_in_holding(place))
    yield from likely


def _places_anywhere(law: str, home: Sequence[str], evidence: Evidence, lines: LineCoverage) -> Iterator[str]:
    """Yield the places of all steps, the last first, then all others; last those that every op or tensor calls."""
    if law.startswith("gradient."):
        yield from lines.by_rarity(filter(torch_trace.is_backward, evidence.visited))
    for kind in ("op", "move"):
        for each in reversed(evidence.steps):
            if each.kind == kind:
                yield from _places_of_step(each, evidence, lines)
    yield from reversed(home)
    about_meshes = filter(torch_trace.is_about_meshes, evidence.visited) if not law.startswith("mesh.") else ()
    called_by_all = {*filter(torch_trace.is_generic, evidence.visited), *about_meshes}
    yield from lines.by_rarity(place for place in evidence.visited if place not in called_by_all)
    yield from lines.by_rarity(place for place in evidence.visited if place in called_by_all)


def _might_refuse(evidence: Evidence, chapter: str) -> list[str]:
    """The functions in a chapter's files that can raise by themselves and did not, the outermost first."""
    return [
        place
        for place, ran in evidence.visited.items()
        if torch_trace.is_in_home(place, chapter) and not torch_trace.raise_lines(place) <= ran
    ]


def _called_anew(place: str, evidence: Evidence, lines: LineCoverage) -> list[str]:
    """The functions that a function called and no holding case did, those that ran most lines first."""
    called = [other for other, by in evidence.callers.items() if place in by and torch_trace.is_candidate(other)]
    return sorted(filter(lines.is_never_in_holding, called), key=lambda other: len(evidence.visited[other]), reverse=True)


def _failed_checks(places: Iterable[str], evidence: Evidence) -> list[str]:
    """Those of these functions that validate something, the last first, without those that others of them call."""
    checks = list(filter(torch_trace.is_check, places))
    return [place for place in reversed(checks) if evidence.callers[place].isdisjoint(checks)]


def _places_of_error(evidence: Evidence, lines: LineCoverage) -> Iterator[str]:
    """Yield the places of an error: the function that raised it, or for an error from below DTensor the op's rule, or the last function
    that does more than pass arguments on."""
    unfinished = [step for step in evidence.steps if not step.completed]
    rules = [place for step in reversed(unfinished) for place in _places_of_step(step, evidence, lines)]
    forward_rules = _rules_of_forward(evidence, unfinished)
    frames = [frame.removeprefix(torch_trace.REFUSED_BY) for frame in reversed(evidence.raised)]
    innermost = frames[0] if frames else ""
    raised_itself = any(frame.startswith(torch_trace.REFUSED_BY) for frame in evidence.raised[-1:])
    # a rule that asks for what an operand cannot be
    yield from (evidence.steps[step.within].rule for step in unfinished if step.missing_dim and step.within is not None)
    if not any(map(torch_trace.plans_op, frames)):  # an op with its own handler is not planned
        yield from (step.rule for step in unfinished if step.rule in frames)
    if any(map(torch_trace.is_redistribution, frames)):  # several steps, and one failed: their order may be wrong
        yield from (step.rule for step in unfinished if step.kind == "move" and len(_placement_calls(step)) > 1)
    if torch_trace.plans_op(innermost):  # no rule: take that of ops with similar names, or of the op whose gradient it is
        yield from (step.similar_rule for step in unfinished)
        yield from forward_rules
        yield from (step.rule for step in unfinished)
    elif torch_trace.selects(innermost):  # no strategy to choose from
        yield from filter(torch_trace.expands_strategies, evidence.visited)
    elif raised_itself and not torch_trace.is_generic(innermost) and not torch_trace.is_redistribution(innermost):
        yield from (place for place in evidence.visited if innermost in evidence.callers[place] and torch_trace.is_check(place))
        yield innermost
    elif not innermost or torch_trace.only_forwards(innermost) or torch_trace.is_redistribution(innermost):
        yield from _places_of_transform(evidence, unfinished)
        decomposed = (torch_trace.plans_decomposition(step.rule) for step in unfinished)
        yield from itertools.compress(forward_rules, decomposed)
        yield from rules
    telling = (frame for frame in frames if torch_trace.identifies_cause(frame) and not torch_trace.only_forwards(frame))
    yield from itertools.islice(telling, 1)
    yield from rules


def _rules_of_forward(evidence: Evidence, steps: Sequence[Step]) -> list[str]:
    """For each of these steps, the rule of the op whose gradient it is; empty where no such op has completed."""
    rules = {step.name.rpartition(".")[0]: step.rule for step in evidence.steps if step.completed and step.kind == "op"}
    return [rules.get(step.name.rpartition(".")[0].removesuffix("_backward"), "") for step in steps]


def _places_of_transform(evidence: Evidence, unfinished: Sequence[Step]) -> Iterator[str]:
    """Yield the places for an op that fails on an argument which a redistribution transformed: the planner if there were several steps, and
    the functions that do the transform."""
    for step in unfinished:
        for inner in (move for move in evidence.steps if move.within is not None and evidence.steps[move.within] is step):
            methods = _placement_calls(inner)
            for method in filter(torch_trace.is_derived_partial, methods):
                yield from [inner.rule] if len(methods) > 1 else []
                yield from (
                    place for place in evidence.visited if torch_trace.is_derived_partial(place) and method in _callers(evidence, place)
                )
                yield method


def _callers(evidence: Evidence, place: str) -> set[str]:
    """The functions that call one, looking through those that only pass arguments on."""
    found = evidence.callers.get(place, frozenset())
    return {outer for by in found for outer in (evidence.callers.get(by, ()) if torch_trace.only_forwards(by) else (by,))} - {place}


def _places_of_step(step: Step, evidence: Evidence, lines: LineCoverage) -> Iterator[str]:
    """Yield the places of a step: functions with lines that only this case ran, then what decided the step."""
    if step.kind == "move":
        methods = _placement_calls(step)
        merged = [call for call in step.calls if torch_trace.MERGES_MOVES.match(call)]
        changes = _count_changed_dims(step)
        yield from merged if len(methods) < changes else [step.rule] if changes > 1 else []
        yield from (place for place in evidence.visited if torch_trace.cuts_shards(place) and lines.runs_new_lines(place))
        yield from methods
        yield step.rule
        yield from merged
        return
    if step.rule.partition(", ")[2] not in {place.partition(", ")[2] for place in evidence.visited}:  # the rule was not asked
        yield from (place for place in evidence.visited if torch_trace.plans_op(place) and step.rule_asked)
        return
    earlier = itertools.takewhile(lambda other: other is not step, evidence.steps)
    if any(other.name == step.name and _layouts(other) == _layouts(step) for other in earlier):
        yield step.rule  # the earlier call was right: what the op's plans are remembered by is given beside its rule
    # an op in place changed its operand, and not what that says of itself; outside of its mesh a tensor is empty and has one dim
    if any(each.local.numel() and len(each.shape) != each.local.ndim for each in traced_tensors(step.results)):
        yield from filter(torch_trace.gives_spec, evidence.visited)
    below = functions_below(evidence, step.rule)
    under = [place for place in below if count_calls(place) <= 1]
    yield from (place for place in lines.by_rarity(under) if lines.is_never_in_holding(place))
    yield from (place for place in under if place in evidence.answered and torch_trace.is_candidate(place))
    yield from [] if step.completed else lines.rarest_finder(under)
    yield from _handed(evidence, step.rule, below)
    yield step.rule
    yield from _delegates(evidence, step.rule, below)
    yield from (place for place in below if 1 < count_calls(place) <= FEW_CALLS and torch_trace.is_candidate(place))


def _repeats_op(evidence: Evidence) -> bool:
    """Whether an op was called twice: the second call may have had the plan of the first."""
    names = [step.name for step in evidence.steps if step.kind == "op"]
    return len(names) != len(set(names))


def _layouts(step: Step) -> list[tuple[object, ...]]:
    """The shapes, meshes and placements of a step's operands."""
    return [(each.shape, each.mesh, each.placements) for each in traced_tensors(step.arguments)]


def _placement_calls(step: Step) -> list[str]:
    """The placement methods that a redistribution called, one for each of its steps."""
    return [call for call in step.calls if "/placement_types.py" in call]


def _count_changed_dims(step: Step) -> int:
    """Along how many mesh dims a completed redistribution changed the placement."""
    if not (isinstance(step.arguments, TracedTensor) and isinstance(step.results, TracedTensor)):
        return 0
    before, after = (parse_placements(piece.placements) if piece.placements else () for piece in (step.arguments, step.results))
    return sum(one != other for one, other in zip(before, after, strict=False))


def functions_below(evidence: Evidence, rule: str) -> list[str]:
    """The traced functions of sharding rules that a rule called, including itself."""
    spot = rule.partition(", ")[2]
    found = [place for place in evidence.visited if place.partition(", ")[2] == spot]
    for place in found:
        found += [each for each, by in evidence.callers.items() if place in by and each not in found and torch_trace.RULES in each]
    return [place for place in found if not torch_trace.is_generic(place)]


def _handed(evidence: Evidence, rule: str, below: Sequence[str]) -> list[str]:
    """The functions that a rule calls without naming them: they were handed to it, and tell its op from others of the same rule. Where a
    table names the rule's ops, it is the table that does."""
    name, _, spot = rule.partition(", ")
    own = {place for place in below if place.partition(", ")[2] == spot and place.startswith(name)}
    called = [place for place in below if not own.isdisjoint(evidence.callers.get(place, ()))]
    lambdas = {place for place in called if place.startswith("<lambda>")}
    called += [place for place in below if not lambdas.isdisjoint(evidence.callers.get(place, ()))]
    named = torch_trace.names_in(rule)
    if not named:  # its source is not known
        return []
    return [place for place in called if torch_trace.is_candidate(place) and place.partition(", ")[0].rpartition(".")[2] not in named]


def _delegates(evidence: Evidence, rule: str, below: Sequence[str]) -> list[str]:
    """The functions whose result a rule returned as its own, the outermost first."""
    found = [rule]
    for place in found:
        returned = {name for line, name in torch_trace.tail_calls(place).items() if line in evidence.visited.get(place, ())}
        found += [each for each in below if each.partition(", ")[0] in returned and each not in found]
    return found[1:]


@cache
def count_calls(place: str) -> int:
    """How often a function is called in its own file."""
    name, _, spot = place.partition(", ")
    call_text = name.rpartition(".")[2] + "("
    source = Path(torch.__file__).parents[1] / spot.rpartition(":")[0]
    try:
        return source.read_text("utf-8").count(call_text) - 1  # without its definition
    except OSError:
        return 0
