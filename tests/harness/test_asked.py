"""Cases that somebody asks for by their text."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws import find
from shardlaw.conformance.run.case_check import check_case
from shardlaw.conformance.run.expectations import load
from tests.laws.planting import in_folders


@pytest.mark.parametrize("law", in_folders("plan", "roundtrip", "sharded_tensor"), ids=lambda law: law.id)
def test_the_control_of_a_law_may_be_asked_for(law: Law) -> None:
    check_case(law, Case.parse(law.control))


def test_a_case_whose_group_leaves_out_the_first_rank_may_be_asked_for() -> None:
    case = Case.parse("collective.functional[all_reduce] mesh=2@1,2 x=5x3")
    check_case(find(case.law), case)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('case = "redistribute.same mesh=2x2"', "case 'redistribute.same mesh=2x2': no field 'x': want a tensor"),
        ('case = "redistribute.same mesh=2x2"\ntorch = "<2"', ""),
        ('case = "redistribute.same mesh=2 x=5:R"', ""),
        ('target = "glooo"', "target = 'glooo': matches no target (nearest: gloo"),
        ('target = "cuda*"', ""),
    ],
)
def test_expectations_of_a_user_have_cases_that_may_be_asked_for_and_known_targets(line: str, message: str, tmp_path: Path) -> None:
    (file := tmp_path / "mine.toml").write_text(f'[[expect]]\nlaw = "redistribute.same"\nkind = "wrong-value"\nreason = "why"\n{line}\n')
    load([file], [find("redistribute.same")], "2.13.0")
    with pytest.raises(UsageError, match=re.escape(f"mine.toml:5: {message}")) if message else nullcontext():
        load([file], [find("redistribute.same")], "2.13.0", given=[file])
