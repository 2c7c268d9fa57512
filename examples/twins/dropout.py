"""A net with dropout on shards of its width, of which each rank draws its own, and on what all ranks hold, where they draw the same.

`shardlaw twin examples/twins/dropout.py:make --dropout`; with a fault planted: `--option fault=shared`.
"""

import torch
from fault_names import check_fault
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardlaw import Twin

DROPPED = {"shared": "inner", "apart": "outer"}


class Own(nn.Dropout):
    """Dropout of a shard: from random numbers of this rank's own."""

    rank = 0

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed() + self.rank)
            return super().forward(x)


class Net(nn.Module):
    def __init__(self, width, fault):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.inner, self.outer = Own(0.25), Own(0.25) if fault == "apart" else nn.Dropout(0.25)

    def forward(self, x):
        return x + self.outer(self.down(self.inner(torch.tanh(self.up(x)))))


def make(fault=""):
    check_fault(fault, ("shared", "apart"))

    def shard(model, mesh):
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for part in model.modules():
            if isinstance(part, Own) and fault != "shared":
                part.rank = mesh.get_local_rank()

    return Twin(
        model=lambda width, **_: Net(width, fault),
        batch=lambda step, batch, width, **_: torch.randn(batch, width),
        shard=shard,
        mesh={"tp": 2},
        sizes={"width": (16, 4), "batch": (8, 2)},
    )
