"""Cases that somebody asks for by their text."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws import find
from shardlaw.conformance.run.case_check import check_case
from tests.laws.planting import in_folders


@pytest.mark.parametrize("law", in_folders("plan", "roundtrip", "sharded_tensor"), ids=lambda law: law.id)
def test_the_control_of_a_law_may_be_asked_for(law: Law) -> None:
    check_case(law, Case.parse(law.control))


def test_a_case_whose_group_leaves_out_the_first_rank_may_be_asked_for() -> None:
    case = Case.parse("collective.functional[all_reduce] mesh=2@1,2 x=5x3")
    check_case(find(case.law), case)
