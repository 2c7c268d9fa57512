"""Whatever a rank does becomes a verdict on the case in which it did it, and on no other."""

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.verdict import Verdict
from tests.faults.conftest import House, case

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def outcomes(verdict: Verdict) -> list[str]:
    return [answer.outcome for answer in verdict.ranks]


def test_rank_that_raises_alone(house: House) -> None:
    verdict = house.among("raises_alone")
    assert (verdict.kind, outcomes(verdict)) == ("divergence", ["held", "raised", "held"])
    assert "rank 1 raised ValueError: alone 17" in verdict.message
    assert "laws.py" in verdict.ranks[1].stack


def test_rank_that_raises_while_the_others_wait(house: House) -> None:
    verdict = house.among("raises_while_others_wait")
    assert (verdict.kind, outcomes(verdict)) == ("divergence", ["silent", "raised", "silent"])
    assert all("raises_while_others_wait" in answer.stack for answer in verdict.ranks)


def test_rank_that_is_wrong_while_the_others_wait(house: House) -> None:
    """What they wait for must not be the next case's."""
    verdict = house.among("wrong_while_others_wait")
    assert (verdict.kind, outcomes(verdict)) == ("divergence", ["silent", "deviates", "silent"])


def test_ranks_of_a_mesh_that_wait_for_the_others(house: House) -> None:
    """A rank outside has nothing to wait for: it must not go on to the next case, whose collective they would meet."""
    waits = Case.of("fault.rank[those_inside_wait_for_all]", mesh="2@0,2")
    bad, *good = house.judge(waits, *(case("sums", seed=seed) for seed in range(8)))
    assert (bad.kind, outcomes(bad)) == ("divergence", ["silent", "held", "silent"])
    assert {verdict.status for verdict in good} == {"held"}


@pytest.mark.parametrize("name", ["raises_alike", "raises_alike_after_sum"])
def test_ranks_that_raise_alike_go_on_in_the_same_world(house: House, name: str) -> None:
    verdicts = house.judge(*(case(one, seed=i) for i in range(5) for one in ("sums", name)))
    assert {verdict.kind for verdict in verdicts[1::2]} == {"raised"}
    assert {verdict.status for verdict in verdicts[::2]} == {"held"}
    assert len(verdicts[-1].history) >= 9, "the world was replaced"
    assert "together" in verdicts[1].message


def test_a_history_holds_no_histories(house: House) -> None:
    """Cases near one that needs a history bring it along; told again with each of them it would double each time."""
    before = case("sums", seed=1)
    *_, verdict = house.judge(case("sums", seed=2).with_after((before,)), case("raises_alike"))
    assert case("sums", seed=2) in verdict.history
    assert not any(earlier.after for earlier in verdict.history)


def test_a_history_holds_no_case_of_which_nothing_was_done(house: House) -> None:
    *_, verdict = house.judge(case("means_nothing", seed=1), case("sums", seed=3), case("raises_alike"))
    assert case("sums", seed=3) in verdict.history
    assert case("means_nothing", seed=1) not in verdict.history


def test_prints_of_a_case_come_with_its_answer(house: House) -> None:
    verdicts = house.judge(case("raises_alike"), case("wrong"), case("raises_alike", seed=1))
    assert verdicts[1].ranks[1].output == "I am rank 1\n"
    assert verdicts[2].ranks[0].output == "about to raise\n"


def test_ranks_that_raise_differently(house: House) -> None:
    assert house.among("raises_differently").kind == "divergence"


@pytest.mark.parametrize(
    ("name", "error"), [("raises_exit", "SystemExit: let me out"), ("raises_textless", "Broken: (no text: ValueError)")]
)
def test_odd_exceptions(house: House, name: str, error: str) -> None:
    verdict = house.among(name)
    assert (verdict.kind, verdict.error) == ("raised", error)


@pytest.mark.parametrize(("name", "reason"), [("exits", "exit code 3"), ("killed", "signal SIGKILL"), ("aborts", "signal SIGABRT")])
def test_rank_that_ends(house: House, name: str, reason: str) -> None:
    verdict = house.among(name)
    assert (verdict.kind, verdict.error) == ("crash", reason)
    assert verdict.ranks[1].outcome == "crashed"
    assert all(answer.stack for answer in (verdict.ranks[0], verdict.ranks[2]))


def test_what_an_aborting_rank_said_last(house: House) -> None:
    answer = house.among("aborts").ranks[1]
    assert "terminate called" in answer.output
    assert "Fatal Python error: Aborted" in answer.stack


def test_std_terminate(house: House) -> None:
    verdict = house.among("terminates")
    assert (verdict.kind, verdict.error) == ("crash", "signal SIGABRT")
    assert "terminate called" in verdict.ranks[1].output
    assert "in terminates" in verdict.ranks[1].stack
    assert all("in terminates" in answer.stack for answer in verdict.ranks)


def test_gloo_that_meets_other_sizes(house: House) -> None:
    verdict = house.among("overruns")
    assert verdict.kind in ("crash", "divergence", "hang", "raised")
    assert all("overruns" in answer.stack for answer in verdict.ranks)


def test_work_that_nobody_waits_for_does_no_harm(house: House) -> None:
    assert house.among("unfinished").status == "held"


@pytest.mark.parametrize("name", ["joins_alone", "starts_alone"])
def test_collective_that_the_others_never_join(house: House, name: str) -> None:
    verdict = house.among(name)
    assert (verdict.kind, verdict.check) == ("divergence", "collectives")
    assert "rank 0 0, rank 1 1, rank 2 0" in verdict.message


def test_collective_that_the_others_never_join_as_the_last_case(house: House) -> None:
    (verdict,) = house.judge(case("joins_alone"))
    assert (verdict.kind, outcomes(verdict)) == ("divergence", ["held", "silent", "held"])
    assert "all_reduce" in verdict.ranks[1].stack


def test_all_ranks_wait(house: House) -> None:
    verdict = house.among("all_wait")
    assert (verdict.kind, outcomes(verdict)) == ("hang", ["silent"] * 3)
    assert all("all_wait" in answer.stack and "waiting" in answer.output for answer in verdict.ranks)


@pytest.mark.parametrize("name", ["mismatched_shape", "mismatched_dtype"])
def test_mismatched_collective(house: House, name: str) -> None:
    verdict = house.among(name)
    assert verdict.kind in ("crash", "hang", "divergence", "raised")


def test_rank_that_spins_gets_the_full_limit(house: House) -> None:
    verdict = house.among("spins")
    assert verdict.kind == "hang"
    assert "in spins" in verdict.ranks[1].stack


def test_rank_that_prints_without_end(house: House) -> None:
    verdict = house.among("prints_without_end")
    assert verdict.kind == "divergence"
    assert 0 < len(verdict.ranks[1].output) <= 4096


def test_rank_that_eats_memory(house: House) -> None:
    verdict = house.among("eats_memory", 2)
    assert (verdict.kind, outcomes(verdict)) == ("divergence", ["held", "raised"])
    assert "memory" in verdict.message


def test_rank_that_is_stopped(house: House) -> None:
    assert house.among("stopped").kind == "hang"


@pytest.mark.parametrize("name", ["destroys_group", "leaves_thread"])
def test_rank_that_leaves_something_behind(house: House, name: str) -> None:
    verdict = house.among(name)
    assert (verdict.kind, outcomes(verdict)) == ("divergence", ["held", "raised", "held"])
    assert verdict.error.startswith("LeftBehindError")


def test_thread_that_python_did_not_begin_is_left_alone(house: House) -> None:
    assert house.among("leaves_foreign_thread").status == "held"


def test_group_that_all_ranks_destroy(house: House) -> None:
    assert house.among("all_destroy_group").kind == "raised"


@pytest.mark.parametrize(("name", "reason"), [("closes_stream", "closed its stream"), ("babbles", "no message"), ("garbles", "no message")])
def test_rank_that_can_no_longer_be_understood(house: House, name: str, reason: str) -> None:
    verdict = house.among(name)
    assert verdict.kind == "crash"
    assert reason in verdict.message


def test_rank_that_ends_between_cases(house: House) -> None:
    # the timer ends the rank during or between later cases: no case may be lost, whichever is blamed
    verdicts = house.judge(case("dies_later"), *(case("sums", seed=i) for i in range(200)))
    assert sum(verdict.kind == "crash" for verdict in verdicts) <= 1
    assert {verdict.kind for verdict in verdicts} <= {None, "crash"}


def test_every_fault_at_once_loses_no_case(house: House) -> None:
    names = ["raises_alone", "killed", "raises_alike", "joins_alone", "exits", "destroys_group", "wrong", "raises_differently"]
    cases = [case(names[i // 6 % len(names)] if i % 6 == 5 else "sums", 2 + i % 3, seed=i) for i in range(144)]
    verdicts = house.judge(*cases)
    assert [verdict.case for verdict in verdicts] == cases
    assert [v.case.text for v in verdicts if (v.status == "held") != v.case.law.endswith("[sums]")] == []
