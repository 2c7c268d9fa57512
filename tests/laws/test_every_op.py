"""The laws of ops, hundreds that share a fault: what must hold does, and each sees the fault that is planted for it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from conformance.case import Case
from conformance.law import Law
from conformance.target import Target
from conformance.verdict import Verdict
from conformance.world import Pool
from tests.laws.planting import first_cases, in_folders, plantable

LAWS = in_folders("op")
# torch has no rule for these, or for their gradients, in any layout: every case is refused
UNSUPPORTED = {
    *(f"op.backward[nn.functional.{name}]" for name in ("relu6", "softshrink", "hardtanh", "hardsigmoid", "hardswish", "hardshrink")),
    *(f"op.backward[nn.functional.{name}]" for name in ("logsigmoid", "avg_pool1d")),
    *(f"op.backward[{name}]" for name in ("cumprod", "cummax", "cummin", "select_scatter", "slice_scatter", "diagonal_scatter")),
    "op.backward[cummax.ties]",
    *(f"op.out[{name}]" for name in ("cumsum", "cat", "stack")),
}
BY_FAULT: dict[str, list[Law]] = defaultdict(list)
for _law in LAWS:
    BY_FAULT[_law.planted].append(_law)


def judge(pool: Pool, work: list[tuple[Law, Case]]) -> dict[str, list[Verdict]]:
    """Verdicts by law."""
    said: dict[str, list[Verdict]] = defaultdict(list)
    for law, case in work:
        pool.feed(law, case, lambda verdict: said[verdict.case.law].append(verdict))
    pool.flush()
    return said


@pytest.mark.timeout(300)
def test_controls_hold() -> None:
    with Pool(Target()) as pool:
        said = judge(pool, [(law, Case.parse(law.control)) for law in LAWS])
    assert len(said) == len(LAWS)
    wrong = {law: verdict for law, (verdict,) in said.items() if verdict.status != "held"}
    assert {law: verdict.message for law, verdict in wrong.items() if law not in UNSUPPORTED or verdict.status != "refused"} == {}


@pytest.mark.planted
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", sorted(BY_FAULT))
def test_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text(fault)
    left = BY_FAULT[fault]
    with Pool(plantable(tmp_path / "fault", timeout=5.0)) as pool:
        for start, stop in ((0, 1), (1, 3), (3, 9), (9, 41)):
            said = judge(pool, [(law, case) for law in left for case in first_cases(law, stop)[start:stop]])
            left = [law for law in left if all(verdict.status != "deviates" for verdict in said[law.id])]
    assert {law.id for law in left} <= UNSUPPORTED
