"""Traces of acts on real ranks: what they survive, and what they follow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.rank.trace import Tracer
from shardlaw.conformance.run.place import find_places
from shardlaw.conformance.world import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(Target()) as pool:
        yield pool


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("module.registered mesh=2 x=4:S(0) dim=-1", id="a-rule-that-is-a-partial-function"),
        pytest.param("module.gather-hooks mesh=2 model=mlp dims=5x7x3 hooks=all", id="shards-of-a-subclass-without-memory"),
    ],
)
def test_a_case_that_holds_holds_under_the_tracer(text: str, pool: Pool) -> None:
    case = Case.parse(text)
    verdict = pool.check_fresh(find(case.law), case, traced="at end")
    assert verdict.status == "held", verdict.message


def test_ops_that_another_dispatch_mode_keeps_from_the_tracer_are_steps_by_their_planning() -> None:
    case = Case.parse("op.local mesh=2 a=4x2:S(0) steps=sum(a,0) to=P(sum)")
    with Pool(Target(setup="tests.planted.op_faults:results_claimed_whole")) as pool:
        verdict = pool.check_fresh(find(case.law), case, traced="at end")
    assert verdict.status == "deviates"
    assert find_places(verdict, [])[0].startswith("linear_reduction_strategy, torch/distributed/tensor/_ops/_math_ops.py")


def test_a_rank_that_dies_leaves_its_trace() -> None:
    case = Case.parse("redistribute.local mesh=2 x=4x3:S(0) to=R")
    with Pool(Target(setup="tests.faults.hooks:aborts_gathers")) as pool:
        verdict = pool.check_fresh(find(case.law), case, traced="each step")
    crashed = next(answer for answer in verdict.ranks if answer.outcome == "crashed")
    assert "redistribute S(0) to R" in crashed.trace
    assert find_places(verdict, [])[0].startswith("DTensorRedistributePlanner.")


def test_the_trace_of_a_load_has_what_ran_in_the_save(pool: Pool) -> None:
    case = Case.parse("roundtrip.files mesh=2 mesh.load=3 c=4:S(0) threads=2 state={c:c}")
    law = find(case.law)
    for verdict in (pool.check_fresh(law, case, traced="at end"), *pool.check(law, [case], traced="at end")):
        for answer in verdict.ranks:
            assert answer.evidence is not None
            ran = [place.partition(",")[0] for place in answer.evidence.visited]
            assert ran.index("dedup_save_plans") < ran.index("create_default_local_load_plan")


def test_a_trace_follows_the_threads_that_an_act_starts() -> None:
    def find_object() -> None:
        find_state_dict_object({"a": 1}, MetadataIndex("a"))

    tracer = Tracer()
    with tracer.recording():
        thread = threading.Thread(target=find_object)
        thread.start()
        thread.join()
    assert any(place.startswith("find_state_dict_object, ") for place in tracer.evidence.visited)
    assert threading.gettrace() is None


def test_an_error_that_a_checkpoint_reports_is_traced_to_the_frame_that_raised_it(tmp_path: Path) -> None:
    tracer = Tracer()
    with pytest.raises(CheckpointException), tracer.recording():
        dcp.load({"a": torch.zeros(2)}, checkpoint_id=tmp_path / "missing", no_dist=True)
    *_, reports, finds = (place.removeprefix("refused by ") for place in tracer.evidence.raised)
    assert finds.startswith("_load_state_dict.local_step, torch/distributed/checkpoint/state_dict_loader.py:")
    assert finds in tracer.evidence.visited  # named as its call is
    assert reports.startswith("_DistWrapper.reduce_scatter, ")
