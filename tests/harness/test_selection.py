"""Which laws a glob means."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.selection import aten_overloads, matches, matches_op, select, select_ids

IDS = [
    "mesh.groups",
    "mesh.flatten",
    "op.forward[add]",
    "op.forward[add.in-place]",
    "op.forward[mean]",
    "op.backward[mean]",
    "redistribute.local",
]


@dataclass(frozen=True)
class FakeLaw:
    id: str
    aliases: tuple[str, ...] = ()

    @property
    def chapter(self) -> str:
        return self.id.split(".")[0]

    @property
    def variant(self) -> str:
        return self.id.partition("[")[2].removesuffix("]")


LAWS = [FakeLaw(law_id) for law_id in IDS]


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ([], IDS),
        (["mesh.*"], IDS[:2]),
        (["op.forward"], IDS[2:5]),
        (["op.forward[add]"], IDS[2:3]),
        (["op.forward[add*]"], IDS[2:4]),
        (["*[mean]"], IDS[4:6]),
        (["op.*"], IDS[2:6]),
        (["op.?orward"], IDS[2:5]),
        (["!op.*"], [*IDS[:2], IDS[6]]),
        (["op.*", "!op.forward"], [IDS[5]]),
        (["!op.forward", "op.*"], [IDS[5]]),
        (["redistribute.local", "mesh.groups"], [IDS[0], IDS[6]]),
        (["*"], IDS),
    ],
)
def test_globs(patterns: list[str], chosen: list[str]) -> None:
    assert select_ids(IDS, patterns) == chosen


def test_brackets_are_literal() -> None:
    assert not matches("op.forward[amd]", "op.forward[add]")
    assert not matches("op.[f]orward", "op.forward[add]")
    assert not matches("op.forward[", "op.forward[add]")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["op.foward"], "op.forward"),
        (["mesh.grups"], "mesh.groups"),
        (["mesh"], "'mesh.*'"),
        (["!zzz"], "no law matches 'zzz'"),
        (["mesh.*", "!mesh.*"], "selects no law"),
    ],
)
def test_what_selects_nothing_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        select_ids(IDS, patterns)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_alias_means_the_law_that_it_became() -> None:
    laws = [FakeLaw("mesh.groups", aliases=("mesh.fibres",)), FakeLaw("mesh.flatten")]
    assert [law.id for law in select(laws, ["mesh.fibres"])] == ["mesh.groups"]


def test_op_restricts_the_laws_that_take_an_op() -> None:
    assert [law.id for law in select(LAWS, ["*"], ["mean"])] == [*IDS[:2], IDS[4], IDS[5], IDS[6]]
    assert [law.id for law in select(LAWS, [], ["mean"])] == IDS[4:6]
    assert [law.id for law in select([*LAWS, FakeLaw("op.program")], ["op.*"], ["add*"])] == IDS[2:4]  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"--op maen.*nearest: mean"):
        select(LAWS, [], ["maen"])


def test_an_op_is_known_by_its_name_and_by_its_overloads() -> None:
    assert matches_op("mean", "mean")
    assert matches_op("aten.mean.dim", "mean", ("aten.mean.dim",))
    assert matches_op("mean.*", "average", ("aten.mean.dim",))
    assert matches_op("aten.mean", "average", ("aten.mean.dim",))
    assert not matches_op("sum", "mean", ("aten.mean.dim",))
    assert [law.id for law in select(LAWS, ["op.forward"], ["aten.mean.dim"])] == ["op.forward[mean]"]
    assert "aten._softmax.default" in aten_overloads("nn.functional.softmax")
    assert "aten.add_.Tensor" in aten_overloads("add.in-place")
    assert aten_overloads("no_such_op") == ()
