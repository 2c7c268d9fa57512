"""What a target lacks is rejected by every rank, also by those that take no part: each of them would otherwise make groups alone."""

import pytest

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.rank.context import RankContext, Rejected


@pytest.mark.parametrize("rank", range(4))
def test_lists_that_are_not_exchanged(rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    case = Case.parse("collective.all-to-all mesh=3@0,1,3 form=list x=2")
    monkeypatch.setattr(compat, "supports_all_to_all", lambda backend: False)
    with pytest.raises(Rejected, match="exchanges no lists"):
        find(case.law).acts[0].arguments(case, RankContext(rank, 4, Target(), str(tmp_path), {}))
