"""New findings by cause: which are one fault, and which are two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

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


def test_the_planner_of_redistributions_is_the_cause_of_what_shares_its_features_alone() -> None:
    moves, planner = (f"f, torch/distributed/tensor/{file}.py:1" for file in ("placement_types", "_redistribute"))

    def line(at: int, law: str, *features: str, by: str = moves) -> FindingLine:
        return reports.finding(f"{at:08x}", f"{law} mesh=2", where=by, places=[by, planner], features=list(features))

    one, two = line(1, "redistribute.back", "strided", "uneven", by=planner), line(2, "redistribute.full", "0-d", "strided", by=planner)
    shares, order = line(3, "redistribute.path", "nan", "strided", by="x, torch/a.py:1"), line(4, "redistribute.local", "permuted")
    stands_on_it = line(5, "module.linear", by="y, torch/b.py:1")
    found = reports.report([], [one, two, shares, order, stands_on_it]).causes()
    assert [sorted(each.id for each in lines) for lines in found] == [[one.id, two.id, shares.id, stands_on_it.id], [order.id]]


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


def test_code_that_findings_at_many_places_pass_is_no_cause() -> None:
    common = "load, torch/distributed/checkpoint/state_dict_loader.py:1"
    firsts = [f"{name}, torch/distributed/checkpoint/{name}.py:1" for name in ("plan", "read", "index", "copy", "flatten")]
    for number, groups in ((4, 1), (5, 5)):
        lines = [reports.finding(f"{at:08x}", where=place, places=[place, common]) for at, place in enumerate(firsts[:number])]
        assert len(reports.report([], lines).causes()) == groups
    at_it = [reports.finding(f"{at:08x}", where=common, places=[common], features=["mesh-2d"]) for at in range(5, 11)]
    assert len(reports.report([], [*lines, *at_it[:4]]).causes()) == 6
    assert len(reports.report([], [*lines, *at_it]).causes()) == 1


def test_one_finding_that_nothing_sets_apart_from_many_is_of_their_cause() -> None:
    rule, style, own, check = (f"{name}, torch/distributed/tensor/{name}.py:1" for name in ("rule", "style", "own", "check"))

    def line(at: int, kind: str = "wrong-value", law: str = "module.forward", **given: Any) -> FindingLine:
        return reports.finding(f"{at:08x}", f"{law} mesh=2", kind=kind, cause=f"{at} | wrong", **given)

    many = [line(at, where=rule, places=[rule, style, check][: 3 if at < 4 else 1], features=["module"]) for at in range(1, 6)]
    passes, unplaced = line(6, where=style, places=[style], features=["uneven"]), line(7, features=["0-d"])
    apart, elsewhere = line(8, where=own, places=[own]), line(9, law="layout.full", features=[])
    other_kind = line(10, "wrong-error", where=check, places=[check])
    found = reports.report([], [*many, passes, unplaced, apart, elsewhere, other_kind]).causes()
    assert [sorted(each.id for each in lines) for lines in found] == [
        [each.id for each in (*many, passes, unplaced)], [apart.id], [elsewhere.id], [other_kind.id],
    ]  # fmt: skip


def test_a_rule_that_the_laws_of_ops_find_in_order_is_not_where_a_model_goes_wrong() -> None:
    rule, style = "mm_rule, torch/distributed/tensor/_ops/_matrix_ops.py:1", "output, torch/distributed/tensor/parallel/style.py:2"
    ops, few = reports.law("op.forward[mm]", cases=100), reports.law("op.forward[mm]", cases=9)
    model = reports.finding("00000001", "module.forward[mlp] mesh=2", where=rule, places=[rule, style])
    op = reports.finding("00000002", "op.forward[mm] mesh=2", where=rule, places=[rule])
    assert [[line.where for line in lines] for lines in reports.report([ops], [model]).causes()] == [[style]]
    assert [[line.where for line in lines] for lines in reports.report([few], [model]).causes()] == [[rule]]
    assert [[line.where for line in lines] for lines in reports.report([ops], [model, op]).causes()] == [[rule, rule]]


def test_what_runs_on_meshes_that_are_wrong_is_of_their_cause() -> None:
    def line(at: int, law: str, *features: str) -> FindingLine:
        place = f"f{at}, torch/distributed/some.py:{at}"
        return reports.finding(f"{at:08x}", f"{law} mesh=2", where=place, places=[place], features=list(features))

    meshes = line(1, "mesh.slice", "mesh-2d", "mesh-view", "permuted")
    on_view, on_2d = line(2, "module.linear", "mesh-2d", "mesh-view", "uneven"), line(3, "module.linear", "mesh-2d", "uneven")
    found = reports.report([], [meshes, on_view, on_2d]).causes()
    assert [[each.id for each in lines] for lines in found] == [[meshes.id, on_view.id], [on_2d.id]]


def test_a_feature_that_far_more_findings_have_than_cases_makes_one_cause() -> None:
    def line(at: int, law: str, *features: str) -> FindingLine:
        place = f"f{at}, torch/distributed/some.py:{at}"
        return reports.finding(f"{at:08x}", f"{law} mesh=2", where=place, places=[place], features=list(features))

    nested = [line(at, law, "nested", "uneven") for at, law in enumerate((*LAWS, "plan.cached", "layout.math"), 1)]
    other = line(6, "module.linear", "uneven")
    for cases, count in ((1000, 2), (10, 6)):  # a tenth of the cases, and all of them
        made = reports.report([], [*nested, other])
        made.totals.cases, made.features = cases, {"nested": 100 if cases == 1000 else 10, "uneven": cases}
        assert len(made.causes()) == count


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


def test_findings_whose_place_is_not_known_join_the_group_whose_features_they_have() -> None:
    style = "output, torch/distributed/tensor/parallel/style.py:2"
    models = [reports.finding(f"{at:08x}", where=style, places=[style], features=["module", f"way:{at}"]) for at in (1, 2)]
    models[1] = msgspec.structs.replace(models[1], kind="raised")
    died = reports.finding("00000003", where="", kind="crash", features=["compiled", "module", "way:3"])
    other = reports.finding("00000004", where="", kind="crash", features=["compiled"])
    found = reports.report([], [*models, died, other]).causes()
    assert [[line.id for line in lines] for lines in found] == [[*(line.id for line in models), died.id], [other.id]]
    move = "gather, torch/distributed/tensor/placement_types.py:3"
    basic = [reports.finding(f"{at:08x}", f"{law} mesh=2", where=move, places=[move], features=[]) for at, law in enumerate(LAWS, 5)]
    assert len(reports.report([], [*basic, other]).causes()) == 1
    assert len(reports.report([], [*basic[:2], other]).causes()) == 2
    apart = [reports.finding(f"{at:08x}", f"plan.{at} world=1", where=f"f{at}, a.py:1", features=["part"]) for at in range(8, 12)]
    assert len(reports.report([], [*basic, other, *apart]).causes()) == 2 + len(apart)


def test_what_makes_one_cause_of_several_places() -> None:
    def line(at: int, where: str, law: str, *features: str) -> FindingLine:
        place = f"{where}, torch/a.py:{at}"
        return reports.finding(f"{at:08x}", f"{law} mesh=2 x=5x6:S(0)", where=place, places=[place], features=list(features))

    forward = line(1, "rule", "op.forward[nn.functional.pad.constant]", "uneven")
    gradient, other_op = line(2, "handler", "op.backward[nn.functional.pad]"), line(3, "another", "op.backward[nn.functional.fold]")
    flatten, split = line(4, "Views.flatten", "op.program", "nested", "view"), line(5, "Views.split", "op.history", "view")
    apart = line(6, "Views.cut", "op.out", "empty-shard")
    source, later = line(7, "distribute", "layout.source", "source-rank"), line(8, "style", "module.source", "source-rank", "uneven")
    same = line(9, "else", "layout.memory", "source-rank")
    nowhere = reports.finding("0000000a", where="", features=["nested", "uneven"])
    made = reports.report([], [forward, gradient, other_op, flatten, split, apart, source, later, same, nowhere])
    made.totals.cases = 1000
    made.features = {"source-rank": 5, "uneven": 300, "view": 9}
    assert [sorted(each.id for each in lines) for lines in made.causes()] == [
        [forward.id, gradient.id, nowhere.id],
        [other_op.id],
        [flatten.id, split.id],
        [apart.id],
        [source.id, later.id],
        [same.id],
    ]


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
