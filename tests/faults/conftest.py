"""A pool of live gloo ranks that know the laws of :mod:`tests.faults.laws`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.world import Pool
from tests.faults import laws

os.environ["SHARDLAW_LAWS"] = laws.__name__
# commands that other tests start find them too, wherever they are started
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
LAWS: dict[str, Law] = {law.variant: law for law in laws.LAWS}


def case(name: str, world: int = 3, **fields: object) -> Case:
    return Case.of(f"fault.rank[{name}]", world=world, **fields)


class House:
    """A pool, and the ways in which these tests use it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def judge(self, *cases: Case) -> list[Verdict]:
        """Verdicts on cases of several laws, in their order."""
        found: dict[int, Verdict] = {}
        for at, one in enumerate(cases):
            self.pool.submit(LAWS[one.law.partition("[")[2].rstrip("]")], one, lambda verdict, at=at: found.setdefault(at, verdict))
        self.pool.flush()
        assert sorted(found) == list(range(len(cases)))
        return [found[at] for at in range(len(cases))]

    def among(self, name: str, world: int = 3) -> Verdict:
        """The verdict on one bad case among good ones, all of which must hold."""
        cases = [case("sums", world, seed=i) for i in range(16)]
        cases.insert(7, case(name, world))
        verdicts = self.judge(*cases)
        bad = verdicts.pop(7)
        assert [verdict.case.text for verdict in verdicts if verdict.status != "held"] == []
        return bad


@pytest.fixture(scope="session")
def house() -> Iterator[House]:
    with Pool(Target(timeout=3)) as pool:
        yield House(pool)
