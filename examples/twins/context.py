"""A transformer whose sequence is cut twice: over context-parallel ranks, by hand, and over tensor-parallel ones, by torch's styles."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Gather
from fault_names import check_fault
from llama import MLP, rope, tokens_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

from shardlaw import Twin

FAULTS = {"rope": "layers.0.attn", "mask": "layers.0.attn", "norm": "layers.0.norm1", "gather": "layers.1.attn"}


class Attention(nn.Module):
    """Of the tokens of this rank to those of all ranks before it."""

    def __init__(self, width, heads):
        super().__init__()
        self.head, self.group, self.fault = width // heads, None, ""
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        first = dist.get_rank(self.group) * x.shape[1] if self.group else 0
        q, k = (rope(t, 0 if self.fault == "rope" else first) for t in (q, k))
        if self.group:
            k, v = (Gather.apply(t, 1, self.group, self.fault != "gather") for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.head**0.5
        place = torch.arange(x.shape[1])[:, None] + (0 if self.fault == "mask" else first)
        scores = scores.masked_fill(torch.arange(k.shape[1]) > place, -1e4)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attn, self.mlp, self.norm1, self.norm2 = Attention(width, heads), MLP(width), nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers, heads, head, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, heads * head)
        self.layers = nn.Sequential(*(Block(heads * head, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(heads * head), nn.Linear(heads * head, vocab)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embed(tokens))))


def parallel(model, mesh, fault):
    """Norms on shards of the sequence, linear layers on shards of the width."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    plan = {name: SequenceParallel() for name in ("norm1", "norm2")} | {"attn": whole, "mlp": whole}
    plan |= dict.fromkeys(("attn.wq", "attn.wk", "attn.wv", "mlp.up", "mlp.gate"), ColwiseParallel())
    plan |= dict.fromkeys(("attn.wo", "mlp.down"), RowwiseParallel(output_layouts=Shard(1)))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        layer.attn.group, layer.attn.fault = mesh["cp"].get_group(), fault


def summed(model, mesh, fault):
    """Each rank has the gradients of its own tokens: of what DTensor knows over all ranks of one dim, of the rest over none."""
    for name, parameter in model.named_parameters() if mesh is not None else ():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            if any(placement.is_partial() for placement in grad.placements):
                parameter.grad = grad = grad.redistribute(placements=parameter.placements)
            if not (fault == "norm" and "norm" in name):
                dist.all_reduce(grad.to_local(), group=mesh["cp"].get_group())
        else:
            dist.all_reduce(grad)


def make(fault=""):
    check_fault(fault, FAULTS)

    def part(batch, mesh):
        places = [(mesh[dim].size(), mesh[dim].get_local_rank()) for dim in ("cp", "tp")]
        cut = [half.chunk(places[0][0], 1)[places[0][1]].chunk(places[1][0], 1)[places[1][1]] for half in batch[:2]]
        return *cut, batch[2]

    return Twin(
        model=lambda layers, heads, head, vocab, **_: Transformer(layers, heads, head, vocab),
        batch=lambda step, batch, seq, vocab, **_: (*tokens_of(batch, seq, vocab), batch * seq),
        part=part,
        shard=lambda model, mesh: parallel(model, mesh, fault),
        loss=lambda logits, batch: F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum") / batch[2],
        before_step=lambda model, mesh: summed(model, mesh, fault),
        mesh={"cp": 2, "tp": 2},
        sizes={"layers": (2, 1), "heads": (4, 2), "head": (4, 2), "vocab": (16, 4), "batch": (2, 1), "seq": (8, 4)},
    )
