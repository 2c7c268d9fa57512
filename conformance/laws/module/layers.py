"""Laws of single layers of torch.nn: on inputs and parameters that are placed by hand, and fully sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Claimed, Global, Near
from shardlaw.conformance.law.fields import NamedMesh, Placements, Rank, Shape, WordField
from shardlaw.conformance.laws.module.fully_shard import FSDP
from shardlaw.conformance.laws.module.model_fields import NEEDS, claimed, copied_parameters, reduced_gradients
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.modules import eighths

# Plain torch, for acts


class First(nn.Module):
    """The first result of a layer that gives several; of packed sequences, what they hold."""

    def __init__(self, layer: Any, packed: bool = False, heads: bool = False) -> None:
        super().__init__()
        self.layer, self.packed, self.heads = layer, packed, heads

    def forward(self, x: Any) -> Any:
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 4]), batch_first=True, enforce_sorted=False)
        out = self.layer(x, x, x)[0] if self.heads else self.layer(x)[0]
        return out.data if self.packed else out


class Cosine(nn.Module):
    """The losses of vectors that are to be like the last of them, or unlike."""

    def forward(self, x: torch.Tensor) -> Any:
        like = torch.where(x.detach()[:, :1].sum(1) > 0, 1, -1)
        return nn.functional.cosine_embedding_loss(x, x.detach() * x.detach() + 1, like, margin=0.5, reduction="none")


class Looked(nn.Module):
    """Rows of a table, by indices that are made of the input, before a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 4, **options), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.table((x * 8).long().abs() % 5)).sum(-2)


PLACED: dict[str, Callable[[], Any]] = {
    "batch-norm": lambda: nn.BatchNorm1d(4, eps=0.125),
    "batch-norm-averaged": lambda: nn.BatchNorm1d(4, eps=0.125, momentum=None),
    "batch-norm-plain": lambda: nn.BatchNorm1d(4, eps=0.125, affine=False),
    "batch-norm-own": lambda: nn.BatchNorm1d(4, eps=0.125, track_running_stats=False),
    "batch-norm-eval": lambda: nn.BatchNorm1d(4, eps=0.125).eval(),
    "layer-norm": lambda: nn.LayerNorm(4, eps=0.125),
    "rms-norm": lambda: nn.RMSNorm(4, eps=0.125),
    "gru-cell": lambda: nn.GRUCell(4, 5),
    "attention": lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), heads=True),
    "cosine-loss": Cosine,
    "softmin": lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmin(1)),
    "pooled": lambda: nn.AdaptiveAvgPool1d(2),
    "padded": lambda: nn.CircularPad1d(1),
    "shuffled": lambda: nn.ChannelShuffle(2),
    "gated": lambda: nn.GLU(-1),
}
FULLY: dict[str, Callable[[], Any]] = {
    "lstm": lambda: First(nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True, proj_size=3)),
    "gru": lambda: First(nn.GRU(4, 5, batch_first=True)),
    "packed": lambda: First(nn.LSTM(4, 3, batch_first=True), packed=True),
    "attention": lambda: First(nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True), heads=True),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 5, 0.0, layer_norm_eps=0.125, batch_first=True),
    "batch-norm": lambda: nn.Sequential(nn.BatchNorm1d(4, eps=0.125), nn.PReLU(4)),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "table": Looked,
    "table-by-counts": lambda: Looked(scale_grad_by_freq=True, padding_idx=1),
}


def set_up(layer: Any) -> Any:
    """A layer in float64 with parameters that are functions of their positions."""
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            at = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_(((at * 5 + at * at) % 13 - 6).div(8).reshape(parameter.shape))
    return layer


def partition(module: Any, weights: Any, mesh: Any) -> None:
    """Place each parameter of a module; one without the dim that is to be sharded is replicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        at = [Replicate() if isinstance(at, Shard) and at.dim >= parameter.ndim else at for at in weights]
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, at)))


def run_pass(layer: Any, x: Any) -> Any:
    """A pass of a layer, forward and backward, with the output as its own gradient. Returns the output."""
    out = layer(x)
    whole = out.full_tensor() if isinstance(out, DTensor) else out
    whole.backward(whole.detach())
    return out.detach()


CASES = (
    "mesh=2 x=4x4:S(0):float64 weights=R layer=batch-norm",
    "mesh=3 x=5x4x2:S(0):float64 weights=R layer=batch-norm-averaged",
    "mesh=2 x=5x4x3:S(2):float64 weights=R layer=batch-norm",
    "mesh=2x2 x=5x4:S(0),R:float64 weights=R,R layer=batch-norm-plain",
    "mesh=2 x=5x4:S(1):float64 weights=S(0) layer=batch-norm-own",
    "mesh=2 x=5x4:S(0):float64 weights=S(0) layer=batch-norm-eval",
    "mesh=2 x=5x4:S(1):float64 weights=R layer=batch-norm-eval",
    "mesh=2 x=5x4:S(1):float64 weights=R layer=batch-norm",
    "mesh=3 x=5x4:S(0):float64 weights=S(0) layer=batch-norm-averaged",
    "mesh=3 x=5x3x4:S(1):float64 weights=R layer=layer-norm",
    "mesh=2 x=5x3x4:S(2):float64 weights=R layer=layer-norm",
    "mesh=2x2 x=5x4:S(0),S(1):float64 weights=R,R layer=rms-norm",
    "mesh=2 x=5x4:S(0):float64 weights=R layer=gru-cell",
    "mesh=2 x=4x3x4:S(0):float64 weights=R layer=attention",
    "mesh=2 x=5x4:S(0):float64 weights=R layer=cosine-loss",
    "mesh=2 x=5x4:S(1):float64 weights=R layer=cosine-loss",
    "mesh=3 x=5x4:S(0):float64 weights=R layer=softmin",
    "mesh=2 x=5x4x3:S(0):float64 weights=R layer=padded",
    "mesh=2 x=5x4x4:S(1):float64 weights=R layer=pooled",
    "mesh=3 x=5x4:S(1):float64 weights=R layer=gated",
    "mesh=2 x=5x4x3:S(1):float64 weights=R layer=shuffled",
)


@law(
    "module.layers",
    source="torch.distributed.tensor docs, distribute_module; torch.nn: each layer, and its running statistics",
    control=CASES[0],
    cases=CASES,
    refusal="allowed",
    features=lambda case: {"module", "backward", f"way:{case.get('layer')}"},
    needs=NEEDS,
    weight=0.2,
)
def placed(x: DTensor, mesh: DeviceMesh, weights: Placements, layer: Annotated[str, WordField(PLACED)]):
    """A layer of torch.nn whose parameters and buffers are DTensors gives for a DTensor what it gives for the whole:
    outputs, gradients and running statistics."""
    net = set_up(PLACED[layer]())
    distribute_module(net, mesh, lambda _, module, mesh: partition(module, weights, mesh))
    x.requires_grad_()
    outs = [run_pass(net, x) for _ in range(2)]
    gradients, buffers = reduced_gradients(net), dict(net.named_buffers())
    return {"outputs": outs, "gradient": x.grad, "gradients": gradients, "buffers": buffers}


@placed.due
def _(x: Global, mesh: Mesh, layer: str):
    net = set_up(PLACED[layer]())
    full: Any = x.full.clone().requires_grad_()
    outs = [run_pass(net, full) for _ in range(2)]
    return {
        "outputs": [Claimed(out, mesh, exact=False) for out in outs],
        "gradient": Claimed(full.grad, mesh, exact=False),
        "gradients": claimed(reduced_gradients(net), mesh),
        "buffers": claimed(dict(net.named_buffers()), mesh),
    }


FULLY_CASES = (
    "mesh=2 x=2x4x4 layer=lstm",
    "mesh=3 x=2x4x4 layer=gru",
    "mesh=2 x=2x4x4 layer=packed units=1",
    "mesh=3 x=2x4x4 layer=attention units=1",
    "mesh=2 x=2x4x4 layer=encoder",
    "mesh=3 x=2x4x4 layer=encoder units=1",
    "mesh=2 x=5x4 layer=batch-norm units=1",
    "mesh=3 x=5x4 layer=batch-norm",
    "mesh=3 x=5x4 layer=weight-norm",
    "mesh=2 x=2x4x4 layer=table",
    "mesh=3 x=2x4x4 layer=table-by-counts units=1",
)


@law(
    "module.layers-fully",
    source=f"{FSDP}: the model computes as it would unsharded, and its parameters are those to train; torch.nn",
    control=FULLY_CASES[0],
    cases=FULLY_CASES,
    features=lambda case: {"module", "fully-sharded", "backward", f"way:{case.get('layer')}"},
    needs=NEEDS,
    weight=0.2,
)
def fully(mesh: NamedMesh, x: Shape, layer: Annotated[str, WordField(FULLY)], rank: Rank, units: bool = False):
    """A layer of torch.nn that is fully sharded is trained as the dense one by the mean gradient, each rank with its
    own inputs: outputs, buffers and parameters."""
    net = set_up(FULLY[layer]())
    for unit in [*net.children(), net] if units else [net]:
        fully_shard(unit, mesh=mesh)
    optim, outs = torch.optim.SGD(net.parameters(), lr=0.25), []
    for _ in range(2):
        outs.append(run_pass(net, eighths(x, rank)))
        optim.step()
        optim.zero_grad()
    return {"outputs": outs, "parameters": copied_parameters(net), "buffers": dict(net.named_buffers())}


@fully.due
def _(mesh: Mesh, x, layer: str, rank: Rank):
    net, outs = set_up(FULLY[layer]()), []
    nets = {member: copy.deepcopy(net) for member in mesh.ranks}  # trained alike, with statistics of their own
    optims = [torch.optim.SGD(each.parameters(), lr=0.25) for each in nets.values()]
    for _ in range(2):
        outs.append({member: run_pass(each, eighths(x, member)) for member, each in nets.items()}[rank])
        for copies in zip(*(each.parameters() for each in nets.values()), strict=True):
            mean = torch.stack([parameter.grad for parameter in copies]).mean(0)
            for parameter in copies:
                parameter.grad = mean.clone()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return {
        "outputs": [Near(out) for out in outs],
        "parameters": claimed(copied_parameters(nets[rank]), mesh),
        "buffers": {name: Near(buffer) for name, buffer in nets[rank].named_buffers()},
    }
