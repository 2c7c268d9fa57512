"""The law of what is done to a fully sharded model beside its steps: it must be what it is to the dense model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch.distributed.fsdp import fully_shard

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.due import Claimed, Near, Of
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.fsdp_methods import Inputs, Whole
from shardlaw.conformance.laws.module.fully_shard import FSDP, Reshard
from shardlaw.conformance.laws.module.model_fields import NEEDS, Pairs, reduced_gradients
from shardlaw.reference.mesh import Mesh

DOES = Literal[
    "loaded", "beside", "evaluated", "inferred", "frozen", "cast", "dropped", "dropped-held", "hooked", "slope", "own"
]
SHOWN = (
    *(f"mesh=2 model=mlp dims=5x7x3 does={does}" for does in get_args(DOES) if does != "dropped-held"),
    "mesh=2x2 model=mlp dims=5x7x3 does=dropped-held",
    "mesh=3 model=mlp dims=5x7x3 does=beside units=1 reshard=yes",
    "mesh=2x2 model=mlp dims=5x7x3 does=evaluated units=1 reshard=no",
    "mesh=3 model=mlp dims=5x7x3 does=evaluated reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=inferred units=1 reshard=yes",
)


# Plain torch, for acts


class Result:
    """What a model may return."""

    def __init__(self, only: torch.Tensor) -> None:
        self.only = only


def passed(model: Any, x: torch.Tensor, grad: torch.Tensor, does: str) -> Any:
    """What a model gives in a pass forth and back."""
    out = model(x)
    out = out.only if does == "own" else out
    if does == "beside":
        with torch.no_grad():
            model(x * 2)
    if does == "slope":  # goes back through the gradient of the input
        (slope,) = torch.autograd.grad(out, x, grad, create_graph=True)
        slope.sum().backward()
    else:
        out.backward(grad)
    return out.detach()


def look(model: Any, x: torch.Tensor, does: str) -> None:
    """A pass without gradients."""
    with torch.inference_mode() if does == "inferred" else torch.no_grad():
        model(x)


def trained(model: Any, batches: Sequence[Pairs], does: str) -> dict[str, Any]:
    """Two steps of a model, of which each takes the mean of the gradients of some pairs."""
    stepping, steps = torch.optim.SGD(model.parameters(), lr=0.5), []
    switch = {"dropped": "set_requires_gradient_sync", "dropped-held": "set_requires_all_reduce"}.get(does, "")
    for parameter in model.parameters() if does == "hooked" else ():
        parameter.register_hook(lambda grad: grad * 2)
    if does == "inferred":
        look(model, batches[0][0][0], does)
    for pairs in batches:
        dtype, slope = next(model.parameters()).dtype, does == "slope"
        taken = [(x.to(dtype).requires_grad_(slope), (grad / len(pairs)).to(dtype)) for x, grad in pairs]
        if switch:  # gradients that are not shared with all ranks when they are dropped
            getattr(model, switch, bool)(False)
            passed(model, *taken[0], does)
            model.zero_grad()
            getattr(model, switch, bool)(True)
        outs = [passed(model, x, grad, does) for x, grad in taken]
        steps.append({"forward": outs, "gradients": reduced_gradients(model)})
        if does == "evaluated":
            look(model, taken[0][0], does)
        stepping.step()
        stepping.zero_grad()
        if does == "loaded":
            model.load_state_dict({name: one * 2 for name, one in model.state_dict().items()})
        if does == "frozen" and len(steps) == 1:
            look(model, taken[0][0], does)
            model.net1.requires_grad_(False)
        if does == "cast":
            model.float()
    return {"steps": steps, "trained": {name: one.requires_grad for name, one in model.named_parameters()}}


@law(
    "module.meanwhile",
    source=f"{FSDP}: the model computes as it would unsharded, and its parameters are those to train",
    control=SHOWN[0],
    sweep=texts(*SHOWN),
    sweeps=len(SHOWN),
    features=lambda case: {"module", "fully-sharded", "backward", f"way:{case.get('does')}"},
    needs=NEEDS,
    weight=0.2,
)
def meanwhile(
    model: Whole, mesh: NamedMesh, inputs: Inputs, does: DOES, reshard: Reshard | None = None, units: bool = False
):
    """What is done to a fully sharded model beside its steps is done as to the dense one: it is evaluated, loaded,
    cast or frozen, its gradients are dropped, changed or gone back through, and it returns what it likes."""
    if does == "own":
        model.register_forward_hook(lambda *heard: Result(heard[-1]))
    for part in [model.net1, model.net2, model] if units else [model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    return trained(model, [[pair] for pair in inputs], does)


@meanwhile.due
def _(model, mesh: Mesh, inputs: list[Pairs], does: str, rank: Rank):
    if does == "own":
        model.register_forward_hook(lambda *heard: Result(heard[-1]))
    found = trained(model, inputs, does)
    for step in found["steps"]:
        step["forward"] = [Near(step["forward"][mesh.ranks.index(rank)])]
        arrived = {name: grad for name, grad in step["gradients"].items() if grad is not None}
        step["gradients"] |= {name: Claimed(grad, mesh, exact=False) for name, grad in arrived.items()}
    return {"steps": found["steps"], "trained": Of(found["trained"])}
