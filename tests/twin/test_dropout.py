"""What ranks drop: of the same part the same, of other parts by themselves, each element by its chance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardlaw
from shardlaw.conformance.twin.align import TensorComparison
from shardlaw.conformance.twin.comparison import RunComparison
from shardlaw.conformance.twin.dropout import compare_dropout
from shardlaw.conformance.twin.record import Key, LocalTensor
from shardlaw.conformance.twin.spec import Plan, find_make
from shardlaw.conformance.twin.steps import RankRun
from shardlaw.reference.placement import Placements, Replicate, Shard

FILE = Path(__file__).parents[2] / "examples" / "twins" / "dropout.py"
PLAN = Plan(find_make(f"{FILE}:make"), {}, {"tp": 2}, {})
WHOLE: Placements = (Replicate(),)
X, DROPS = torch.arange(200.0) + 1, torch.arange(200) % 4 == 0


def said(*ranks: torch.Tensor, lies: Placements = WHOLE, grads: torch.Tensor | None = None, claim: str = "") -> str:
    """What is said of outputs of a dropout of a quarter, whose input is ``X`` on every rank."""
    out, into = Key(0, "forward", "drop", "output 0"), Key(0, "forward", "drop", "input 0")
    parts = []
    for y in ranks:
        pieces = {into: LocalTensor(X, placements=claim), out: LocalTensor(y, placements=claim)}
        if grads is not None:
            pieces |= {
                Key(0, "backward", "drop", "output 0"): LocalTensor(torch.ones(200)),
                Key(0, "backward", "drop", "input 0"): LocalTensor(grads),
            }
        parts.append(RankRun(pieces, (), {"drop": 0.25}))
    calm = RunComparison(PLAN, (TensorComparison(out, 0.0, 0.0, "", placements=lies),))
    result = compare_dropout(PLAN, calm, parts)
    assert len(result.judged) == 1
    assert result.departs == bool(result.judged[0].word)
    return result.judged[0].word


def dropped(what: torch.Tensor) -> torch.Tensor:
    return X.masked_fill(what, 0) / 0.75


def test_replicas_that_drop_the_same_hold_and_others_do_not() -> None:
    assert said(dropped(DROPS), dropped(DROPS)) == ""
    assert "ranks 0 and 1 hold the same part" in said(dropped(DROPS), dropped(DROPS.roll(1)))


def test_shards_that_drop_the_same_repeat_one_another() -> None:
    assert said(dropped(DROPS), dropped(DROPS.roll(1)), lies=(Shard(0),)) == ""
    assert "draw the same numbers" in said(dropped(DROPS), dropped(DROPS), lies=(Shard(0),))
    assert said(dropped(DROPS), dropped(DROPS), lies=(Shard(0),), claim="S(0)") == ""  # torch promises nothing there


def test_elements_are_zero_or_scaled_and_as_many_as_chance_allows() -> None:
    assert "neither zero nor 1.33333 times" in said(dropped(DROPS) * 0.75, dropped(DROPS))
    nothing = torch.zeros(200, dtype=torch.bool)
    assert "0 of 200 elements are dropped" in said(dropped(nothing), dropped(nothing))


def test_backward_drops_what_forward_dropped() -> None:
    right = torch.ones(200).masked_fill(DROPS, 0) / 0.75
    assert said(dropped(DROPS), dropped(DROPS), grads=right) == ""
    assert "backward does not drop" in said(dropped(DROPS), dropped(DROPS), grads=right.roll(1))


@pytest.mark.ranks
@pytest.mark.parametrize(("fault", "path", "word"), [("", "", ""), ("shared", "inner", "same numbers"), ("apart", "outer", "same part")])
def test_seeds_that_are_shared_or_not_are_found(fault: str, path: str, word: str) -> None:
    result = shardlaw.twin(f"{FILE}:make", options={"fault": fault}, values=("float32",), dropout=True)
    assert [one.departs for one in result.compared] == [False, bool(fault)]
    assert len(result.compared[1].judged) == 2
    if result.departure is not None:
        assert result.departure.path == path
        assert word in result.departure.judged.word
