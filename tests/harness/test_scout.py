"""Runs that end with their first finding begin where something is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.run.scout import MAX_PENDING, PARTS, Scout, cases_in_turn, interleave_families
from shardlaw.conformance.run.search import Plan

LAWS = [find(law) for law in ("redistribute.same", "op.forward[neg]", "op.forward[abs]", "op.backward[neg]", "layout.full")]
PLANTED = """
from torch.distributed.tensor._sharding_prop import ShardingPropagator

true = ShardingPropagator.propagate_op_sharding_non_cached

def wrong(self, schema):
    if "flip" in str(schema.op):
        raise ValueError("planted")
    return true(self, schema)

def plant():
    ShardingPropagator.propagate_op_sharding_non_cached = wrong
"""


class Ranks:
    """A pool whose ranks find cases wrong, and that answers once it is waited for."""

    def __init__(self, is_wrong: Callable[[Case], str]) -> None:
        self.is_wrong = is_wrong
        self.fed: list[Case] = []
        self.waiting: list[Callable[[], None]] = []

    def submit(self, law: Law, case: Case, on_verdict: Callable[[Verdict], None], *, reuse: bool) -> None:
        status = self.is_wrong(case) or "held"
        self.fed.append(case)
        self.waiting.append(lambda: on_verdict(Verdict(case, status, "wrong-value" if status == "deviates" else "", "x")))

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.waiting.pop(0)()


class Known:
    """Expectations that cover what deviates of one law, of another perhaps, and cases of a third that would cost a world."""

    def __init__(self, known: str = "", doubtful: str = "", costly: str = "") -> None:
        self.known, self.doubtful, self.costly = known, doubtful, costly

    def match_verdict(self, law: Law, verdict: Verdict) -> str | None:
        return law.id if law.id == self.known else None

    def needs_trace(self, law: Law, verdict: Verdict) -> bool:
        return law.id == self.doubtful

    def costly_entries(self, case: Case, features: object) -> list[str]:
        return [case.law] if case.law == self.costly else []


def plans_of(laws: list[Law]) -> list[Plan]:
    return [Plan.for_law(law, Limits(), 0, "smoke") for law in laws]


def found(ranks: Ranks, laws: list[Law] = LAWS, supported: frozenset[str] = frozenset(), **known: str) -> Case | None:
    request, listener = SimpleNamespace(profile="smoke", uses_smoke_shares=False), SimpleNamespace(on_scouted=lambda law: None)
    run: Any = SimpleNamespace(expectations=Known(**known), request=request, supported=supported, scouted={})
    pool: Any = ranks
    wrong = Scout(run, pool, listener).find_deviation(plans_of(laws))  # type: ignore[arg-type]
    assert set(run.scouted) <= set(ranks.fed)
    return wrong


def of_laws(*wrong: str) -> Callable[[Case], str]:
    return lambda case: "deviates" if case.law in wrong else ""


def test_each_family_has_its_turn() -> None:
    assert [plan.law.id for plan in interleave_families(plans_of(LAWS))] == [LAWS[at].id for at in (0, 1, 3, 4, 2)]


def fed(law: Law, *, drawn: bool = True) -> list[Case]:
    """The cases of a law in a run of its own; without ``drawn`` those alone that are not drawn."""
    cases: list[Case] = []
    plans_of([law])[0].feed(lambda case, is_drawn: cases.append(case), drawn=drawn)
    return cases


def in_turn(plans: list[Plan], waves: dict[str, list[frozenset[int]]] | None = None) -> list[Case]:
    return [case for _, case in cases_in_turn(plans, waves or {})]


def texts(cases: Iterable[Case]) -> list[str]:
    return sorted(case.text for case in cases)


def test_the_control_of_each_law_comes_before_a_tenth_of_its_listed_cases_and_the_drawn_cases_law_by_law() -> None:
    cases, listed = in_turn(plans_of(LAWS)), fed(LAWS[0], drawn=False)
    controls = [Case.parse(law.control) for law in LAWS]
    tenth, drawn = [controls[0], *listed[::PARTS]], fed(LAWS[0])[len(listed) :]
    assert drawn
    assert cases[: len(tenth) + len(drawn) + 1] == [*tenth, *drawn, controls[1]]
    assert texts(cases) == texts([*controls, *(case for law in LAWS for case in fed(law))])


def test_waves_come_first_and_the_others_with_the_later_ones() -> None:
    nothing: frozenset[int] = frozenset()
    waves = {LAWS[1].id: [frozenset({3, 5}), frozenset({0}), nothing, frozenset({1})], LAWS[2].id: [nothing, frozenset({1, 10**6})]}
    waves[LAWS[2].id] += [nothing, nothing]
    plans = plans_of(LAWS)
    first = [Case.parse(LAWS[1].control), *plans[1].listed_at([3, 5]), *plans[1].listed_at([0])]
    first += [Case.parse(LAWS[2].control), *plans[2].listed_at([1])]
    (later,) = plans[1].listed_at([1])
    cases = in_turn(plans, waves)
    assert next(case for case in cases[len(first) :] if case.law == LAWS[1].id) == later
    assert cases[: len(first)] == first
    assert texts(cases[len(first) :]) == texts(case for case in in_turn(plans_of(LAWS)) if case not in first)


def test_a_law_whose_cases_cannot_be_made_keeps_no_other_from_its_turn() -> None:
    def broken(limits: Limits) -> list[Case]:
        raise ValueError("not made")

    plans = plans_of([replace(LAWS[4], sweep=broken, sweeps=2), LAWS[0]])
    laws = [case.law for case in in_turn(plans, {LAWS[4].id: [frozenset({1})]})]
    assert laws == [LAWS[4].id, *[LAWS[0].id] * (len(fed(LAWS[0])) + 1)]


def test_the_first_case_that_deviates_is_told() -> None:
    assert found(Ranks(of_laws())) is None
    assert found(Ranks(of_laws("op.forward[abs]", "layout.full"))) == Case.parse(LAWS[4].control)
    assert found(Ranks(of_laws("layout.full")), known="layout.full") is None
    last = fed(LAWS[4])[-1]
    assert found(Ranks(lambda case: "deviates" if case == last else "")) == last


def test_what_only_a_trace_tells_comes_after_what_is_wrong() -> None:
    assert found(Ranks(of_laws("layout.full")), doubtful="layout.full") == Case.parse(LAWS[4].control)
    assert found(Ranks(of_laws("layout.full", "op.forward[abs]")), doubtful="layout.full") == Case.parse(LAWS[2].control)


def test_what_would_cost_a_world_has_its_turn_later() -> None:
    ranks = Ranks(of_laws("layout.full"))
    assert found(ranks, costly="layout.full") is None
    assert {case.law for case in ranks.fed} == {law.id for law in LAWS[:4]}


def test_a_law_that_was_supported_and_refuses_is_told() -> None:
    def refuses(case: Case) -> str:
        return "refused" if case.law == "layout.full" else ""

    assert found(Ranks(refuses)) is None
    wrong = found(Ranks(refuses), supported=frozenset({"layout.full"}))
    assert wrong is not None
    assert wrong.text != LAWS[4].control


def test_no_more_is_tried_once_something_is_wrong() -> None:
    ranks = Ranks(of_laws(LAWS[0].id))
    assert sum(map(len, map(fed, LAWS))) > 2 * MAX_PENDING
    assert found(ranks) == Case.parse(LAWS[0].control)
    assert len(ranks.fed) == MAX_PENDING


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_a_run_that_ends_with_its_first_finding_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "shardlaw.toml").write_text('[target.faulty]\nbackend = "gloo"\nsetup = "planted:plant"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = cli.main(["run", "redistribute.*", "op.forward[fliplr]", "--target", "faulty", "-x"])
    assert code == 1, capsys.readouterr()
    report = json.loads((tmp_path / "shardlaw-report" / "report.json").read_text())
    (finding,) = [one for one in report["findings"] if one["status"] == "new"]
    assert finding["case"]["law"] == "op.forward[fliplr]"
    assert [law["id"] for law in report["laws"] if law["cases"]] == ["op.forward[fliplr]"]
