"""Where to look in torch: the first step that departs from the reference is found, and who decided it is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardlaw.conformance.compat.trace import tail_calls
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.evidence import Evidence, Step, TracedTensor, pack, traced_tensors, unpack
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Raised, Verdict
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.laws.layout.inputs import KINDS
from shardlaw.conformance.rank.trace import snapshot
from shardlaw.conformance.run import nearby, place
from shardlaw.conformance.run.nearby import simpler_cases
from shardlaw.conformance.run.place import add_decision, find_places, find_storage_frame, places_by_steps
from tests.harness.traces import FULL, METHOD, PLANNER, RULE, halves, move, piece, ranks, right, wrong

CASE = Case.parse("op.forward[neg] mesh=2 a=4:S(0) steps=neg(a)")


def verdict(*answers: Answer, kind: str = "wrong-value") -> Verdict:
    return Verdict(CASE, "deviates", kind, "result", "", "", answers)  # type: ignore[arg-type]


def heard(steps: tuple[Step, ...], visited: dict[str, frozenset[int]], **more: object) -> Evidence:
    return Evidence(steps, visited, {place: frozenset() for place in visited}, **more)  # type: ignore[arg-type]


def test_a_redistribution_is_put_down_to_what_cuts_shards_on_lines_that_no_holding_case_ran() -> None:
    fills = "fill_empty_tensor_to_shards, torch/distributed/tensor/_collective_utils.py:268"
    wrong_move = tuple(move(local, torch.zeros(4)) for local in halves(FULL))
    lines = {rank: {METHOD: frozenset({1}), fills: frozenset({2, 3})} for rank in range(2)}
    answers = [Answer(rank, "deviates", evidence=heard(its, lines[rank])) for rank, its in ranks(wrong_move).items()]  # type: ignore[arg-type]
    held = replace(verdict(Answer(0, "held", evidence=heard((), {METHOD: frozenset({1}), fills: frozenset({2})}))), status="held")
    assert places_by_steps(verdict(*answers), [held])[:2] == [fills, METHOD]
    assert find_places(verdict(*answers), [])[0] == METHOD


def test_where_several_dims_change_the_planner_comes_before_what_cuts_shards() -> None:
    given, gave = (TracedTensor((4,), "2x1", placements, FULL) for placements in ("S(0),S(0)", "R,R"))
    steps = [
        Step("move", "redistribute", replace(given, local=half), replace(gave, local=FULL + 1), PLANNER, [METHOD] * 2, completed=True)
        for half in halves(FULL)
    ]
    lines = {METHOD: frozenset({1, 2}), PLANNER: frozenset({3})}
    answers = [Answer(rank, "deviates", evidence=heard((step,), lines)) for rank, step in enumerate(steps)]
    held = replace(verdict(Answer(0, "held", evidence=heard((), {METHOD: frozenset({1}), PLANNER: frozenset({3})}))), status="held")
    assert places_by_steps(verdict(*answers), [held])[:2] == [PLANNER, METHOD]


def test_the_rule_of_the_op_that_departs_is_named() -> None:
    noted = {rank: heard(its, {RULE: frozenset({1})}) for rank, its in ranks(right(), wrong()).items()}
    answers = (Answer(rank, "deviates", evidence=evidence) for rank, evidence in noted.items())
    assert find_places(verdict(*answers), [])[0] == RULE


@pytest.mark.parametrize("placements", ["R", "P(sum)"])
def test_what_made_an_operand_that_contradicts_its_placements_is_named_before_the_rules(placements: str) -> None:
    makes, takes = (f"_ToTorchTensor.{name}, torch/distributed/tensor/_api.py:{at}" for at, name in enumerate(("forward", "backward")))
    visited = dict.fromkeys((makes, takes, RULE), frozenset({1}))
    noted = {}
    for rank, local in enumerate((FULL, FULL + 1)):
        step = Step("op", "aten.neg.default", ((piece(local, placements),), {}), (piece(-local, placements), []), RULE, completed=True)
        noted[rank] = heard((replace(step, since=[makes, takes]),), visited)
    answers = (Answer(rank, "deviates", evidence=evidence) for rank, evidence in noted.items())
    found = find_places(verdict(*answers), [])
    assert found[:2] == ([takes, makes] if placements == "R" else [RULE, makes])


def test_a_helper_that_a_few_rules_share_comes_after_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (f"{name}, torch/distributed/tensor/_ops/_some_ops.py:{at}" for at, name in ((2, "contract"), (3, "reduce_dims")))
    monkeypatch.setattr(place, "count_calls", {RULE: 0, few: 5, many: 15}.__getitem__)
    callers = {few: frozenset({RULE}), many: frozenset({RULE})}
    noted = {
        rank: Evidence(its, dict.fromkeys((RULE, few, many), frozenset({1})), callers) for rank, its in ranks(right(), wrong()).items()
    }
    answers = (Answer(rank, "deviates", evidence=evidence) for rank, evidence in noted.items())
    assert find_places(verdict(*answers), [])[:2] == [RULE, few]


def places_by_rule(
    rule: str, steps: dict[int, tuple[Step, ...]], visited: dict[str, frozenset[int]], callers: dict[str, frozenset[str]]
) -> list[str]:
    noted = {rank: Evidence(tuple(replace(step, rule=rule) for step in its), visited, callers) for rank, its in steps.items()}
    return find_places(verdict(*(Answer(rank, "deviates", evidence=evidence) for rank, evidence in noted.items())), [])


@pytest.mark.parametrize(("rule", "handed"), [("register_map", True), ("register_map.rule", True), ("table_of_ops", False)])
def test_what_is_handed_to_a_rule_comes_before_it(rule: str, handed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "torch/distributed/tensor/_ops/_handed_ops.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "def register_map(maps):\n    def rule(op):\n        return helper(maps[op](op))\n    return rule\n\n"
        "def helper(op):\n    return op\n\ndef squeeze_map(op):\n    return op\n\nMAPS = {1: lambda op: squeeze_map(op)}\n"
    )
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    where = "torch/distributed/tensor/_ops/_handed_ops.py"
    own, helper, maps, made = (
        f"{name}, {where}:{at}" for name, at in (("register_map.rule", 2), ("helper", 6), ("squeeze_map", 9), ("<lambda>", 12))
    )
    callers = {own: frozenset[str](), helper: frozenset({own}), maps: frozenset({made}), made: frozenset({own})}
    steps = ranks(right("aten.abs.default"), wrong())
    places = places_by_rule(f"{rule}, {where}:2", steps, dict.fromkeys(callers, frozenset({3})), callers)
    assert places[0] == (maps if handed else f"{rule}, {where}:2")


@pytest.mark.parametrize("again", [True, False])
def test_of_an_op_that_was_right_before_the_rule_comes_first_whatever_it_called(again: bool) -> None:
    helper = "_needs_reduce, torch/distributed/tensor/_ops/_some_ops.py:2"
    visited, callers = dict.fromkeys((RULE, helper), frozenset({1})), {RULE: frozenset[str](), helper: frozenset({RULE})}
    steps = ranks(right() if again else right("aten.abs.default"), wrong()).items()
    noted = {rank: Evidence(its, visited, callers, answered=frozenset({helper})) for rank, its in steps}
    answers = (Answer(rank, "deviates", evidence=evidence) for rank, evidence in noted.items())
    assert find_places(verdict(*answers), [])[:2] == ([RULE, helper] if again else [helper, RULE])


@pytest.mark.parametrize(("kind", "calls"), [("wrong-metadata", 1), ("wrong-metadata", 2), ("wrong-layout", 1)])
def test_where_only_metadata_are_wrong_what_finds_them_comes_first_unless_the_op_was_planned_before(kind: str, calls: int) -> None:
    finds = "ShardingPropagator._propagate_tensor_meta_non_cached, torch/distributed/tensor/_sharding_prop.py:520"
    steps = ranks(*[right()] * calls).items()
    answers = (Answer(rank, "deviates", evidence=heard(its, dict.fromkeys((finds, RULE), frozenset({1})))) for rank, its in steps)
    assert find_places(verdict(*answers, kind=kind), [])[0] == (finds if (kind, calls) == ("wrong-metadata", 1) else RULE)


@pytest.mark.parametrize(("dims", "elements"), [(1, 2), (2, 2), (2, 0)])
def test_an_op_whose_result_has_other_dims_than_it_says_is_put_down_to_what_gives_it_its_spec(dims: int, elements: int) -> None:
    gives = "OpDispatcher._dispatch_fast_path_python_tail, torch/distributed/tensor/_dispatch.py:489"

    def said(step: Step) -> Step:
        gave = (replace(each, shape=(4,) * dims, local=each.local[:elements]) for each in traced_tensors(step.results))
        return replace(step, results=tuple(gave))

    noted = [heard((said(step),), dict.fromkeys((RULE, gives), frozenset({1}))) for step in wrong()]
    answers = (Answer(rank, "deviates", evidence=evidence) for rank, evidence in enumerate(noted))
    assert find_places(verdict(*answers, kind="wrong-metadata"), [])[0] == (gives if dims == 2 and elements else RULE)


def test_what_a_rule_returns_as_its_own_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "torch/distributed/tensor/_ops/_tail_ops.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "@register\ndef some_strategy(op):\n    if op.empty:\n        return other(op)\n    return reduce(op)\n\n"
        "def reduce(op):\n    found = other(op)\n    return found\n\ndef other(op):\n    return 1\n"
    )
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    rule, reduces, others = (
        f"{name}, torch/distributed/tensor/_ops/_tail_ops.py:{at}" for name, at in (("some_strategy", 1), ("reduce", 7), ("other", 11))
    )
    assert tail_calls(rule) == {4: "other", 5: "reduce"}
    callers = {rule: frozenset[str](), reduces: frozenset({rule}), others: frozenset({rule, reduces})}
    visited = {rule: frozenset({3, 5}), reduces: frozenset({8, 9}), others: frozenset({12})}
    assert places_by_rule(rule, ranks(right(), wrong()), visited, callers)[:2] == [rule, reduces]


def test_an_error_from_below_the_rule_is_put_down_to_the_rule_and_a_refusal_to_who_refused() -> None:
    begun = Step("op", "aten.neg.default", rule=RULE, rule_asked=True)
    raised = Raised("RuntimeError", "", "")
    hands_on = "OpDispatcher._dispatch_get_local_results_slow_path, torch/distributed/tensor/_dispatch.py:9"
    checks = "refused by distribute_tensor, torch/distributed/tensor/_api.py:7"
    for frames, named in (((hands_on,), RULE), ((checks,), checks.removeprefix("refused by "))):
        evidence = heard((begun,), {RULE: frozenset({1})}, raised=frames)
        assert find_places(verdict(Answer(0, "raised", raised=raised, evidence=evidence), kind="raised"), [])[0] == named


def refusal(*steps: Step, frames: tuple[str, ...], visited: tuple[str, ...] = (), **more: object) -> list[str]:
    """The places of an error that came through these functions."""
    lines = dict.fromkeys((RULE, *visited), frozenset({1}))
    answer = Answer(0, "raised", raised=Raised("RuntimeError", "", ""), evidence=heard(steps, lines, raised=frames, **more))
    return find_places(verdict(answer, kind="raised"), [])


KERNEL = "OpDispatcher._dispatch_get_local_results_slow_path, torch/distributed/tensor/_dispatch.py:9"
NO_RULE = "refused by ShardingPropagator.propagate_op_sharding_non_cached, torch/distributed/tensor/_sharding_prop.py:9"
DECOMPOSES = "DecompShardingStrategy.propagate_strategy, torch/distributed/tensor/_decompositions.py:4"


def test_an_op_back_without_a_rule_is_put_down_to_what_should_have_it() -> None:
    forth = Step("op", "aten.neg.default", ((), {}), (None, []), RULE, rule_asked=True, completed=True)
    back = Step("op", "aten.neg_backward.default", rule=DECOMPOSES, rule_asked=True)
    assert refusal(forth, back, frames=(KERNEL,))[0] == RULE, "planned by its decomposition, it fails"
    assert refusal(forth, back, frames=(NO_RULE,))[0] == RULE
    back.similar_rule = "other_strategy, torch/distributed/tensor/_ops/_other_ops.py:1"
    assert refusal(forth, back, frames=(NO_RULE,))[0] == back.similar_rule


def test_a_choice_among_nothing_is_put_down_to_who_offers() -> None:
    chooses = "_select_min_cost_strategy, torch/distributed/tensor/_sharding_prop.py:9"
    offers = "expand_to_full_mesh_op_strategy, torch/distributed/tensor/_ops/utils.py:3"
    begun = Step("op", "aten.neg.default", rule=RULE, rule_asked=True)
    assert refusal(begun, frames=(NO_RULE.removeprefix("refused by "), chooses), visited=(offers,))[0] == offers


@pytest.mark.parametrize("dims", [1, 2])
def test_what_a_transform_made_of_an_argument_is_put_down_to_it_or_to_the_order_of_steps(dims: int) -> None:
    method, does = (f"_MaskPartial.{name}, torch/distributed/tensor/placement_types.py:{name!r}" for name in ("_partition_value", "_mask"))
    calls = [method, METHOD.replace("Shard._to_replicate_tensor", "Partial._reduce_value")][:dims]
    inner = Step("move", "redistribute", None, None, PLANNER, calls, within=0, completed=True)
    evidence = Evidence(
        (Step("op", "aten.neg.default", rule=RULE, rule_asked=True), inner),
        {does: frozenset({1})},
        {does: frozenset({method})},
        raised=(KERNEL,),
    )
    answer = Answer(0, "raised", raised=Raised("RuntimeError", "", ""), evidence=evidence)
    assert find_places(verdict(answer, kind="raised"), [])[0] == (PLANNER if dims == 2 else does)


def test_a_rule_that_asks_for_a_dim_that_is_not_there_is_named_before_what_fails_of_it() -> None:
    frames = (KERNEL, "refused by Shard._custom_chunk, torch/distributed/tensor/placement_types.py:9")
    begun = Step("op", "aten.equal.default", rule=RULE, rule_asked=True)
    inner = Step("move", "redistribute", rule=PLANNER, calls=[METHOD], within=0, missing_dim=True)
    assert refusal(begun, inner, frames=frames)[0] == RULE
    assert refusal(begun, replace(inner, missing_dim=False), frames=frames)[0] != RULE


def test_comparisons_come_first_then_lines_that_no_holding_case_ran_then_what_does_most() -> None:
    checks, compares, keeps = (
        f"{name}, torch/distributed/checkpoint/planner.py:{at}"
        for at, name in enumerate(("_check_bounds", "_compare_plans", "dedup_plans"))
    )
    law = Case.parse("plan.dedup world=1")

    def answered(*lines: int, status: str = "deviates", kind: str = "wrong-metadata") -> Verdict:
        visited = {keeps: frozenset({5, 6}), compares: frozenset({9}), checks: frozenset(lines)}
        evidence = Evidence((), visited, dict.fromkeys(visited, frozenset()), frozenset({checks, compares}))
        answer = Answer(0, "deviates" if status == "deviates" else "held", evidence=evidence)
        return Verdict(law, status, kind, "result", "", "", (answer,))  # type: ignore[arg-type]

    held = answered(5, status="held")
    assert places_by_steps(answered(5, 6), [held]) == [compares, checks, keeps]
    assert places_by_steps(answered(5), [held]) == [compares, keeps, checks]
    assert set(places_by_steps(answered(5, kind="wrong-error"), [held])[:2]) == {compares, checks}


def of_plans(visited: dict[str, frozenset[int]], status: str, kind: str = "wrong-metadata", **callers: frozenset[str]) -> Verdict:
    """The verdict on a case of a law of plans that ran lines of functions, each with its callers by the name of the function."""
    by = {name: callers.get(name.partition(",")[0], frozenset()) for name in visited}
    answer = Answer(0, "deviates" if status == "deviates" else "held", evidence=Evidence((), visited, by))
    return Verdict(Case.parse("plan.dedup world=1"), status, kind, "result", "", "", (answer,))  # type: ignore[arg-type]


def test_what_a_function_calls_on_lines_that_no_holding_case_ran_is_named_before_it() -> None:
    makes, calls, longest = (
        f"{name}, torch/distributed/checkpoint/planner.py:{at}" for at, name in enumerate(("make", "create", "flatten"))
    )
    many = frozenset(range(20, 40))
    found = of_plans({longest: many, calls: frozenset({5, 6}), makes: frozenset({9})}, "deviates", make=frozenset({calls}))
    held = of_plans({longest: many, calls: frozenset({5})}, "held")
    assert places_by_steps(found, [held]) == [makes, calls, longest]


def test_of_what_holding_cases_ran_too_the_rarest_is_named_first() -> None:
    often, seldom = (f"{name}, torch/distributed/checkpoint/planner.py:{at}" for at, name in enumerate(("create", "flatten")))
    most = {often: frozenset(range(20, 40)), seldom: frozenset({5, 6})}
    near = [of_plans(most, "held"), of_plans({often: most[often], seldom: frozenset({5})}, "held")]
    assert places_by_steps(of_plans(most, "deviates"), near) == [seldom, often]
    assert places_by_steps(of_plans(most, "deviates"), near[:1]) == [often, seldom]


def test_what_should_have_been_refused_is_put_down_to_what_can_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    works, refuses = (f"{name}, torch/distributed/checkpoint/planner.py:{at}" for at, name in enumerate(("create", "__init__")))
    monkeypatch.setattr(place.torch_trace, "raise_lines", {works: frozenset({5}), refuses: frozenset({8})}.__getitem__)
    visited = {works: frozenset({5, 6}), refuses: frozenset({7})}
    assert find_places(of_plans(visited, "deviates", "wrong-error"), []) == [refuses, works]
    assert find_places(of_plans(visited, "deviates"), []) == [works]


def test_who_found_out_is_named_before_who_carries_it_out() -> None:
    made = {
        name: f"Propagator.{name}, torch/distributed/tensor/_ops/_some_ops.py:{name!r}" for name in ("analyze", "_analyze_a", "_rewrite_b")
    }
    begun = Step("op", "aten.neg.default", rule=RULE, rule_asked=True)
    assert refusal(begun, frames=(f"refused by {made['_rewrite_b']}",), visited=tuple(made.values()))[:2] == [
        made["_analyze_a"],
        made["_rewrite_b"],
    ]


def test_a_constructor_that_took_another_way_is_named_and_a_check_only_of_what_had_to_be_refused() -> None:
    makes = "LocalShardsWrapper.__new__, torch/distributed/tensor/_shards_wrapper.py:5"
    checks = "_validate_wrapper, torch/distributed/tensor/_shards_wrapper.py:9"
    law = Case.parse("layout.wrapper[columns] mesh=2")

    def answered(*lines: int, kind: str = "wrong-metadata", status: str = "deviates") -> Verdict:
        visited = {checks: frozenset({9}), makes: frozenset(lines)}
        outcome = "deviates" if status == "deviates" else "held"
        answer = Answer(0, outcome, evidence=Evidence((), visited, {checks: frozenset(), makes: frozenset()}))
        return Verdict(law, status, kind, "result", "", "", (answer,))  # type: ignore[arg-type]

    held = answered(5, 6, status="held")
    assert places_by_steps(answered(5, 7), [held])[0] == makes
    assert makes not in places_by_steps(answered(5, 6), [held])
    assert places_by_steps(answered(5, 6, kind="wrong-error"), [held])[0] == checks


def test_what_few_chapters_call_is_looked_at_whatever_law_calls_it() -> None:
    reads, makes, handles = (
        f"{name}, torch/distributed/{file}.py:4"
        for name, file in (("read_data", "checkpoint/filesystem"), ("init_groups", "device_mesh"), ("handle_op", "tensor/_dispatch"))
    )
    visited = {makes: frozenset({4}), handles: frozenset({4, 5, 6, 7}), reads: frozenset({4, 5, 6})}
    answer = Answer(0, "deviates", evidence=Evidence((), visited, {place: frozenset() for place in visited}))
    renewed = Verdict(Case.parse("mesh.renewed world=2"), "deviates", "wrong-value", "result", "", "", (answer,))
    assert find_places(renewed, []) == [reads, makes, handles]


def test_what_c_plus_plus_refuses_is_not_put_down_to_anybody() -> None:
    begun = Step("op", "aten.neg.default", rule=RULE)
    answer = Answer(0, "raised", raised=Raised("RuntimeError", "", ""), evidence=heard((begun,), {}))
    assert find_places(verdict(answer, kind="raised"), []) == []


@pytest.mark.parametrize(("outcome", "kind"), [("silent", "hang"), ("crashed", "crash")])
def test_the_stack_of_a_rank_that_left_no_trace_tells_where_it_was(outcome: str, kind: str) -> None:
    stack = 'File "/lib/torch/_ops.py", line 9 in __call__\nFile "/lib/torch/distributed/distributed_c10d.py", line 12 in scatter'
    answers = Answer(0, "held"), Answer(1, outcome, stack=stack)  # type: ignore[arg-type]
    assert find_places(verdict(*answers, kind=kind), []) == ["scatter, torch/distributed/distributed_c10d.py:12"]


def test_a_gradient_that_the_engine_refuses_is_put_down_to_the_function_that_gave_it() -> None:
    forward, backward = (f"_ToTorchTensor.{name}, torch/distributed/tensor/_api.py:9" for name in ("forward", "backward"))
    text = "Function _ToTorchTensorBackward returned an invalid gradient at index 0 - got [2] but expected shape compatible with [3]"
    lines = dict.fromkeys((forward, backward), frozenset({1}))
    answer = Answer(0, "raised", raised=Raised("RuntimeError", text, ""), evidence=heard((), lines))
    assert find_places(verdict(answer, kind="raised"), []) == [backward]


def test_a_place_says_what_its_rule_asked_for() -> None:
    line = f"op aten.neg.default(S(0)): {RULE}, asked for R and claimed R"
    assert add_decision(RULE, [line]) == f"{RULE}, asked for R and claimed R"
    assert add_decision(PLANNER, [line]) == PLANNER
    helper = "helper, torch/distributed/tensor/_ops/_some_ops.py:9"
    assert add_decision(helper, [line]) == f"{helper}, asked for R and claimed R"


def test_evidence_travels_as_bytes() -> None:
    steps = (*ranks(wrong())[0], move(FULL[:2], FULL))
    sent = Evidence(steps, {RULE: frozenset({1, 2})}, {RULE: frozenset()}, frozenset({RULE}), (RULE,))
    got = unpack(pack(sent))
    assert (got.visited, got.callers, got.answered, got.raised) == (sent.visited, sent.callers, sent.answered, sent.raised)
    assert [(step.kind, step.rule, step.calls) for step in got.steps] == [(step.kind, step.rule, step.calls) for step in steps]
    assert torch.equal(got.steps[0].arguments[0][0].local, FULL[:2])


@pytest.mark.parametrize("kind", ["subclass", "mkldnn", "csr", "nested"])
def test_tensors_of_every_class_and_layout_are_sent(kind: str) -> None:
    [step] = unpack(pack(Evidence((Step("op", "aten.view.default", arguments=snapshot(KINDS[kind]())),)))).steps
    assert type(step.arguments) is torch.Tensor


def test_formats_of_memory_are_sent() -> None:
    [step] = unpack(pack(Evidence((Step("op", "aten.clone.default", arguments={"memory_format": torch.preserve_format}),)))).steps
    assert step.arguments == {"memory_format": torch.preserve_format}


def test_plainer_cases_have_one_departure_less() -> None:
    case = Case.parse("op.forward[add] mesh=2x2@0,2,1,3 a=5x4:S(0),P(sum):float64 b=4:R,R steps=add(a,b)")
    texts = {other.text for other in simpler_cases(case)}
    assert "op.forward[add] mesh=2x2 a=5x4:S(0),P(sum):float64 b=4:R,R steps=add(a,b)" in texts
    assert "op.forward[add] mesh=2x2@0,2,1,3 a=8x4:S(0),P(sum):float64 b=4:R,R steps=add(a,b)" in texts
    assert "op.forward[add] mesh=2x2@0,2,1,3 a=5x4:R,P(sum):float64 b=4:R,R steps=add(a,b)" in texts
    assert "op.forward[add] mesh=2 a=5x4:S(0):float64 b=4:R steps=add(a,b)" in texts
    assert case.text not in texts


def test_a_plainer_case_without_a_field_that_its_law_needs_is_left_out() -> None:
    law = find("roundtrip.fsspec")
    plainer = simpler_cases(Case.parse(law.control))
    lacking = [other for other in plainer if "through" not in other]
    assert lacking
    assert not any(nearby._fits_target(law, other, Limits()) for other in lacking)
    assert any(nearby._fits_target(law, other, Limits()) for other in plainer)


def test_of_every_plainer_case_that_fits_is_known_what_world_it_needs() -> None:
    for law in catalogue().values():
        for other in simpler_cases(Case.parse(law.control)):
            if nearby._fits_target(law, other, Limits()):
                law.needs_own_world(other)


def test_an_error_from_a_storage_of_somebodys_own_is_put_down_to_it() -> None:
    frames = ["/site-packages/torch/distributed/checkpoint/utils.py", "/home/me/mine/io.py", "/lib/python3.11/pickle.py"]
    lines = [f'  File "{file}", line {at}, in read_data' for at, file in enumerate(frames, 7)]
    text = "\n".join(["read: KeyError: 1", *(line for rank in (1, 2) for line in (f"Traceback: (RANK {rank})", *lines[: 4 - rank]))])
    found = verdict(Answer(1, "raised", raised=Raised("CheckpointFailed", text, "/lib/torch/x.py:3 in load")), kind="raised")
    direct = verdict(Answer(0, "raised", raised=Raised("KeyError", "1", "/home/me/mine/io.py:5 in Reader.reset")), kind="raised")
    mine = Target(storage="mine", writer="mine.io:Writer", reader="mine.io:Reader")
    assert find_storage_frame(found, mine) == "read_data, mine/io.py:8"
    assert find_storage_frame(direct, mine) == "Reader.reset, mine/io.py:5"
    assert find_storage_frame(found, Target()) == find_storage_frame(found, replace(mine, writer="torch.a:B", reader="other:C")) == ""
