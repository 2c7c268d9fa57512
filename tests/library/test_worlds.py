"""Live ranks for people's own functions and laws: what comes back, and what is said of ranks that do not come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from shardlaw import Case, DeviationError, Law, Target, UsageError, Worlds, check, close, explain
from shardlaw.conformance.api import parse_marker
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Shard
from tests.library import spmd_functions as functions

pytestmark = pytest.mark.ranks

TWO = Law(
    id="mine.two",
    clause="There are two ranks.",
    source="tests",
    check=functions.check_two,
    control="mine.two world=2",
    draw=lambda limits: st.just(Case.of("mine.two", world=2)),
    draws=1,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Worlds]:
    with Worlds(timeout=3) as made:
        yield made


def test_a_function_gives_what_it_returns_on_each_rank(ranks: Worlds) -> None:
    answers = ranks(3).run(functions.total, torch.tensor([1, 2]), scale=10)
    assert [answer["rank"] for answer in answers] == [0, 1, 2]
    assert [answer["sum"].tolist() for answer in answers] == [[33, 63]] * 3
    assert ranks.run("tests.library.spmd_functions:late") == [0, 1]


def test_a_rank_stands_where_the_reference_says(ranks: Worlds) -> None:
    layout = Layout((5, 2), Mesh((3,), (2, 0, 3)), (Shard(0),))
    held = ranks(4).run(functions.held, layout)
    assert [local.tolist() for local in held] == [[[4.0, 5.0], [6.0, 7.0]], [], [[0.0, 1.0], [2.0, 3.0]], [[8.0, 9.0]]]


def test_a_rank_that_raises_is_told_with_every_stack(ranks: Worlds) -> None:
    with pytest.raises(DeviationError) as failed:
        ranks(3).run(functions.one_raises)
    text = str(failed.value)
    assert failed.value.verdict.kind == "divergence"
    assert "rank 1 raised ValueError: the odd one\n" in text
    assert 'raise ValueError("the odd one")' in text
    assert "rank 0 did not answer" in text
    assert text.count("in one_raises") == 3
    assert "| on rank 1" in text
    assert "/conformance/world/" not in text
    assert ranks(3).run(functions.late) == [0, 1, 2]


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (functions.all_wait, "hang", "no rank answered within the limit"),
        (functions.dies, "crash", "rank 1 ended by itself: exit code 3"),
        (functions.other_value, "wrong-value", "rank 1: local tensor holds other elements than it must: 2 of 2, by up to 1"),
    ],
)
def test_what_goes_wrong_is_a_verdict_and_the_next_call_is_served(ranks: Worlds, function: object, kind: str, said: str) -> None:
    outcome = ranks.judge(function)  # type: ignore[arg-type]
    assert (outcome.verdict.status, outcome.verdict.kind, outcome.verdict.message) == ("deviates", kind, said)
    assert f"{kind} (" in explain(outcome.verdict, ranks.target)
    assert outcome.verdict.case.text == f"spmd.call world=2 function=tests.library.spmd_functions:{function.__name__}"  # type: ignore[attr-defined]
    assert ranks.run(functions.late) == [0, 1]


def test_what_cannot_travel_is_refused(ranks: Worlds) -> None:
    layout = Layout((4,), Mesh.of(2), (Shard(0),))
    with pytest.raises(DeviationError, match="TypeError: a DTensor cannot be sent"):
        ranks.run(functions.unsent, layout)
    with pytest.raises(UsageError, match="spmd_functions:total: a tuple that cannot be sent"):
        ranks.run(functions.total, lambda: 1)
    with pytest.raises(UsageError, match="want a function that stands at the top of a module"):
        ranks.run(lambda here: 1)
    with pytest.raises(UsageError, match="want module:name, or a function"):
        ranks.run("total")
    with pytest.raises(DeviationError, match=r"AttributeError: tests.library.spmd_functions has no function gone"):
        ranks.run("tests.library.spmd_functions:gone")


def test_a_case_of_a_law(ranks: Worlds) -> None:
    assert ranks.check("redistribute.local", "mesh=2 x=5:S(0) to=R").status == "held"
    assert ranks.check("redistribute.local").case.text.startswith("redistribute.local mesh=2x2")
    with pytest.raises(UsageError, match=r"no law is called 'redistribute.locl' \(nearest: redistribute.local"):
        ranks.check("redistribute.locl")
    with pytest.raises(UsageError, match=r"is one of layout.full, not of redistribute.local"):
        ranks.check("redistribute.local", "layout.full mesh=2 x=4:R")
    with pytest.raises(UsageError, match="is not NAME=VALUE"):
        ranks.check("redistribute.local", "mesh=2 wrong")
    with pytest.raises(UsageError, match="no field 'to'"):
        ranks.check("redistribute.local", "mesh=2 x=5:S(0)")


def test_a_law_of_ones_own_needs_no_catalogue(ranks: Worlds) -> None:
    assert ranks.check(TWO).status == "held"
    verdict = ranks.check(TWO, Case.parse("mine.two world=2 odd=1"))
    assert (verdict.kind, verdict.message) == ("wrong-value", "rank 1: the odd one")
    assert verdict.case.text == "mine.two world=2 odd=1"


def test_a_planted_fault_is_in_every_rank(ranks: Worlds) -> None:
    with ranks.planted(functions.barriers_raise) as broken, pytest.raises(DeviationError, match="RuntimeError: no barrier here"):
        broken.run(functions.waits)
    assert ranks.run(functions.waits) == ["through", "through"]


def test_ranks_are_kept_between_single_checks() -> None:
    assert check("redistribute.local", "mesh=2 x=5:S(0) to=R", target=Target(name="mine")).status == "held"
    close()
    with pytest.raises(UsageError, match="no target is called 'glo'"):
        check("redistribute.local", target="glo")


def test_what_a_target_cannot_do_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "shardlaw.toml").write_text('[target.mine]\nbackend = "gloo"\ncannot = ["all_to_all", "subgroups"]\n')
    mine = Worlds("mine", folder=tmp_path)
    assert mine.lacks(["all_gather"]) == ""
    assert mine.lacks(["subgroups", "all_to_all"]) == "target mine declares that it cannot do all_to_all, subgroups"
    with pytest.raises(UsageError, match=r"needs: unknown 'all_to_al' \(nearest: all_to_all"):
        mine.lacks(["all_to_al"])
    with pytest.raises(UsageError, match=r"collective.all-to-all cannot be tried: target mine declares"):
        mine.check("collective.all-to-all")
    with pytest.raises(UsageError, match="a world of 0 ranks: want a whole number from 1 to 64"):
        mine(0)
    with pytest.raises(UsageError, match="timeout=-1: want seconds, more than 0"):
        Worlds(timeout=-1)


def test_what_a_marker_asks_for() -> None:
    assert parse_marker((), {"world": 4, "needs": ["p2p"]}) == (4, ("p2p",))
    assert parse_marker((), {}) == (2, ())
    for args, options, said in [((), {"wrld": 4}, "unknown 'wrld'"), ((4,), {}, "want world=N"), ((), {"needs": "p2p"}, "want world=N")]:
        with pytest.raises(UsageError, match=said):
            parse_marker(args, options)
