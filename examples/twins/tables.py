"""Embedding tables of a recommender: one whole on one rank, one by rows, one by columns, pooled by the mean; a small net on top."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Gather, Sum
from fault_names import check_fault
from torch import nn

from shardlaw import Twin

FAULTS = {"row": "by_rows", "column": "by_columns", "pool": "by_rows", "double": "on_one"}


class Table(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.weight, self.first, self.group, self.how, self.fault = nn.Parameter(torch.randn(rows, width) / 2), 0, None, "", ""

    def forward(self, ids):
        """The mean of the rows that ``ids`` (batch, 4) name."""
        if self.how == "rows":
            local = ids - self.first + (self.fault == "row" and self.first > 0)
            inside = (local >= 0) & (local < len(self.weight))
            found = F.embedding(local.where(inside, 0), self.weight) * inside[..., None].to(self.weight.dtype)
            count = inside.sum(-1, keepdim=True).clamp(min=1) if self.fault == "pool" else ids.shape[-1]
            return Sum.apply(found.sum(1) / count, self.group)
        found = F.embedding(ids, self.weight).sum(1) / ids.shape[-1] if len(self.weight) else self.weight.new_zeros(len(ids), self.width)
        if self.how == "columns":
            parts = Gather.apply(found, 1, self.group, False)
            return torch.cat(parts.chunk(dist.get_world_size(self.group), 1)[::-1], 1) if self.fault == "column" else parts
        if self.how == "one":
            again = found - found.detach() if self.fault == "double" else 0  # its gradient once more
            return Sum.apply(found + again, self.group)
        return found


class Net(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.on_one, self.by_rows, self.by_columns = (Table(rows, width) for _ in range(3))
        self.top = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, ids):
        tables = (self.on_one, self.by_rows, self.by_columns)
        return self.top(torch.cat([table(ids[:, at]) for at, table in enumerate(tables)], 1))


def cut(model, mesh, fault=""):
    """The first table stays on rank 0, where others have no row; the second is cut by rows, the third by columns."""
    rank, size = mesh.get_local_rank(), mesh.size()
    for table, how in ((model.on_one, "one"), (model.by_rows, "rows"), (model.by_columns, "columns")):
        table.how, table.group, table.fault, weight = how, mesh.get_group(), fault, table.weight.detach()
        table.width = weight.shape[1]
        if how == "one":
            table.weight = nn.Parameter(weight if rank == 0 else weight[:0])
        else:
            parts = weight.chunk(size, int(how == "columns"))
            table.weight, table.first = nn.Parameter(parts[rank].clone()), rank * len(parts[0])


def make(fault=""):
    check_fault(fault, FAULTS)
    return Twin(
        model=lambda rows, width, **_: Net(rows, width),
        batch=lambda step, batch, rows, **_: torch.randint(rows, (batch, 3, 4)),
        shard=lambda model, mesh: cut(model, mesh, fault),
        optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
        mesh={"ranks": 2},
        sizes={"rows": (13, 2), "width": (8, 2), "batch": (6, 1)},
    )
