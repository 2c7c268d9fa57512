"""Combine the answers of all ranks into one verdict. Kinds are tried in a fixed order, and the first that applies is taken."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import EarlyRefusal, Law
from shardlaw.conformance.law.refusal import is_refusal
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import KINDS, Answer, Deposit, Deviation, HarnessError, Kind, Verdict
from shardlaw.conformance.rank.context import describe_value, is_close
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import parse_shape
from shardlaw.reference.placement import Partial, parse_placements
from shardlaw.reference.simulate import assemble_replicas

# the check named by a verdict when something is refused that must be supported
REFUSED_NOW = "refused-now"


def combine_answers(law: Law, case: Case, answers: Sequence[Answer], target: Target, stage: int = 0) -> Verdict:
    """The verdict on one ``stage`` of ``case``. ``answers`` holds one answer for each rank of the world, in order of rank."""
    held = Verdict(case, "held", features=tuple(sorted({feature for answer in answers for feature in answer.features})))
    unfinished = _judge_unfinished(held, answers)
    if unfinished is not None:
        return unfinished
    members = law.member_ranks(case, stage) if len({answer.outcome for answer in answers}) > 1 else None
    # ranks that take no part refuse nothing
    acting = answers if members is None else [answer for answer in answers if answer.rank in members or answer.outcome != "held"]
    return (
        _judge_outcomes(held, answers, acting)
        or _judge_errors(held, answers, acting, law)
        or _judge_deviations(held, answers)
        or _judge_deposits(held, answers, target)
        or held
    )


def _deviates(held: Verdict, answers: Sequence[Answer], kind: Kind, check: str, message: str, error: str = "") -> Verdict:
    return replace(held, status="deviates", kind=kind, check=check, message=message, error=error, ranks=tuple(answers))


def _judge_unfinished(held: Verdict, answers: Sequence[Answer]) -> Verdict | None:
    """The verdict where the harness failed, or ranks crashed or did not answer."""
    broken = next((answer.raised for answer in answers if answer.raised and answer.raised.error == HarnessError.__name__), None)
    if broken is not None:
        return Verdict(held.case, "error", message=broken.text, error=broken.stack, ranks=tuple(answers))
    dead = next((answer for answer in answers if answer.outcome == "crashed"), None)
    if dead is not None:
        return _deviates(held, answers, "crash", "process", f"rank {dead.rank} ended by itself: {dead.reason}", dead.reason)
    waiting = [answer.rank for answer in answers if answer.outcome == "silent"]
    if not waiting:
        return None
    if len(waiting) == len(answers):
        return _deviates(held, answers, "hang", "process", "no rank answered within the limit")
    loudest = min((answer for answer in answers if answer.outcome != "silent"), key=lambda answer: answer.outcome == "held")
    message = f"rank {loudest.rank} {_describe_outcome(loudest)} while ranks {waiting} still waited"
    return _deviates(held, answers, "divergence", "process", message, _error_text(loudest))


def _judge_outcomes(held: Verdict, answers: Sequence[Answer], acting: Sequence[Answer]) -> Verdict | None:
    """The verdict where ranks rejected the case, or only some of them raised."""
    outcomes = {answer.outcome for answer in acting}
    if "rejected" in outcomes and outcomes <= {"rejected", "held"}:  # ranks that take no part reject nothing
        return replace(held, status="rejected", message=next(answer.reason for answer in answers if answer.outcome == "rejected"))
    if len(outcomes) == 1 or outcomes.isdisjoint({"raised", "rejected"}):
        return None
    raised = next((answer for answer in answers if answer.outcome == "raised"), answers[0])
    return _deviates(held, answers, "divergence", "outcome", _describe_outcomes(answers), _error_text(raised))


def _judge_errors(held: Verdict, answers: Sequence[Answer], acting: Sequence[Answer], law: Law) -> Verdict | None:
    """The verdict where every rank raised: the case is refused, or the error is a deviation."""
    first = acting[0]
    if first.outcome != "raised":
        return None
    assert first.raised is not None
    error, text = first.raised.error, first.raised.text
    if any(answer.raised and answer.raised.error != error for answer in acting):
        return _deviates(held, answers, "divergence", "error", _describe_outcomes(acting), _error_text(first))
    if not (is_refusal(error, text) and may_refuse(law, held.case, text)):
        return _deviates(held, answers, "raised", "error", f"every rank raised {error}: {strip_stacks(text)}", _error_text(first))
    lost = ""
    if held.case.text == law.control and not isinstance(law.refusal, EarlyRefusal):
        lost = "the law's control, which must hold,"
    elif law.refusal == "lost":
        lost = "a case of a law of which earlier releases refuse no case"
    if lost:
        return _deviates(held, answers, "raised", REFUSED_NOW, f"{lost} is refused by every rank: {error}: {text}", _error_text(first))
    return replace(held, status="refused", message=f"{error}: {text}", error=_error_text(first))


def _judge_deviations(held: Verdict, answers: Sequence[Answer]) -> Verdict | None:
    """The verdict where a rank recorded a deviation: the most severe one."""
    found = [(answer.rank, deviation) for answer in answers for deviation in answer.deviations[:1]]
    if not found:
        return None
    rank, worst = min(found, key=lambda item: (KINDS.index(item[1].kind), item[0]))
    return _deviates(held, answers, worst.kind, worst.check, f"rank {rank}: {worst.message}", _quoted_error(worst))


def _judge_deposits(held: Verdict, answers: Sequence[Answer], target: Target) -> Verdict | None:
    """The verdict where what ranks contributed does not reduce to what is due."""
    for column in _group_deposits(answers):
        found = _compare_deposits(column, target)
        if found is not None:
            rank, wrong = found
            message = wrong.message if rank is None else f"rank {rank}: {wrong.message}"
            return _deviates(held, _with_contributions(answers, column, wrong), wrong.kind, wrong.check, message)
    return None


def may_refuse(law: Law, case: Case, text: str) -> bool:
    """Whether the law allows its case to be refused with this error text."""
    return law.refusal(case, text) if callable(law.refusal) else law.refusal != "never"


def strip_stacks(text: str) -> str:
    """The text of an error without the stacks of other ranks, which torch quotes. Each error that they raised stays, once."""
    if "Traceback (most recent call last)" not in text:
        return text
    errors: list[str] = []
    for line in filter(None, text.splitlines()):
        if not line.startswith((" ", "\t", "Traceback", "CheckpointException ranks:")) and not any(line in other for other in errors):
            errors.append(line)
    return "; ".join(errors)


def _describe_outcome(answer: Answer) -> str:
    if answer.raised is not None:
        return f"raised {answer.raised.error}: {answer.raised.text.strip().splitlines()[0] if answer.raised.text.strip() else '(no text)'}"
    return {"held": "answered", "deviates": "answered", "rejected": "rejected the case", "silent": "waited"}.get(
        answer.outcome, answer.outcome
    )


def _describe_outcomes(answers: Sequence[Answer]) -> str:
    return "; ".join(f"rank {answer.rank} {_describe_outcome(answer)}" for answer in answers)


def _error_text(answer: Answer) -> str:
    return f"{answer.raised.error}: {answer.raised.text}" if answer.raised else ""


def _quoted_error(deviation: Deviation) -> str:
    """The error that a deviation's message quotes: what follows ``refused`` or ``raised``; empty for other kinds."""
    before = {"wrong-error": ": (?:must be )?refused,? ", "raised": ": raised "}.get(deviation.kind)
    return re.split(before, deviation.message, maxsplit=1)[-1] if before else ""


def _group_deposits(answers: Sequence[Answer]) -> list[dict[int, Deposit]]:
    """Deposits by rank, one group for each check. Where ranks make several deposits for a check, the n-th ones form a group."""
    columns: dict[tuple[str, int], dict[int, Deposit]] = {}
    for answer in answers:
        seen: Counter[str] = Counter()
        for deposit in answer.deposits:
            columns.setdefault((deposit.check, seen[deposit.check]), {})[answer.rank] = deposit
            seen[deposit.check] += 1
    return list(columns.values())


def _compare_deposits(deposits: Mapping[int, Deposit], target: Target) -> tuple[int | None, Deviation] | None:
    """Reduce the contributions of all ranks to one tensor, and compare the result with the expected one.

    Returns ``None`` where they agree, else the first rank that differs (``None`` where ranks contradict one another) and the deviation.
    """
    first = next(iter(deposits.values()))
    claims = {(deposit.shape, deposit.mesh, deposit.placements) for deposit in deposits.values()}
    if len(claims) > 1:
        layouts = sorted(" ".join(claim) for claim in claims)
        return None, Deviation("divergence", first.check, f"ranks claim different layouts: {layouts}")
    layout = Layout(parse_shape(first.shape), Mesh.parse(first.mesh), parse_placements(first.placements))
    want = next((deposit.want for deposit in deposits.values() if deposit.want is not None), None)
    if want is None:
        return None
    missing = sorted(set(layout.mesh.ranks) - set(deposits))
    if missing:
        message = f"ranks {missing} hold nothing to compare of {first.check}, the others do"
        return missing[0], Deviation("divergence", first.check, message)
    unordered = [str(placement) for placement in layout.placements if placement in (Partial("max"), Partial("min"))]
    if unordered and want.is_complex():
        message = f"claims {unordered[0]} of complex numbers, which have no order"
        return None, Deviation("wrong-layout", first.check, message)
    world = {coord: deposits[layout.mesh.rank_at(coord)].local for coord in layout.mesh.coords()}
    tolerance = None if first.exact else target.tolerance
    computed = want.dtype if want.dtype != first.local.dtype else None  # the result was computed in this dtype, then cast
    for coord, got in assemble_replicas(world, layout).items():
        if not is_close(got.to(computed or got.dtype), want, tolerance):
            message = f"the contributions under {first.placements} reduce to other elements than they must"
            if not layout.has_partial():
                message = "holds other elements than the ranks that must hold the same"
            return layout.mesh.rank_at(coord), Deviation("wrong-value", first.check, message, describe_value(want), describe_value(got))
    return None


def _with_contributions(answers: Sequence[Answer], column: Mapping[int, Deposit], found: Deviation) -> list[Answer]:
    """The answers; each rank's contribution is added to the deviation that the driver found."""
    return [
        replace(
            answer,
            outcome="deviates",
            deviations=(replace(found, got=f"{found.got}; rank {answer.rank} contributed {describe_value(column[answer.rank].local)}"),),
        )
        if answer.rank in column
        else answer
        for answer in answers
    ]
