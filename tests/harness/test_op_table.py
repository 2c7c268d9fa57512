"""The table of ops that is made of a report: what each case counts as."""

from __future__ import annotations

from benchmarks.op_table import cell, counted, rows

LINES = (
    "held swept op.forward[mm] mesh=2 a=4x4:S(0) b=4x4:R steps=mm(a,b)",
    "wrong-value drawn op.forward[mm] mesh=2x2 a=5x4:S(0),P(sum) b=4x4:R,R steps=mm(a,b)",
    "refused swept op.backward[mm] mesh=2 a=4x4:S(0) b=4x4:R steps=mm(a,b) wrt=a",
    "rejected swept op.backward[mm] mesh=2 a=4x4:S(0) b=4x4:R steps=mm(a,b) wrt=b",
    "held swept op.forward[add.in-place] mesh=2 a=4x4:S(0) steps=a.add_(2)",
    "held swept redistribute.local mesh=2 x=4:S(0) to=R",
)


def test_each_case_counts_for_its_kinds() -> None:
    table = counted(LINES)
    assert set(table) == {"mm", "add"}
    assert {kind: cell(counts) for kind, counts in table["mm"].items()} == {
        "forward": "1 / 1 / 0",
        "backward": "0 / 0 / 1",
        "2-D mesh": "0 / 1 / 0",
        "uneven": "0 / 1 / 0",
        "Partial": "0 / 1 / 0",
    }
    assert cell(table["add"]["in-place"]) == "1 / 0 / 0"


def test_the_first_row_adds_up() -> None:
    total, *ops = list(rows(counted(LINES)))[2:]
    assert total.startswith("| **all 2** | 2 / 1 / 0 | 0 / 0 / 1 |")
    assert [row.split(" | ")[0] for row in ops] == ["| add", "| mm"]
