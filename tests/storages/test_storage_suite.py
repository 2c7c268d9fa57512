"""The laws of checkpoints on a storage that is not the project's own: one in memory, which holds, and faulty ones, which are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.world import Pool
from tests.laws.planting import UNSEEN
from tests.storages.faulty import FAULTS

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
MANY = "mesh=2 mesh.load=3 x=5x4:S(0) a=4:R b=3:- to.x=S(1) state={x:x,a:a,b:b,n:1,m:None}"
OVER = "mesh=2 x=5:S(0) a=4:R state={x:x,a:a,n:1}"
# each fault with the case of a law that finds it
FOUND = {
    "drops-the-last-item": f"roundtrip.kinds {MANY}",
    "swaps-two-items": "roundtrip.dtensor mesh=2 x=4:S(0) a=4:S(0)",
    "truncates": f"roundtrip.kinds {MANY}",
    "zeroes-the-end": "roundtrip.dtensor mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1)",
    "loses-values": f"roundtrip.kinds {MANY}",
    "writes-memory": "roundtrip.views mesh=2 x=5x6:S(0):float32:distinct:transposed",
    "forgets-metadata": f"roundtrip.metadata {OVER}",
    "commits-late": f"roundtrip.complete {OVER}",
    "keeps-the-first": f"roundtrip.overwrite {OVER}",
    "always-overwrites": f"roundtrip.refuses[overwrite] {OVER}",
    "swallows-errors": f"roundtrip.fault[save] {OVER} at=resolve_data ranks=0",
    "remembers-metadata": "roundtrip.again mesh=2 x=6:S(0) to.x=R order=ab",
    "reads-from-the-start": "roundtrip.dtensor mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1)",
    "never-commits": f"roundtrip.protocol[load] {OVER}",
    "fills-by-halves": f"roundtrip.fault[load] {OVER} at=resolve_tensor ranks=1",
    "ignores-checkpoint-id": f"roundtrip.protocol[save] {OVER} id=given",
    "one-place-for-all": "roundtrip.caching mesh=2 x=6:S(0) to.x=R order=aab",
}


@dataclass
class Suite:
    """Worlds whose storage has the fault that ``switch`` names."""

    pool: Pool
    switch: Path

    def verdict(self, text: str, fault: str = "") -> Verdict:
        self.switch.write_text(fault)
        case = Case.parse(text)
        return self.pool.check_fresh(find(case.law), case)

    def judge(self, text: str, fault: str = "") -> str:
        verdict = self.verdict(text, fault)
        return verdict.kind or verdict.status


@pytest.fixture(scope="module")
def server() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def suite(server: TCPStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    switch = tmp_path_factory.mktemp("faulty") / "switch"
    target = Target(
        env=(("PYTHONPATH", str(ROOT)),),
        cannot=("checkpoint_files",),
        storage="faulty",
        writer="tests.storages.faulty:Writer",
        reader="tests.storages.faulty:Reader",
        options=(("path", f"localhost:{server.port}/{{run}}"), ("switch", str(switch))),
        reader_options=(("switch", str(switch)),),
    )
    with Pool(target) as pool:
        yield Suite(pool, switch)


def test_every_fault_has_a_law() -> None:
    assert FOUND.keys() == FAULTS.keys()


@pytest.mark.planted
@pytest.mark.parametrize("fault", FOUND)
def test_a_faulty_storage_is_found(fault: str, suite: Suite) -> None:
    without = suite.verdict(FOUND[fault])
    assert without.status == "held", without.message + without.error
    assert suite.judge(FOUND[fault], fault) not in UNSEEN


@pytest.mark.planted
def test_an_option_that_a_storage_does_not_take_is_no_case_for_it(suite: Suite) -> None:
    assert suite.judge(f"roundtrip.files {OVER} threads=2") == "rejected"


@pytest.mark.planted
def test_a_run_against_a_storage_of_the_config_file(server: TCPStore, tmp_path: Path) -> None:
    (tmp_path / "shardlaw.toml").write_text(
        f"""[storage.memory]
writer = "tests.storages.memory:Writer"
reader = "tests.storages.memory:Reader"
options = {{ path = "localhost:{server.port}/{{run}}" }}
"""
    )
    laws = ["roundtrip.plain", "roundtrip.overwrite", "roundtrip.file", "roundtrip.refuses[damaged]", "plan.hints"]
    told = subprocess.run(
        [sys.executable, "-m", "shardlaw", "run", *laws, "--storage", "memory", "--report", "report"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["target"]["storage"] == "memory"
    said = {law["id"]: (law["outcome"], law["reason"]) for law in report["laws"]}
    assert {law: outcome for law, (outcome, _) in said.items()} == {
        "roundtrip.plain": "held",
        "roundtrip.overwrite": "held",
        "roundtrip.file": "untested",
        "roundtrip.refuses[damaged]": "untested",
        "plan.hints": "held",
    }
    assert "checkpoint_files" in said["roundtrip.file"][1]
