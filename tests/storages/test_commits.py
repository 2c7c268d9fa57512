"""The laws of crashes on a storage that commits as it must, in all states, and with each of its faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.world import Pool
from tests.laws.planting import UNSEEN
from tests.storages.committing import FAULTS

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
TWO = "mesh=2 x=4:S(0) a=3:R"
BATCH = 40
# every state of these holds
SCENARIOS = (
    f"crash.fresh {TWO} disk=posix",
    f"crash.overwrite {TWO} disk=kill",
    f"crash.overwrite {TWO} disk=posix",
    f"crash.replaced {TWO} disk=posix",
    "crash.replaced mesh=3 x=6:S(0) disk=kill",
    f"crash.returned {TWO} disk=posix",
    f"crash.overlap {TWO}",
)
# each fault with the case that shows it
FOUND = {
    "pointer-before-data": f"crash.replaced {TWO} disk=posix done=7,1",
    "pointer-before-index": f"crash.replaced {TWO} disk=posix done=11,9",
    "pointer-by-first-rank-done": f"crash.replaced {TWO} disk=posix done=11,1",
    "pointer-by-every-rank": f"crash.replaced {TWO} disk=posix done=11,1",
    "pointer-of-each-rank": f"crash.overwrite {TWO} disk=kill done=11,1",
    "pointer-not-synced": f"crash.replaced {TWO} disk=posix done=15,9 lost=0.14",
    "pointer-synced-after-rename": f"crash.replaced {TWO} disk=posix done=15,9 lost=0.14",
    "pointer-synced-before-flush": f"crash.replaced {TWO} disk=posix done=16,9 lost=0.15",
    "pointer-in-place": f"crash.replaced {TWO} disk=posix done=13,9",
    "pointer-appended": f"crash.replaced {TWO} disk=posix done=14,9 half=0.14",
    "pointer-removed-first": f"crash.replaced {TWO} disk=posix done=16,9",
    "pointer-copied": f"crash.replaced {TWO} disk=posix done=16,9",
    "pointer-name-not-synced": f"crash.replaced {TWO} disk=posix done=17,9 lost=0.16",
    "index-not-synced": f"crash.replaced {TWO} disk=posix done=15,9 lost=0.9",
    "index-synced-before-flush": f"crash.replaced {TWO} disk=posix done=16,9 lost=0.10",
    "index-in-place": f"crash.replaced {TWO} disk=posix done=8,9",
    "data-not-synced": f"crash.replaced {TWO} disk=posix done=15,7 lost=0.5",
    "data-synced-by-leader": f"crash.replaced {TWO} disk=posix done=16,7 lost=1.3",
    "data-synced-by-others": f"crash.replaced {TWO} disk=posix done=15,9 lost=0.5",
    "last-item-not-synced": f"crash.replaced {TWO} disk=posix done=15,8 lost=0.5",
    "data-synced-before-flush": f"crash.replaced {TWO} disk=posix done=16,9 lost=0.6",
    "data-written-late": f"crash.overwrite {TWO} disk=kill crash=0",
    "data-in-place": f"crash.overwrite {TWO} disk=kill done=3,3",
    "data-replaced-in-place": f"crash.overwrite {TWO} disk=kill done=3,5",
    "data-linked": f"crash.overwrite {TWO} disk=kill done=3,4",
    "names-not-synced": f"crash.replaced {TWO} disk=posix done=15,9 lost=0.7",
    "folder-not-synced": f"crash.replaced {TWO} disk=posix done=15,9 lost=0.2",
    "old-removed-first": f"crash.replaced {TWO} disk=posix done=2,1",
    "old-removed-before-pointer": f"crash.replaced {TWO} disk=posix done=13,9",
    "old-removed-before-sync": f"crash.replaced {TWO} disk=posix done=17,9 lost=0.16",
    "newest-folder-read": f"crash.replaced {TWO} disk=posix done=11,9 lost=0.7",
    "folder-renamed": f"crash.replaced {TWO} disk=posix done=13,9",
}


@dataclass
class Suite:
    """Worlds whose storage has the fault that ``switch`` names."""

    pool: Pool
    switch: Path


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    switch = tmp_path_factory.mktemp("committing") / "switch"
    target = Target(
        env=(("PYTHONPATH", str(ROOT)),),
        cannot=("checkpoint_files",),
        storage="committing",
        writer="tests.storages.committing:Writer",
        reader="tests.storages.committing:Reader",
        options=(("switch", str(switch)),),
        reader_options=(("switch", str(switch)),),
    )
    with Pool(target) as pool:
        yield Suite(pool, switch)


def test_every_fault_has_a_case() -> None:
    assert FOUND.keys() == FAULTS.keys()
    assert len(FOUND) >= 30


@pytest.mark.planted
@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_in_the_order_of_commit_is_found(fault: str, suite: Suite) -> None:
    case = Case.parse(FOUND[fault])
    suite.switch.write_text(fault)
    verdict = suite.pool.check_fresh(find(case.law), case)
    assert (verdict.kind or verdict.status) not in UNSEEN, verdict.message


@pytest.mark.planted
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_storage_that_commits_as_it_must_holds_in_every_state(scenario: str, suite: Suite) -> None:
    suite.switch.write_text("")
    law, held = find(scenario.partition(" ")[0]), 0
    for first in range(0, 1000, BATCH):
        verdicts = suite.pool.check(law, [Case.parse(f"{scenario} crash={first + at}") for at in range(BATCH)])
        assert {verdict.status for verdict in verdicts} <= {"held", "rejected"}, [v.message for v in verdicts if v.status == "deviates"]
        held += sum(verdict.status == "held" for verdict in verdicts)
        if verdicts[-1].status == "rejected":
            break
    assert held > (0 if "returned" in scenario else 20)
