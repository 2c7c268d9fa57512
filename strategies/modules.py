"""Small models with exact weights, and strategies for their sizes, for the laws of modules.

Weights, inputs and incoming gradients are eighths between -6/8 and 6/8, a pure function of the position: sums of products of them are
exact in float64. The input of a ReLU is never 0, so that rounding cannot decide on which side of the kink it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from shardlaw.reference.notation import Shape


class MLP(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, sizes: Shape, bias: bool = True) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = (
            nn.Linear(sizes[0], sizes[1], bias),
            nn.ReLU(),
            nn.Linear(sizes[1], sizes[2], bias),
        )

    def forward(self, x: torch.Tensor) -> object:
        return self.net2(self.relu(self.net1(x)))


class FeedForward(nn.Module):
    """Linear, GELU, linear, dropout."""

    def __init__(self, dim: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.w1, self.gelu, self.w2 = nn.Linear(dim, hidden, bias), nn.GELU(), nn.Linear(hidden, dim, bias)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> object:
        return self.drop(self.w2(self.gelu(self.w1(x))))


class Stacked(nn.Module):
    """Feed-forward blocks one after the other."""

    def __init__(self, sizes: Shape, bias: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(FeedForward(sizes[0], sizes[1], bias) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> object:
        return self.layers(x)


class RMSNorm(nn.Module):
    """The norm in plain calls: ``x * rsqrt(mean(x^2) + eps) * weight``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> object:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.125) * self.weight


class Normed(nn.Module):
    """A norm before a linear layer."""

    def __init__(self, sizes: Shape, bias: bool = True, norm: str = "rms") -> None:
        super().__init__()
        self.norm = RMSNorm(sizes[0]) if norm == "rms" else nn.LayerNorm(sizes[0], eps=0.125, bias=bias)
        self.out = nn.Linear(sizes[0], sizes[1], bias)

    def forward(self, x: torch.Tensor) -> object:
        return self.out(self.norm(x))


class Tied(nn.Module):
    """An embedding that shares its weight with the linear layer after it."""

    def __init__(self, sizes: Shape, bias: bool = True) -> None:
        super().__init__()
        self.tok, self.out = nn.Embedding(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[0], bias=False)
        self.out.weight = self.tok.weight

    def forward(self, x: torch.Tensor) -> object:
        return self.out(self.tok(x))


class TiedByName(nn.Module):
    """An embedding whose weight the model uses once more, under a name of its own."""

    def __init__(self, sizes: Shape, bias: bool = True) -> None:
        super().__init__()
        self.tok = nn.Embedding(sizes[0], sizes[1])
        self.table = self.tok.weight

    def forward(self, x: torch.Tensor) -> object:
        return linear(self.tok(x), self.table)


class Attention(nn.Module):
    """Causal attention with several heads; their number follows from the local size of the projections."""

    def __init__(self, dim: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.width = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> object:
        q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
        q, k, v = (part.view(*part.shape[:2], -1, self.width).transpose(1, 2) for part in (q, k, v))
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(seen.transpose(1, 2).flatten(2))


class Attentive(nn.Module):
    """A model of one attention layer; sizes are heads and the width of each."""

    def __init__(self, sizes: Shape, bias: bool = True) -> None:
        super().__init__()
        self.attention = Attention(sizes[0] * sizes[1], sizes[0], bias)

    def forward(self, x: torch.Tensor) -> object:
        return self.attention(x)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim, eps=0.125), Attention(dim, heads)
        self.ffn_norm, self.ffn = nn.LayerNorm(dim, eps=0.125), FeedForward(dim, 2 * dim)

    def forward(self, x: torch.Tensor) -> object:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """Token and position embeddings, two blocks, and a linear layer with the weight of the tokens; sizes are heads, width, tokens."""

    def __init__(self, sizes: Shape, bias: bool = True) -> None:
        super().__init__()
        heads, width, tokens = sizes
        self.tok, self.pos = nn.Embedding(tokens, heads * width), nn.Embedding(16, heads * width)
        self.layers = nn.ModuleList(Block(heads * width, heads) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(heads * width, eps=0.125), nn.Linear(heads * width, tokens, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, x: torch.Tensor) -> object:
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(h))


class Filled(nn.Linear):
    """A linear layer whose ``reset_parameters`` sets its parameters and a buffer to functions of its sizes."""

    scale: torch.Tensor

    def __init__(self, sizes: Shape) -> None:
        super().__init__(sizes[0], sizes[1], dtype=torch.float64)
        self.register_buffer("scale", torch.zeros((), dtype=torch.float64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.in_features / 8)
        nn.init.constant_(self.bias, -self.out_features / 8)
        if hasattr(self, "scale"):  # nn.Linear calls it before the buffer exists
            self.scale.fill_(self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Blank(nn.Module):
    """Two :class:`Filled` layers and a norm, all with ``reset_parameters``."""

    def __init__(self, sizes: Shape) -> None:
        super().__init__()
        self.net1, self.net2 = Filled(sizes[:2]), Filled(sizes[1:])
        self.norm = nn.LayerNorm(sizes[2], eps=0.125, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> object:
        return self.norm(self.net2(self.net1(x)))


class Experts(nn.Module):
    """Experts of two layers, with one tensor for each layer of all experts; sizes are experts, width, hidden width."""

    def __init__(self, sizes: Shape) -> None:
        super().__init__()
        experts, width, hidden = sizes
        self.w1 = nn.Parameter(torch.zeros(experts, width, hidden))
        self.w2 = nn.Parameter(torch.zeros(experts, hidden, width))

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> object:
        """The sum of the experts' outputs for each row, weighted by ``shares``, of shape (rows, experts)."""
        rows = x.unsqueeze(0).expand(self.w1.shape[0], -1, -1)
        outputs = torch.bmm(torch.relu(torch.bmm(rows, self.w1)), self.w2)
        return (shares.t().unsqueeze(-1) * outputs).sum(0)


class Mixture(nn.Module):
    """A router and experts; every expert gets all rows, weighted. Sizes are those of the experts."""

    def __init__(self, sizes: Shape, bias: bool = True) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(sizes[1], sizes[0], bias), Experts(sizes)

    def forward(self, x: torch.Tensor) -> object:
        return self.experts(x, torch.softmax(self.router(x), -1))


def eighths(shape: Shape, seed: int) -> torch.Tensor:
    """Eighths between -6/8 and 6/8 in float64; no two rows or columns of a small matrix are alike."""
    at = torch.arange(torch.Size(shape).numel())
    return ((at * at * 3 + at * (seed % 12 + 1) + seed) % 13 - 6).double().div(8).reshape(shape)


def indices(shape: Shape, count: int, seed: int) -> torch.Tensor:
    """Indices below ``count``."""
    at = torch.arange(torch.Size(shape).numel())
    return ((at * 5 + at * at + seed) % count).reshape(shape)


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo. ``input_sizes``, ``output_sizes``: the indices of the sizes whose product is the last dim of the input and the
    output, or the number of tokens. ``tokens``: inputs are indices; ``sequences``: inputs have a sequence dim."""

    build: type[nn.Module]
    input_sizes: tuple[int, ...]
    output_sizes: tuple[int, ...]
    tokens: bool = False
    sequences: bool = False

    def make_input(self, sizes: Shape, rows: int, length: int, seed: int) -> torch.Tensor:
        """An input with ``rows`` rows, each a sequence of ``length`` steps where the model takes sequences."""
        shape, width = ((rows, length) if self.sequences else (rows,)), math.prod(sizes[at] for at in self.input_sizes)
        return indices(shape, width, seed) if self.tokens else eighths((*shape, width), seed + 5)

    def make_output_gradient(self, sizes: Shape, entry: torch.Tensor, seed: int) -> torch.Tensor:
        """An incoming gradient for the output of the input ``entry``."""
        rows = entry.shape if self.tokens else entry.shape[:-1]
        return output_gradient((*rows, math.prod(sizes[at] for at in self.output_sizes)), seed)


ZOO: Mapping[str, ZooModel] = {
    "mlp": ZooModel(MLP, (0,), (2,)),
    "stacked": ZooModel(Stacked, (0,), (0,)),
    "norm": ZooModel(Normed, (0,), (1,), sequences=True),
    "tied": ZooModel(Tied, (0,), (0,), tokens=True, sequences=True),
    "tied-by-name": ZooModel(TiedByName, (0,), (0,), tokens=True, sequences=True),
    "attention": ZooModel(Attentive, (0, 1), (0, 1), sequences=True),
    "transformer": ZooModel(Transformer, (2,), (2,), tokens=True, sequences=True),
}


def output_gradient(shape: Shape, seed: int) -> torch.Tensor:
    """An incoming gradient for an output of ``shape``."""
    return eighths(shape, seed + 7)


def build_model(model: type[nn.Module], sizes: Shape, bias: bool, seed: int, **options: object) -> nn.Module:
    """A model of the zoo in float64 with exact weights, in eval mode."""
    module = model(sizes, bias, **options).double()
    with torch.no_grad():
        for at, (name, parameter) in enumerate(module.named_parameters()):
            parameter.copy_(eighths(tuple(parameter.shape), seed + 3 * at))
            if name.endswith("net1.bias"):
                parameter.add_(1 / 128)
    return module.eval()


class OffsetLinear(nn.Linear):
    """A linear layer with a second argument, a number that is added to its output."""

    def forward(self, x: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        return super().forward(x) + offset


class OffsetNorm(RMSNorm):
    """A norm with a second argument, a number that is added to its input."""

    def forward(self, x: torch.Tensor, offset: float = 0.0) -> object:
        return super().forward(x + offset)


LAYERS: Mapping[str, Callable[..., nn.Module]] = {
    "linear": nn.Linear,
    "embedding": nn.Embedding,
    "layer-norm": lambda width: nn.LayerNorm(width, eps=0.125),
    "rms-norm": RMSNorm,
    "dropout": lambda width: nn.Dropout(0.5),
    "offset-linear": OffsetLinear,
    "offset-norm": OffsetNorm,
}


def build_layer(name: str, sizes: Shape, seed: int, frozen: str = "") -> nn.Module:
    """One layer in float64 with exact weights, in eval mode; ``frozen`` is a parameter without ``requires_grad``, or ``all``."""
    module = LAYERS[name](*sizes).double()
    with torch.no_grad():
        for at, (path, parameter) in enumerate(module.named_parameters()):
            parameter.copy_(eighths(tuple(parameter.shape), seed + 3 * at)).requires_grad_(frozen not in (path, "all"))
    return module.eval()


def module_sizes(kind: str, ranks: int, *, even: bool) -> SearchStrategy[Shape]:
    """Sizes of a model of the zoo. With ``even``, the dims that its parallel styles shard divide by ``ranks``."""
    odd = st.sampled_from([3, 5, 7, 2, 8])
    split = st.sampled_from([ranks, 2 * ranks, 3 * ranks]) if even else st.sampled_from([3, 5, 7, 4, 8, 2, 1])
    match kind:
        case "mlp":
            return st.tuples(odd, split, odd)
        case "stacked" | "norm":
            return st.tuples(odd, split)
        case "attention":
            return st.tuples(st.sampled_from([ranks, 2 * ranks]), st.sampled_from([2, 3, 4]))
        case "transformer":
            return st.tuples(st.just(ranks), st.sampled_from([2, 4]), odd)
    return st.tuples(odd, odd)
