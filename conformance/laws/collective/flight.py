"""Laws of several collectives under way at once, in one group or in several, and of what they only read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.collective import scripts as texts
from conformance.laws.collective.calls import KINDS, LATE_SECONDS, STALE, Ask, Call, made, members, numbers, team
from conformance.laws.collective.draws import drawn, features
from conformance.laws.collective.values import DOC
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from strategies.collectives import groups

if TYPE_CHECKING:
    from conformance.here import Here

# what every backend carries between the same buffers in any memory: other ways have laws of their own
FLYING = ("all_reduce", "all_gather_single", "broadcast", "reduce_scatter_single", "all_gather", "all_to_all_single", "reduce")
READING = tuple(name for name in KINDS if name not in ("all_reduce", "reduce", "broadcast"))
FIELDS = ("mesh", "mesh.b", "mesh.c")


def planned(case: Case) -> list[tuple[str, str]]:
    """The calls of a case in order: the mesh field of the group, and the collective."""
    found = []
    for word in case.get("calls").split("/"):
        letter, _, name = word.rpartition(":")
        found.append((f"mesh.{letter}" if letter in ("b", "c") else "mesh", name))
    return found


def check_flight(case: Case, here: Here) -> None:
    """Works that are under way together each end as if alone, in whatever order they are waited for; then inputs are free again."""
    for field in (name for name in FIELDS if name in case):
        team(case, here, field)
    calls = [made(case, here, name, field, turn) for turn, (field, name) in enumerate(planned(case))]
    order = numbers(case.get("wait", "")) or tuple(range(len(calls)))
    if case.get("late", "") == str(here.rank):
        time.sleep(LATE_SECONDS)
    works: list[Any] = [call and call.start(async_op=True) for call in calls]
    for at in order:
        call = calls[at]
        if call is None:
            continue
        works[at].wait()
        if not call.part.changes:
            call.judge_inputs(here, "input")
            for x in call.given:
                x.fill_(STALE)
    for call in filter(None, calls):
        _judge_results(call, here)


def _judge_results(call: Call, here: Here) -> None:
    got = call.given if call.part.changes else [out for out, _ in call.outputs]
    exact = call.ask.op != "avg" or call.ask.size in (1, 2, 4, 8)
    for at, (mine, want) in enumerate(zip(got, call.part.wanted or (), strict=False)):
        here.same(mine, want, "result", exact=exact, what=f"output {at} of call {call.ask.turn}, {call.ask.name},")


def draw_async(limits: Limits) -> SearchStrategy[Case]:
    def calls(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        names = draw(st.lists(st.sampled_from(FLYING), min_size=1, max_size=4))
        order = draw(st.permutations(range(len(names))))
        wait = ".".join(map(str, order)) if list(order) != sorted(order) else None
        late = draw(st.integers(-2, mesh.size - 1))
        return {"calls": "/".join(names), "wait": wait, "late": sorted(mesh.ranks)[late] if late >= 0 else None}

    return drawn("collective.async", limits, root=True, memories=False, works=False, min_dims=1, extra=calls)


def draw_interleaved(limits: Limits) -> SearchStrategy[Case]:
    def calls(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        others = draw(st.lists(groups(world_size=limits.world_size), min_size=1, max_size=2))
        letters = ["a", "b", "c"][: len(others) + 1]
        names = draw(st.lists(st.tuples(st.sampled_from(letters), st.sampled_from(FLYING)), min_size=2, max_size=5))
        order = draw(st.permutations(range(len(names))))
        return {
            "world": None,
            **{f"mesh__{letter}": other for letter, other in zip("bc", others, strict=False)},
            "calls": "/".join(f"{letter}:{name}" for letter, name in names),
            "wait": ".".join(map(str, order)) if list(order) != sorted(order) else None,
        }

    return drawn("collective.interleaved", limits, memories=False, works=False, min_dims=1, extra=calls)


def sweep_interleaved(limits: Limits) -> list[Case]:
    """Groups without a common rank, which few draws have."""
    pairs = (("2", "2@2,3"), ("2@0,2", "2@3,1"), ("1@1", "2@2,0"))
    calls = "a:all_reduce/b:all_gather/a:broadcast/b:reduce_scatter_single"
    cases = [Case.of("collective.interleaved", mesh=one, mesh__b=other, x="3x2", calls=calls, wait="3.1.0.2") for one, other in pairs]
    return [case for case in cases if case.world <= limits.world_size]


def script_flight(case: Case) -> Script:
    """The calls one after another, each started before any is waited for; their inputs are literal."""
    body: list[str] = []
    constants: list[str] = []
    for field in (name for name in FIELDS if name in case):
        body += texts.group(case, field, _variable(field))
    body += ["works, got, expected = {}, [], []"]
    for turn, (field, name) in enumerate(planned(case)):
        ranks = members(case, field)
        ask = Ask.of(case, name, len(ranks), turn)
        parts = KINDS[name].parts(ask)
        constants += texts.table(f"GIVEN_{turn}", {rank: part.given[0] for rank, part in zip(ranks, parts, strict=True)})
        constants += texts.table(f"WANT_{turn}", {rank: list(part.wanted or ()) for rank, part in zip(ranks, parts, strict=True)})
        outs = "[x]" if parts[0].changes else f"[{', '.join(texts.room(want, 'plain') for want in parts[0].wanted or ())}]"
        statement = texts.statement(case, ask, group=_variable(field), ranks=ranks)
        body += [
            f"if rank in GIVEN_{turn}:",
            f"    x = GIVEN_{turn}[rank]",
            f"    outs = {outs}",
            f"    works[{turn}] = {statement}, async_op=True)",
            f"    got, expected = [*got, outs if WANT_{turn}[rank] else []], [*expected, WANT_{turn}[rank]]",
        ]
    order = numbers(case.get("wait", "")) or tuple(range(len(planned(case))))
    body += [f"for turn in {list(order)}:", "    if turn in works:", "        works[turn].wait()", "return expected, got"]
    return scripts.script(body, world=case.world, constants=constants)


def _variable(field: str) -> str:
    return field.replace("mesh", "group").replace(".", "_")


def draw_kept(limits: Limits) -> SearchStrategy[Case]:
    def call(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        return {"call": draw(st.sampled_from(READING))}

    return drawn("collective.inputs-kept", limits, root=True, memories=False, works=False, min_dims=1, extra=call)


def check_kept(case: Case, here: Here) -> None:
    """What a collective only reads is as it was, and what it wrote is another memory."""
    call = made(case, here, case.get("call"))
    if call is None:
        return
    call.start()
    call.judge_inputs(here, "input")
    for x in call.given:
        x.fill_(STALE)
    _judge_results(call, here)


def script_kept(case: Case) -> Script:
    ask = Ask.of(case, case.get("call"), len(members(case)))
    return texts.call(case, ask, KINDS[ask.name].parts(ask), kept=True)


def features_kept(case: Case) -> set[str]:
    return features(case) | {f"collective:{case.get('call')}"}


NEEDS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter", "subgroups")
LAWS = (
    Law(
        id="collective.async",
        clause="Works under way together each end as if alone, in whatever order they are waited for; then what they read is free again.",
        source=DOC + "synchronous and asynchronous collective operations",
        check=check_flight,
        script=script_flight,
        features=features,
        control="collective.async mesh=2 x=3 calls=all_reduce/all_gather wait=1.0",
        planted="async_returns_before_the_end",
        draw=draw_async,
        draws=60,
        needs=NEEDS,
        weight=0.4,
    ),
    Law(
        id="collective.interleaved",
        clause="Collectives in groups that overlap, or have no rank in common, do not meet, however they are interleaved.",
        source=DOC + "new_group",
        check=check_flight,
        script=script_flight,
        features=features,
        control="collective.interleaved mesh=2 mesh.b=3 x=3 calls=a:all_reduce/b:all_reduce",
        planted="groups_are_mixed_up",
        sweep=sweep_interleaved,
        sweeps=3,
        draw=draw_interleaved,
        draws=60,
        needs=NEEDS,
        weight=0.4,
    ),
    Law(
        id="collective.inputs-kept",
        clause="What a collective only reads is as it was, and shares no memory with what it wrote.",
        source=DOC + "collective functions, input and output tensors",
        check=check_kept,
        script=script_kept,
        features=features_kept,
        control="collective.inputs-kept mesh=2 x=5x3 call=all_gather",
        planted="all_gather_shares_its_input",
        draw=draw_kept,
        draws=50,
        needs=(*NEEDS, "gather", "scatter"),
        weight=0.3,
    ),
)
