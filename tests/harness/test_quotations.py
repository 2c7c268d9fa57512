"""What the README and the documents quote of laws is what the laws say."""

from __future__ import annotations

import re
from pathlib import Path

from shardlaw.conformance.laws import catalogue

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"^\s+law: (.*)$", re.MULTILINE)


def test_clauses_that_are_quoted_are_those_of_laws() -> None:
    clauses = {" ".join(law.clause.split()) for law in catalogue().values()}
    quoted = [clause for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) for clause in QUOTED.findall(file.read_text("utf-8"))]
    assert quoted
    assert set(quoted) <= clauses
