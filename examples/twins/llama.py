"""A llama, its attention with grouped queries, under the tensor-parallel styles of torch.

`shardlaw twin examples/twins/llama.py:make`; with a fault planted: `--option fault=heads`.
"""

import torch
import torch.nn.functional as F
from fault_names import check_fault
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardlaw import Twin

COLWISE, ROWWISE = ("attn.wq", "attn.wk", "attn.wv", "mlp.up", "mlp.gate"), ("attn.wo", "mlp.down")
FAULTS = {"heads": "layers.0.attn", "scale": "layers.0.attn", "bias": "layers.0.mlp.down"}


def rope(x, first=0):
    """Turn pairs of (batch, sequence, head, width) by their position, of which the first is ``first``."""
    half = x.shape[-1] // 2
    angle = torch.arange(first, first + x.shape[1])[:, None] * 100.0 ** (-torch.arange(half) / half)
    cos, sin = (turned[:, None, :].to(x.dtype) for turned in (angle.cos(), angle.sin()))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    def __init__(self, width, heads, groups, fault=""):
        super().__init__()
        self.head, self.fault = width // heads, fault
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, groups * self.head, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        local = q.shape[2] * self.head < self.wq.in_features
        each = q.shape[2] // k.shape[2]
        again = (1, 1, each, 1)
        k, v = (t.repeat(again) if self.fault == "heads" and local else t.repeat_interleave(each, 2) for t in (k, v))
        scale = q.shape[2] * self.head if self.fault == "scale" else self.head
        scores = torch.einsum("bqhd,bkhd->bhqk", rope(q), rope(k)) / (scale**0.5 if local else self.head**0.5)
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(ahead, -1e4).softmax(-1), v)
        return self.wo(mixed.flatten(2))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.gate = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads, groups, fault=""):
        super().__init__()
        self.attn, self.mlp = Attention(width, heads, groups, fault), MLP(width)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, layers, heads, head, vocab, fault=""):
        super().__init__()
        width = heads * head
        self.embed, self.norm = nn.Embedding(vocab, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Block(width, heads, max(heads // 2, 1), fault) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens_of(batch, seq, vocab):
    """Tokens and the tokens that follow them."""
    tokens = torch.randint(vocab, (batch, seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def crossed(logits, batch):
    """The mean cross entropy of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def make(fault=""):
    check_fault(fault, FAULTS)

    def shard(model, mesh):
        for layer in model.layers:
            plan = {**dict.fromkeys(COLWISE, ColwiseParallel()), **dict.fromkeys(ROWWISE, RowwiseParallel())}
            parallelize_module(layer, mesh["tp"], plan)
            if fault == "bias":  # added by every rank, before the sum
                with torch.no_grad():
                    layer.mlp.down.bias.to_local().mul_(mesh.size())

    return Twin(
        model=lambda layers, heads, head, vocab, **_: Llama(layers, heads, head, vocab, fault),
        batch=lambda step, batch, seq, vocab, **_: tokens_of(batch, seq, vocab),
        shard=shard,
        loss=crossed,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        mesh={"tp": 2},
        sizes={"layers": (2, 1), "heads": (8, 2), "head": (4, 2), "vocab": (32, 4), "batch": (2, 1), "seq": (8, 2)},
    )
