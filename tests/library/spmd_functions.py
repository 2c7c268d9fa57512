"""Functions that the tests of the library run on live ranks."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardlaw import Case, RankContext
from shardlaw.reference.layout import Layout


def total(here: RankContext, x: torch.Tensor, *, scale: int = 1) -> dict[str, Any]:
    got = here.tensor(x * scale + here.rank)
    dist.all_reduce(got)
    return {"rank": here.rank, "sum": got}


def one_raises(here: RankContext) -> None:
    print("on rank", here.rank)
    if here.rank == 1:
        raise ValueError("the odd one")
    dist.barrier()


def all_wait(here: RankContext) -> None:
    if here.rank == 0:
        dist.recv(torch.ones(2), src=1)
    else:
        dist.barrier()


def dies(here: RankContext) -> None:
    if here.rank == 1:
        os._exit(3)
    dist.barrier()


def late(here: RankContext) -> int:
    time.sleep(0.9 * (here.rank == 1))
    return here.rank


def other_value(here: RankContext) -> None:
    here.same(torch.ones(2) + (here.rank == 1), torch.ones(2), "value")


def held(here: RankContext, layout: Layout) -> torch.Tensor:
    full = torch.arange(float(torch.Size(layout.shape).numel())).reshape(layout.shape)
    return here.dtensor(full, layout).to_local() if here.coord(layout.mesh) else torch.empty(0)


def unsent(here: RankContext, layout: Layout) -> DTensor:
    return here.dtensor(torch.zeros(layout.shape), layout)


def check_two(case: Case, here: RankContext) -> None:
    here.require(here.world == 2, "wrong-value", "world", "no two ranks", 2, here.world)
    here.require(here.rank != case.integer("odd", 9), "wrong-value", "odd", "the odd one")


def barriers_raise() -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no barrier here")

    dist.barrier = broken


def waits(here: RankContext) -> str:
    dist.barrier()
    return "through"
