"""Cases that ask for nothing: plain torch refuses what they do to operands that lie in memory as theirs do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.world import Pool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(Target()) as pool:
        yield pool


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("op.forward[view_as_complex] mesh=2 a=2x2:R steps=view_as_real(view_as_complex(a))", "held"),
        ("op.forward[view_as_complex] mesh=2 a=2x2:R:float32:distinct:offset steps=view_as_real(view_as_complex(a))", "rejected"),
        ("op.forward[view] mesh=2 a=2x2:R:float32:distinct:sliced steps=view(a,(4,))", "rejected"),
        ("op.forward[neg] mesh=2 a=2x2:R:float32:distinct:sliced steps=neg(a)", "held"),
    ],
)
def test_memory_that_plain_torch_refuses(text: str, status: str, pool: Pool) -> None:
    case = Case.parse(text)
    (verdict,) = pool.check(find(case.law), [case])
    assert verdict.status == status, verdict.message
