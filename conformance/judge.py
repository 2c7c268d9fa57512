"""From the answers of all ranks to one verdict. The kinds are tried in a fixed order; the first that applies is it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from conformance.case import Case
from conformance.here import close, show
from conformance.law import Law
from conformance.target import Target
from conformance.verdict import KINDS, Answer, Deposit, Deviation, Kind, Verdict
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import parse_shape
from reference.placement import parse_placements
from reference.simulate import assemble_replicas

# An error is a refusal when it says, in the words of the field, what is not possible.
REFUSAL_CLASSES = ("NotImplementedError", "RuntimeError", "ValueError", "TypeError", "AssertionError", "IndexError")
REFUSAL_WORDS = (
    "shard",
    "placement",
    "dtensor",
    "partial",
    "redistribut",
    "mesh",
    "strateg",
    "replicat",
    "uneven",
    "not supported",
    "not implemented",
)
# A plan that stumbles is reported with the words of the field behind what it stumbled over.
STUMBLES = ("tuple index out of range", "list index out of range", "'NoneType' object", "object has no attribute", "unhashable type")


def judge(law: Law, case: Case, answers: Sequence[Answer], target: Target) -> Verdict:
    """The verdict on ``case``; ``answers`` holds one for every rank of the world, in order of rank."""
    features = tuple(sorted({feature for answer in answers for feature in answer.features}))

    def deviates(kind: Kind, check: str, message: str, error: str = "") -> Verdict:
        return Verdict(case, "deviates", kind, check, message, error, tuple(answers), features)

    outcomes = {answer.outcome for answer in answers}
    if "crashed" in outcomes:
        dead = next(answer for answer in answers if answer.outcome == "crashed")
        return deviates("crash", "process", f"rank {dead.rank} ended by itself: {dead.reason}", dead.reason)
    if outcomes == {"silent"}:
        return deviates("hang", "process", "no rank answered within the limit")
    if "silent" in outcomes:
        said = next(answer for answer in answers if answer.outcome != "silent")
        waiting = [answer.rank for answer in answers if answer.outcome == "silent"]
        message = f"rank {said.rank} {_outcome(said)} while ranks {waiting} still waited"
        return deviates("divergence", "process", message, _error(said))
    if len(outcomes) > 1 and outcomes & {"raised", "rejected"}:
        message = "; ".join(f"rank {answer.rank} {_outcome(answer)}" for answer in answers)
        raised = next((answer for answer in answers if answer.outcome == "raised"), answers[0])
        return deviates("divergence", "outcome", message, _error(raised))
    if outcomes == {"rejected"}:
        return Verdict(case, "rejected", message=answers[0].reason, features=features)
    if outcomes == {"raised"}:
        errors = {answer.raised.error for answer in answers if answer.raised}
        first = answers[0].raised
        assert first is not None
        if len(errors) > 1:
            message = "; ".join(f"rank {answer.rank} {_outcome(answer)}" for answer in answers)
            return deviates("divergence", "error", message, _error(answers[0]))
        if law.refusal == "allowed" and is_refusal(first.error, first.text):
            return Verdict(case, "refused", message=f"{first.error}: {first.text}", error=_error(answers[0]), features=features)
        return deviates("raised", "error", f"every rank raised {first.error}: {first.text}", _error(answers[0]))
    worst = _worst(answers)
    if worst is not None:
        rank, deviation = worst
        # of a wrong refusal, what follows the words for what was attempted is the error
        error = re.split(": (?:must be )?refused,? ", deviation.message, maxsplit=1)[-1] if deviation.kind == "wrong-error" else ""
        return deviates(deviation.kind, deviation.check, f"rank {rank}: {deviation.message}", error)
    for at in range(len(max((answer.deposits for answer in answers), key=len))):
        found = _judge_deposits([answer.deposits[at : at + 1] for answer in answers], target)
        if found is not None:
            return Verdict(case, "deviates", found.kind, found.check, found.message, "", tuple(_told(answers, found)), features)
    return Verdict(case, "held", features=features)


def is_refusal(error: str, text: str) -> bool:
    """Whether an exception says that sharding this is not possible, instead of stumbling over it."""
    if text.startswith(STUMBLES[:2]) or any(words in text.partition("Sharding propagation failed")[0] for words in STUMBLES[2:]):
        return False
    return error == "NotImplementedError" or (error in REFUSAL_CLASSES and any(word in text.lower() for word in REFUSAL_WORDS))


def _outcome(answer: Answer) -> str:
    if answer.raised is not None:
        return f"raised {answer.raised.error}: {answer.raised.text.strip().splitlines()[0] if answer.raised.text.strip() else '(no text)'}"
    return {"held": "answered", "deviates": "answered", "rejected": "rejected the case", "silent": "waited"}.get(
        answer.outcome, answer.outcome
    )


def _error(answer: Answer) -> str:
    return f"{answer.raised.error}: {answer.raised.text}" if answer.raised else ""


def _worst(answers: Sequence[Answer]) -> tuple[int, Deviation] | None:
    found = [(answer.rank, deviation) for answer in answers for deviation in answer.deviations[:1]]
    return min(found, key=lambda item: (KINDS.index(item[1].kind), item[0]), default=None)


def _judge_deposits(column: Sequence[tuple[Deposit, ...]], target: Target) -> Deviation | None:
    """The contributions that all ranks hold of one tensor, reduced and compared with what they must denote."""
    deposits = {rank: deposit for rank, (deposit, *_) in ((r, d) for r, d in enumerate(column) if d)}
    first = next(iter(deposits.values()))
    claims = {(deposit.shape, deposit.mesh, deposit.placements) for deposit in deposits.values()}
    if len(claims) > 1:
        return Deviation("divergence", first.check, f"ranks claim different layouts: {sorted(' '.join(claim) for claim in claims)}")
    layout = Layout(parse_shape(first.shape), Mesh.parse(first.mesh), parse_placements(first.placements))
    want = next((deposit.want for deposit in deposits.values() if deposit.want is not None), None)
    if want is None:
        return None
    world = {coord: deposits[layout.mesh.rank_at(coord)].local for coord in layout.mesh.coords()}
    tolerance = None if first.exact else target.tolerance
    got = next((full for full in assemble_replicas(world, layout).values() if not close(full, want, tolerance)), None)
    if got is None:
        return None
    message = f"the contributions under {first.placements} reduce to other elements than they must"
    if not layout.has_partial():
        message = "ranks that must hold the same hold different elements"
    return Deviation("wrong-value", first.check, message, show(want), show(got))


def _told(answers: Sequence[Answer], found: Deviation) -> list[Answer]:
    """The answers, each with what its rank contributed to the deviation that the driver found."""
    from dataclasses import replace

    return [
        replace(
            answer,
            outcome="deviates",
            deviations=(replace(found, got=f"{found.got}; rank {answer.rank} contributed {show(answer.deposits[0].local)}"),),
        )
        if answer.deposits
        else answer
        for answer in answers
    ]
