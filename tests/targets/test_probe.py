"""What is asked of a target beside the laws, without any rank."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shardlaw.conformance.law.target import CAPABILITIES, Target
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.target.probe import PROBES
from shardlaw.conformance.world.worker import Rank

pytestmark = pytest.mark.ranks


def test_everything_that_can_be_declared_is_tried() -> None:
    assert sorted(PROBES) == sorted(set(CAPABILITIES) - {"checkpoint_files"})


def test_what_laws_need_can_be_declared() -> None:
    assert {word for law in catalogue().values() for word in law.needs} <= set(CAPABILITIES)


def test_the_law_that_probes_is_part_of_no_run() -> None:
    assert find("doctor.call").id not in catalogue()


class Counter:
    """Counts the collectives of a group by itself, as a backend in Python may."""

    def _get_sequence_number_for_group(self) -> int:
        return 7


def rank_of(target: Target) -> Rank:
    made = object.__new__(Rank)
    made.target = target
    made._initial_threads = frozenset({threading.main_thread()})
    return made


def test_a_group_in_python_counts_for_itself() -> None:
    import torch.distributed as dist

    made = rank_of(Target())
    made._sequence_number = dist.ProcessGroup._get_sequence_number_for_group
    made._live_groups = lambda: [("0", Counter())]  # type: ignore[method-assign,list-item]
    assert made._count_collectives() == {"0": 7}


def waits_in_a_backend(until: threading.Event) -> None:
    until.wait()


class Monitor(threading.Thread):
    """As a progress bar's, which a library starts."""


@pytest.mark.parametrize(
    ("runs", "setup", "left"),
    [
        (waits_in_a_backend, "", True),
        (waits_in_a_backend, "other:register", True),
        (waits_in_a_backend, f"{__name__}:register", False),
        (lambda until: until.wait(), f"{__name__.partition('.')[0]}:register", False),
    ],
)
def test_threads_of_a_backends_package_are_not_left_behind(runs: Callable[[threading.Event], None], setup: str, left: bool) -> None:
    until = threading.Event()
    thread = threading.Thread(target=runs, args=(until,), daemon=True)
    thread.start()
    try:
        made = rank_of(Target(setup=setup))
        assert made._is_leftover(thread) is left
        assert not made._is_leftover(threading.main_thread())
        made._initial_threads |= {thread}
        assert not made._is_leftover(thread)
    finally:
        until.set()
        thread.join()


def test_a_librarys_own_thread_is_not_left_behind() -> None:
    made = rank_of(Target())
    assert not made._is_leftover(Monitor())
    assert made._is_leftover(threading.Timer(1, print))
