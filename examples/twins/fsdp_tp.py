"""The llama of llama.py under FSDP2 and tensor parallelism, its gradients clipped by their norm, its embedding frozen."""

import torch
from fault_names import check_fault
from llama import COLWISE, ROWWISE, Llama, crossed, tokens_of
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardlaw import Twin

FAULTS = {"clip": "(before_step)", "scale": "(loss)", "thaw": "embed", "stale": "(optimizer)", "norm": "norm"}
RESUMED = {"moments": "(optimizer)"}


def frozen(layers, heads, head, vocab, **_):
    model = Llama(layers, heads, head, vocab)
    model.embed.weight.requires_grad_(False)
    return model


def parallel(model, mesh, fault):
    """Tensor parallelism inside, fully sharded outside."""
    model.embed.weight.requires_grad_(fault == "thaw")
    if fault == "stale":  # the optimizer gets what was there before
        model.stale = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {**dict.fromkeys(COLWISE, ColwiseParallel()), **dict.fromkeys(ROWWISE, RowwiseParallel())})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"], ignored_params={model.norm.weight} if fault == "norm" else None)


def clipped(model, fault):
    """Scale all gradients so that their norm is 0.05 at most: of a rank's own shards where the fault is there."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = "to_local" if fault == "clip" else "full_tensor"
    norm = torch.stack([getattr(grad, whole, lambda grad=grad: grad)().norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((0.05 / norm).clamp(max=1).to(grad.dtype))


def weights_only(model, optimizer, folder):
    """Load a checkpoint, but for what the optimizer remembers."""
    state = {"model": get_model_state_dict(model)}
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])


def make(fault=""):
    check_fault(fault, (*FAULTS, "moments"))

    def optimizer(model):
        parameters = getattr(model, "stale", None) or [one for one in model.parameters() if one.requires_grad]
        return torch.optim.AdamW(parameters, lr=0.01)

    def part(batch, mesh):
        cut = tuple(half.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for half in batch)
        return *cut, mesh.size()  # of all ranks, also those that have the same tokens

    return Twin(
        model=frozen,
        batch=lambda step, batch, seq, vocab, **_: tokens_of(batch, seq, vocab),
        part=part,
        shard=lambda model, mesh: parallel(model, mesh, fault),
        loss=lambda logits, batch: crossed(logits, batch) / (batch[2] if fault == "scale" and len(batch) > 2 else 1),
        optimizer=optimizer,
        before_step=lambda model, mesh: clipped(model, fault) if fault != "stale" else None,
        load=weights_only if fault == "moments" else None,
        mesh={"dp": 2, "tp": 2},
        sizes={"layers": (2, 1), "heads": (4, 2), "head": (4, 2), "vocab": (32, 4), "batch": (4, 2), "seq": (8, 2)},
    )
