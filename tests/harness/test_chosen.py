"""The cases of a smoke run of everything are those that were chosen, by place and number."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.chosen import cover, later_calls, of_words, pending_operands
from benchmarks.first import by_worth
from benchmarks.measured import Tried
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.run.search import Plan
from shardlaw.conformance.run.shares import (
    SCALE,
    Share,
    first_waves,
    format_share,
    format_waves,
    full_share,
    law_share,
    parse_share,
    parse_waves,
    smoke_shares,
)

LAW = "layout.run-check"


def offered(share: Share | None = None) -> tuple[list[str], list[str]]:
    """The enumerated and the drawn cases of a law under smoke."""
    found: tuple[list[str], list[str]] = [], []
    Plan.for_law(find(LAW), Limits(), 1, "smoke", share=share).feed(lambda case, drawn: found[drawn].append(case.text))
    return found


def test_a_plan_takes_the_places_of_its_share_and_as_many_draws() -> None:
    every, drawn = offered()
    swept, fewer = offered(Share(8, 5, frozenset({1, 4, 7})))
    assert swept == [every[at] for at in (1, 4, 7)]
    assert 0 < len(fewer) <= 5 < len(drawn)


def test_a_run_of_everything_tries_what_was_chosen_and_a_selection_all() -> None:
    law = find(LAW)
    assert law_share(law, RunRequest()) == smoke_shares()[LAW]
    for other in (
        RunRequest(laws=("redistribute.*",)),
        RunRequest(ops=("add",)),
        RunRequest(profile="ci"),
        RunRequest(certify="dtensor-2026.1"),
    ):
        assert law_share(law, other) == full_share(law, other.profile)
    assert law_share(law, RunRequest(laws=(LAW,), resumed_smoke_shares=True)) == smoke_shares()[LAW]
    assert law_share(replace(law, id="redistribute.unheard-of"), RunRequest()).indices is None


def test_every_law_that_is_named_is_there_and_keeps_a_case() -> None:
    for law_id, share in smoke_shares().items():
        law = catalogue()[law_id]
        assert share.count, law_id
        most = law.sweeps * (SCALE["ci"] if law_id.startswith("op.backward[") else 1)
        # a newer torch enumerates more
        assert share.sweeps <= most or (law.sweep is not None and len(law.sweep(Limits())) <= law.sweeps), law_id
        assert share.draws <= law.draws, law_id


def test_what_is_tried_first_is_tried_at_all() -> None:
    for law_id, waves in first_waves().items():
        share = law_share(catalogue()[law_id], RunRequest())
        places = frozenset[int]().union(*waves)
        assert places, law_id
        assert places <= share.places, law_id
        assert parse_waves(format_waves(law_id, waves)) == (law_id, waves)


def test_what_shows_most_for_its_cost_comes_first() -> None:
    def case(text: str, seconds: float, *blocks: int) -> Tried:
        return Tried(LAW, f"{LAW} {text}", "held", False, seconds, {*blocks})

    wide, like_it, other, dear = case("a", 0.02, 1, 2, 3), case("b", 0.02, 1, 2), case("c", 0.02, 4), case("d", 2.0, 1, 2, 3, 4, 5)
    assert [*by_worth([dear, like_it, other, wide])] == [wide, other, like_it, dear]


def test_listed_cases_are_tried_where_the_target_has_their_dtypes() -> None:
    texts = (f"{LAW} mesh=2 x=4:R:float64 how=data", f"{LAW} mesh=2 x=4:R how=data")
    share = Share(0, 0, frozenset(), texts)
    assert offered(share) == ([*texts], [])
    assert [case.text for case in share.cases_within(Limits(dtypes=("float32",)))] == [texts[1]]


def test_listed_texts_have_the_places_after_the_sweeps() -> None:
    law = find(LAW)
    texts = (f"{LAW} mesh=2 x=4:R:float64 how=data", f"{LAW} mesh=2 x=4:R how=data")
    plan = Plan.for_law(law, Limits(), 0, "smoke", share=Share(3, 0, frozenset({0, 2}), texts))
    assert plan.share.places == {0, 2, 3, 4}
    assert plan.listed_at({1, 4, 5}) == [[*law.sweep(Limits())][1], Case.parse(texts[1])]  # type: ignore[misc]


def test_every_listed_case_can_be_read_and_is_of_its_law() -> None:
    for law_id, share in smoke_shares().items():
        for case in share.cases_within(Limits()):
            assert case.law == law_id


@pytest.mark.parametrize("places", [set(), {0}, {0, 1, 2}, {1, 3, 4, 5, 9}])
def test_a_share_is_read_as_written(places: set[int]) -> None:
    cases = (f"{LAW} mesh=2 x=4:R how=data", f"{LAW} mesh=2 x=5:R how=sizes")
    law, share = parse_share(format_share(LAW, places, 3, cases))
    assert (law, share.indices, share.draws, share.cases) == (LAW, places, 3, cases)


def test_the_cheapest_cases_that_show_everything_are_chosen_but_what_shows_little_for_its_cost() -> None:
    def case(text: str, seconds: float, *blocks: int, word: str = "held") -> Tried:
        assert Case.parse(text).law == LAW
        return Tried(LAW, text, word, False, seconds, set(blocks))

    one = case(f"{LAW} mesh=2 x=4:R how=data", 0.001, 1, 2)
    dear = case(f"{LAW} mesh=2 x=4:R how=data seed=1", 0.009, 1, 2, 3)
    cheap = case(f"{LAW} mesh=2 x=4:R how=data seed=2", 0.001, 3)
    wrong = case(f"{LAW} mesh=2 x=4:R how=data seed=3", 0.001, 1, word="wrong-value")
    slow = case(f"{LAW} mesh=2 x=4:R how=data seed=4", 1.0, 1, 4)
    lost = case(f"{LAW} mesh=2 x=4:R how=data seed=5", 0.001, 1, 4, word="divergence")
    alone = case(f"{LAW} mesh=2 x=4:R how=data seed=6", 0.2, 5)
    assert {one.text for one in cover([one, dear, cheap, wrong, slow, lost, alone])} == {one.text, cheap.text, wrong.text, alone.text}
    kept = replace(slow, seconds=0.4, is_listed=True)  # would cost too much as a new one
    assert {each.text for each in cover([one, kept])} == {one.text, kept.text}
    assert {each.text for each in cover([one, replace(kept, is_listed=False)])} == {one.text}


def test_each_word_of_a_law_that_is_told_apart_by_words_keeps_its_cheapest_case() -> None:
    def case(law: str, fields: str, seconds: float) -> Tried:
        return Tried(law, f"{law} {fields}", "held", False, seconds)

    again = "roundtrip.again"
    taken = case(again, "mesh=2 x=6:S(0) order=aa", 0.01)
    dear = case(again, "mesh=2 x=6:S(0) order=aa ways=ac", 0.02)
    cheap = case(again, "mesh=2 x=6:S(0) order=aa ways=ac seed=1", 0.01)
    sliced = case(again, "mesh=2 x=6:S(0):float32:distinct:sliced order=aa", 0.03)
    longer = case(again, "mesh=2x2 x=6:S(0),R order=aa", 0.04)
    larger = case(again, "mesh=3 x=7:S(0):int64 order=aa", 0.01)
    costly = case(again, "mesh=2 x=6:S(0):float32:distinct:expanded order=aa", 0.3)
    elsewhere = case("redistribute.after", "mesh=2 x=4:R to=R b=4:R to.b=R", 0.01)
    found = list(of_words([taken, dear, cheap, sliced, longer, larger, costly, elsewhere], {taken.text}))
    assert [one.text for one in found if one is not larger] == [cheap.text, sliced.text, longer.text]


def test_each_operand_of_an_op_is_pending_as_a_sum_a_maximum_and_a_minimum_once() -> None:
    def case(fields: str, seconds: float = 0.1, word: str = "held", b: str = "R") -> Tried:
        return Tried("op.forward[mul]", f"op.forward[mul] mesh=2 {fields} b=5x3:{b} steps=mul(a,b)", word, False, seconds)

    taken = case("a=5x3:P(sum)")
    again = case("a=5x3:P(sum) seed=1")
    dear = case("a=5x3:P(max)", 0.2)
    cheap = case("a=5x3:P(max) seed=1")
    least = case("a=5x3:P(min)")
    wrong = case("a=5:P(min)", 0.01, "wrong-value")
    average = case("a=5x3:P(avg)")
    other = case("a=5x3:S(0)", b="P(sum)")
    found = list(pending_operands([taken, again, dear, cheap, least, wrong, average, other], {taken.text}))
    assert [one.text for one in found] == [cheap.text, least.text, other.text]


def test_each_call_of_an_op_whose_gradient_has_a_rule_is_made_with_each_dim_cut() -> None:
    law, limits = find("op.backward[nn.functional.softmax]"), Limits()
    later = later_calls(law, {2}, limits)
    assert law.sweep is not None
    cases = [law.sweep(limits)[place] for place in sorted(later | {2})]
    cut = Counter((case.get("steps"), str(case.tensor("a").placements)) for case in cases)
    assert 2 not in later
    assert max(cut.values()) == 1
    assert sum("softmax(a,-2)" in steps for steps, _ in cut) == 2
