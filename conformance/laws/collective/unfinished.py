"""The law of functional results that are used before the collective is done."""

from __future__ import annotations

import copy
import io
import pickle
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Device, Folder, WordField, WorldSize

# for how long the last rank keeps the others from finishing, if they wait for it
HELD_SECONDS = 0.1


def save_and_load(x):
    """Pass a tensor through a file."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assign_gradient(x):
    leaf = torch.zeros_like(x.detach().clone(), requires_grad=True)
    leaf.grad = x
    return leaf.grad


USES = {
    "listed": lambda x: x,
    "numpy": lambda x: x.numpy(),
    "array": lambda x: x.__array__(),
    "exported": torch.from_dlpack,
    "numbers": lambda x: torch.tensor([float(x[0]), x[1].item()]),
    "iterated": lambda x: torch.tensor([float(number) for number in x]),
    "truth": lambda x: torch.tensor([bool(x[0] == 3), bool(x[1] == 5)]),
    "equal": lambda x: torch.tensor([torch.equal(x, x.new_tensor([3, 5]))]),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": save_and_load,
    "shared": lambda x: x.share_memory_(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view": lambda x: x.view(1, 2)[0],
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "gradient": assign_gradient,
    "dtype": lambda x: x.double(),
    "assigned": lambda x: torch.zeros(2, device=x.device).copy_(x),
    "stacked": lambda x: torch.stack([x, x])[1],
    "out": lambda x: torch.neg(x, out=torch.zeros(2, device=x.device)),
    "in-place": lambda x: x.add_(1),
    "vmap": torch.vmap(lambda x: x + 1),
    "set": lambda x: torch.zeros(2, device=x.device).set_(x),
}


def scatter(x):
    """What rank 1 gets of rank 0, which keeps a copy for itself."""
    out, others = torch.zeros(2, device=x.device), [x] * (dist.get_world_size() - 1)
    dist.scatter(out, [x.clone(), *others] if dist.get_rank() == 0 else None, 0)
    return out


def all_gather(x):
    outs = [torch.zeros(2, device=x.device) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, x)
    return outs[1]


# inputs of other collectives, which give every rank the same elements
PASSED = {"scatter": scatter, "all-gather": all_gather}


@law(
    "collective.unfinished",
    source="torch.distributed._functional_collectives, AsyncCollectiveTensor: waits before the first use of the tensor",
    control="world=2 use=listed",
    cases=[f"world=2 use={use}" for use in (*USES, *PASSED)],
    features=lambda case: {"functional", f"way:{case.get('use')}"},
    needs=("all_reduce", "all_gather", "scatter", "subgroups"),
    weight=0.3,
)
def unfinished(use: Annotated[str, WordField(USES | PASSED)], folder: Folder, device: Device):
    """The result of a functional collective is waited for before it is used, in whatever way."""
    rank, done = dist.get_rank(), Path(folder, "done")
    until = time.monotonic() + HELD_SECONDS
    while rank and not done.exists() and time.monotonic() < until:
        time.sleep(0.001)
    x = torch.tensor([1.0 + rank, 2.0 + rank], device=device)
    used = (USES | PASSED)[use](compat.functional.all_reduce(x, "sum", dist.group.WORLD))
    if rank == 0:
        done.touch()
    return {"used": used.tolist()}


@unfinished.due
def _(use, world: WorldSize):
    x = torch.tensor([sum(first + rank for rank in range(world)) for first in (1.0, 2.0)])
    return {"used": Of((x if use in PASSED else USES[use](x)).tolist(), "wrong-value")}
