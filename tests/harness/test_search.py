"""The search on a pool of its own that judges in this process: several faults, each found, shrunk apart, and confirmed."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Verdict
from shardlaw.conformance.run.confirm import NOT_MINIMAL, Confirmer, try_find_places
from shardlaw.conformance.run.entry import Entry
from shardlaw.conformance.run.expectations import Expectations
from shardlaw.conformance.run.search import Plan, StopDrawing, draw, law_seed, reduce_history


def cases(limits: Limits) -> st.SearchStrategy[Case]:
    return st.builds(
        lambda n, m, flag: Case.of("test.sum", shape=f"{n}x{m}", flag=flag), st.integers(0, 30), st.integers(0, 30), st.booleans()
    )


LAW = Law(
    id="test.sum",
    clause="nothing goes wrong",
    source="this test",
    check=lambda case, here: None,
    control="test.sum shape=0x0 flag=False",
    draw=cases,
    draws=300,
)


class PoolOfOne:
    """Judges cases by a function; ``calls`` counts them, ``sticky`` faults need an earlier case in the same world."""

    def __init__(self, fault: Callable[[Case], str], sticky: str = "") -> None:
        self.fault, self.sticky, self.calls, self.served = fault, sticky, 0, []

    def verdict(self, case: Case, history: Sequence[Case]) -> Verdict:
        self.calls += 1
        check = self.fault(case)
        if check and self.sticky and not any(self.sticky in old.text for old in history):
            check = ""
        return Verdict(case, "deviates" if check else "held", "wrong-value" if check else None, check, history=tuple(history))

    def check(self, law: Law, cases: Sequence[Case], *, traced: bool = False) -> list[Verdict]:
        found = []
        for case in cases:
            found.append(self.verdict(case, self.served))
            self.served = [*self.served, case]
        return found

    def check_fresh(self, law: Law, case: Case, *, traced: bool = False) -> Verdict:
        return self.verdict(case, case.after)


def three_faults(case: Case) -> str:
    n, m = case.shape()
    if case.get("flag") == "True" and n > 4:
        return "flagged"
    if n * m >= 40:
        return "large"
    return "edge" if m == 13 else ""


def first_pass(pool: PoolOfOne, seed: int = 1) -> tuple[Plan, dict[Case, Verdict], dict[str, Verdict]]:
    plan = Plan.for_law(LAW, Limits(), seed, "smoke")
    memory: dict[Case, Verdict] = {}
    new: dict[str, Verdict] = {}

    def take(case: Case, drawn: bool) -> None:
        (verdict,) = pool.check(LAW, [case])
        memory[case] = verdict
        if verdict.status == "deviates":
            new.setdefault(verdict.signature, verdict)

    plan.feed(take)
    return plan, memory, new


def test_every_fault_is_found_and_shrunk_to_its_own_minimum() -> None:
    pool = PoolOfOne(three_faults)
    plan, memory, new = first_pass(pool)
    confirmer = Confirmer(plan, pool, memory, lambda verdict: False)  # type: ignore[arg-type]
    found = {v.check: confirmer.confirm(v, is_drawn=True, seconds=10.0) for v in new.values()}
    assert sorted(found) == ["edge", "flagged", "large"]
    assert found["flagged"].case.text == "test.sum shape=5x0 flag=True"
    assert found["edge"].case.text == "test.sum shape=0x13 flag=False"
    n, m = found["large"].case.shape()
    assert n * m >= 40
    assert all(f.minimal and f.confirmed == (2, 2) for f in found.values())


def test_what_there_is_no_time_to_shrink_is_confirmed_all_the_same() -> None:
    pool = PoolOfOne(three_faults)
    plan, memory, new = first_pass(pool)
    first = next(v for v in new.values() if v.check == "flagged")
    found = Confirmer(plan, pool, memory, lambda verdict: False).confirm(first, is_drawn=True, seconds=0.0)  # type: ignore[arg-type]
    assert found is not None
    assert found.case == first.case
    assert (found.minimal, found.note, found.confirmed) == (False, NOT_MINIMAL, (1, 1))


def test_shrinking_reaches_a_world_only_with_candidates_it_has_not_judged() -> None:
    pool = PoolOfOne(three_faults)
    plan, memory, new = first_pass(pool)
    before = pool.calls
    first = next(v for v in new.values() if v.check == "flagged")
    found = Confirmer(plan, pool, memory, lambda verdict: False).confirm(first, is_drawn=True, seconds=10.0)  # type: ignore[arg-type]
    assert found is not None
    assert pool.calls - before < 100


def test_a_new_fault_does_not_shrink_into_a_known_one() -> None:
    pool = PoolOfOne(lambda case: "large" if case.shape()[0] > 3 else "")
    plan, memory, _new = first_pass(pool)
    known = lambda verdict: verdict.case.get("flag") == "False"  # noqa: E731
    first = next(v for v in memory.values() if v.status == "deviates" and not known(v))
    found = Confirmer(plan, pool, memory, known).confirm(first, is_drawn=True, seconds=10.0)  # type: ignore[arg-type]
    assert found is not None
    assert found.case.text == "test.sum shape=4x0 flag=True"


def test_a_fault_of_history_carries_the_case_that_it_needs() -> None:
    pool = PoolOfOne(lambda case: "sticky" if case.shape()[0] == 7 else "", sticky="shape=3x")
    plan, memory, new = first_pass(pool)
    (first,) = new.values()
    found = Confirmer(plan, pool, memory, lambda verdict: False).confirm(first, is_drawn=True, seconds=10.0)  # type: ignore[arg-type]
    assert found is not None
    assert len(found.case.after) == 1
    assert found.case.after[0].get("shape").startswith("3x")
    assert pool.check_fresh(LAW, Case.from_json(found.case.to_json())).status == "deviates"


def test_where_many_findings_are_a_further_one_is_traced_once_and_not_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    class TracedPool(PoolOfOne):
        target = Target()

        def verdict(self, case: Case, history: Sequence[Case]) -> Verdict:
            return replace(super().verdict(case, history), ranks=(Answer(0, "deviates"),))

    monkeypatch.setattr("shardlaw.conformance.run.confirm.find_places", lambda verdict, *_: [f"find_{verdict.check}, torch/rules.py:3"])
    pool = TracedPool(lambda case: three_faults(case) if "shape" in case and "flag" in case else "")
    plan, memory, new = first_pass(pool)
    large, edge = (next(verdict for verdict in new.values() if verdict.check == check) for check in ("large", "edge"))
    confirmer = Confirmer(plan, pool, memory, lambda verdict: False)  # type: ignore[arg-type]
    whole = confirmer.confirm(large, is_drawn=True, seconds=10.0)
    assert whole is not None
    assert whole.minimal
    confirmer.frequent_causes = {whole.cause: False}
    first = confirmer.confirm(large, is_drawn=True, seconds=10.0)
    assert first is not None
    assert first.minimal  # as none at that place is yet
    confirmer.frequent_causes, before = {whole.cause: True}, pool.calls
    again, other = (confirmer.confirm(verdict, is_drawn=True, seconds=10.0) for verdict in (large, edge))
    assert again is not None
    assert (again.case, again.minimal, again.where, again.confirmed) == (large.case, False, whole.where, (1, 1))
    assert again.note == "not shrunk: many findings of this run are at the same place"
    assert other is not None
    assert other.minimal
    assert other.where == "find_edge, torch/rules.py:3"
    assert pool.calls > before + 2


def covering(plan: Plan, word: str) -> Plan:
    """The plan where a known finding covers the cases that hold a word."""
    known = Expectations([Entry(LAW.id, "wrong-value", "known", features=frozenset({word}), laws=(LAW.id,))])
    plan.is_covered = lambda case: known.covers(case, set(case.text.split()))
    return plan


@pytest.mark.parametrize(("word", "most", "least"), [("flag=True", 50, 230), (LAW.id, 150, 140), ("elsewhere", 0, 300)])
def test_three_in_four_drawn_cases_that_a_known_finding_covers_give_way_to_others(word: str, most: int, least: int) -> None:
    plan = covering(Plan.for_law(LAW, Limits(), 1, "smoke"), word)
    first, second = list[Case](), list[Case]()
    for found in (first, second):
        plan.feed(lambda case, _, found=found: found.append(case))
    assert first == second
    assert sum(word in case.text for case in first) <= most
    assert least <= len(first) <= plan.number <= LAW.draws
    assert sum(count for _, count in plan.rounds) <= 3 * LAW.draws


def test_what_was_passed_over_is_no_obstacle_to_shrinking() -> None:
    pool, memory = PoolOfOne(three_faults), dict[Case, Verdict]()
    plan = covering(Plan.for_law(LAW, Limits(), 1, "smoke"), "flag=True")
    plan.feed(lambda case, _: memory.update({case: pool.check(LAW, [case])[0]}))
    first = next(verdict for verdict in memory.values() if verdict.check == "flagged")
    before = pool.calls
    found = Confirmer(plan, pool, memory, lambda verdict: False).confirm(first, is_drawn=True, seconds=10.0)  # type: ignore[arg-type]
    assert found is not None
    assert found.minimal
    assert found.case.text == "test.sum shape=5x0 flag=True"
    assert plan.is_skipped(found.case)
    assert pool.calls - before < 100


def test_a_trace_that_cannot_be_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[str]:
        raise RuntimeError("no elements")

    monkeypatch.setattr("shardlaw.conformance.run.confirm.find_places", fails)
    places, note = try_find_places(Verdict(Case.parse(LAW.control), "deviates"), [])
    assert (places, note) == ([], "where it happens is not known, its trace cannot be read: RuntimeError: no elements")


def test_what_does_not_repeat_is_no_finding() -> None:
    pool = PoolOfOne(three_faults)
    plan, memory, new = first_pass(pool)
    quiet = PoolOfOne(lambda case: "")
    assert Confirmer(plan, quiet, memory, lambda v: False).confirm(next(iter(new.values())), is_drawn=True, seconds=10.0) is None  # type: ignore[arg-type]


def test_one_seed_draws_one_list_and_two_seeds_draw_two() -> None:
    def drawn(seed: int) -> list[Case]:
        found: list[Case] = []
        Plan.for_law(LAW, Limits(), seed, "smoke").feed(lambda case, _: found.append(case))
        return found

    assert drawn(1) == drawn(1)
    shared = set(drawn(1)) & set(drawn(2))
    assert len(shared) < len(drawn(1)) / 2


def test_what_breaks_a_drawing_once_comes_out_as_it_is() -> None:
    taken: list[Case] = []

    def take(case: Case) -> None:
        taken.append(case)
        if len(taken) == 3:
            raise OSError("the ranks are gone")

    with pytest.raises(OSError, match="the ranks are gone"):
        draw(st.builds(lambda seed: Case.of("a.b", seed=seed), st.integers(0, 1000)), 1, 50, take)
    assert len(taken) == 3


def test_a_drawing_that_is_cut_short_is_a_prefix() -> None:
    whole: list[Case] = []
    draw(cases(Limits()), 5, 200, whole.append)
    cut: list[Case] = []

    def take(case: Case) -> None:
        if len(cut) == 20:
            raise StopDrawing
        cut.append(case)

    with pytest.raises(StopDrawing):
        draw(cases(Limits()), 5, 200, take)
    assert cut == whole[:20]


def test_the_shards_of_a_run_make_up_the_whole() -> None:
    def fed(shard: tuple[int, int]) -> list[Case]:
        found: list[Case] = []
        Plan.for_law(law, Limits(), 1, "smoke", shard).feed(lambda case, _: found.append(case))
        return found

    # the drawing comes upon cases that were enumerated: they belong to one shard all the same
    law = replace(LAW, sweep=lambda limits: [Case.of("test.sum", shape=f"{n % 20}x0", flag=False) for n in range(60)], sweeps=60)
    whole = fed((1, 1))
    for shards in (2, 5):
        parts = [case for i in range(shards) for case in fed((i + 1, shards))]
        assert sorted(parts, key=str) == sorted(whole, key=str)
        assert len(set(parts)) == len(parts)


def test_a_shard_draws_its_own_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fed(shard: tuple[int, int]) -> list[Case]:
        found: list[Case] = []
        plan = Plan.for_law(law, Limits(), 1, "smoke", shard)
        plan.feed(lambda case, _: found.append(case))
        assert plan.number == 210
        draws.append(sum(count for _, count in plan.rounds))
        return found

    monkeypatch.setattr("shardlaw.conformance.run.search.BLOCK_DRAWS", 50)
    law, draws = replace(LAW, draws=210), list[int]()
    whole = fed((1, 1))
    parts = [fed((part + 1, 4)) for part in range(4)]
    assert set(whole) == set().union(*parts)
    assert draws[0] == 210
    assert sorted(draws[1:]) == [50, 50, 50, 60]


def test_no_shard_has_what_an_enumerator_repeats() -> None:
    law = replace(LAW, sweep=lambda limits: [Case.of("test.sum", n=n, place=n % 8) for n in range(400)], sweeps=400, draw=None)
    for part in range(8):
        found: list[Case] = []
        Plan.for_law(law, Limits(), 1, "smoke", (part + 1, 8)).feed(lambda case, _, found=found: found.append(case))
        assert len({case.get("place") for case in found}) == 8


def test_a_history_is_cut_down_to_what_matters() -> None:
    history = tuple(Case.of("test.sum", n=i) for i in range(40))
    needed = {"test.sum n=3", "test.sum n=31"}
    kept = reduce_history(history, lambda some: needed <= {case.text for case in some}, deadline=float("inf"))
    assert {case.text for case in kept} == needed


def test_the_seed_of_a_law_depends_on_its_id_and_the_run_alone() -> None:
    assert law_seed(1, "a") == law_seed(1, "a")
    assert len({law_seed(1, "a"), law_seed(1, "b"), law_seed(2, "a")}) == 3


def test_a_case_that_needs_more_ranks_than_allowed_is_left_out() -> None:
    law = replace(
        LAW, sweep=lambda limits: [Case.of("test.sum", mesh="2x4", shape="1x1"), Case.of("test.sum", shape="2x2")], sweeps=2, draw=None
    )
    found: list[Case] = []
    Plan.for_law(law, Limits(world_size=4), 1, "smoke").feed(lambda case, _: found.append(case))
    assert [case.get("shape") for case in found] == ["2x2"]
