"""The pieces of a world that need no ranks: clocks, frames, the page that ranks leave behind, files that are being cut down."""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Deposit, Deviation, Raised
from shardlaw.conformance.world import protocol, watch
from shardlaw.conformance.world.launch import WorldError
from shardlaw.conformance.world.manager import WorldManager
from shardlaw.conformance.world.observer import LocalObserver
from shardlaw.conformance.world.output import read_tail
from shardlaw.conformance.world.progress import BUFFER_BYTES, PARKED, RUNNING, Position, ProgressPage
from shardlaw.conformance.world.watch import Watch
from shardlaw.conformance.world.worker import Rank
from shardlaw.conformance.world.world import Job, World
from tests.faults.conftest import LAWS

pytestmark = pytest.mark.ranks


class Ranks:
    """Processes of this machine, as a watch sees them."""

    def __init__(self, *pids: int) -> None:
        self._pids = dict(enumerate(pids))

    def activity(self) -> list[watch.Activity]:
        return watch.read_activity(self._pids)

    def cpu_share(self) -> float:
        return watch.cpu_share()


NOBODY = Ranks()


@pytest.fixture
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def set_share(part: float) -> None:
        monkeypatch.setattr(watch, "cpu_share", lambda: part)

    set_share(1.0)
    return set_share


def test_quiet_time_counts_only_while_the_driver_looks(idle_machine: Callable[[float], None]) -> None:
    clock = Watch()
    assert not clock.update(0.0, "here", NOBODY)
    for now in (0.1, 0.2, 0.3):
        assert clock.update(now, "here", NOBODY)
    assert clock.quiet == pytest.approx(0.3)
    clock.update(100.0, "here", NOBODY)
    assert clock.quiet < 0.6
    clock.update(100.1, "moved", NOBODY)
    assert (clock.quiet, clock.stuck) == (0, 0)


def test_time_counts_less_on_a_busy_machine(idle_machine: Callable[[float], None]) -> None:
    clock = Watch()
    idle_machine(0.1)
    clock.update(0.0, "here", NOBODY)
    clock.update(0.2, "here", NOBODY)
    assert (clock.quiet, clock.stuck, clock.passed) == pytest.approx((0.02, 0.02, 0.2))
    assert not clock.is_busy_for(0.1, 0.5)
    clock.busiest = 0.05
    assert clock.is_busy_for(0.1, 0.5)
    assert not clock.is_busy_for(0.1, 1.0)


def test_share_of_this_machine() -> None:
    assert 0 < watch.cpu_share() <= 1


def test_process_that_uses_the_cpu_is_not_quiet(idle_machine: Callable[[float], None]) -> None:
    clock = Watch()
    clock.update(0.0, "here", Ranks(os.getpid()))
    clock.update(0.1, "here", Ranks(os.getpid()))
    assert clock.quiet == 0
    assert clock.stuck == pytest.approx(0.1)


def test_a_law_that_was_late_before_gets_less_time() -> None:
    target = Target(timeout=10)
    first, again, full = watch.search_limits(target), watch.search_limits(target, hung=True), watch.full_limits(target)
    assert again.quiet < first.quiet < watch.search_limits(target, storage=True).quiet < full.quiet == full.busy == 10
    assert first.busy_share < full.busy_share == 1
    assert watch.search_limits(Target(timeout=0.2)).quiet == 0.2


ANSWERS = [
    Answer(1, "held", features=("a", "b")),
    Answer(1, "rejected", reason="no"),
    Answer(1, "raised", raised=Raised("ValueError", "text", "stack"), stack="stack", output="out"),
    Answer(1, "deviates", (Deviation("wrong-value", "check", "message", "1", "2"),), output="out"),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.outcome)
def test_answers_travel(answer: Answer) -> None:
    frames = protocol.FrameDecoder(protocol.FromRank)
    data = protocol.encode_frame(protocol.pack_answer(3, 4, answer, answer.output, {"0": 1}))
    assert list(frames.feed(data[:7])) == []
    (said,) = frames.feed(data[7:])
    assert (said.batch, said.index, said.collectives) == (3, 4, {"0": 1})
    assert protocol.unpack_answer(1, said) == answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_tensors_travel(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6).reshape(3, 2).expand(3, 2).to(dtype)
    tensor = tensor.t().contiguous().t() if shape == (3, 2) else tensor[0, 0] if shape == () else torch.empty(shape, dtype=dtype)
    back = protocol.unpack_tensor(protocol.pack_tensor(tensor))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))


def test_deposits_travel() -> None:
    deposit = Deposit("check", "2", "2", "P(sum)", torch.ones(2), torch.full((2,), 2.0), True)
    said = protocol.pack_answer(0, 0, Answer(0, "held", deposits=(deposit, deposit)), "", {})
    (back, _) = protocol.unpack_answer(0, said).deposits
    assert torch.equal(back.local, deposit.local)
    assert back.want is not None
    assert back.exact


NO_TEXT = protocol.encode_frame(protocol.Failed("text")).replace(b"text", b"\x87ext")


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\3abc", pytest.param(NO_TEXT, id="no-text")])
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(protocol.ProtocolError):
        list(protocol.FrameDecoder(protocol.FromRank).feed(data))


def test_an_answer_whose_evidence_cannot_be_read_is_no_message() -> None:
    said = protocol.pack_answer(0, 0, Answer(0, "held"), "", {})
    with pytest.raises(protocol.ProtocolError, match="Error"):
        protocol.unpack_answer(0, msgspec.structs.replace(said, evidence=b"overwritten"))


def test_page_keeps_what_a_rank_has_not_sent(tmp_path: Path) -> None:
    driver = ProgressPage(str(tmp_path / "page"), 2, create=True)
    rank = ProgressPage(str(tmp_path / "page"), 2)
    rank.set_position(1, 5, 3, RUNNING)
    assert rank.buffer(1, b"one")
    assert rank.buffer(1, b"two")
    assert (driver.position(1), driver.unsent(1), driver.unsent(0)) == (Position(5, 3, RUNNING), b"onetwo", b"")
    assert not rank.buffer(1, bytes(BUFFER_BYTES))
    rank.clear_buffer(1)
    assert driver.unsent(1) == b""


def test_rank_that_verifies_many_groups_makes_progress(tmp_path: Path) -> None:
    world = World(1, 2, LocalObserver(str(tmp_path / "world"), 2, lambda: None), deque())
    rank = ProgressPage(str(tmp_path / "world" / "progress"), 2)
    rank.set_position(1, 5, 3, PARKED)
    before = world.progress()
    rank.set_position(1, 5, 3, PARKED, 1)
    assert world.progress() != before


def test_a_group_that_counts_nothing_hides_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError("does not support sequence numbers")

    rank = object.__new__(Rank)
    rank._sequence_number = refuse
    groups = [("0", SimpleNamespace(refuse=lambda: 3)), ("1", SimpleNamespace(refuse=refuse))]
    monkeypatch.setattr(rank, "_live_groups", lambda: groups)
    assert rank._count_collectives() == {"0": 3}


def test_batch_is_over_when_every_rank_says_so_and_nothing_is_due(tmp_path: Path) -> None:
    world = World(1, 2, LocalObserver(str(tmp_path / "world"), 2, lambda: None), deque())
    world.send_batch([Job(LAWS["nothing"], Case.of("fault.rank[nothing]"), print, "", (2,))])
    batch = world.batches[0]
    # a rank that was read while it sent says so twice
    assert world.mark_finished(0, 1) is None
    assert world.mark_finished(0, 1) is None
    assert world.mark_finished(1, 1) is None
    batch.pending.clear()
    completed = world.mark_finished(1, 1)
    assert completed is not None
    assert completed[0] is batch
    world.destroy()


def test_tail_of_a_file_that_has_been_cut(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("0123456789")
    assert read_tail(str(file), 4) == "456789"
    assert read_tail(str(file), 10) == ""
    assert read_tail(str(file), 99) == "0123456789"
    assert read_tail(str(tmp_path / "none")) == ""


def test_the_time_to_start_counts_less_on_a_busy_machine() -> None:
    share = 0.1
    observer = SimpleNamespace(
        cpu_share=lambda: share, activity=list, refresh=lambda dump: None, stacks_and_output=lambda rank: ("", ""), close=lambda: None
    )
    manager = WorldManager.__new__(WorldManager)
    manager._target, manager._failed_starts, manager._has_started = Target(startup_timeout=1.0), 0, False
    world = World(1, 2, observer, deque())

    def wait(steps: range) -> None:
        for step in steps:
            manager._check_start(world, step / 4)

    wait(range(1, 30))
    share = 1.0
    with pytest.raises(WorldError, match=r"ranks \[0, 1\] of 2 were not ready within 1 s"):
        wait(range(30, 40))
