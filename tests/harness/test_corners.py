"""How many cases reach each corner is counted from their texts."""

from pathlib import Path

import pytest

from benchmarks.corners import Corner, corners, count, main
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import is_known

OWN = ("solid", "unsummed", "first-unsummed", "variant:", "field:")
CASES = {
    "op.alias mesh=2x2x2 a=8x3:_S(0,2),R,P(max) steps=v=t(a);a.add_(1);v": {"strided shard", "true 3-D mesh", "pending, no sum"},
    "op.alias mesh=2@2,1 a=0x3:S(0) steps=v=t(a);a.add_(1);v": {"permuted ranks", "sub-mesh", "zero-size operand"},
    "op.alias mesh=2x2x1 a=4x3:R,R,P(sum) steps=v=t(a);a.add_(1);v": set(),
}


@pytest.mark.parametrize("text", CASES)
def test_a_case_counts_for_the_corners_that_it_is_in(text: str) -> None:
    found = {corner.name for corner in count([Case.parse(text)]) if corner.group == "alias"}
    assert found - {"pending, no sum, first operand"} == CASES[text]


def test_every_corner_asks_for_what_a_case_may_have() -> None:
    asked = [word.removeprefix("!") for corner in corners() for words in corner.words.split() for word in words.split("/")]
    assert [word for word in asked if not is_known(word) and not word.startswith(OWN)] == []


def test_all_words_of_a_corner_must_hold() -> None:
    corner = Corner("", "", "roundtrip.* op.*", "dtype:int8/dtype:int16 !strided field:state={1:")
    case = Case.parse("roundtrip.kinds mesh=2 x=4:S(0):int8 state={1:x}")
    assert corner.holds(case, frozenset({"dtype:int8"}))
    assert not corner.holds(case, frozenset({"dtype:int8", "strided"}))
    assert not corner.holds(case, frozenset())
    assert not corner.holds(case.with_fields(state="{a:x}"), frozenset({"dtype:int8"}))


def test_the_table_of_a_report_and_what_is_no_report(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "cases.txt").write_text("".join(f"held swept op.alias mesh=2@1,0 a={n}x3:S(0) steps=t(a)\n" for n in range(1, 11)))
    assert main([str(tmp_path)], said.append) == 1
    (line,) = [line for line in said if line.split()[:3] == ["alias", "permuted", "ranks"]]
    assert line.split()[3:] == ["10"]
    assert main([str(tmp_path), "op.history"], said.append) == 1
    assert main([str(tmp_path / "none")], said.append) == 2
    assert main([str(tmp_path), "no.such-law"], said.append) == 2
