"""The laws of ops on real ranks: what must hold does, and each sees its planted fault."""

from __future__ import annotations

from collections import defaultdict

import pytest

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws.op.forward import LAWS
from conformance.search import draw, seed_of
from conformance.target import Target
from conformance.verdict import Verdict
from conformance.world import Pool

BY_FAULT: dict[str, list[Law]] = defaultdict(list)
for _law in LAWS:
    BY_FAULT[_law.planted].append(_law)


def first_cases(law: Law, count: int) -> list[Case]:
    """What a run tries first, after the control."""
    cases = [Case.parse(law.control)]
    limits = Limits()
    if law.sweep is not None:
        cases += law.sweep(limits)[:count]
    elif law.draw is not None:
        draw(law.draw(limits), seed_of(0, law.id), count, cases.append)
    return list(dict.fromkeys(cases))[:count]


def judge(pool: Pool, work: list[tuple[Law, Case]]) -> dict[str, list[Verdict]]:
    """Verdicts by law."""
    said: dict[str, list[Verdict]] = defaultdict(list)
    for law, case in work:
        pool.feed(law, case, lambda verdict: said[verdict.case.law].append(verdict))
    pool.flush()
    return said


@pytest.mark.timeout(120)
def test_controls_hold() -> None:
    with Pool(Target()) as pool:
        said = judge(pool, [(law, Case.parse(law.control)) for law in LAWS])
    wrong = [f"{law}: {verdicts[0].status} {verdicts[0].message}" for law, verdicts in said.items() if verdicts[0].status != "held"]
    assert not wrong
    assert len(said) == len(LAWS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", sorted(BY_FAULT))
def test_planted_fault_is_caught(fault: str) -> None:
    left = BY_FAULT[fault]
    with Pool(Target(setup=f"tests.planted.op_faults:{fault}", timeout=5.0)) as pool:
        for start, stop in ((0, 2), (2, 8), (8, 40)):
            said = judge(pool, [(law, case) for law in left for case in first_cases(law, stop)[start:]])
            left = [law for law in left if all(verdict.status != "deviates" for verdict in said[law.id])]
    assert not [law.id for law in left]
