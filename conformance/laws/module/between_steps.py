"""The law of what happens to a fully sharded model between its steps, and to its gradients and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch.autograd import forward_ad
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Near, Of
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.fsdp_methods import Inputs, MLPModel
from shardlaw.conformance.laws.module.fully_shard import FSDP, Reshard
from shardlaw.conformance.laws.module.model_fields import NEEDS, Pairs, claimed, reduced_gradients
from shardlaw.reference.mesh import Mesh

FirstAction = Literal[
    "loaded", "beside", "evaluated", "inferred", "frozen", "cast", "dropped", "dropped-held", "hooked", "slope", "own"
]
Action = Literal[
    FirstAction, "inner", "changed", "changes", "tangent", "jvp", "assigned", "recomputed", "recomputed-whole",
    "recomputed-twice",
]  # fmt: skip
CASES = (
    *(f"mesh=2 model=mlp dims=5x7x3 does={does}" for does in get_args(FirstAction) if does != "dropped-held"),
    "mesh=2x2 model=mlp dims=5x7x3 does=dropped-held",
    "mesh=3 model=mlp dims=5x7x3 does=beside units=1 reshard=yes",
    "mesh=2x2 model=mlp dims=5x7x3 does=evaluated units=1 reshard=no",
    "mesh=3 model=mlp dims=5x7x3 does=evaluated reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=inferred units=1 reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=inner",
    "mesh=3 model=mlp dims=5x7x3 does=inner reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=inner units=1 reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=changed",
    "mesh=3 model=mlp dims=5x7x3 does=changed reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=changed units=1 reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=changes",
    "mesh=3 model=mlp dims=5x7x3 does=changes units=1 reshard=yes",
    "mesh=4 model=mlp dims=5x7x3 does=evaluated units=1 reshard=2",
    "mesh=4 model=mlp dims=5x7x3 does=frozen units=1 reshard=2",
    "mesh=4 model=mlp dims=5x7x3 does=beside reshard=2",
    "mesh=2 model=mlp dims=5x7x3 does=tangent",
    "mesh=2 model=mlp dims=5x7x3 does=tangent units=1 reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=jvp",
    "mesh=3 model=mlp dims=5x7x3 does=jvp units=1 reshard=yes",
    "mesh=3 model=mlp dims=5x7x3 does=assigned units=1 reshard=no",
    "mesh=2 model=mlp dims=5x7x3 does=recomputed units=1 reshard=yes",
    "mesh=2 model=mlp dims=5x7x3 does=recomputed",
    "mesh=2 model=mlp dims=5x7x3 does=recomputed-whole units=1 reshard=yes",
    "mesh=2 model=mlp dims=5x5x5 does=recomputed-twice units=1 compute=float32",
    "mesh=2x1 model=mlp dims=5x7x3 does=inferred",
    "mesh=2 model=mlp dims=4x6x2 does=inferred columns=yes",
)


# Plain torch, for acts


class OwnResult:
    """A result of a class of the user's own."""

    def __init__(self, only: torch.Tensor) -> None:
        self.only = only


def recomputed(module: Any, x: torch.Tensor) -> Any:
    """The output of a module, which runs again in the backward pass."""
    return checkpoint(module, x, use_reentrant=False)


def add_hooks(model: Any, does: str) -> None:
    """Give a model hooks, before it is sharded: ``own`` has it return an object, ``changed`` a view, and ``changes``
    has its first layer change its input in place; ``recomputed`` and ``recomputed-twice`` have layers run again in the
    backward pass."""
    if does == "own":
        model.register_forward_hook(lambda *hook_arguments: OwnResult(hook_arguments[-1]))
    if does == "changed":
        model.register_forward_hook(lambda *hook_arguments: hook_arguments[-1][:, :])
    if does == "changes":
        model.net1.register_forward_pre_hook(lambda _, inputs: (inputs[0].mul_(2),))
    if does == "recomputed":
        model.forward = lambda x: recomputed(model.net2, model.relu(recomputed(model.net1, x)))
    if does == "recomputed-twice":
        model.forward = lambda x: model.net2(recomputed(lambda y: model.net1(model.relu(model.net1(y))), x))


def push_forward(model: Any, x: torch.Tensor, does: str) -> Any:
    """The output of a model, and its derivative along the input: in forward mode, or by :func:`torch.func.jvp`."""
    if does == "jvp":
        return torch.stack(torch.func.jvp(model, (x,), (x,))).detach()
    with forward_ad.dual_level():
        return torch.stack(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.clone())))).detach()


def run_pass(model: Any, x: torch.Tensor, grad: torch.Tensor, does: str) -> Any:
    """Run a model forward and backward, or forward alone with the derivative. Returns its output."""
    if does in ("tangent", "jvp"):
        return push_forward(model, x, does)
    given = list[Any]()
    if does == "inner":  # the loss is made of what a layer gives, not of what the model gives
        hook = model.net1.register_forward_hook(lambda *hook_arguments: given.append(hook_arguments[-1]))
    if does == "recomputed-whole":
        out = recomputed(model, x)
    else:
        out = model(x.requires_grad_() * 1 if does == "changes" else x)
    if does == "inner":
        hook.remove()
        out, grad = given[0], grad[:, :1].expand_as(given[0])
    if does == "changed":
        out.mul_(2)
    out = out.only if does == "own" else out
    if does == "beside":
        with torch.no_grad():
            model(x * 2)
    if does == "slope":  # backward through the gradient of the input
        (slope,) = torch.autograd.grad(out, x, grad, create_graph=True)
        slope.sum().backward()
    else:
        out.backward(grad)
    return out.detach()


def evaluate(model: Any, x: torch.Tensor, does: str) -> None:
    """A forward pass without gradients."""
    with torch.inference_mode() if does == "inferred" else torch.no_grad():
        model(x)


def train(model: Any, batches: Sequence[Pairs], does: str) -> dict[str, Any]:
    """Two steps of a model, each with the mean of the gradients of one list of pairs."""
    optim, steps = torch.optim.SGD(model.parameters(), lr=0.5), []
    sync_method = {"dropped": "set_requires_gradient_sync", "dropped-held": "set_requires_all_reduce"}.get(does, "")
    for parameter in model.parameters() if does == "hooked" else ():
        parameter.register_hook(lambda grad: grad * 2)
    if does == "inferred":
        evaluate(model, batches[0][0][0], does)
    for pairs in batches:
        dtype, slope = next(model.parameters()).dtype, does == "slope"
        cast_pairs = [(x.to(dtype).requires_grad_(slope), (grad / len(pairs)).to(dtype)) for x, grad in pairs]
        if sync_method:  # gradients that are dropped before they are reduced over all ranks
            getattr(model, sync_method, bool)(False)
            run_pass(model, *cast_pairs[0], does)
            model.zero_grad()
            getattr(model, sync_method, bool)(True)
        outs = [run_pass(model, x, grad, does) for x, grad in cast_pairs]
        steps.append({"forward": outs, "gradients": reduced_gradients(model)})
        if does == "evaluated":
            evaluate(model, cast_pairs[0][0], does)
        optim.step()
        optim.zero_grad()
        if does in ("loaded", "assigned"):
            state = {name: value * 2 for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=does == "assigned")
        if does == "frozen" and len(steps) == 1:
            evaluate(model, cast_pairs[0][0], does)
            model.net1.requires_grad_(False)
        if does == "cast":
            model.float()
    return {"steps": steps, "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()}}


@law(
    "module.meanwhile",
    source=f"{FSDP}: the model computes as it would unsharded, and its parameters are those to train",
    control=CASES[0],
    cases=CASES,
    features=lambda case: {"module", "fully-sharded", "backward", f"way:{case.get('does')}"},
    needs=NEEDS,
    weight=0.2,
)
def between_steps(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Inputs,
    does: Action,
    reshard: Reshard | None = None,
    units: bool = False,
    compute: torch.dtype | None = None,
    columns: bool = False,
):
    """A fully sharded model behaves as the dense one when it is evaluated, loaded, cast or frozen between steps, when
    gradients are dropped, changed or differentiated, when it returns an object, when the loss is made of what a layer
    gives, when its input or output is changed in place, when it is differentiated in forward mode, and when it is
    computed again in the backward pass, in a lower precision too."""
    add_hooks(model, does)
    output = None if compute is None else torch.float64
    policy = MixedPrecisionPolicy(param_dtype=compute, output_dtype=output)
    place = (lambda parameter: Shard(parameter.ndim - 1)) if columns else None
    for unit in [model.net1, model.net2, model] if units else [model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, shard_placement_fn=place)
    return train(model, [[pair] for pair in inputs], does)


@between_steps.due
def _(model, mesh: Mesh, inputs: list[Pairs], does: str, compute, rank: Rank):
    add_hooks(model, does)
    trained = train(model, inputs, does)
    for step in trained["steps"]:
        step["forward"] = [Near(step["forward"][mesh.ranks.index(rank)], compute)]
        step["gradients"] = claimed(step["gradients"], mesh, compute)
    return {"steps": trained["steps"], "trained": Of(trained["trained"])}
