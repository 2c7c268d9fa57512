"""Worlds: what they share, what they forget, and how they are replaced."""

import re
import time
from dataclasses import replace

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.world import Pool, WorldError, manager
from shardlaw.conformance.world.progress import MAX_BATCH_CASES
from tests.faults import laws
from tests.faults.conftest import LAWS, House, case

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def test_each_case_has_one_verdict_in_order(house: House) -> None:
    cases = [case("nothing", 2 + i % 3, seed=i) for i in range(300)]
    assert [verdict.case for verdict in house.pool.check(LAWS["nothing"], cases)] == cases


def test_cases_that_somebody_waits_for_go_first(house: House) -> None:
    found: list[Verdict] = []
    fed: list[Verdict] = []

    def feed(verdict: Verdict) -> None:  # what a callback submits is sent to no rank before it returns
        fed.append(verdict)
        for at in range(400):
            house.pool.submit(LAWS["nothing"], case("nothing", seed=at), found.append)

    house.pool.submit(LAWS["nothing"], case("nothing", seed=2000), feed)
    house.pool.wait_until(lambda: bool(fed))
    cases = [case("nothing", seed=1000 + at) for at in range(3)]
    assert [verdict.case for verdict in house.pool.check(LAWS["nothing"], cases)] == cases
    assert len(found) <= 2 * MAX_BATCH_CASES  # those that are sent along with the cases waited for, and one batch ahead
    house.pool.flush()
    assert [verdict.case.seed for verdict in found] == list(range(400))


def test_callbacks_may_feed(house: House) -> None:
    found: list[Verdict] = []

    def again(verdict: Verdict) -> None:
        found.append(verdict)
        if len(found) < 20:
            house.pool.submit(LAWS["nothing"], case("nothing", seed=len(found)), again)

    house.pool.submit(LAWS["nothing"], case("nothing", seed=0), again)
    house.pool.flush()
    assert [verdict.case.seed for verdict in found] == list(range(20))


def test_callback_that_raises_loses_no_other_verdict(house: House) -> None:
    found: list[Verdict] = []

    def spoil(verdict: Verdict) -> None:
        raise KeyError("mine")

    house.pool.submit(LAWS["nothing"], case("nothing", seed=1), found.append)
    house.pool.submit(LAWS["nothing"], case("nothing", seed=2), spoil)
    house.pool.submit(LAWS["nothing"], case("nothing", seed=3), found.append)
    with pytest.raises(KeyError, match="mine"):
        house.pool.flush()
    house.pool.flush()
    assert [verdict.case.seed for verdict in found] == [1, 3]


def test_deviations_and_rejections(house: House) -> None:
    wrong, rejected = house.judge(case("wrong"), case("rejects"))
    assert (wrong.kind, wrong.check) == ("wrong-value", "rank")
    assert (rejected.status, rejected.message) == ("rejected", "it means nothing")


@pytest.mark.parametrize(("off", "kind"), [({}, None), ({"off": 1}, "wrong-value")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_deposits_reach_the_driver(house: House, off: dict[str, int], kind: str | None, dtype: str) -> None:
    if dtype == "bool" and off:
        pytest.skip("nothing can be added to a bool")
    (verdict,) = house.judge(case("deposits", 2, mesh="2", x=f"3x2:P(sum):{dtype}:small", **off))
    assert (verdict.kind, verdict.message) == (kind, verdict.message if kind else "")


def test_what_a_case_changes_is_restored(house: House) -> None:
    assert {verdict.status for verdict in house.judge(*(case("disturbs", seed=i) for i in range(3)))} == {"held"}


def test_history_is_what_the_world_has_served(house: House) -> None:
    house.pool.check(LAWS["killed"], [case("killed", 2)])
    cases = [case("sums", 2, seed=i) for i in range(5)] + [case("marks", 2), case("sums", 2, seed=9)]
    house.judge(*cases)
    (verdict,) = house.judge(case("remembers", 2))
    assert verdict.kind == "wrong-value"
    assert verdict.history == tuple(cases)
    alone = house.pool.check_fresh(LAWS["remembers"], verdict.case)
    assert alone.status == "held"
    after = verdict.case.with_after((case("nothing", 2), case("marks", 2)))
    assert house.pool.check_fresh(LAWS["remembers"], after).kind == "wrong-value"
    house.pool.check(LAWS["killed"], [case("killed", 2)])


def test_case_that_needs_its_own_world_has_none_before_it_and_none_after(house: House) -> None:
    def own(name: str) -> Verdict:
        law = replace(LAWS[name], own_world=lambda case: True)
        return house.pool.check(law, [case(name, 2)])[0]

    house.judge(case("marks", 2))
    assert own("remembers").status == "held"
    assert own("marks").status == "held"
    assert [own("remembers").status for _ in range(2)] == ["held", "held"]
    (shared,) = house.judge(case("remembers", 2))
    assert shared.kind == "wrong-value"
    house.pool.check(LAWS["killed"], [case("killed", 2)])


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1), (2, 2)])
def test_stages_run_in_worlds_of_their_sizes_and_share_a_folder(house: House, sizes: tuple[int, int]) -> None:
    one = Case.of("fault.rank[passes_on]", first=sizes[0], second=sizes[1])
    assert [verdict.status for verdict in house.judge(one, one)] == ["held", "held"]
    assert house.pool.check_fresh(LAWS["passes_on"], one).status == "held"


@pytest.mark.parametrize("bad", [0, 1])
def test_stage_that_does_not_hold_is_the_verdict(house: House, bad: int) -> None:
    one = Case.of("fault.rank[passes_on]", first=2, second=3, bad=bad)
    for verdict in (*house.judge(one), house.pool.check_fresh(LAWS["passes_on"], one)):
        assert (verdict.kind, verdict.check, len(verdict.ranks)) == ("wrong-value", "stage", 2 + bad)


def test_hang_is_confirmed_under_the_full_limit(house: House) -> None:
    before = time.monotonic()
    verdict = house.pool.check_fresh(LAWS["all_wait"], case("all_wait"))
    assert verdict.kind == "hang"
    assert time.monotonic() - before > 3


def test_idle_worlds_of_many_sizes_do_not_pile_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MAX_RANKS", 20)
    for size in (8, 7, 6, 5, 4, 3, 2):
        assert [verdict.status for verdict in house.judge(case("sums", size))] == ["held"]
        assert sum(world.size for world in house.pool._manager.worlds.values()) <= 20


def test_worlds_side_by_side_work_on_different_laws_and_share_one_of_many_cases() -> None:
    with Pool(Target(timeout=4), worlds=2) as pool:

        def judged(name: str, count: int) -> list[set[str]]:
            cases = [case(name, 2, seed=i) for i in range(count)]
            assert {verdict.status for verdict in pool.check(LAWS[name], cases)} == {"held"}
            return [{served.law for served in world.served} for world in pool._manager.worlds.values()]

        judged("sums", 20)
        first, second = judged("nothing", 20)
        assert not first & second
        first, second = judged("sums", 100)
        assert len(first & second) == 1


def test_groups_of_gloo_share_what_carries_their_messages(house: House) -> None:
    house.judge(case("nothing", 3))
    before = [rank["threads"] for rank in house.pool.usage()]
    house.judge(case("groups", 3))
    more = [now["threads"] - then for now, then in zip(house.pool.usage(), before, strict=True)]
    assert max(more) <= 2 * laws.GROUPS, "each has a thread of its own that wakes up"


def test_world_goes_on_after_messages_between_two_of_its_ranks(house: House) -> None:
    verdicts = house.judge(*(case(name, 3, seed=i) for i in range(3) for name in ("sends", "raises_alike", "sums")))
    assert [verdict.kind or verdict.status for verdict in verdicts] == ["held", "raised", "held"] * 3
    assert len(verdicts[7].history) >= 7, "the world was replaced"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (Target(backend="nonsense"), r"rank \d of 2 ended while it started: .*nonsense"),
        (Target(setup="tests.faults.hooks:breaks"), r"rank \d of 2 ended while it started: RuntimeError: this backend is broken"),
        (Target(setup="tests.faults.hooks:ends"), r"rank \d of 2 ended while it started: exit code 5"),
        (Target(setup="tests.faults.hooks:sleeps", startup_timeout=5.0), r"ranks \[0, 1\] of 2 were not ready within 5 s"),
        (Target(env=(("SHARDLAW_LAWS", "no.such.module"),)), "ModuleNotFoundError: No module named 'no'"),
        (Target(setup="tests.faults.hooks:kills_server"), "the process that starts ranks has ended"),
    ],
    ids=["backend", "raises", "exits", "sleeps", "no-laws", "server"],
)
def test_target_that_cannot_start_says_why(target: Target, told: str) -> None:
    with Pool(target) as pool, pytest.raises(WorldError, match=told) as caught:
        pool.check(LAWS["nothing"], [case("nothing", 2)])
    assert "\n" not in str(caught.value)
    if caught.value.output.startswith("where rank"):  # not while torch is still being loaded
        assert re.search(r"where rank 0 was:(\n.*)+hooks.py\", line \d+ in sleeps", caught.value.output)


def test_setup_and_environment_of_a_target_reach_every_rank() -> None:
    target = Target(setup="tests.faults.hooks:marks", env=(("WANTED", "here"),), options=(("threads", 2),))
    with Pool(target) as pool:
        (verdict,) = pool.check(LAWS["remembers"], [case("remembers", 2)])
        assert [answer.outcome for answer in verdict.ranks] == ["deviates", "deviates"]


def test_a_thread_that_a_target_brings_is_nobodys_to_end() -> None:
    with Pool(Target(setup="tests.faults.hooks:keeps_a_thread", timeout=3)) as pool:
        (verdict,) = pool.check(LAWS["leaves_thread"], [case("leaves_thread", 2)])
        assert "a thread still runs: left" in verdict.message


def test_init_method_of_a_target() -> None:
    with Pool(Target(init_method="tcp://localhost:{port}")) as pool:
        verdicts = pool.check(LAWS["sums"], [case("sums", 2), case("sums", 3)])
        assert {verdict.status for verdict in verdicts} == {"held"}


def test_lost_server_is_started_again() -> None:
    with Pool(Target(timeout=4)) as pool:
        pool.check(LAWS["sums"], [case("sums", 2)])
        verdicts = pool.check(LAWS["kills_server"], [case("kills_server", 2)])
        assert verdicts[0].status == "held"


def test_unknown_law_is_no_silent_pass(house: House) -> None:
    (verdict,) = house.pool.check(replace(LAWS["nothing"], id="fault.unknown"), [Case.of("fault.unknown", world=2)])
    assert (verdict.kind, verdict.error) == ("raised", "KeyError: 'fault.unknown'")
