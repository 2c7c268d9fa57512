"""The law of CommDebugMode, which counts the collectives of models, in all and by module."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import WordField
from shardlaw.conformance.laws.module.model_fields import NEEDS

# what is done while the mode is on, and how many collectives the layers a and b of the model then need forward and
# backward; as tensor-parallel layers each need one a pass and direction
WAYS = {
    "pass": {"a": (1, 1), "b": (1, 1)},
    "evaluated": {"a": (1, 0), "b": (1, 0)},
    "frozen": {"a": (1, 0), "b": (1, 0)},
    "steps": {"a": (2, 2), "b": (2, 2)},
    "reused": {"a": (2, 2), "b": (1, 1)},
    "recomputed": {"a": (1, 2), "b": (1, 1)},
    "forward": {"a": (1, 0), "b": (1, 0)},
    "part": {"a": (1, 0), "b": (0, 0)},
    "again": {"a": (1, 1), "b": (1, 1)},
    "after-error": {"a": (1, 1), "b": (1, 1)},
    "within": {"a": (2, 2), "b": (2, 2)},
    "gathered": {"a": (1, 1), "b": (1, 1)},
    # gathered for each direction, and a reduce-scatter
    "fully-sharded": {"a": (1, 2), "b": (1, 2)},
}


# Plain torch, for acts


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.net2(self.net1(x).relu())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layers(), Layers()
        self.does = "pass"

    def forward(self, x):
        if self.does == "recomputed":
            with set_checkpoint_early_stop(False):
                return self.b(checkpoint(self.a, x, use_reentrant=False))
        return self.b(self.a(self.a(x)) if self.does == "reused" else self.a(x))


def fail(*hook_arguments: Any) -> None:
    raise ValueError("this layer fails")


def fails(model: Any, x: torch.Tensor) -> None:
    """A forward pass that ends in an error."""
    hook = model.b.net2.register_forward_pre_hook(fail)
    try:
        model(x)
    finally:
        hook.remove()


def count_pass(mode: Any, model: Any, x: torch.Tensor, does: str) -> None:
    """What is to be counted, and what surrounds it."""
    if does in ("again", "after-error"):
        with suppress(ValueError), mode:
            (fails if does == "after-error" else Two.__call__)(model, x)
    with mode:
        if does == "evaluated":
            with torch.no_grad():
                model(x)
        elif does == "part":
            model.a(x)
        else:
            out = model(x.detach() if does == "frozen" else x)
            if does != "forward":
                out.sum().backward()
        if does == "steps":
            model(x).sum().backward()
        if does == "within":
            with compat.CommDebugMode():
                model(x).sum().backward()
        if does == "gathered":
            next(model.parameters()).full_tensor()


@law(
    "module.counted",
    source="torch.distributed.tensor.debug docs, CommDebugMode: counts the functional collectives within its context",
    control="mesh=2 does=pass",
    cases=[f"mesh={2 + at % 3 // 2 * 2} does={does}" for at, does in enumerate(WAYS)],
    features=lambda case: {"module", f"way:{case.get('does')}"},
    needs=NEEDS,
    weight=0.3,
)
def counted(mesh: DeviceMesh, does: Annotated[str, WordField(WAYS)]):
    """CommDebugMode counts the collectives within its context, of each module and direction and in all: of modules
    that run several times, again in the backward pass, or end in an error, and nothing that comes before or after."""
    torch.manual_seed(0)
    model: Any = Two()
    model.does = does
    if does == "frozen":
        model.a.requires_grad_(False)
    if does == "fully-sharded":
        for layer in (model.a, model.b, model):
            fully_shard(layer, mesh=mesh)
    else:
        plan = {"a.net1": ColwiseParallel(), "a.net2": RowwiseParallel()}
        parallelize_module(model, mesh, plan | {name.replace("a.", "b."): style for name, style in plan.items()})
    x, mode = torch.ones(3, 4, requires_grad=True), compat.CommDebugMode()
    count_pass(mode, model, x, does)
    total, modules = mode.get_total_counts(), {}
    for name, directions in mode.comm_module_counts.items():
        modules[name.split(".")[-1]] = [sum(directions[way].values()) for way in ("forward", "backward")]
    model(x).sum().backward()
    return {"total": total, "later": mode.get_total_counts(), "modules": [modules.get(name, [0, 0]) for name in "ab"]}


@counted.due
def _(does):
    modules = [[*WAYS[does][name]] for name in "ab"]
    total = sum(map(sum, modules)) + (does == "gathered")
    # gathering ahead belongs to no layer, and a layer that is called by itself is the root
    by_module = ... if does in ("fully-sharded", "part") else Of(modules, "wrong-value")
    return {"total": Of(total, "wrong-value"), "later": Of(total, "wrong-value"), "modules": by_module}
