"""What a rank records, without a world."""

import pytest

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.rank.context import RankContext


def raising(error: BaseException):
    def attempt():
        raise error

    return attempt


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (raising(ValueError("no such dim")), ""),
        (raising(ValueError("")), "dim 9: refused by ValueError without a word"),
        (raising(TypeError("what is 9")), "dim 9: must be refused by ValueError, raised TypeError: what is 9"),
        (lambda: 9, "dim 9: must be refused, was accepted"),
    ],
)
def test_a_refusal_has_the_class_and_a_text(attempt, message):
    here = RankContext(0, 1, Target(), "", {})
    assert here.refused(attempt, "dim", "dim 9", errors=(ValueError,)) is (not message)
    assert [(each.kind, each.message) for each in here.answer().deviations] == ([("wrong-error", message)] if message else [])
