"""What ``docs/coverage.md`` claims: one case for each feature of the documents, which holds or deviates by a known cause."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import torch

from shardlaw.conformance.law.act import check_case
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.run.expectations import expectation_files, load
from shardlaw.conformance.world import Pool
from tests.laws.planting import ROOT

ROWS = re.findall(r"^\| (00\d-\d\d) \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs" / "coverage.md").read_text("utf-8"), re.MULTILINE)
TEXTS = {row: cell.strip("`") for row, cell in ROWS if re.fullmatch(r"`[a-z_]+\.[^`]+`", cell)}


def test_every_row_has_a_case_or_says_why_there_is_none() -> None:
    rows = [row for row, _ in ROWS]
    assert len(rows) == len({*rows}) == 163
    assert len(rows) - len(TEXTS) <= 32
    assert all(len(cell.split()) > 1 for _, cell in ROWS)


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_case_of_every_row_holds_or_is_known() -> None:
    known = load(expectation_files(Target()), list(catalogue().values()), torch.__version__)
    by_law = defaultdict(list)
    for text in dict.fromkeys(TEXTS.values()):
        case = Case.parse(text)
        check_case(find(case.law), case)
        by_law[case.law].append(case)
    wrong = {}
    with Pool(Target()) as pool:
        for law_id, cases in by_law.items():
            for verdict in pool.check(find(law_id), cases):
                if verdict.status != "held" and (verdict.status != "deviates" or not known.match_verdict(find(law_id), verdict)):
                    wrong[verdict.case.text] = verdict.message or verdict.status
    assert wrong == {}
