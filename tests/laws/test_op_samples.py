"""The laws of ops that come from OpInfo: what is read of a sample, and what their cases say."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools

import pytest
import torch

from shardlaw.conformance.compat import TorchMovedError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.program.fields import operands_of
from shardlaw.conformance.law.program.parse import Program
from shardlaw.conformance.law.script import ScriptError
from shardlaw.conformance.laws.op import opinfo
from shardlaw.conformance.laws.op.backward import flatten
from shardlaw.conformance.laws.op.opinfo_laws import LAWS, narrow_cases
from shardlaw.conformance.laws.op.results import dense_operands
from shardlaw.conformance.report.reproducer import render_reproducer
from shardlaw.conformance.run.search import Plan, draw
from shardlaw.conformance.run.state import LawResult
from shardlaw.strategies.op_catalogue import OPS
from shardlaw.strategies.op_sweep import Sweep, combination, combination_count

FORWARD = [law for law in LAWS if law.name == "op.forward"]
BACKWARD = [law for law in LAWS if law.name == "op.backward"]
SOME = [law for at, law in enumerate(LAWS) if at % 40 == 0]


def test_there_are_laws() -> None:
    assert len(FORWARD) >= 300
    assert len(BACKWARD) >= 180
    assert not {law.variant for law in FORWARD} & set(OPS)


@pytest.mark.parametrize("law", SOME, ids=lambda law: law.id)
def test_cases_of_samples_read_back_and_run_plain(law: Law) -> None:
    assert law.sweep is not None
    cases = law.sweep(Limits())[:12]
    assert len({case.text for case in cases}) > 3
    assert any("sample" in case for case in cases)
    for case in cases:
        assert Case.parse(case.text) == case
        steps = Program.parse(case.get("steps"))
        assert str(steps) == case.get("steps")
        steps.run_plain(dense_operands(operands_of(case)))
    small = [case for case in cases if sum(x.numel() for x in dense_operands(operands_of(case)).values()) <= 12]
    for case in small[:2]:
        with contextlib.suppress(ScriptError):  # a pool of few elements may be large when it is undone
            text = render_reproducer(law, case)
            ast.parse(text)
            assert "shardlaw" not in text


def test_a_smoke_run_needs_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opinfo, "read", lambda name: pytest.fail(f"samples of {name} are read"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    taken: list[Case] = []
    for law in FORWARD[:40]:
        Plan.for_law(law, Limits(), 1, "smoke").feed(lambda case, drawn: taken.append(case))
    assert len(taken) == 40
    opinfo.database.cache_clear()
    with pytest.raises(TorchMovedError, match="expecttest"):
        opinfo.database()


def test_narrowed_cases_are_no_larger() -> None:
    case = Case.parse("op.forward[addr] mesh=2x2 a=5x4:S(0),R b=5:S(0),R c=4:R,S(0) steps=addr(a,b,c)")
    near: list[Case] = []
    draw(narrow_cases(case), 1, 40, near.append)
    assert all(max(one.tensor("b").shape) <= 5 and one.tensor("a").shape[0] == one.tensor("b").shape[0] for one in near)
    assert len({one.text for one in near}) > 10


def test_what_is_read_is_settled() -> None:
    """Plain results of what is taken are finite and the same twice; what is random, left out or not claimed is not taken."""
    for name in ("addr", "nn.functional.glu", "linalg.solve"):
        found = opinfo.read(name)
        assert found.variants
        assert found.gradients
        for variant in found.variants:
            one, other = (list(flatten(Program.parse(variant.call).run_plain(opinfo.build_tensors(variant, 3))[-1])) for _ in "ab")
            assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))
            assert all(value.isfinite().all() for value in one)
    assert opinfo.read("bernoulli").reason == "its result is random"
    assert opinfo.read("empty_like").reason == opinfo.UNINITIALISED
    assert opinfo.read("nonzero").reason.startswith("not claimed: aten.nonzero")
    assert opinfo.read("nonesuch").reason == "the installed torch has no such OpInfo"


def test_every_two_placements_of_every_two_arguments_meet() -> None:
    for sizes in ((2, 3), (4, 4, 4), (5, 9, 7, 2), (3,) * 6):
        choices = [tuple(range(100 * at, 100 * at + size)) for at, size in enumerate(sizes)]
        met = {pair for index in range(combination_count(choices)) for pair in itertools.combinations(combination(choices, index), 2)}  # type: ignore[arg-type]
        due = {pair for one, other in itertools.combinations(choices, 2) for pair in itertools.product(one, other)}
        assert met == due
    sweep = Sweep(OPS["addcmul"])
    assert len(sweep) < sweep.combinations


def test_a_law_of_which_every_case_is_refused_does_not_hold() -> None:
    refused, mixed = LawResult(LAWS[0], cases=3, refused=3), LawResult(LAWS[0], cases=3, refused=2)
    refused.conclude([])
    mixed.conclude([])
    assert refused.outcome == "untested"
    assert refused.reason is not None
    assert refused.reason.startswith("unsupported")
    assert mixed.outcome == "held"
