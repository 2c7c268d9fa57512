"""Laws whose checks do what a rank must never do. They join the catalogue through ``SHARDLAW_LAWS``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from conformance.case import Case
from conformance.here import Here
from conformance.law import Law

BAD = 1


def everybody(case: Case, here: Here) -> None:
    """Nothing is wrong: a sum over all ranks."""
    ones = torch.ones(2)
    dist.all_reduce(ones)
    here.require(ones[0].item() == here.world, "wrong-value", "sum", "the sum is not the number of ranks", here.world, ones)


def nothing(case: Case, here: Here) -> None:
    """Nothing happens at all."""


def raises_alone(case: Case, here: Here) -> None:
    if here.rank == BAD:
        raise ValueError("alone 17")


def raises_alone_and_others_wait(case: Case, here: Here) -> None:
    if here.rank == BAD:
        raise ValueError("alone 17")
    dist.all_reduce(torch.ones(2))


def raises_alike(case: Case, here: Here) -> None:
    print("about to raise")
    raise RuntimeError("together")


def raises_alike_after_sum(case: Case, here: Here) -> None:
    dist.all_reduce(torch.ones(2))
    raise RuntimeError("together")


def raises_differently(case: Case, here: Here) -> None:
    raise ValueError("odd") if here.rank % 2 else RuntimeError("even")


def exits(case: Case, here: Here) -> None:
    if here.rank == BAD:
        os._exit(3)
    dist.all_reduce(torch.ones(2))


def killed(case: Case, here: Here) -> None:
    if here.rank == BAD:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


def aborts(case: Case, here: Here) -> None:
    if here.rank == BAD:
        print("terminate called", file=sys.stderr)
        os.abort()
    dist.all_reduce(torch.ones(2))


def joins_alone(case: Case, here: Here) -> None:
    if here.rank == BAD:
        dist.all_reduce(torch.ones(2))


def all_wait(case: Case, here: Here) -> None:
    print("waiting")
    if here.rank == BAD:
        dist.recv(torch.ones(2), src=(BAD + 1) % here.world)
    else:
        dist.barrier()


def mismatched(case: Case, here: Here) -> None:
    dist.all_reduce(torch.ones(2 if here.rank == BAD else 3000))


def spins(case: Case, here: Here) -> None:
    while here.rank == BAD:
        pass
    dist.all_reduce(torch.ones(2))


def prints_without_end(case: Case, here: Here) -> None:
    while here.rank == BAD:
        print("x" * 1000)


def destroys_group(case: Case, here: Here) -> None:
    if here.rank == BAD:
        dist.destroy_process_group()


def closes_stream(case: Case, here: Here) -> None:
    if here.rank == BAD:
        os.closerange(3, 256)
        time.sleep(60)


def leaves_thread(case: Case, here: Here) -> None:
    if here.rank == BAD:
        threading.Thread(target=time.sleep, args=(60,), daemon=True, name="left").start()


CHECKS = (
    everybody, nothing, raises_alone, raises_alone_and_others_wait, raises_alike, raises_alike_after_sum, raises_differently, exits, killed, aborts,
    joins_alone, all_wait, mismatched, spins, prints_without_end, destroys_group, closes_stream, leaves_thread,
)  # fmt: skip
LAWS = [
    Law(f"fault.{check.__name__}", check.__doc__ or "A rank misbehaves.", "the tests of worlds", check, f"fault.{check.__name__} world=2", "")
    for check in CHECKS
]
