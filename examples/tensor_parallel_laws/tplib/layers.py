"""The layers. Each rank of a group holds one shard of the weight; every rank gets the whole result."""

from __future__ import annotations

import torch
import torch.distributed as dist


def is_mine(ids: torch.Tensor, first: int, rows: int) -> torch.Tensor:
    """Which of ``ids`` lie among the ``rows`` rows from ``first`` on."""
    return (ids >= first) & (ids < first + rows)


def embedding(ids: torch.Tensor, shard: torch.Tensor, first: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows ``ids`` of a table of which this rank holds ``shard``, from row ``first`` on: the same on every rank of ``group``.

    ``ids`` has any shape; the result has one dim more. A rank may hold no rows at all.
    """
    mine = is_mine(ids, first, len(shard))
    found = shard.new_zeros((*ids.shape, shard.shape[1]))
    found[mine] = shard[ids[mine] - first]
    dist.all_reduce(found, group=group)
    return found


def column_linear(x: torch.Tensor, shard: torch.Tensor, columns: int, group: dist.ProcessGroup) -> torch.Tensor:
    """``x @ w.T``, where this rank holds ``shard``, some of the ``columns`` rows of ``w``: the same on every rank of ``group``.

    Raises ``NotImplementedError`` where the columns do not divide evenly.
    """
    if columns % dist.get_world_size(group):
        raise NotImplementedError(f"{columns} columns cannot be sharded evenly over {dist.get_world_size(group)} ranks")
    mine = x @ shard.T
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, dim=-1)
