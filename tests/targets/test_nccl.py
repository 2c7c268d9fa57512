"""What can be said of NCCL, and of devices, where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardlaw.conformance.commands import cli
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.rank.context import to_device
from shardlaw.conformance.run.entry import Entry
from shardlaw.conformance.run.nearby import trace_nearby
from shardlaw.conformance.target.builtin import BUILTIN, count_needed_devices
from shardlaw.conformance.world import join
from shardlaw.conformance.world.device import is_lost
from shardlaw.conformance.world.launch import rank_environment
from shardlaw.reference.tensors import MEMORIES, lay_out

pytestmark = pytest.mark.ranks


def test_a_failed_collective_ends_its_rank_and_the_driver_sees_a_hang_first() -> None:
    target = BUILTIN["nccl"]
    env = rank_environment(target)
    assert (env["TORCH_NCCL_ASYNC_ERROR_HANDLING"], env["TORCH_NCCL_BLOCKING_WAIT"]) == ("3", "0")
    assert env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in rank_environment(BUILTIN["gloo"])


def test_ranks_of_nccl_are_bound_to_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_device=lambda: 3))
    assert join.init_options(BUILTIN["nccl"]) == {"device_id": torch.device("cuda", 3)}
    assert join.init_options(BUILTIN["cuda-gloo"]) == {}
    assert join.init_options(BUILTIN["gloo"]) == {}


def test_options_of_a_backend_are_made_by_its_own_function() -> None:
    assert join.init_options(Target(init_options=(("pg_options", "builtins:dict"),))) == {"pg_options": {}}


def test_one_gpu_a_rank_or_one_for_all() -> None:
    assert [count_needed_devices(BUILTIN[name], 4) for name in ("nccl", "cuda-gloo", "gloo")] == [4, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "seen", "needs"),
    [
        (["run", "--target", "nccl"], 0, "target nccl with 4 ranks needs 4 GPUs (one for each rank), 0 seen"),
        (["run", "--target", "nccl"], 2, "needs 4 GPUs (one for each rank), 2 seen"),
        (["run", "--target", "nccl", "--world-size", "1"], 0, "target nccl with 1 rank needs 1 GPU (one for each rank), 0 seen"),
        (["run", "--target", "cuda-gloo"], 0, "target cuda-gloo with 4 ranks needs 1 GPU (shared by the ranks), 0 seen"),
    ],
)
def test_too_few_gpus_end_a_run_with_one_line(
    arguments: list[str], seen: int, needs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardlaw.conformance.target.builtin.count_devices", lambda target: seen)
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("shardlaw: ")
    assert told.err.count("\n") == 1
    assert needs in told.err
    assert f"--world-size {seen} fits" in told.err or not seen


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_tensor_lies_on_another_device_as_it_did(memory: str) -> None:
    x = lay_out(torch.arange(24.0).reshape(2, 3, 4), memory)
    there = to_device(x, torch.device("meta"))
    assert (there.device.type, there.shape, there.stride()) == ("meta", x.shape, x.stride())
    assert there.storage_offset() == x.storage_offset()


def test_a_device_is_lost_that_cannot_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=fails))
    assert is_lost("cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=lambda: None))
    assert not is_lost("cuda")
    monkeypatch.setattr(torch, "get_device_module", None)
    assert not is_lost("cpu")


@pytest.mark.parametrize(("most", "sizes"), [(1, {1}), (2, {1, 2})])
def test_cases_near_a_finding_stay_within_the_world(most: int, sizes: set[int]) -> None:
    law = find("roundtrip.staged")
    seen = list[Case]()

    class Asked:
        def check_fresh(self, law: Law, case: Case, traced: bool) -> None:
            seen.append(case)

        def check(self, law: Law, cases: list[Case], traced: bool) -> list[None]:
            seen.extend(cases)
            return []

    trace_nearby(Asked(), law, Case.parse("roundtrip.staged mesh=1 x=5:S(0) value=slots async=writer"), Limits(world_size=most))  # type: ignore[arg-type]
    assert {size for case in seen for size in law.worlds(case)} == sizes


@pytest.mark.parametrize(
    ("signature", "same"),
    [
        ("index # is out of bounds", True),
        ("index out of range", True),
        ("index_select", True),
        ("tuple index out of range", False),
        ("list assignment index out of range", False),
        ("Dimension out of range", False),
        ("out of bounds for storage of size #", False),
        ("Boolean value", False),
    ],
)
def test_an_assertion_of_a_gpu_is_an_index_out_of_range(signature: str, same: bool) -> None:
    entry = Entry("redistribute.masked", "raised", "", signature=signature)
    case = Case.parse("redistribute.masked mesh=2 w=4x5:S(0) i=7:R:int64:index4 out=R use=once")
    assert entry.matches(case, "raised", set(), "AcceleratorError: CUDA error: device-side assert triggered") == same
