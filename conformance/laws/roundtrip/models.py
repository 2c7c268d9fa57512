"""Laws on ``torch.distributed.checkpoint.state_dict``: states of models and optimizers, full and sharded.

:mod:`shardlaw.conformance.laws.checkpoint.models` describes the model of a case.
"""

from __future__ import annotations

import copy
import warnings
from typing import Annotated, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import Destination, Reader, Saved, StateField, Writer
from shardlaw.conformance.laws.checkpoint.models import (
    INNER,
    OTHER_RATES,
    RATES,
    Model,
    adam,
    changed,
    dense,
    frozen,
    in_model,
    keeps,
    learned,
    parameters_of,
    saved_rates,
)
from shardlaw.conformance.laws.roundtrip.cases import one_world_law, trip_law

DOCS = "torch.distributed.checkpoint.state_dict docs"
Poisoned = Annotated[dict[str, Any], StateField("save", fill="poison")]
FullState = Annotated[dict[str, Any], StateField("save", plain=True)]


WHOLE_OPTIMIZERS = (
    "mesh=2 x=5x2:S(0):float32:small a=4x3:S(1):float32:small",
    "mesh=3 x=7:S(0):float32:small a=4:R:float32:small b=2x3:S(0):float64:small",
    "mesh=2x2 x=5x4:S(0),S(1):float32:small a=6:R,S(0):float32:small",
)
MODELS = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4x3:S(1) to.x=S(1) to.a=S(0)",
    "mesh=2 x=7:S(0) a=4:R b=3x3:S(1):int64 to.x=R to.a=S(0) to.b=S(0)",
    "mesh=2x2 mesh.load=2 x=5x4:S(0),S(1) a=6:R,S(0) c=3:-:float64 to.x=S(0) to.a=S(0)",
    "mesh=3 mesh.load=2 x=2x3:S(0) a=4x3:S(0):bfloat16 to.x=S(1) to.a=S(1)",
)
OPTIMIZERS = (
    "mesh=2 mesh.load=3 x=5x2:S(0):float32:small a=4x3:S(1):float32:small b=3:R:float32:small to.x=S(1) to.a=S(0) "
    "to.b=R",
    "mesh=2 x=7:S(0):float32:small a=4:R:float32:small to.x=R to.a=S(0) flat=yes",
    "mesh=2x2 mesh.load=2 x=5x4:S(0),S(1):float64:small a=6:R,S(0):float32:small c=3:-:float32:small to.x=S(0) "
    "to.a=S(0)",
    "mesh=3 mesh.load=2 x=2x3:S(0):float32:small a=4x3:S(0):float64:small b=2:R to.x=S(1) to.a=S(1) to.b=R flat=yes",
)

WHOLES = (
    "mesh=2 x=5x2:S(0) a=4x3:S(1)",
    "mesh=3 x=7:S(0) a=4:R b=3x3:S(1):int64 c=2x2:S(0):float64",
    "mesh=2x2 x=5x4:S(0),S(1) a=6:R,S(0) c=3:-:float64",
    "mesh=3 x=2x3:S(0) a=4x3:S(0):bfloat16",
    "mesh=2x2@0,2,1,3 x=7x3:S(0),S(0) a=3:S(0),R b=8x2:_S(0,2),S(0)",
)


@trip_law(
    "model",
    source=f"{DOCS}, get_model_state_dict, set_model_state_dict",
    control="mesh=2 x=5x2:S(0) a=4x3:S(1) to.x=S(1) to.a=S(0)",
    texts=MODELS,
)
def model(state: Saved, writer: Writer, folder: Folder):
    """The saved state of a model loads into a model with other layouts; a state that lacks a parameter is refused."""
    model_state = get_model_state_dict(Model(state))
    save({"model": model_state}, writer(folder))
    return {"names": sorted(model_state)}


@model.due
def _(state: Contents):
    return {"names": Of(sorted(in_model(state.values())))}


@model.then
def _(state: Destination, other: Destination, reader: Reader, folder: Folder):
    model_state = load({"model": get_model_state_dict(Model(state))}, reader(folder))["model"]
    model = Model(other)
    set_model_state_dict(model, model_state)
    loaded = model.held()
    model_state.pop(next(iter(state)))
    return {"loaded": loaded, "without a parameter": caught(lambda: set_model_state_dict(model, model_state))}


@model.due
def _(state: Contents):
    return {"loaded": in_model(state.values()), "without a parameter": Refused()}


@one_world_law(
    "model-whole",
    source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0, ignore_frozen_params, strict",
    control="mesh=2 x=5x2:S(0) a=4x3:S(1)",
    texts=WHOLES,
)
def model_whole(state: Saved, other: Poisoned, full: FullState, rank: Rank):
    """With full_state_dict the state of a model has full tensors on every rank; broadcast from rank 0, it sets every
    rank's part of a model."""
    model, target = Model(state, frozen(state)), Model(other, frozen(state))
    full_state = in_model(full) if rank == 0 else {}
    incomplete = {name: tensor.clone() for name, tensor in full_state.items() if name != next(iter(state))}
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states = {
        "whole": get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        "offloaded": sorted(
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        ),
        "without the frozen": sorted(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))),
    }
    set_model_state_dict(target, full_state, options=from_rank_0)
    loaded = target.held()
    refused = caught(lambda: set_model_state_dict(target, incomplete, options=from_rank_0))
    return {**states, "from rank 0": loaded, "without a parameter": refused}


@model_whole.due
def _(state: Contents, full: Contents, rank: Rank):
    tensors = in_model(full.values())
    frozen_names = frozen(dense(full.values()))
    inside = state.end.mesh.coord(rank) is not None
    return {
        "whole": tensors if inside else ...,
        "offloaded": Of(sorted(tensors) if rank == 0 else []),
        "without the frozen": Of(sorted(path for path in tensors if path[-1] not in frozen_names)),
        "from rank 0": in_model(state.values()),
        "without a parameter": Refused(),
    }


@one_world_law(
    "model-part",
    source=f"{DOCS}, get_model_state_dict: submodules; StateDictOptions: keep_submodule_prefixes",
    control="mesh=2 x=5x2:S(0) a=4x3:S(1)",
    texts=WHOLES,
)
def model_part(state: Saved):
    """The state of a submodule has its tensors alone, those of its own submodules included, with or without the prefix
    of their names in the model, and is set for a submodule anywhere in a model."""
    model, parts = Model(state), []
    for whole, part, prefix in (
        (model, model.inner, True),
        (model, model.inner, False),
        (nn.Sequential(model), model, False),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            options = StateDictOptions(keep_submodule_prefixes=prefix)
            parts.append(get_model_state_dict(whole, submodules={part}, options=options))
    deep = copy.deepcopy(model)
    outer, part = nn.Sequential(nn.Sequential(deep)), deep.inner
    zeros = {name: torch.zeros_like(tensor) for name, tensor in part.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        set_model_state_dict(outer, {part: zeros}, options=StateDictOptions(strict=False))  # type: ignore[dict-item]
    return {
        "with the prefix": parts[0],
        "without": parts[1],
        "of nested modules": parts[2],
        "set in a model": part.state_dict(),
    }


@model_part.due
def _(state: Contents):
    nested = in_model(state.values())
    inside = {path: tensor for path, tensor in nested.items() if path.startswith(INNER)}
    return {
        "with the prefix": inside,
        "without": {path.removeprefix(INNER): tensor for path, tensor in inside.items()},
        "of nested modules": nested,
        "set in a model": {
            path.removeprefix(INNER): tensor.holding(torch.zeros_like(tensor.full)) for path, tensor in inside.items()
        },
    }


def step_once(model: nn.Module, gradients: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer after one step with these gradients, by the names of the parameters in their modules."""
    optimizer = adam([*model.parameters()], RATES)
    for path, parameter in model.named_parameters():
        parameter.grad = gradients[path.rpartition(".")[2]]
    optimizer.step()
    return optimizer


def optimizer_contents(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    return learned(dict(model.named_parameters()), optimizer)


def due_contents(state: Contents) -> dict[str, Any]:
    """The :func:`optimizer_contents` of an optimizer after one step."""
    trained = parameters_of(state.values())
    return keeps(trained, saved_rates([*trained]))


@trip_law(
    "optimizer",
    source=f"{DOCS}, get_optimizer_state_dict, set_optimizer_state_dict",
    control="mesh=2 x=3:S(0):float32:small a=2:R:float32:small",
    texts=OPTIMIZERS,
)
def optimizer(state: Saved, gradients: Saved, writer: Writer, folder: Folder, flat: bool = False):
    """The saved state of an optimizer loads into an optimizer of a model with other layouts, group by group."""
    model = Model(state)
    optimizer = step_once(model, gradients)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    save({"optim": get_optimizer_state_dict(model, optimizer, options=options)}, writer(folder))
    return optimizer_contents(optimizer, model)


@optimizer.due
def _(state: Contents):
    return due_contents(state)


@optimizer.then
def _(state: Destination, other: Destination, reader: Reader, folder: Folder, flat: bool = False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, fresh_model = Model(state), Model(other)
    optimizer, fresh = (adam([*module.parameters()], OTHER_RATES) for module in (model, fresh_model))
    destination = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
    optim_state = load(destination, reader(folder))["optim"]
    rates = [group["lr"] for group in optimizer.param_groups]
    set_optimizer_state_dict(fresh_model, fresh, optim_state, options=options)
    loaded = optimizer_contents(fresh, fresh_model)
    refused = None
    if not flat:
        optim_state["state"].pop(next(iter(optim_state["state"])))
        refused = caught(lambda: set_optimizer_state_dict(fresh_model, fresh, optim_state, options=options))
    return {"rates after asking": rates, **loaded, "parameters": fresh_model.held(), "without a parameter": refused}


@optimizer.due
def _(state: Contents, flat):
    due = due_contents(state)
    rates = [OTHER_RATES[at % len(OTHER_RATES)] for at in range(len(due["rates"]))]
    return {
        "rates after asking": rates,
        **due,
        "parameters": in_model(state.before_load().values()),
        "without a parameter": ... if flat else Refused(),
    }


@one_world_law(
    "optimizer-whole",
    source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0",
    control="mesh=2 x=3:S(0):float32:small a=2:R:float32:small",
    texts=WHOLE_OPTIMIZERS,
)
def optimizer_whole(state: Saved, gradients: Saved, other: Poisoned, rank: Rank):
    """With full_state_dict the state of an optimizer has full tensors; broadcast from rank 0, it sets every rank's part
    of an optimizer."""
    model, target = Model(state), Model(other)
    optimizer, fresh = step_once(model, gradients), adam([*target.parameters()], OTHER_RATES)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    averages = {path: entry["exp_avg"] for path, entry in full["state"].items() if "exp_avg" in entry}  # type: ignore[index, call-overload, union-attr, operator]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(target, fresh, full if rank == 0 else {}, options=options)
    return {"whole": averages, **optimizer_contents(fresh, target)}


@optimizer_whole.due
def _(state: Contents, full: FullState):
    trained = parameters_of(full.values())  # type: ignore[arg-type]
    halves = {path: changed(value, lambda elements: elements / 2) for path, value in trained.items()}
    return {"whole": halves, **due_contents(state)}
