"""A mixture of experts: each rank has its part of the batch and some of the experts; tokens travel to their expert and back."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Exchange, Sum, average
from fault_names import check_fault
from torch import nn

from shardlaw import Twin

FAULTS = {"loss": "moe.balance", "swap": "moe", "expert": "moe.experts.", "router": "moe.router"}


class Both(torch.autograd.Function):
    """A sum over ranks, each of which has the loss that follows from it: the gradients are added too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return Sum.forward(None, x, group)

    @staticmethod
    def backward(ctx, grad):
        return Sum.forward(None, grad, ctx.group), None


class Balance(nn.Module):
    """How unevenly tokens go to experts: over all tokens, or over a rank's own where the fault is there."""

    group, fault = None, ""

    def forward(self, share, chosen):
        often, much = F.one_hot(chosen, share.shape[-1]).to(share.dtype).mean(0), share.mean(0)
        if self.group is not None and self.fault != "loss":
            size = dist.get_world_size(self.group)
            often, much = Sum.apply(often, self.group) / size, Both.apply(much, self.group) / size
        return share.shape[-1] * (often * much).sum()


class Experts(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router, self.balance = nn.Linear(width, experts, bias=False), Balance()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(experts))
        self.group, self.fault = None, ""

    def forward(self, x):
        share = self.router(x).softmax(-1)
        weight, chosen = share.max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=share.shape[-1])
        back = order.argsort()
        if self.group is None:
            rows = torch.cat([expert(part) for expert, part in zip(self.experts, x[order].split(counts.tolist()), strict=True)])
        else:
            rows = self.travel(x[order], counts)
        return weight[:, None] * rows[order if self.fault == "swap" else back], self.balance(share, chosen)

    def travel(self, rows, counts):
        """Each row to the rank of its expert, through it, and back."""
        size, mine = dist.get_world_size(self.group), len(self.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, got = (table.view(size, mine).sum(1).tolist() for table in (counts, theirs))
        blocks = Exchange.apply(rows, sent, got, self.group).split(theirs.tolist())  # by rank, then by expert
        done = [expert(torch.cat(blocks[at::mine])).split(theirs.tolist()[at::mine]) for at, expert in enumerate(self.experts)]
        return Exchange.apply(torch.cat([done[at][rank] for rank in range(size) for at in range(mine)]), got, sent, self.group)


class Net(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(width, width), Experts(width, experts), nn.Linear(width, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        rows, uneven = self.moe(x)
        return self.last(x + rows).square().mean() + uneven / 8


def cut(model, mesh, fault=""):
    """Each rank keeps its own experts."""
    moe, mine = model.moe, len(model.moe.experts) // mesh.size()
    moe.experts = moe.experts[mesh.get_local_rank() * mine :][:mine]
    moe.group = moe.balance.group = mesh.get_group()
    moe.fault = moe.balance.fault = fault


def renamed(path, mesh, experts):
    """Expert 0 of a rank is not that of the whole model."""
    parts = path.split(".")
    if parts[:2] == ["moe", "experts"] and len(parts) > 2:
        parts[2] = str(int(parts[2]) + mesh.get_local_rank() * experts)
    return ".".join(parts)


def step(model, mesh, fault):
    """The loss is the mean over ranks: gradients are averaged, those of experts, which had every rank's tokens, divided."""
    if mesh is not None:
        average(model, mesh.get_group(), ("moe.experts", *(["moe.router"] if fault == "router" else [])))
        for parameter in model.moe.experts.parameters():
            if parameter.grad is not None and fault != "expert":
                parameter.grad /= mesh.size()


def make(fault=""):
    check_fault(fault, FAULTS)
    return Twin(
        model=lambda width, experts, **_: Net(width, experts),
        batch=lambda step, batch, width, **_: torch.randn(batch, width),
        part=lambda batch, mesh: batch.chunk(mesh.size())[mesh.get_local_rank()],
        shard=lambda model, mesh: cut(model, mesh, fault),
        before_step=lambda model, mesh: step(model, mesh, fault),
        name=lambda path, mesh: renamed(path, mesh, EXPERTS // mesh.size()),
        mesh={"ep": 2},
        sizes={"width": (8, 2), "experts": EXPERTS, "batch": (24, 4)},
    )


EXPERTS = 4
