"""The laws of ops, hundreds that share a fault: what must hold does, and each sees the fault that is planted for it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.report.reproducer import FaultInfo, render_reproducer
from shardlaw.conformance.run import proof
from shardlaw.conformance.run.law_run import reuses_plans
from shardlaw.conformance.world import Pool
from shardlaw.strategies.op_catalogue import OPS
from tests.laws.planting import PLANT, UNSEEN, first_cases, in_folders, plantable
from tests.planted.hook import FAULTS, fault_of

LAWS = in_folders("op")
# torch has no rule for these, or for their gradients, in any layout: an entry of the expectations says why
UNSUPPORTED = {
    *(f"op.backward[nn.functional.{name}]" for name in ("relu6", "softshrink", "hardtanh", "hardsigmoid", "hardswish", "hardshrink")),
    *(f"op.backward[nn.functional.{name}]" for name in ("logsigmoid", "avg_pool1d")),
    *(f"op.backward[{name}]" for name in ("cumprod", "cummax", "cummin", "select_scatter", "slice_scatter", "diagonal_scatter")),
    *(f"op.backward[{name}]" for name in ("cummax.ties",)),
    *(f"op.out[{name}]" for name in ("cumsum", "cat", "stack")),
}
# results that stay where the operands lie show nothing of what they claim: operands must be taken for others
FOLLOWING = ("diagonal", "tril", "triu", "diag", "diag_embed", "rot90", "triangles", "median.ties")


def fault_for(law: Law) -> str:
    """The fault that a law must catch: one of its own, or else operands taken for whole ones (of results that follow their operands, in
    place, and of OpInfo, whose controls are sharded), or results that claim to be whole."""
    fault = fault_of(law.id)
    assert fault is not None, f"no fault of tests/planted breaks {law.id}"
    if law.id in FAULTS:
        return fault.name
    of_opinfo = law.variant not in OPS and law.variant != "squeeze.multiple"
    follows = law.name == "op.forward" and (law.variant in FOLLOWING or "in-place" in law.variant or of_opinfo)
    return "operands_claimed_whole" if follows else fault.name


BY_FAULT: dict[str, list[Law]] = defaultdict(list)
for _law in LAWS:
    BY_FAULT[fault_for(_law)].append(_law)


def judge(pool: Pool, work: list[tuple[Law, Case]], *, reuse: bool) -> dict[str, list[Verdict]]:
    """Verdicts by law; ``reuse``: as in the first pass of a smoke run."""
    said: dict[str, list[Verdict]] = defaultdict(list)
    for law, case in work:
        again = reuse and reuses_plans(law, "smoke")
        pool.submit(law, case, lambda verdict: said[verdict.case.law].append(verdict), reuse=again)
    pool.flush()
    return said


@functools.cache
def more(law: str) -> list[Case]:
    """The cases of a law beside its control in which a fault is looked for."""
    return first_cases(find(law), 41)[1:]


@pytest.fixture(scope="module")
def healthy() -> Iterator[Pool]:
    with Pool(Target()) as pool:
        yield pool


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that names the fault to plant."""
    return tmp_path_factory.mktemp("planted") / "fault"


@pytest.fixture(scope="module")
def faulty(named: Path) -> Iterator[Pool]:
    with Pool(plantable(named, timeout=5.0)) as pool:
        yield pool


@pytest.mark.timeout(300)
@pytest.mark.ranks
def test_controls_hold(healthy: Pool) -> None:
    said = judge(healthy, [(law, Case.parse(law.control)) for law in LAWS], reuse=True)
    assert len(said) == len(LAWS)
    wrong = {law: verdict.message for law, (verdict,) in said.items() if verdict.status != "held"}
    assert {law: message for law, message in wrong.items() if law not in UNSUPPORTED} == {}
    assert {law: said[law][0].kind for law in UNSUPPORTED} == dict.fromkeys(UNSUPPORTED, "raised")


@pytest.mark.ranks
@pytest.mark.planted
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", sorted(BY_FAULT))
def test_planted_fault_is_seen_in_a_case_that_holds_without_it(fault: str, healthy: Pool, faulty: Pool, named: Path) -> None:
    """The control shows it, or, where nothing of it is sharded, one of the next cases; of one law both scripts are
    run."""
    named.write_text(fault)
    faulty.end_worlds()
    left = {law.id: law for law in BY_FAULT[fault] if law.id not in UNSUPPORTED}
    shown: Verdict | None = None
    for start, stop in ((0, 1), (1, 3), (3, 9), (9, 41)):
        work = [
            (law, case) for law in left.values() for case in (more(law.id)[start - 1 : stop - 1] if start else [Case.parse(law.control)])
        ]
        seen = [one for said in judge(faulty, work, reuse=False).values() for one in said if (one.kind or one.status) not in UNSEEN]
        for said in judge(healthy, [(left[one.case.law], one.case) for one in seen], reuse=True).values():
            if any(verdict.status == "held" for verdict in said):
                del left[said[0].case.law]
                held = [verdict.case for verdict in said if verdict.status == "held"]
                shown = shown or next(one for one in seen if one.case in held)
    assert sorted(left) == []
    assert shown is not None
    law = next(law for law in BY_FAULT[fault] if law.id == shown.case.law)
    script = render_reproducer(law, shown.case, FaultInfo.from_verdict(shown))
    assert proof.run_script(script).code == 0
    faulty_run = proof.run_script(script, setup=PLANT, argument=fault)
    assert faulty_run.code == 1, faulty_run.output
