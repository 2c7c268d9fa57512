"""A vocabulary over the ranks, cut by hand: embedding, tied head and loss, of an odd number of tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Copy, Sum
from fault_names import check_fault
from torch import nn

from shardlaw import Twin

FAULTS = {"row": "embed", "mask": "embed", "sum": "loss", "untied": "embed", "copy": "head"}


class Cut(nn.Module):
    """What has rows of the vocabulary: all of them, or those from ``first`` on."""

    def __init__(self, weight=None):
        super().__init__()
        self.weight, self.first, self.group, self.fault = weight, 0, None, ""

    def mine(self, tokens, rows):
        """The tokens by their row here, and which of them are elsewhere."""
        local = tokens - self.first + (self.fault == "row" and self.first > 0)
        outside = (local < 0) | (local >= rows)
        return local.masked_fill(outside, 0), outside


class Embedding(Cut):
    def forward(self, tokens):
        if self.group is None:
            return F.embedding(tokens, self.weight)
        local, outside = self.mine(tokens, len(self.weight))
        found = F.embedding(local, self.weight)
        return Sum.apply(found if self.fault == "mask" else found.masked_fill(outside[..., None], 0), self.group)


class Head(Cut):
    def forward(self, x):
        if self.group is not None and self.fault != "copy":
            x = Copy.apply(x, self.group)
        return x @ self.weight.T


class Loss(Cut):
    def forward(self, logits, targets):
        if self.group is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        top = logits.detach().amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        total = (logits - top[..., None]).exp().sum(-1)
        local, outside = self.mine(targets, logits.shape[-1])
        hit = logits.gather(-1, local[..., None])[..., 0].masked_fill(outside, 0)
        total = total if self.fault == "sum" else Sum.apply(total, self.group)
        return (total.log() + top - Sum.apply(hit, self.group)).mean()


class Tied(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        weight = nn.Parameter(torch.randn(vocab, width) / 2)
        self.embed, self.head, self.loss = Embedding(weight), Head(weight), Loss()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        return self.loss(self.head(self.norm(x + torch.tanh(self.mix(x)))), targets)


def cut(model, mesh, fault=""):
    """Give each rank its rows of the vocabulary."""
    rows = model.embed.weight.chunk(mesh.size())
    weight = nn.Parameter(rows[mesh.get_local_rank()].detach().clone())
    model.embed.weight = model.head.weight = weight
    if fault == "untied":
        model.head.weight = nn.Parameter(weight.detach().clone())
    for part in (model.embed, model.head, model.loss):
        part.first, part.group = mesh.get_local_rank() * len(rows[0]), mesh.get_group()
        part.fault = fault if part is not model.loss or fault == "sum" else ""


def make(fault=""):
    check_fault(fault, FAULTS)

    def batch(step, batch, seq, vocab, **_):
        tokens = torch.randint(vocab, (batch, seq + 1))
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    return Twin(
        model=lambda vocab, width, **_: Tied(vocab, width),
        batch=batch,
        shard=lambda model, mesh: cut(model, mesh, fault),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        mesh={"tp": 2},
        sizes={"vocab": (31, 3), "width": (16, 2), "batch": (2, 1), "seq": (6, 1)},
    )
