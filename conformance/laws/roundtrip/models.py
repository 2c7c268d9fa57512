"""Laws on the helpers that turn models and optimizers into states: their names, whole and sharded, through a checkpoint
and back.

The model of a case has one parameter for each tensor of floats and one buffer for each other, every second one inside a
submodule.
"""

from __future__ import annotations

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
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import Blank, Reader, Saved, StateField, Writer
from shardlaw.conformance.laws.checkpoint.trip import worlds
from shardlaw.conformance.laws.roundtrip.cases import trip_law
from shardlaw.conformance.laws.roundtrip.model import INNER, OTHER_RATES, RATES, Model

DOCS = "torch.distributed.checkpoint.state_dict docs"
Poisoned = Annotated[dict[str, Any], StateField("save", blank="poison")]
Whole = Annotated[dict[str, Any], StateField("save", plain=True)]


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


def paths_of(names: list[str]) -> dict[str, str]:
    """The name in the model of each tensor of a case."""
    return {name: f"{INNER}{name}" if at % 2 else name for at, name in enumerate(names)}


def in_model(state: Contents) -> Contents:
    """What the parameters and buffers of a model hold."""
    return state.renamed(paths_of(state.names))


def trained_names(state: Contents) -> list[str]:
    return [name for name, full in state.trip.values.items() if full.dtype.is_floating_point]


def frozen_names(tensors: dict[str, Any]) -> list[str]:
    """The last one of several parameters."""
    return [name for name, tensor in tensors.items() if tensor.dtype.is_floating_point][1:][-1:]


def held_by(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its name."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.data if isinstance(tensor, nn.Parameter) else tensor for name, tensor in held.items()}


@trip_law(
    "model",
    source=f"{DOCS}, get_model_state_dict, set_model_state_dict",
    holds="mesh=2 x=5x2:S(0) a=4x3:S(1) to.x=S(1) to.a=S(0)",
    texts=MODELS,
    stages=worlds,
)
def model(state: Saved, writer: Writer, folder: Folder):
    """The state of a model, saved and loaded, makes a model sharded otherwise the same model; an incomplete one is
    refused."""
    model_state = get_model_state_dict(Model(state))
    save({"model": model_state}, writer(folder))
    return {"names": sorted(model_state)}


@model.due
def _(state: Contents):
    return {"names": Of(sorted(paths_of(state.names).values()))}


@model.then
def _(state: Blank, other: Blank, reader: Reader, folder: Folder):
    asked = {"model": get_model_state_dict(Model(state))}
    model_state = load(asked, reader(folder))["model"]
    model = Model(other)
    set_model_state_dict(model, model_state)
    loaded = held_by(model)
    model_state.pop(next(iter(state)))
    return {"loaded": loaded, "without a parameter": caught(lambda: set_model_state_dict(model, model_state))}


@model.due
def _(state: Contents):
    return {"loaded": in_model(state), "without a parameter": Refused()}


@trip_law(
    "model-whole",
    source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0, ignore_frozen_params, strict",
    holds="mesh=2 x=5x2:S(0) a=4x3:S(1)",
    texts=WHOLES,
)
def model_whole(state: Saved, other: Poisoned, whole: Whole, rank: Rank):
    """Asked for whole, the state of a model is whole on every rank; given whole on rank 0 alone, all get their part of
    it."""
    frozen = frozen_names(state)
    model, given = Model(state, frozen), Model(other, frozen)
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    full = {name: whole[name.rpartition(".")[2]] for name in names} if rank == 0 else {}
    lacking = {name: tensor.clone() for name, tensor in full.items() if name != next(iter(state))}
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    asked = {
        "whole": get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        "offloaded": sorted(
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        ),
        "without the frozen": sorted(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))),
    }
    set_model_state_dict(given, full, options=from_rank_0)
    loaded = held_by(given)
    refused = caught(lambda: set_model_state_dict(given, lacking, options=from_rank_0))
    return {**asked, "from rank 0": loaded, "without a parameter": refused}


@model_whole.due
def _(state: Contents, whole: Contents, rank: Rank):
    paths = paths_of(state.names)
    frozen = trained_names(state)[1:][-1:]
    inside = state.end.mesh.coord(rank) is not None
    return {
        "whole": in_model(whole) if inside else ...,
        "offloaded": Of(sorted(paths.values()) if rank == 0 else []),
        "without the frozen": Of(sorted(path for name, path in paths.items() if name not in frozen)),
        "from rank 0": in_model(state),
        "without a parameter": Refused(),
    }


@trip_law(
    "model-part",
    source=f"{DOCS}, get_model_state_dict: submodules; StateDictOptions: keep_submodule_prefixes",
    holds="mesh=2 x=5x2:S(0) a=4x3:S(1)",
    texts=WHOLES,
)
def model_part(state: Saved):
    """Of a module inside, the state has its tensors alone, under their names in the model or under their own, as
    asked."""
    model, parts = Model(state), []
    for kept in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            options = StateDictOptions(keep_submodule_prefixes=kept)
            parts.append(get_model_state_dict(model, submodules={model.inner}, options=options))
    return {"with the prefix": parts[0], "without": parts[1]}


@model_part.due
def _(state: Contents):
    inside = {name: path for name, path in paths_of(state.names).items() if path.startswith(INNER)}
    return {"with the prefix": state.renamed(inside), "without": state.renamed({name: name for name in inside})}


def adam_of(model: nn.Module, rates: tuple[float, ...]) -> torch.optim.Optimizer:
    """Adam with a group for each parameter that is trained, whose averages of small whole numbers are exact."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [parameter], "lr": rates[at % len(rates)]} for at, parameter in enumerate(trained)]
    return torch.optim.Adam(groups, betas=(0.5, 0.5), foreach=False)


def stepped(model: nn.Module, gradients: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer after one step with these gradients, by the names of the parameters in their modules."""
    optimizer = adam_of(model, RATES)
    for path, parameter in model.named_parameters():
        parameter.grad = gradients[path.rpartition(".")[2]]
    optimizer.step()
    return optimizer


def told_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The rates of an optimizer's groups, and its state by the name of the parameter."""
    states = {path.rpartition(".")[2]: optimizer.state[parameter] for path, parameter in model.named_parameters()}
    told = {
        key: {name: state[key] for name, state in states.items() if key in state}
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    steps = {name: step.to_local() if isinstance(step, DTensor) else step for name, step in told["step"].items()}
    return {
        "rates": [float(group["lr"]) for group in optimizer.param_groups],
        "steps": {name: float(step) for name, step in steps.items()},
        "averages": told["exp_avg"],
        "averages of squares": told["exp_avg_sq"],
    }


def after_a_step(state: Contents) -> dict[str, Any]:
    """What :func:`told_by` gives of an optimizer that made one step: averages are halves of the gradient and of its
    square."""
    names = trained_names(state)
    trained = state.renamed({name: name for name in names})
    return {
        "rates": [RATES[at % len(RATES)] for at in range(len(names))],
        "steps": dict.fromkeys(names, 1.0),
        "averages": trained.having(lambda full: full / 2),
        "averages of squares": trained.having(lambda full: full * full / 2),
    }


@trip_law(
    "optimizer",
    source=f"{DOCS}, get_optimizer_state_dict, set_optimizer_state_dict",
    holds="mesh=2 x=3:S(0):float32:small a=2:R:float32:small",
    texts=OPTIMIZERS,
    stages=worlds,
)
def optimizer(state: Saved, gradients: Saved, writer: Writer, folder: Folder, flat: bool = False):
    """The state of an optimizer, saved and loaded, is that of an optimizer whose model is sharded otherwise, group by
    group."""
    model = Model(state)
    optimizer = stepped(model, gradients)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    save({"optim": get_optimizer_state_dict(model, optimizer, options=options)}, writer(folder))
    return told_by(optimizer, model)


@optimizer.due
def _(state: Contents):
    return after_a_step(state)


@optimizer.then
def _(state: Blank, other: Blank, reader: Reader, folder: Folder, flat: bool = False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, fresh_model = Model(state), Model(other)
    optimizer, fresh = adam_of(model, OTHER_RATES), adam_of(fresh_model, OTHER_RATES)
    asked = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
    optim_state = load(asked, reader(folder))["optim"]
    rates = [group["lr"] for group in optimizer.param_groups]
    set_optimizer_state_dict(fresh_model, fresh, optim_state, options=options)
    loaded = told_by(fresh, fresh_model)
    refused = None
    if not flat:
        optim_state["state"].pop(next(iter(optim_state["state"])))
        refused = caught(lambda: set_optimizer_state_dict(fresh_model, fresh, optim_state, options=options))
    return {"rates after asking": rates, **loaded, "parameters": held_by(fresh_model), "without a parameter": refused}


@optimizer.due
def _(state: Contents, flat):
    due = after_a_step(state)
    rates = [OTHER_RATES[at % len(OTHER_RATES)] for at in range(len(due["rates"]))]
    parameters = in_model(state.holding(state.tree, state.names))
    return {
        "rates after asking": rates,
        **due,
        "parameters": parameters,
        "without a parameter": ... if flat else Refused(),
    }


@trip_law(
    "optimizer-whole",
    source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0",
    holds="mesh=2 x=3:S(0):float32:small a=2:R:float32:small",
    texts=WHOLE_OPTIMIZERS,
)
def optimizer_whole(state: Saved, gradients: Saved, other: Poisoned, rank: Rank):
    """Asked for whole, the state of an optimizer is whole; given whole on rank 0 alone, every rank's optimizer gets its
    part."""
    model, given = Model(state), Model(other)
    optimizer, fresh = stepped(model, gradients), adam_of(given, OTHER_RATES)
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    averages = {path.rpartition(".")[2]: held["exp_avg"] for path, held in whole["state"].items() if "exp_avg" in held}  # type: ignore[index, call-overload, union-attr, operator]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(given, fresh, whole if rank == 0 else {}, options=options)
    return {"whole": averages, **told_by(fresh, given)}


@optimizer_whole.due
def _(state: Contents, whole: Whole):
    trained = whole.renamed({name: name for name in trained_names(state)})  # type: ignore[attr-defined]
    return {"whole": trained.having(lambda full: full / 2), **after_a_step(state)}
