"""The law of ``ZeroRedundancyOptimizer``: optimizers of which each rank holds a part.

All ranks have the same plain parameters and gradients. Fields of a case: ``sizes`` names the shapes of the parameters,
``optimizer`` and ``options`` are those of ``module.optimizer``, ``does`` is what happens beside the steps, and
``view`` has parameters lie in the buckets that are sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank, WordField
from shardlaw.conformance.laws.module.arguments import FromCase
from shardlaw.conformance.laws.module.training import OPTIMIZERS, copied, set_gradients
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.modules import eighths

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "several": ((4, 6), (3,), (3, 5), (1,)),
    "one": ((4, 3),),
    "alike": ((2, 3), (2, 3), (2, 3), (2, 3)),
    "empty": ((4,), (0,), (2, 2)),
    "scalars": ((), (3,), ()),
}
STEPS = 4
Action = Literal[
    "steps", "rates", "groups", "iterators", "adds", "freezes", "skips", "closes", "resumes", "resets", "keeps", "casts"
]
CASES = (
    "mesh=2 does=steps options=momentum",
    "mesh=3 does=steps optimizer=adam options=amsgrad view=yes",
    "mesh=3 does=steps optimizer=rmsprop options=momentum sizes=empty view=yes",
    "mesh=2@1,2 does=steps options=nesterov sizes=alike",
    "mesh=2 does=steps optimizer=adagrad sizes=one view=yes",
    "mesh=2 does=rates optimizer=adamw sizes=scalars",
    "mesh=2 does=groups options=momentum view=yes",
    "mesh=2 does=iterators options=momentum",
    "mesh=3 does=adds options=momentum sizes=alike view=yes",
    "mesh=2 does=freezes options=momentum view=yes",
    "mesh=2 does=skips options=momentum",
    "mesh=2 does=closes optimizer=adam",
    "mesh=3 does=resumes optimizer=adam options=amsgrad view=yes",
    "mesh=2@1,2 does=resumes options=momentum",
    "mesh=2 does=resets options=momentum",
    "mesh=2 does=resets optimizer=adam view=yes",
    "mesh=2 does=keeps options=momentum",
    "mesh=2 does=casts options=momentum",
    "mesh=2 does=casts optimizer=adam",
)


def read_tensors(case: Case) -> list[list[torch.Tensor]]:
    """The elements of the parameters, and their gradients in each step."""
    shapes = SHAPES[WordField(SHAPES).parse(case.get("sizes", "several"))]
    return [
        [eighths(shape, case.seed + 5 * row + number) for number, shape in enumerate(shapes)]
        for row in range(STEPS + 1)
    ]


# Plain torch, for acts


def whole_state(optim: Any, group: Any) -> Any:
    """The state of an optimizer, on every rank of the group that holds it in parts: the last rank puts it together."""
    if group is None:
        return copy.deepcopy(optim.state_dict())
    last = dist.get_world_size(group) - 1
    optim.consolidate_state_dict(to=last)
    states = [optim.state_dict() if dist.get_rank(group) == last else None]
    dist.broadcast_object_list(states, src=dist.get_global_rank(group, last), group=group)
    return states[0]


def rounded(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter in float32, apart from tensors without dims, which count steps."""
    return {key: value.float() if getattr(value, "ndim", 0) else value for key, value in state.items()}


def first_groups(parameters: Sequence[nn.Parameter], does: str) -> Any:
    """What an optimizer is given first: parameters, or groups of them."""
    if does == "adds":
        return parameters[:1]
    if does == "groups":
        return [{"params": parameters[:1], "lr": 0.125}, {"params": parameters[1:]}]
    if does == "iterators":
        return [{"params": iter(parameters[:1]), "lr": 0.125}, {"params": iter(parameters[1:])}]
    return parameters


def sum_of_squares(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """A loss, with its gradients."""
    for parameter in parameters:
        parameter.grad = None
    loss = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
    loss.backward()
    return loss


def train(rows: Sequence[list[torch.Tensor]], make: Callable[..., Any], does: str, group: Any = None) -> dict[str, Any]:
    """Train parameters in a few steps. Returns them after each step, the losses, and the optimizer's whole state."""
    parameters = [nn.Parameter(full.clone()) for full in rows[0]]
    optim = make(first_groups(parameters, does))
    first_state = copy.deepcopy(torch.optim.SGD(parameters).state_dict()["state"])
    steps, losses, given = list[Any](), list[Any](), None
    for number, row in enumerate(rows[1:]):
        set_gradients(parameters, [gradient.clone() for gradient in row])
        if does == "freezes":
            parameters[0].requires_grad_(number != 2)
        if (does == "skips" and number != 1) or not parameters[0].requires_grad:
            parameters[0].grad = None
        losses.append(optim.step(partial(sum_of_squares, parameters)) if does == "closes" else optim.step())
        steps.append(copied(parameters))
        if number != 1:
            continue
        if does == "rates":
            for options in optim.param_groups:
                options["lr"] *= 0.5
        if does == "adds":
            optim.add_param_group({"params": parameters[1:], "lr": 0.125})
        if does == "resets":
            optim.load_state_dict({"state": first_state, "param_groups": whole_state(optim, group)["param_groups"]})
        if does in ("resumes", "keeps", "casts"):
            given = whole_state(optim, group)
            if does == "casts":
                given["state"] = {index: rounded(state) for index, state in given["state"].items()}
            optim = make(parameters)
            optim.load_state_dict(given if does == "keeps" else copy.deepcopy(given))
    state = whole_state(optim, group)
    return {"steps": steps, "losses": losses, "state": state, "given": given and given["state"]}


@law(
    "module.zero",
    source="torch.distributed.optim docs, ZeroRedundancyOptimizer: an optimizer, its states sharded over ranks",
    control=CASES[0],
    cases=CASES,
    features=lambda case: {"module", "repeated", f"way:{case.get('does')}"},
    needs=("broadcast",),
    weight=0.1,
)
def zero(
    mesh: NamedMesh,
    tensors: Annotated[list[Any], FromCase(read_tensors, "sizes")],
    does: Action,
    optimizer: Annotated[str, WordField(OPTIMIZERS)] = "sgd",
    options: str | None = None,
    view: bool = False,
):
    """An optimizer that is shared out among the ranks steps parameters as one that is not, with rates that change,
    parameters that come in groups, later, or frozen, without a gradient, or with a closure. Its state, put together, is
    that of the other, is loaded in place of what it had, in the dtype of the parameters, and is left as it was."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if mesh.get_coordinate() is None:
        return {}
    chosen: Any = OPTIMIZERS[optimizer]
    make, common, further = chosen
    shared = partial(
        ZeroRedundancyOptimizer,
        optimizer_class=make,
        process_group=mesh.get_group(),
        parameters_as_bucket_view=view,
        **common,
        **further.get(options, {}),
    )
    return train(tensors, shared, does, mesh.get_group())


@zero.due
def _(mesh: Mesh, tensors: list[Any], does: str, optimizer: str, options, rank: Rank):
    if mesh.coord(rank) is None:
        return {}
    make, common, further = OPTIMIZERS[optimizer]
    want = train(tensors, partial(make, **common, **further.get(options, {})), does)

    def near(states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {
            index: {key: Near(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            for index, state in states.items()
        }

    return {
        "steps": [[Near(full) for full in step] for step in want["steps"]],
        "losses": [None if loss is None else Near(loss.detach()) for loss in want["losses"]],
        "state": {"state": near(want["state"]["state"]), "param_groups": want["state"]["param_groups"]},
        "given": want["given"] and near(want["given"]),
    }
