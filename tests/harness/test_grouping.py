"""New findings by cause: which are one fault, and which are two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shardlaw.conformance.report.run_report import FindingLine
from tests.harness import reports
from tests.harness.runs import CASE, finding, verdict

LAWS = ("layout.full", "redistribute.path", "gradient.graph")


def test_what_departs_in_several_ways_at_one_place_or_by_way_of_it_is_one_cause() -> None:
    one = "gather_rule, torch/distributed/tensor/_ops/_some_ops.py:1"

    def line(at: int, cause: str, features: list[str], where: str = one) -> FindingLine:
        return reports.finding(f"{at:08x}", where=where, cause=f"{where} | {cause}", features=features)

    wrong, raised = line(1, "wrong", ["uneven", "world:3"]), line(2, "raised | no", ["empty-shard", "uneven"])
    other = msgspec.structs.replace(line(3, "hang", ["permuted"]), kind="hang")
    asked = line(4, "wrong", ["uneven"], f"{one}, asked for R")
    elsewhere = line(5, "wrong", ["uneven"], one.replace("gather", "reduce"))
    through = msgspec.structs.replace(line(6, "raised", ["0-d", "uneven"], "below"), kind="raised", places=["below", elsewhere.where])
    found = reports.report([], [wrong, raised, other, asked, elsewhere, through]).causes()
    assert [sorted(each.id for each in lines) for lines in found] == [
        [wrong.id, raised.id, asked.id],
        [other.id],
        [elsewhere.id, through.id],
    ]


def test_what_every_op_goes_through_does_not_make_one_cause_of_two_ops_that_are_refused() -> None:
    planner = "ShardingPropagator.propagate_op_sharding_non_cached, torch/distributed/tensor/_sharding_prop.py:735"

    def refused(at: int, op: str) -> FindingLine:
        more = {"kind": "raised", "where": planner, "places": [planner], "cause": f"{planner} | raised | no rule of {op}"}
        return reports.finding(f"{at:08x}", features=[f"option:{op}"], **more)

    assert len(reports.report([], [refused(1, "one"), refused(2, "other"), refused(3, "one")]).causes()) == 2


def test_a_cause_is_shown_by_what_departs_at_the_place_that_is_named_most() -> None:
    took, gave, else_ = (f"{name}, torch/distributed/tensor/parallel/style.py:{at}" for at, name in enumerate(("took", "gave", "else")))
    models = [reports.finding(f"{at:08x}", where=took, places=[took, gave]) for at in (1, 2, 3)]
    style = reports.finding("00000004", CASE.text.replace("5x6", "15x16"), where=gave, places=[gave, else_])
    other = reports.finding("00000005", where=else_, places=[else_])
    found = reports.report([], [*models, style, other]).causes()
    assert [[line.id for line in lines] for lines in found] == [[style.id, *(line.id for line in models)], [other.id]]


def test_a_cause_is_shown_by_the_chapter_that_is_about_its_place() -> None:
    rule = "mm_rule, torch/distributed/tensor/_ops/_matrix_ops.py:1"
    model = reports.finding("00000001", "module.tied mesh=2", where=rule)
    op = reports.finding("00000002", "op.forward[mm] mesh=2 a=5x6:S(0)", where=rule)
    (found,) = reports.report([], [model, op]).causes()
    assert [line.id for line in found] == [op.id, model.id]


def test_a_place_that_nearly_all_findings_at_two_places_pass_is_their_cause() -> None:
    check, index, plan = (
        f"{name}, torch/distributed/checkpoint/default_planner.py:{at}" for at, name in enumerate(("check", "index", "plan"))
    )
    saved = [reports.finding(f"{at:08x}", where=check, places=[check, plan]) for at in (1, 2)]
    loaded = [reports.finding(f"{at:08x}", where=index, places=[index, plan]) for at in (3, 4)]
    (found,) = reports.report([], [*saved, *loaded]).causes()
    assert [line.id for line in found] == [line.id for line in (*saved, *loaded)]
    assert found[0].where == plan


def test_a_place_that_most_findings_list_late_accounts_for_none_but_its_own() -> None:
    common = "load, torch/distributed/checkpoint/state_dict_loader.py:1"
    firsts = [f"{name}, torch/distributed/checkpoint/{name}.py:1" for name in ("plan", "read", "index", "copy", "flatten")]
    checks = [f"{name}, torch/distributed/checkpoint/checks.py:1" for name in ("plan", "read", "index", "copy", "flatten")]
    late = [
        reports.finding(f"{at:08x}", where=first, places=[first, check, common])
        for at, (first, check) in enumerate(zip(firsts, checks, strict=True))
    ]
    at_it = [reports.finding(f"{at:08x}", where=common, places=[common]) for at in range(5, 13)]
    assert len(reports.report([], [*late, *at_it[:2]]).causes()) == 6
    assert len(reports.report([], [*late, *at_it]).causes()) == 1, "eight of thirteen list it first"


def test_a_large_cause_accounts_for_small_ones_that_ran_its_place_and_for_findings_without_a_place() -> None:
    rule, style, own = (f"{name}, torch/distributed/tensor/{name}.py:1" for name in ("rule", "style", "own"))

    def line(at: int, where: str = "", ran: tuple[str, ...] = (), **given: Any) -> FindingLine:
        given |= {"places": [where] if where else [], "ran": dict.fromkeys(ran, 0), "cause": f"{at} | wrong"}
        return reports.finding(f"{at:08x}", where=where, **given)

    many = [line(at, rule) for at in range(1, 6)]
    ran = [line(6, style, (rule, style)), line(7, style, (rule, style))]
    apart = line(8, own, (own, style))
    unplaced, other_kind = line(9), line(10, kind="wrong-error")
    found = reports.report([], [*many, *ran, apart, unplaced, other_kind]).causes()
    assert [sorted(each.id for each in lines) for lines in found] == [
        [each.id for each in (*many, *ran, unplaced)], [apart.id], [other_kind.id],
    ]  # fmt: skip
    found = reports.report([], [*many[:4], *ran, apart, unplaced, other_kind]).causes()
    assert len(found) == 5, "four are no large cause"


@pytest.mark.parametrize(("held", "listed", "is_one"), [(1, True, True), (5, True, False), (1, False, False)])
def test_code_that_all_ran_and_few_holding_cases_did_makes_one_cause_if_some_list_it(held: int, listed: bool, is_one: bool) -> None:
    gather, reduce, cut = (
        f"{name}, torch/distributed/tensor/placement_types.py:{at}" for at, name in enumerate(("gather", "reduce", "cut"))
    )

    def line(at: int, where: str) -> FindingLine:
        places = [where, "a, torch/a.py:1", "b, torch/b.py:1", cut] if listed and at == 1 else [where]
        return reports.finding(f"{at:08x}", where=where, places=places, ran={where: 0, cut: held}, similar=10)

    lines = [line(at, gather) for at in (1, 2, 3)] + [line(at, reduce) for at in (4, 5, 6)]
    found = reports.report([], lines).causes()
    assert [len(group) for group in found] == ([6] if is_one else [3, 3])
    assert found[0][0].where == (cut if is_one else gather)


@pytest.mark.parametrize(("held", "listed", "is_one"), [(7, True, True), (8, True, False), (7, False, False)])
def test_code_that_all_list_and_fewer_holding_cases_ran_than_their_places_makes_one_cause(held: int, listed: bool, is_one: bool) -> None:
    load, ask, cut = (f"{name}, torch/distributed/checkpoint/state_dict.py:{at}" for at, name in enumerate(("load", "ask", "cut")))

    def line(at: int, where: str, places: list[str]) -> FindingLine:
        return reports.finding(f"{at:08x}", where=where, places=[where, *places], ran={where: 10, cut: held}, similar=10)

    loads = [line(at, load, ["a, torch/a.py:1", "b, torch/b.py:1", cut]) for at in (1, 2, 3)]
    found = reports.report([], [*loads, line(4, ask, ["c, torch/c.py:1", "d, torch/d.py:1", *[cut][:listed]])]).causes()
    assert [(len(group), group[0].where) for group in found] == ([(4, cut)] if is_one else [(3, load), (1, ask)])


def test_of_code_that_all_list_and_as_few_ran_the_first_listed_is_the_cause() -> None:
    send, make = "scatter, torch/distributed/distributed_c10d.py:1", "make, torch/distributed/tensor/placement_types.py:2"

    def line(at: int, where: str) -> FindingLine:
        places = [where, f"a{at}, torch/a.py:1", f"b{at}, torch/b.py:1", make, send]
        return reports.finding(f"{at:08x}", where=where, places=places, ran={where: 5, make: 1, send: 1}, similar=10)

    ((first, _),) = reports.report([], [line(1, "tensor, torch/a.py:1"), line(2, "module, torch/b.py:1")]).causes()
    assert first.where == make


def test_the_place_of_a_cause_accounts_for_one_other_that_lists_it_early() -> None:
    shape = "compute_local_shape_and_global_offset, torch/distributed/tensor/_utils.py:1"
    zeros, other = (f"{name}, torch/distributed/tensor/{name}.py:1" for name in ("zeros", "other"))
    asked = reports.finding("00000001", where=shape, places=[shape])
    made = [reports.finding(f"{at:08x}", where=zeros, places=[zeros, "a, torch/a.py:1", shape]) for at in (2, 3, 4)]
    (found,) = reports.report([], [asked, *made]).causes()
    assert (found[0].id, len(found)) == (asked.id, 4)
    third = reports.finding("00000005", where=other, places=[other, "b, torch/b.py:1", shape])
    assert len(reports.report([], [asked, *made, third]).causes()) == 3, "several list what every call passes"


@pytest.mark.parametrize(("size", "reached", "count"), [(6, 50, 2), (6, 51, 7), (4, 20, 2), (4, 21, 5)])
def test_a_feature_that_hardly_any_case_has_makes_one_cause(size: int, reached: int, count: int) -> None:
    lines = [
        reports.finding(
            f"{at:08x}", where=(place := f"f{at}, torch/a.py:{at}"), places=[place], features=["nested", "uneven"][: 1 + at % 2]
        )
        for at in range(size)
    ]
    made = reports.report([], [*lines, reports.finding("00000009", where="g, torch/b.py:1", features=["uneven"])])
    made.totals.cases, made.features = 1000, {"nested": reached, "uneven": 400}
    assert len(made.causes()) == count


def test_a_rule_that_the_laws_of_ops_find_in_order_is_not_where_a_model_goes_wrong() -> None:
    rule, style = "mm_rule, torch/distributed/tensor/_ops/_matrix_ops.py:1", "output, torch/distributed/tensor/parallel/style.py:2"
    ops, few = reports.law("op.forward[mm]", cases=100), reports.law("op.forward[mm]", cases=9)
    model = reports.finding("00000001", "module.forward[mlp] mesh=2", where=rule, places=[rule, style])
    op = reports.finding("00000002", "op.forward[mm] mesh=2", where=rule, places=[rule])
    assert [[line.where for line in lines] for lines in reports.report([ops], [model]).causes()] == [[style]]
    assert [[line.where for line in lines] for lines in reports.report([few], [model]).causes()] == [[rule]]
    assert [[line.where for line in lines] for lines in reports.report([ops], [model, op]).causes()] == [[rule, rule]]


def test_one_error_whose_place_is_not_known_is_one_cause() -> None:
    def raised(at: int, law: str, place: str, error: str) -> FindingLine:
        more = {"kind": "raised", "where": place, "places": [place] if place else []}
        return reports.finding(f"{at:08x}", f"{law} mesh=2", cause=f"{place or law} | raised | {error}", features=[f"option:{at}"], **more)

    gradient = "RuntimeError: it returned an invalid gradient"
    lines = [
        raised(1, "gradient.leaf", "", gradient),
        raised(2, "module.local-map", "wrapped, torch/distributed/some.py:2", gradient),
        raised(3, "gradient.graph", "", gradient),
        raised(4, "gradient.graph", "", "ValueError: another"),
    ]
    assert [{line.id for line in found} for found in reports.report([], lines).causes()] == [{line.id for line in lines[:3]}, {lines[3].id}]


def test_an_error_of_some_ranks_and_of_all_is_one_cause() -> None:
    some = replace(verdict(), kind="divergence", error="RuntimeError: of 3")
    every = replace(verdict(), kind="raised", error="RuntimeError: of 4")
    causes = {finding(kind=each.kind, verdict=each, where="f, torch/a.py:1").cause for each in (some, every)}
    assert causes == {("f, torch/a.py:1", "raised", "RuntimeError: of #")}


def test_what_two_collectives_of_a_back_end_do_wrong_is_two_causes() -> None:
    def found(at: int, features: tuple[str, ...], kind: str = "wrong-value") -> FindingLine:
        one = finding(kind=kind, verdict=replace(verdict(), kind=kind), where="the back end mine", features=features)
        return reports.finding(f"{at:08x}", kind=kind, where=one.where, cause=" | ".join(one.cause), features=list(features))

    one, alike = found(1, ("collective:all_reduce",)), found(2, ("async", "collective:all_reduce"))
    other, described = found(3, ("collective:all_gather",)), found(4, ("collective:all_reduce",), "wrong-metadata")
    causes = reports.report([], [one, alike, other, described]).causes()
    assert [sorted(line.id for line in lines) for lines in causes] == [[one.id, alike.id], [other.id], [described.id]]


def test_what_stands_on_a_collective_of_a_back_end_is_of_its_cause() -> None:
    """One fault of ``all_gather``: its other forms, errors where the parts are uneven, and where torch gathers."""
    place = "Shard._to_replicate_tensor, torch/distributed/tensor/placement_types.py:591"
    planner = "_optimize_transform_infos, torch/distributed/tensor/_redistribute.py:395"

    def line(at: int, kind: str = "wrong-value", called: str = "", where: str = "the back end mine", **fields: Any) -> FindingLine:
        features = [f"collective:{name}" for name in called.split()] + fields.pop("more", [])
        return reports.finding(f"{at:08x}", kind=kind, cause=f"{at}", where=where, features=features, **fields)

    gather, reduce = line(1, called="all_gather"), line(2, called="all_reduce", more=["async"])
    both = line(3, called="all_gather broadcast", more=["in-flight"])
    raised = line(4, "raised", "all_gather", more=["uneven-split"])
    moved = line(5, where=place, places=[place, planner], calls=["all_gather"])
    planned = line(6, "divergence", calls=["all_gather", "broadcast"])
    other = line(7, where=planner, places=[planner], more=["uneven"])
    found = reports.report([], [gather, reduce, both, raised, moved, planned, other]).causes()
    assert [sorted(each.id for each in lines) for lines in found] == [
        [gather.id, both.id, raised.id, moved.id, planned.id],
        [reduce.id],
        [other.id],
    ]
    assert found[0][0].where == "the back end mine", "the smallest case of what stands on it"
