"""The cases of laws that need one process alone: plans, and the arithmetic of layouts."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.script import ScriptError
from shardlaw.conformance.laws import laws_of
from shardlaw.conformance.report.reproducer import reproducer
from tests.laws.planting import first_cases, in_folders

LAWS = [*in_folders("plan"), *laws_of("shardlaw.conformance.laws.layout.arithmetic")]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)
def test_every_case_is_for_one_process(law: Law) -> None:
    assert {case.world for case in first_cases(law)} == {1}


def test_few_cases_are_too_long_for_a_reproducer() -> None:
    told = left = 0
    for law in LAWS:
        for case in first_cases(law):
            try:
                compile(reproducer(law, case), law.id, "exec")
                told += 1
            except ScriptError:
                left += 1
    assert told > 300
    assert left <= told // 20
