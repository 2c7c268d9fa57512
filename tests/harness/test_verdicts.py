"""What counts as a refusal, and what is made of the answers of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.refusal import is_refusal
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Deposit, Deviation, Raised, Verdict, error_pattern
from shardlaw.conformance.world.verdicts import combine_answers, strip_stacks

PLANNED = "Sharding propagation failed for aten.index.Tensor(Spec(f32[5, 4](R)))"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("NotImplementedError", ""),
        ("RuntimeError", "Cannot flatten unevenly sharded tensor"),
        ("RuntimeError", f"Cannot unflatten unevenly sharded tensor: dimension 0. {PLANNED}"),
        ("ValueError", "Mixed Partial reduce types are not supported"),
        ("AssertionError", "Redistribution from one partial type (sum) to another (max) is unsupported."),
    ],
)
def test_refusals_speak_of_sharding(error: str, text: str) -> None:
    assert is_refusal(error, text)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("RuntimeError", "shape '[8]' is invalid for input of size 10"),
        ("KeyError", "shard"),
        ("AssertionError", "aten.convolution_backward.default: strategy position 1 mixes None with placements across mesh dims"),
        ("RuntimeError", f"tuple index out of range\n\n{PLANNED}"),
        ("RuntimeError", f"list index out of range {PLANNED}"),
        ("RuntimeError", f"'NoneType' object is not iterable {PLANNED}"),
        ("RuntimeError", f"'Replicate' object has no attribute 'dim' {PLANNED}"),
    ],
)
def test_plans_that_stumble_are_none(error: str, text: str) -> None:
    assert not is_refusal(error, text)


HELD, REJECTED = Answer(0, "held"), Answer(0, "rejected", reason="it means nothing")
RAISED = Answer(0, "raised", raised=Raised("RuntimeError", "no", ""))
WRONG = Answer(0, "deviates", deviations=(Deviation("wrong-value", "a", "another value"),))


def of_ranks(*answers: Answer) -> Verdict:
    law = Law("mesh.x", "A clause.", "docs", "mesh.x mesh=2", lambda case, here: None)
    return combine_answers(law, Case.parse("mesh.x mesh=2"), [replace(answer, rank=rank) for rank, answer in enumerate(answers)], Target())


@pytest.mark.parametrize("answers", [(REJECTED, REJECTED), (REJECTED, HELD, REJECTED), (HELD, REJECTED)])
def test_what_a_rank_rejects_while_others_hold_is_rejected(answers: tuple[Answer, ...]) -> None:
    verdict = of_ranks(*answers)
    assert (verdict.status, verdict.message) == ("rejected", "it means nothing")


def test_who_does_not_act_has_nothing_to_refuse() -> None:
    law = Law("mesh.x", "A clause.", "docs", "mesh.x mesh=2", lambda case, here: None, members=True, refusal="allowed")
    refused = Answer(0, "raised", raised=Raised("NotImplementedError", "no float8", ""))
    for mesh, held, status in (("2@0,2", 1, "refused"), ("2@0,1", 2, "refused"), ("2@0,2", 2, "deviates")):
        answers = [replace(HELD if rank == held else refused, rank=rank) for rank in range(3)]
        assert combine_answers(law, Case.parse(f"mesh.x mesh={mesh}"), answers, Target()).status == status


@pytest.mark.parametrize("answers", [(RAISED, HELD), (HELD, RAISED, HELD), (REJECTED, RAISED), (REJECTED, WRONG), (RAISED, WRONG)])
def test_ranks_that_part_are_a_divergence(answers: tuple[Answer, ...]) -> None:
    verdict = of_ranks(*answers)
    assert (verdict.status, verdict.kind, verdict.check) == ("deviates", "divergence", "outcome")


def test_who_raised_is_named_before_who_only_answered() -> None:
    verdict = of_ranks(HELD, RAISED, Answer(2, "silent"))
    assert (verdict.kind, verdict.check) == ("divergence", "process")
    assert verdict.message.startswith("rank 1 raised")
    assert verdict.error


def deposit(check: str, local: torch.Tensor, want: torch.Tensor | None) -> Deposit:
    return Deposit(check, "2", "2", "P(sum)", local, want, True)


def judged(*ranks: Sequence[Deposit]) -> Verdict:
    answers = [Answer(rank, "held", deposits=tuple(deposits)) for rank, deposits in enumerate(ranks)]
    law = Law("mesh.x", "A clause.", "docs", "mesh.x mesh=2", lambda case, here: None)
    return combine_answers(law, Case.parse("mesh.x mesh=2"), answers, Target())


def test_contributions_belong_together_by_their_check() -> None:
    one, want = torch.ones(2), torch.tensor([2.0, 2.0])
    held = judged([deposit("a", one, want), deposit("b", one, want)], [deposit("b", one, None), deposit("a", one, None)])
    assert held.status == "held"
    wrong = judged([deposit("a", one, want), deposit("b", one, want)], [deposit("b", 2 * one, None), deposit("a", one, None)])
    assert (wrong.kind, wrong.check) == ("wrong-value", "b")
    assert "rank 1 contributed [2.0, 2.0]" in wrong.ranks[1].deviations[0].got


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("exact", [True, False])
def test_a_claimed_average_of_what_has_none_is_judged_by_its_values(dtype: torch.dtype, exact: bool) -> None:
    first, second = torch.tensor([1, 0], dtype=dtype), torch.tensor([1, 1], dtype=dtype)
    parts = (replace(deposit("a", part, want), placements="P(avg)", exact=exact) for part, want in ((first, first), (second, None)))
    assert judged(*([part] for part in parts)).kind == "wrong-value"


@pytest.mark.parametrize(("off", "status"), [(1e-10, "held"), (1e-2, "deviates")])
def test_contributions_are_compared_in_the_dtype_that_they_were_computed_in(off: float, status: str) -> None:
    want, parts = torch.full((2,), 0.1), (torch.full((2,), 2.0 + off, dtype=torch.float64), torch.full((2,), -1.9, dtype=torch.float64))
    first, second = (replace(deposit("a", part, known), exact=False) for part, known in zip(parts, (want, None), strict=True))
    assert judged([first], [second]).status == status


def test_a_rank_without_its_contribution_is_a_divergence() -> None:
    verdict = judged([deposit("a", torch.ones(2), torch.ones(2))], [])
    assert (verdict.kind, verdict.message) == ("divergence", "rank 1: ranks [1] hold nothing to compare of a, the others do")


def test_the_rank_that_holds_another_replica_is_named() -> None:
    replicas = [
        Deposit("a", "2", "3", "R", torch.ones(2) * (1 + (rank == 2)), torch.ones(2) if rank == 0 else None, True) for rank in range(3)
    ]
    assert judged(*([one] for one in replicas)).message == "rank 2: holds other elements than the ranks that must hold the same"


def test_an_error_that_quotes_every_ranks_stack_is_told_once() -> None:
    stack = "Traceback (most recent call last): (RANK 0)\n  File \"a.py\", line 1, in f\nKeyError: 'x'\n"
    text = f"read: KeyError: 'x'\nranks [0]; rank 0:\nCheckpointException ranks:dict_keys([0])\n{stack}"
    assert strip_stacks(text) == "read: KeyError: 'x'; ranks [0]; rank 0:"
    assert strip_stacks("no\n  stack") == "no\n  stack"


def test_an_error_of_the_harness_is_no_finding() -> None:
    answers = [Answer(0, "raised", raised=Raised("HarnessError", "NameError: no such name", "the stack")), Answer(1, "held")]
    law = Law("mesh.x", "A clause.", "docs", "mesh.x mesh=2", lambda case, here: None)
    verdict = combine_answers(law, Case.parse("mesh.x mesh=2"), answers, Target())
    assert (verdict.status, verdict.kind, verdict.error) == ("error", None, "the stack")


def test_what_torch_says_of_every_failed_plan_makes_no_refusal() -> None:
    assert not is_refusal("RuntimeError", "Found a custom value 5\n\nSharding propagation failed for Op(mean)")
    assert is_refusal("RuntimeError", "dim 0 is sharded\n\nSharding propagation failed for Op(mean)")


def test_a_control_that_is_refused_is_a_loss() -> None:
    raised = Raised("NotImplementedError", "no strategy for this", "")
    law = Law("mesh.x", "A clause.", "docs", "mesh.x mesh=2", lambda case, here: None, refusal="allowed")
    control, other = (
        combine_answers(law, Case.parse(text), [Answer(0, "raised", raised=raised)], Target()) for text in (law.control, "mesh.x mesh=3")
    )
    assert (control.kind, control.check) == ("raised", "refused-now")
    assert other.status == "refused"
    for allowed in ("allowed", lambda case, text: "no strategy" in text):
        early = replace(law, refusal=allowed).for_earlier_release()
        assert combine_answers(early, Case.parse(law.control), [Answer(0, "raised", raised=raised)], Target()).status == "refused"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("RuntimeError: \n    [Stage 0] failed to run forward:\n    args: ()", "RuntimeError: _ failed to run forward:"),
        ("AssertionError: ", "AssertionError:"),
        ("ValueError: dim 3 of 2\nand more", "ValueError: dim # of #"),
    ],
)
def test_an_error_is_told_by_its_first_line_that_says_more_than_its_class(text: str, pattern: str) -> None:
    assert error_pattern(text) == pattern
